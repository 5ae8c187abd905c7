"""Arguments of commands that take settings, [CONFIG] [KEY=VALUE]..., and of commands that have options instead."""

import contextlib
import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

from nuclr.errors import UserError

# For `app.command`: options that a command does not know reach `split_config`, whose message names the setting.
SETTINGS_CONTEXT = {"ignore_unknown_options": True}
# Options of other programs whose nearest key by spelling is another setting.
_MEANT = {"data": "data.train", "dataset": "data.train", "train_data": "data.train", "val_data": "data.val"}
_WITH_OPTIONS = re.compile(r"\bdata\.(root|split|allow_outside)\b(=true\b)?")


def split_config(
    arguments: Sequence[str] | None, context: typer.Context, names: Sequence[str] = ()
) -> tuple[Path | None, list[str]]:
    """Return the config file or folder, if the first argument names one, and the settings to change.

    Args:
        arguments: of the command line.
        context: of the command, which knows its options.
        names: what the command takes as NAME=VALUE in addition to settings.

    Raises:
        UserError: if an argument is an option that the command does not have, or a setting without "=".

    """
    overrides = list(arguments or [])
    for position, text in enumerate(overrides):
        if text.startswith("-"):
            raise UserError(_unknown_option(text, overrides[position + 1 :], context, names))
        if "=" not in text and _is_setting(text, names) and not Path(text).exists():
            value = _value_after(overrides[position + 1 :])
            raise UserError(f"{text}: settings are written KEY=VALUE, such as {text}={value}")
    path = Path(overrides.pop(0)) if overrides and "=" not in overrides[0] else None
    return path, overrides


def _unknown_option(text: str, rest: Sequence[str], context: typer.Context, names: Sequence[str]) -> str:
    from nuclr.runs import config

    option, _, value = text.partition("=")
    options = [name for parameter in context.command.params for name in parameter.opts if name.startswith("-")]
    near = difflib.get_close_matches(option, options, n=1, cutoff=0.8)
    if near:
        return f"{option}: unknown option; did you mean {near[0]}?"
    key = option.strip("-").replace("-", "_")
    key = key if key in names else _MEANT.get(key) or config.nearest_key(key) or "optimizer.lr"
    value = value or _value_after(rest)
    return f"{option}: unknown option; settings are written KEY=VALUE, such as {key}={value}"


def _is_setting(text: str, names: Sequence[str]) -> bool:
    """Return whether a text is the key of a setting, or the name of another value that the command takes."""
    from nuclr.runs import config

    return text in names or text in config.all_keys()


def _value_after(rest: Sequence[str]) -> str:
    """Return the next argument if it can be the value of a setting, otherwise "VALUE"."""
    return next((word for word in rest[:1] if "=" not in word and not word.startswith("-")), "VALUE")


@contextlib.contextmanager
def options_in_messages() -> Iterator[None]:
    """In messages about pairs, name the options --root, --split and --allow-outside instead of the settings.

    Raises:
        UserError: the error of the block, with its text changed.

    """
    try:
        yield
    except UserError as error:
        text = _WITH_OPTIONS.sub(lambda match: f"--{match[1].replace('_', '-')}", str(error))
        raise UserError(text) from None
