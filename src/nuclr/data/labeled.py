"""Labeled images for zero-shot classification: one folder a class, names and prompt templates in JSON beside them.

`classes.json` is a list of class names, in the order of the folders' names or naming the folders themselves, or a dict
from folder to name; without it the folders' names are the classes. `templates.json` is a list of texts with {} in the
class's place. One file may hold both: `classes.json` with `{"classes": ..., "templates": [...]}`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from nuclr.data.formats.listed import ListedPairs
from nuclr.data.modalities import image as images
from nuclr.errors import UserError
from nuclr.files import read_text

TEMPLATES = ("a photo of a {}.",)


class LabeledImages(ListedPairs):
    """Pairs of an image and its class's name; `y_id` (n,) is the number of the class in `classes`."""

    def __init__(self, folder: Path, classes: dict[str, str], templates: list[str]) -> None:
        self.classes, self.templates = list(classes.values()), templates
        files = {
            name: sorted(f for f in (folder / name).iterdir() if f.suffix.lower() in images.SUFFIXES)
            for name in classes
        }
        for name, found in files.items():
            if not found:
                raise UserError(f"{folder / name}: no images of this class in it")
        rows = ((f"{name}/{file.name}", classes[name], None) for name in classes for file in files[name])
        super().__init__(rows, folder, folder)
        self.y_id = np.repeat(np.arange(len(classes)), [len(found) for found in files.values()])

    def prompts(self) -> list[list[str]]:
        """For each class, its name in every template."""
        return [[template.replace("{}", name) for template in self.templates] for name in self.classes]


def open_labeled(folder: str | Path, classes: Path | None = None, templates: Path | None = None) -> LabeledImages:
    """Read a folder of classes; `classes` and `templates` take the place of the JSON files in it."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(folders) < 2:
        raise UserError(f"{folder}: {len(folders)} folders in it; needs one for each of at least two classes")
    for given in filter(None, (classes, templates)):
        if not given.is_file():
            raise UserError(f"{given}: no such file")
    path = classes or folder / "classes.json"
    names, words = _read(path), _read(templates or folder / "templates.json")
    if isinstance(names, dict) and "classes" in names:
        names, words = names["classes"], names.get("templates", words) if templates is None else words
    words = list(TEMPLATES) if words is None else words
    return LabeledImages(folder, _classes(path, folders, names), check_templates(templates or folder, words))


def read_templates(path: Path) -> list[str]:
    """A list of templates from a JSON file."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    return check_templates(path, _read(path))


def check_templates(path: Path, templates: Any) -> list[str]:
    """The templates, if they are texts with {} in the class's place; else a UserError that names the first odd one."""
    wanted = f"{path}: templates must be a list of texts with {{}} in the class's place"
    if not isinstance(templates, list) or not templates:
        raise UserError(wanted)
    for template in templates:
        if not isinstance(template, str) or "{}" not in template:
            raise UserError(f"{wanted}; {template!r} has none")
    return templates


def _classes(path: Path, folders: list[str], names: Any) -> dict[str, str]:
    """Folder -> class name, in the order of the classes."""
    if names is None:
        return {name: name for name in folders}
    values = list(names.values()) if isinstance(names, dict) else names
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise UserError(f"{path}: needs a list of class names, or a dict from folder to name")
    wanted = list(names) if isinstance(names, dict) else values
    if set(wanted) == set(folders):
        return dict(zip(wanted, values, strict=True))
    if isinstance(names, list) and len(names) == len(folders):
        return dict(zip(folders, values, strict=True))
    odd = sorted(set(wanted) ^ set(folders))[:5]
    raise UserError(f"{path}: {len(wanted)} classes for {len(folders)} folders; they differ in {', '.join(odd)}")


def _read(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
