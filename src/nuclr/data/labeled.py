"""Labeled images for zero-shot classification: one folder per class, with class names and templates in JSON files.

`classes.json` is a list of class names, or a dict from folder to name. The list may consist of the folders' names in
any order, or have one name per folder in alphabetical order of the folders. Without this file, the folders' names are
the class names. `templates.json` is a list of prompts in which {} stands for the class name. One file may hold both:
`classes.json` with `{"classes": ..., "templates": [...]}`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from nuclr.data.formats.columns import CellColumn, TextColumn
from nuclr.data.formats.listed import ListedPairs
from nuclr.data.modalities.image import SUFFIXES
from nuclr.errors import UserError
from nuclr.files import parse_json, read_text

TEMPLATES = ("a photo of a {}.",)


class LabeledImages(ListedPairs):
    """Pairs of an image and the name of its class.

    Args:
        folder: the folder with one folder per class.
        classes: folder -> class name, in the order of the classes.
        templates: prompts with {} for the class name.
        allow_outside: follow symbolic links that lead out of the folder.

    Attributes:
        classes: the names of the classes.
        templates: the prompts.
        y_id: (n,) int64, the position of each image's class in `classes`.

    """

    def __init__(
        self, folder: Path, classes: dict[str, str], templates: list[str], allow_outside: bool = False
    ) -> None:
        self.classes, self.templates = list(classes.values()), templates
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
        return [[template.replace("{}", name) for template in self.templates] for name in self.classes]


def open_labeled(
    folder: str | Path,
    classes: Path | None = None,
    templates: Path | None = None,
    allow_outside: bool = False,
) -> LabeledImages:
    """Open a folder with one folder of images per class.

    Args:
        folder: the folder (setting `data.classes`).
        classes: a JSON file to use instead of `classes.json` in the folder.
        templates: a JSON file to use instead of `templates.json` in the folder.
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
    for file in filter(None, (classes, templates)):
        if not file.is_file():
            raise UserError(f"{file}: no such file")
    path = classes or folder / "classes.json"
    names, prompts = _read_json(path), _read_json(templates or folder / "templates.json")
    if isinstance(names, dict) and "classes" in names:
        names, prompts = names["classes"], names.get("templates", prompts) if templates is None else prompts
    prompts = list(TEMPLATES) if prompts is None else prompts
    prompts = check_templates(templates or folder, prompts)
    return LabeledImages(folder, _name_folders(path, folders, names), prompts, allow_outside)


def read_templates(path: Path) -> list[str]:
    """Read a list of templates from a JSON file.

    Raises:
        UserError: if the file is missing, or is not a list of templates.

    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    return check_templates(path, _read_json(path))


def check_templates(path: Path, templates: Any) -> list[str]:
    """Return `templates` if all of them are texts with {} for the class name.

    Args:
        path: the file or folder, for messages.
        templates: the content to check.

    Raises:
        UserError: if they are not; it names the first wrong one.

    """
    requirement = f"{path}: templates must be a list of texts with {{}} for the class name"
    if not isinstance(templates, list) or not templates:
        raise UserError(requirement)
    for template in templates:
        if not isinstance(template, str) or "{}" not in template:
            raise UserError(f"{requirement}; {template!r} does not have it")
    return templates


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
    if not path.is_file():
        return None
    try:
        return parse_json(read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
