"""Reading a user's files, and a place for what is expensive to find out twice."""

import os
from pathlib import Path

from nuclr.errors import UserError


def read_text(path: Path) -> str:
    """All of a UTF-8 file, without its byte-order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def stamp_of(path: Path) -> list[int]:
    """Size and time of a file, by which a change is noticed; JSON keeps it exactly."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def cache_folder(beside: Path) -> Path | None:
    """Where to keep what was computed from files in the folder `beside`; None where nothing can be written.

    $NUCLR_CACHE if set; else `.nuclr` beside the files; else, where their folder is read-only, `~/.cache/nuclr`.
    """
    wishes = [Path(os.environ["NUCLR_CACHE"])] if os.environ.get("NUCLR_CACHE") else []
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nuclr"
    for folder in [*wishes, beside / ".nuclr", user]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    return None
