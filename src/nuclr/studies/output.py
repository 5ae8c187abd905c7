"""Writing results: a folder that is checked before the work begins, and files that are either whole or absent."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nuclr.errors import UserError


def prepare_folder(folder: Path, command: str, summary: str, names: Sequence[str]) -> None:
    """Make `folder`, see that it can be written, and that none of `names` in it is somebody else's.

    A former run of the same command is recognized by its `summary`, whose key "written_by" names it; its files may be
    replaced.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"--out {folder}: a file is in the way; name a folder") from None
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written ({error.strerror}); name another folder") from None
    present = [name for name in names if (folder / name).exists()]
    if present and not _written_by(folder / summary, command):
        raise UserError(
            f"{folder / present[0]} exists and was not written by `{command}`; name another folder with --out"
        )


def _written_by(summary: Path, command: str) -> bool:
    try:
        content = json.loads(summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("written_by") == command


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path in the same folder that takes the place of `path` once the block has ended well."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path`; a NaN or an infinity, which JSON does not have, is a programming error."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
