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
    arguments: Sequence[str] | None,
    context: typer.Context,
    names: Sequence[str] = (),
) -> tuple[Path | None, list[str]]:
    """Return the config file or folder, if the first argument names one, and the settings to change.

    Args:
        arguments: of the command line.
        context: of the command, which knows its options.
        names: what the command takes as NAME=VALUE in addition to settings.

    Raises:
        UserError: if an argument is an option that the command does not have, or a setting without "=".

    """
    from nuclr.runs import config

    overrides = list(arguments or [])
    for text in overrides:
        if text.startswith("-") or text in (*names, *config.all_keys()):
            raise UserError(_explain(text, context, names))
    path = Path(overrides.pop(0)) if overrides and "=" not in overrides[0] else None
    return path, overrides


def _explain(
    text: str,
    context: typer.Context,
    names: Sequence[str],
) -> str:
    from nuclr.runs import config

    option, _, value = text.partition("=")
    options = [name for parameter in context.command.params for name in parameter.opts]
    for near in difflib.get_close_matches(option, options, n=1, cutoff=0.8):
        return f"{option}: unknown option; did you mean {near}?"
    key = option.strip("-").replace("-", "_")
    key = key if key in names else _MEANT.get(key) or config.nearest_key(key) or "optimizer.lr"
    return f"{option}: settings are written KEY=VALUE, such as {key}={value or 'VALUE'}"


def check_new_file(out: Path, suffixes: Sequence[str]) -> None:
    """Refuse, before any work, a file to write that exists, cannot be written or has another suffix.

    Raises:
        UserError: names --out and the file.

    """
    if out.suffix not in suffixes or out.exists() or not out.parent.is_dir():
        raise UserError(
            f"--out {out}: needs a file that does not exist, in a folder that does: {' or '.join(suffixes)}"
        )


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
