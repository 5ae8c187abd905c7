"""Pairs whose list names image files: what caption lists and tables have in common."""

import difflib
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from nuclr.data.modalities.image import open_image, read_file
from nuclr.data.pairs import BadSample
from nuclr.data.texts import Texts, clean
from nuclr.errors import UserError

X_COLUMNS = ("image", "filepath", "image_path", "file_name", "filename", "path", "jpg", "png")
Y_COLUMNS = ("caption", "captions", "title", "text", "sentence", "txt")

_LOOKED_AT = 100  # images by which the folder is recognized


class ListedPairs:
    """`rows` are (image name, caption, reason or None), one a pair, in the order of the list `path`.

    Names are relative to `root`, or to a folder within it that is called as the list is (`train/` for `train.jsonl`)
    or `images`; then to the same beside the list. A reason marks a row that is bad already.
    """

    x_kind = "image"
    y_kind = "text"

    def __init__(self, rows: Iterable[tuple[str, str, str | None]], path: Path, root: Path | None = None) -> None:
        self.known_bad: dict[int, str] = {}
        self._names, self._captions = Texts(), Texts()
        for number, (name, caption, reason) in enumerate(rows):
            self._names.append(name)
            self._captions.append(clean(caption))
            reason = reason or ("no image named" if not name else "empty caption" if not caption.strip() else None)
            if reason:
                self.known_bad[number] = reason
        if not len(self._names):
            raise UserError(f"{path}: holds no pairs")
        self.x_id, self.y_id = self._names.ids(), self._captions.ids()
        both = self._names.fingerprint() + self._captions.fingerprint()
        self.fingerprint = hashlib.sha256(both.encode()).hexdigest()
        self.folder = self._find_folder(path, root)

    def __len__(self) -> int:
        return len(self._names)

    def x(self, number: int) -> Image.Image:
        """The image of the file."""
        name = self._names[number]
        if not name:
            raise BadSample("no image named")
        return open_image(read_file(self.folder / name))

    def y(self, number: int) -> str:
        """The caption."""
        if number in self.known_bad:
            raise BadSample(self.known_bad[number])
        return self._captions[number]

    def name(self, number: int) -> str:
        """The file's name as the list has it."""
        return self._names[number]

    def stamp(self) -> str:
        """Changes when the size or the time of any image file does."""
        hashed = hashlib.sha256(str(self.folder.absolute()).encode())
        _, first = np.unique(self.x_id, return_index=True)
        for number in first:
            try:
                status = os.stat(self.folder / self._names[number])  # noqa: PTH116 (millions of them)
                hashed.update(b"%d,%d;" % (status.st_size, status.st_mtime_ns))
            except (OSError, ValueError):
                hashed.update(b"missing;")
        return hashed.hexdigest()

    def _find_folder(self, path: Path, root: Path | None) -> Path:
        """The first folder that holds most of the first images; none of them anywhere is a mistake of the user's."""
        tops = [path.parent] if root is None else [root, path.parent]
        folders = [folder for top in tops for folder in (top, top / path.stem, top / "images")]
        some = [name for name in (self._names[i] for i in range(min(len(self), _LOOKED_AT))) if name]
        found = [sum((folder / name).is_file() for name in some) for folder in folders]
        if some and not any(found):
            raise UserError(
                f"{path}: none of its first images is there, such as {folders[0] / some[0]}; "
                "give the folder that their names are relative to"
            )
        return folders[found.index(max(found))]


def choose_column(columns: Sequence[str], side: Literal["x", "y"], key: str | None, path: Path) -> str:
    """Return the column of one side: `key` if it is given, otherwise the first usual name that exists.

    Args:
        columns: the columns of a table, or the keys of an entry.
        side: "x" for the image, "y" for the caption.
        key: the column that the user asks for (`data.x.key` or `data.y.key`).
        path: the file, for messages.

    Raises:
        UserError: if there is no such column.

    """
    setting, usual, content = f"data.{side}.key", *((X_COLUMNS, "image") if side == "x" else (Y_COLUMNS, "caption"))
    available = ", ".join(repr(column) for column in columns[:20])
    if key is None:
        for name in usual:
            if name in columns:
                return name
        raise UserError(
            f"{path}: no column for the {content} among {available}; "
            f"name it with {setting} (names found automatically: {', '.join(usual)})"
        )
    if key in columns:
        return key
    nearest = difflib.get_close_matches(key, columns, n=1, cutoff=0)
    hint = f"; nearest: {nearest[0]!r}" if nearest else ""
    raise UserError(f"{path}: no column {key!r} ({setting}); found: {available}{hint}")
