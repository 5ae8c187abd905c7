"""Errors that a user can fix. The command line prints the message and exits with status 2."""

import importlib
import re
from types import ModuleType

EXTRAS = {
    "PIL": "search",
    "accelerate": "trainer",
    "aiohttp": "remote",
    "datasets": "hf",
    "faiss": "indexes",
    "fsspec": "remote",
    "geomloss": "bench",
    "jinja2": "search",
    "kornia": "train",
    "lance": "lance",
    "lightning": "lightning",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "open_clip_train": "open-clip",
    "ot": "bench",
    "pyarrow": "hf",
    "pydantic": "search",
    "rich": "search",
    "s3fs": "remote",
    "sentence_transformers": "st",
    "tensorboard": "logging",
    "tokenizers": "train",
    "transformers": "train",
    "typer": "search",
    "wandb": "logging",
    "yaml": "train",
}
"""Optional packages, by the name they are imported under, and the extra of nuclr that installs each."""


# C0 and C1 control characters except tab and line feed, overrides of the direction of text, and lone surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return a text that is safe to print: control characters are shown as escapes, such as ``\x1b``.

    Captions and file names are untrusted. Sent to a terminal as they are, they could clear the screen, set the title,
    or reverse the order of what follows.

    Args:
        text: What is to be printed. Tabs and line breaks are kept.

    Returns:
        The text without control characters, overrides of the direction of text, and lone surrogates.

    Example:
        >>> print(printable("a cat" + chr(27) + "[2J"))
        a cat\x1b[2J
    """
    return _CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def first_line(error: BaseException) -> str:
    """Return the reason of an error for a message: one line of limited length that is safe to print."""
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return printable(text.splitlines()[0][:200])


class UserError(ValueError):
    """A mistake in the input, in a file or in an option. The message names it and says how to fix it."""


class BadSample(Exception):  # noqa: N818 (the sample is bad; the program is not in error)
    """A sample that cannot be used: a broken or missing file, an empty text, a truncated tar.

    Args:
        reason: why it cannot be used, in a few words.

    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def install_command(extra: str) -> str:
    """Return the command that installs an extra of nuclr, for messages.

    Args:
        extra: One of the extras in `pyproject.toml`.

    Returns:
        The command, also for those who install from a clone.

    Example:
        >>> install_command("hf")
        "pip install 'nuclr[hf]', or '.[hf]' in a clone"
    """
    return f"pip install 'nuclr[{extra}]', or '.[{extra}]' in a clone"


def missing_extra(package: str, extra: str | None = None) -> UserError:
    """Return the error for an optional package that is not installed.

    Args:
        package: The name that the package is imported under, such as ``"pyarrow"``.
        extra: The extra of nuclr that installs it. By default it is looked up in `EXTRAS`.

    Returns:
        An error to raise. Its message names the package and the command that installs it.

    Raises:
        KeyError: If `extra` is not given and `EXTRAS` does not list the package.

    Example:
        >>> print(missing_extra("pyarrow"))
        pyarrow is not installed; pip install 'nuclr[hf]', or '.[hf]' in a clone
    """
    return UserError(f"{package} is not installed; {install_command(extra or EXTRAS[package])}")


def require(
    module: str,
    extra: str | None = None,
    purpose: str = "",
) -> ModuleType:
    """Import an optional module, or say which extra of nuclr installs it.

    Args:
        module: The module to import, such as ``"pyarrow.parquet"``.
        extra: The extra that installs it. By default the module's top package is looked up in `EXTRAS`.
        purpose: What needs the package; it starts the message. For example a file or a setting: ``"log.wandb"``.

    Returns:
        The module.

    Raises:
        UserError: If the package is not installed.

    Example:
        >>> require("math").pi > 3
        True
        >>> require("no_such_package", extra="hf", purpose="train.parquet")
        Traceback (most recent call last):
        nuclr.errors.UserError: train.parquet: no_such_package is not installed; pip install 'nuclr[hf]', or ...
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # An installed package that cannot import something of its own is broken, not missing.
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        message = str(missing_extra(package, extra))
        raise UserError(f"{purpose}: {message}" if purpose else message) from None
