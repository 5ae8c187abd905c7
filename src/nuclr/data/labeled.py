"""Labeled images for zero-shot classification: one folder per class, with class names and templates in JSON files.

`classes.json` is a list of class names, or a dict from folder to name. The list may consist of the folders' names in
any order, or have one name per folder in alphabetical order of the folders. Without this file, the folders' names are
the class names. `templates.json` is a list of prompts in which {} stands for the class name. One file may hold both:
`classes.json` with `{"classes": ..., "templates": [...]}`.
"""

from pathlib import Path
from typing import Any

import numpy as np

from nuclr.data.formats.columns import CellColumn, TextColumn
from nuclr.data.formats.listed import ListedPairs
from nuclr.data.modalities.image import SUFFIXES
from nuclr.data.prompts import check_templates, fill, read_json
from nuclr.errors import UserError
from nuclr.files import read_text

TEMPLATES = ("a photo of a {}.",)


class LabeledImages(ListedPairs):
    """Pairs of an image and the name of its class.

    Args:
        folder: the folder with one folder per class.
        classes: folder -> class name, in the order of the classes.
        templates: prompts with {} for the class name.
        allow_outside: follow symbolic links that lead out of the folder.

    Attributes:
        keys: the folders of the classes.
        classes: the names of the classes.
        templates: the prompts.
        y_id: (n,) int64, the position of each image's class in `classes`.

    """

    def __init__(
        self, folder: Path, classes: dict[str, str], templates: list[str], allow_outside: bool = False
    ) -> None:
        self.keys, self.classes, self.templates = list(classes), list(classes.values()), templates
        files = {
            name: sorted(file for file in (folder / name).iterdir() if file.suffix.lower() in SUFFIXES)
            for name in classes
        }
        for name, images in files.items():
            if not images:
                raise UserError(f"{folder / name}: no images of this class; add some or remove the folder")
        rows = ((f"{name}/{file.name}", classes[name], None, 0) for name in classes for file in files[name])
        super().__init__(rows, CellColumn("image", "image"), TextColumn("class name"), folder, folder, allow_outside)
        self.y_id = np.repeat(np.arange(len(classes)), [len(images) for images in files.values()])

    def __repr__(self) -> str:
        return f"LabeledImages({self.label!r}, {len(self):,} images, {len(self.classes):,} classes)"

    def prompts(self) -> list[list[str]]:
        """Return, for each class, its name in every template."""
        return [[fill(template, name) for template in self.templates] for name in self.classes]


def open_labeled(folder: str | Path, allow_outside: bool = False) -> LabeledImages:
    """Open a folder with one folder of images per class.

    Args:
        folder: the folder (setting `data.classes`).
        allow_outside: follow symbolic links that lead out of the folder (setting `data.allow_outside`). Otherwise such
            images are bad samples.

    Returns:
        The labeled images.

    Raises:
        UserError: if a file or folder is missing, or class names and folders do not match.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("cat", "dog"):
        ...         Path(folder, name).mkdir()
        ...         Image.new("RGB", (8, 8)).save(Path(folder, name, "1.png"))
        ...     open_labeled(folder).prompts()
        [['a photo of a cat.'], ['a photo of a dog.']]

    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; needs one folder of images per class")
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(folders) < 2:
        raise UserError(f"{folder}: has {len(folders)} folders; needs one for each of at least two classes")
    path = folder / "classes.json"
    names, prompts = _read_json(path), _read_json(folder / "templates.json")
    if isinstance(names, dict) and "classes" in names:
        names, prompts = names["classes"], names.get("templates", prompts)
    prompts = check_templates(folder, list(TEMPLATES) if prompts is None else prompts)
    return LabeledImages(folder, _name_folders(path, folders, names), prompts, allow_outside)


def _name_folders(path: Path, folders: list[str], names: Any) -> dict[str, str]:
    """Return folder -> class name, in the order of the classes."""
    if names is None:
        return {name: name for name in folders}
    values = list(names.values()) if isinstance(names, dict) else names
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise UserError(f"{path}: needs a list of class names, or a dict from folder to name")
    named_folders = list(names) if isinstance(names, dict) else values
    if set(named_folders) == set(folders):
        return dict(zip(named_folders, values, strict=True))
    if isinstance(names, list) and len(names) == len(folders):
        return dict(zip(folders, values, strict=True))
    different = sorted(set(named_folders) ^ set(folders))[:5]
    raise UserError(
        f"{path}: {len(named_folders)} classes for {len(folders)} folders; they differ in {', '.join(different)}"
    )


def _read_json(path: Path) -> Any:
    return read_json(path, read_text(path)) if path.is_file() else None
