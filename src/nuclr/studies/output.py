"""Output folders of studies: checked before the work begins, so that nothing of the user's is overwritten."""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from nuclr.errors import UserError


def prepare_folder(folder: Path, command: str, summary: str, names: Sequence[str]) -> None:
    """Create `folder` and check that it can be written and that the files to write in it are not somebody else's.

    An earlier run of the same command is recognized by the key "written_by" in its `summary`; its files may be
    replaced.

    Args:
        folder: the folder of `--out`.
        command: the command that writes, such as "nuclr toy".
        summary: name of the JSON file that the command writes last.
        names: the files that will be written.

    Raises:
        UserError: the folder cannot be written, or one of the files belongs to another command.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"--out {folder}: there is a file with this name; name a folder") from None
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written ({error.strerror}); name another folder") from None
    present = [name for name in names if (folder / name).exists()]
    if present and not _written_by(folder / summary, command):
        raise UserError(f"--out {folder}: {present[0]} exists and was not written by `{command}`; name another folder")


def _written_by(summary: Path, command: str) -> bool:
    try:
        content = json.loads(summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("written_by") == command


@contextlib.contextmanager
def user_errors(path: Path) -> Iterator[None]:
    """Turn an OSError in the block, such as a full disk, into a UserError that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or path}: cannot be written ({error.strerror or error})") from error
