"""Pairs whose list names image files: the common part of caption lists, tables and Parquet files with names."""

import difflib
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from nuclr.data.modalities.base import boundary, read_file
from nuclr.data.modalities.image import open_image
from nuclr.data.pairs import BadSample, Checkable
from nuclr.data.texts import MAX_CHARACTERS, Texts, clean, text_problem
from nuclr.errors import UserError

X_COLUMNS = ("image", "filepath", "image_path", "file_name", "filename", "path", "jpg", "png")
Y_COLUMNS = ("caption", "captions", "title", "text", "sentence", "txt")

_PROBED = 100  # images by which the folder is recognized


class ListedPairs(Checkable):
    """Pairs of image files and captions.

    Names of images are relative to `root`, or to a folder in it that has the name of the list (`train/` for
    `train.jsonl`) or the name `images`. After these, the same folders next to the list are tried. An image outside of
    the root (of the list's folder, if it was found there) is a bad sample, unless `allow_outside` is True.

    Args:
        rows: (image name, caption, reason) per pair, in the order of the list. The reason is None unless the row is
            already known to be bad.
        path: the list.
        root: the folder that the names are relative to (setting `data.root`); by default that of the list.
        allow_outside: read images outside of the root as well (setting `data.allow_outside`). A name leaves the root
            if it is absolute, contains `..`, or leads through a symbolic link.

    Raises:
        UserError: if there are no rows, or none of the first images exists.

    """

    x_kind = x_name = "image"
    y_kind = y_name = "text"

    def __init__(
        self,
        rows: Iterable[tuple[str, str, str | None]],
        path: Path,
        root: Path | None = None,
        allow_outside: bool = False,
    ) -> None:
        self.known_bad: dict[int, str] = {}
        self.label = path.name or str(path)
        self._names, self._captions = Texts(), Texts()
        for number, (name, caption, reason) in enumerate(rows):
            self._names.append(name)
            self._captions.append("" if len(caption) > MAX_CHARACTERS else clean(caption))
            reason = reason or ("no image named" if not name else text_problem(caption, "caption"))
            if reason:
                self.known_bad[number] = reason
        if not len(self._names):
            raise UserError(f"{path}: holds no pairs")
        self.x_id, self.y_id = self._names.ids(), self._captions.ids()
        both = self._names.fingerprint() + self._captions.fingerprint()
        self.fingerprint = hashlib.sha256(both.encode()).hexdigest()
        self.folder, top = self._find_folder(path, root)
        self._inside = boundary(top, allow_outside)

    def __len__(self) -> int:
        return len(self._names)

    def x(self, number: int) -> Image.Image:
        """Return the image of the file, not decoded yet."""
        name = self._names[number]
        if not name:
            raise BadSample("no image named")
        return open_image(read_file(self.folder / name, self._inside))

    def y(self, number: int) -> str:
        """Return the caption."""
        if number in self.known_bad:
            raise BadSample(self.known_bad[number])
        return self._captions[number]

    def name(self, number: int) -> str:
        """Return the name of the file, as written in the list."""
        return self._names[number]

    def stamp(self) -> str:
        """Return a hash that changes when the size or modification time of an image file does."""
        hashed = hashlib.sha256(f"{self.folder.absolute()} {self._inside}".encode("utf-8", "surrogateescape"))
        _, first = np.unique(self.x_id, return_index=True)
        for number in first:
            try:
                status = os.stat(self.folder / self._names[number])  # noqa: PTH116 (faster, for millions of files)
                hashed.update(b"%d,%d;" % (status.st_size, status.st_mtime_ns))
            except (OSError, ValueError):
                hashed.update(b"missing;")
        return hashed.hexdigest()

    def _find_folder(self, path: Path, root: Path | None) -> tuple[Path, Path]:
        """Return the folder that holds most of the first images, and the root or list's folder that it belongs to.

        A tie goes to the first folder.
        """
        tops = [path.parent] if root is None else [root, path.parent]
        candidates = [(folder, top) for top in tops for folder in (top, top / path.stem, top / "images")]
        names = [name for name in (self._names[i] for i in range(min(len(self), _PROBED))) if name]
        # Path.is_file would raise an error for names that are too long.
        counts = [sum(os.path.isfile(folder / name) for name in names) for folder, _ in candidates]  # noqa: PTH113
        if names and not any(counts):
            raise UserError(
                f"{path}: none of its first images exists, for example {candidates[0][0] / names[0]}; "
                "set data.root to the folder that their names are relative to"
            )
        return candidates[counts.index(max(counts))]


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
    setting, content = f"data.{side}.key", "image" if side == "x" else "caption"
    usual = X_COLUMNS if side == "x" else Y_COLUMNS
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
