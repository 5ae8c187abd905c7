"""Folders of images, and items with classes: images in one folder per class, and vectors with labels.

Class names and templates of a folder are in JSON files.

`classes.json` is a list of class names, or a dict from folder to name. The list may consist of the folders' names in
any order, or have one name per folder in alphabetical order of the folders. Without this file, the folders' names are
the class names. `templates.json` is a list of prompts in which {} stands for the class name.

Vectors are the arrays x (n, d_x) and labels (n,) of an `.npz` file, with prompts (c, d_y), or (c, m, d_y) for m prompts
per class, if there are any.

Prompt files hold templates, names of classes, or prompts per class, for zero-shot classification:

| file | content |
| --- | --- |
| `.txt` | a template per line; empty lines and lines that begin with # are skipped |
| `.json`, a list | templates |
| `.json`, `{"classes": ..., "templates": [...]}` | names (a list in the classes' order, or folder -> name), templates |
| `.json`, a dict | class -> prompt or list of prompts; a class is called by its folder or by its name |
| `.json`, a dict | test set -> one of the above, as CLIP_benchmark's files have it |

`{}` or `{c}` in a template stands for the name of the class.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nuclr.arrays import as_features, as_integers
from nuclr.data.formats.choose import Request
from nuclr.data.formats.columns import Column, Heading, ListedPairs, Row, make_column
from nuclr.data.modalities import get_modality
from nuclr.data.modalities.base import shorten
from nuclr.data.modalities.image import SUFFIXES
from nuclr.data.pairs import Labeled, Side, SideName, ViewPairs, fill_templates
from nuclr.errors import UserError
from nuclr.files import npz_sizes, read_json, read_npz, read_text

TEMPLATES = ("a photo of a {}.",)
MOST_BYTES = 32 * 2**20  # of a prompt file
_FORMS = "prompts are templates or a dict from class to prompts, in .txt or .json (docs/evaluation.md#prompts)"


class LabeledImages(ListedPairs, Labeled):
    """Pairs of an image and the name of its class.

    Args:
        folder: the folder with one folder per class.
        classes: folder -> class name, in the order of the classes.
        templates: prompts with {} for the class name.
        allow_outside: follow symbolic links that lead out of the folder.

    """

    def __init__(
        self,
        folder: Path,
        classes: dict[str, str],
        templates: list[str],
        allow_outside: bool = False,
    ) -> None:
        self.keys = list(classes)
        self.classes = list(classes.values())
        self.templates = templates
        rows: list[Row] = []
        labels: list[int] = []
        for label, (name, class_name) in enumerate(classes.items()):
            images = sorted(file.name for file in (folder / name).iterdir() if file.suffix.lower() in SUFFIXES)
            if not images:
                raise UserError(f"{folder / name}: no images of this class; add some or remove the folder")
            rows += [Row(f"{name}/{image}", class_name, 0) for image in images]
            labels += [label] * len(images)
        columns: dict[SideName, Column] = {
            "x": make_column(Heading("image", None, get_modality("image"), "image")),
            "y": make_column(Heading("text", None, get_modality("text"), "class name")),
        }
        super().__init__(Request(folder, folder, allow_outside=allow_outside), columns, rows)
        self.sides["y"] = replace(self.sides["y"], ids=np.array(labels, np.int64))


class LabeledVectors(Labeled):
    """Vectors with labels.

    Args:
        path: an `.npz` file with x (n, d_x), labels (n,), and optionally prompts (c, d_y) or (c, m, d_y).

    Attributes:
        x: (n, d_x) float32, finite.
        prompt_vectors: (c, m, d_y) float32, finite; None if the file has no prompts.

    Raises:
        UserError: if the file cannot be read or an array is wrong; it names the array.

    """

    def __init__(self, path: Path) -> None:
        arrays = read_npz(path, ("x", "labels", "prompts"))
        self.prompt_vectors: np.ndarray | None = None
        try:
            self.x = as_features(f"{path}: x", arrays["x"], "any", torch.float32).numpy()
            labels = as_integers(f"{path}: labels", arrays["labels"], len(self.x)).numpy()
            numbers, positions = np.unique(labels, return_inverse=True)
            if "prompts" in arrays:
                prompts = arrays["prompts"]
                rows = as_features(
                    f"{path}: prompts",
                    prompts.reshape(-1, prompts.shape[-1]),
                    "any",
                    torch.float32,
                )
                self.prompt_vectors = rows.reshape(len(prompts), -1, rows.shape[1]).numpy()
                numbers = np.arange(len(prompts))
                positions = labels
        except (KeyError, ValueError, IndexError) as error:
            raise UserError(f"{path}: needs the arrays x (n, d) and labels (n,): {error}") from None
        self.keys = [str(number) for number in numbers.tolist()]
        if labels.min() < 0 or positions.max() >= len(self.keys) or len(self.keys) < 2:
            found = f"labels {labels.min()} to {labels.max()} of {len(self.keys)} classes"
            raise UserError(f"{path}: {found}; needs whole numbers from 0, rows of prompts, and two classes")
        self.classes = self.keys
        self.label = path.name
        self.sides = {
            "x": Side("vector", None, get_modality("vector"), np.arange(len(labels))),
            "y": Side("text", None, get_modality("text"), positions.astype(np.int64)),
        }
        hashed = hashlib.sha256(np.ascontiguousarray(self.x).data)
        hashed.update(labels.tobytes())
        if self.prompt_vectors is not None:
            hashed.update(np.ascontiguousarray(self.prompt_vectors).data)
        self.fingerprint = hashed.hexdigest()

    def __len__(self) -> int:
        return len(self.x)

    def item(self, side: SideName, number: int) -> Any:
        """Return the vector (d_x,), or the number of its class as a text."""
        return self.x[number] if side == "x" else self.classes[self.labels[number]]

    def name(self, number: int) -> str:
        """Return the file and the row."""
        return f"{self.label}, row {number}"


def has_labels(path: Path) -> bool:
    """Return whether an `.npz` file has labels, and is not a file of pairs."""
    names = npz_sizes(path) if path.suffix == ".npz" else {}
    return "labels" in names and "y" not in names


def is_class_folder(folder: Path) -> bool:
    """Return whether a folder has several folders, some of which hold images."""
    return len(class_folders(folder)) > 1 and any(file.suffix.lower() in SUFFIXES for file in folder.glob("*/*"))


def class_folders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, sorted; none if it does not exist."""
    return sorted(path.name for path in folder.glob("[!.]*") if path.is_dir())


def open_class_folder(folder: Path, allow_outside: bool = False) -> LabeledImages:
    """Open a folder with one folder of images per class.

    Args:
        folder: the folder.
        allow_outside: follow symbolic links that lead out of the folder. Otherwise such images are bad samples.

    Raises:
        UserError: if a class has no images, or class names and folders do not match.

    """
    path = folder / "classes.json"
    folders = class_folders(folder)
    names = read_json(path) if path.is_file() else folders
    templates = read_json(folder / "templates.json") if (folder / "templates.json").is_file() else list(TEMPLATES)
    classes = _name_folders(path, folders, names)
    return LabeledImages(
        folder,
        classes,
        _check_templates(folder, templates),
        allow_outside,
    )


def _name_folders(
    path: Path,
    folders: list[str],
    names: Any,
) -> dict[str, str]:
    """Return folder -> class name, in the order of the classes."""
    values = _check_texts(path, "classes", names)
    named_folders = list(names) if isinstance(names, dict) else values
    if set(named_folders) != set(folders):
        if isinstance(names, dict) or len(values) != len(folders):
            different = ", ".join(sorted(set(named_folders) ^ set(folders))[:5])
            raise UserError(f"{path}: {len(values)} classes for {len(folders)} folders; they differ in {different}")
        named_folders = folders
    return dict(zip(named_folders, values, strict=True))


def _check_texts(
    path: Path,
    key: str,
    content: Any,
) -> list[str]:
    """Return a text, a list of texts or the values of a dict as a list, in which {c} is written {}."""
    texts = list(content.values()) if isinstance(content, dict) else [content] if isinstance(content, str) else content
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise UserError(f"{path}: {key} is {shorten(content)}; needs texts")
    return [text.replace("{c}", "{}") for text in texts]


def _check_templates(path: Path, content: Any) -> list[str]:
    templates = _check_texts(path, "templates", content)
    wrong = [template for template in templates if "{}" not in template]
    if wrong:
        raise UserError(f"{path}: template {wrong[0]!r} needs {{}} for the class name")
    return templates


def open_image_folder(folder: Path, allow_outside: bool = False) -> ViewPairs:
    """Open all images in a folder and in its folders as pairs of views; names are relative to the folder.

    Args:
        folder: the folder.
        allow_outside: follow symbolic links that lead out of the folder (setting `data.allow_outside`). Otherwise such
            images are bad samples.

    Raises:
        UserError: if the folder has no images.

    """
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)
    if not files:
        raise UserError(f"{folder}: the folder has no images ({', '.join(sorted(SUFFIXES))})")
    names = (str(file.relative_to(folder)) for file in files)
    rows = (Row(name, name, row) for row, name in enumerate(names))
    heading = Heading(
        "image",
        None,
        get_modality("image"),
        "image",
    )
    columns: dict[SideName, Column] = {"x": make_column(heading), "y": make_column(heading)}
    return ViewPairs(ListedPairs(Request(folder, folder, allow_outside=allow_outside), columns, rows, "row"))


# -- prompts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassTexts:
    """Names and prompts of the classes of a test set.

    Attributes:
        names: the names of the classes.
        templates: the templates of all prompts; None if each class has prompts of its own.
        prompts: the prompts of each class.
        file: the prompt file; None for the set's own prompts.

    """

    names: list[str]
    templates: list[str] | None
    prompts: list[list[str]]
    file: Path | None = None


@dataclass(frozen=True)
class Prompts:
    """The content of a prompt file; what it does not say is None.

    Attributes:
        path: the file; None for prompts that do not come from a file.
        templates: with {} for the name of the class.
        classes: a list of names in the order of the classes, or folder or name -> name.
        of_class: folder or name of a class -> its prompts.

    """

    path: Path | None = None
    templates: list[str] | None = None
    classes: list[str] | dict[str, str] | None = None
    of_class: dict[str, list[str]] | None = None

    def texts(
        self,
        folders: Sequence[str],
        names: Sequence[str],
        templates: Sequence[str],
    ) -> ClassTexts:
        """Return names and prompts of the classes.

        Args:
            folders: the classes as the data set writes them: names of folders, WordNet numbers.
            names: the names of the classes, unless the file has others.
            templates: used if the file has none.

        Raises:
            UserError: if the file does not fit the classes.

        """
        kept = list(names)
        if isinstance(self.classes, list):
            if len(self.classes) != len(kept):
                raise UserError(f"{self.path}: names {len(self.classes)} classes; the test set has {len(kept)}")
            kept = self.classes
        elif self.classes is not None:
            kept = [self._find(self.classes, keys) for keys in zip(folders, names, strict=True)]
        if self.of_class is None:
            used = list(templates) if self.templates is None else self.templates
            return ClassTexts(
                kept,
                used,
                fill_templates(used, kept),
                self.path,
            )
        prompts = []
        for keys in zip(folders, names, kept, strict=True):
            prompts += fill_templates(self._find(self.of_class, keys), keys[-1:])
        return ClassTexts(kept, None, prompts, self.path)

    def _find(self, values: dict[str, Any], keys: Sequence[str]) -> Any:
        for key in keys:
            if key in values:
                return values[key]
        called = " or ".join(repr(key) for key in dict.fromkeys(keys))
        raise UserError(f"{self.path}: has no entry for the class {called}; it needs one for every class")


def read_prompts(path: Path, name: str | None = None) -> Prompts:
    """Read a prompt file.

    Args:
        path: a `.txt` or `.json` file, as described above.
        name: the test set's name, for files that hold the prompts of several sets.

    Raises:
        UserError: if the file is missing or is not a prompt file; it names the entry that is wrong.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "templates.txt")
        ...     _ = path.write_text("a photo of a {}.")
        ...     read_prompts(path).texts(["cat"], ["cat"], []).prompts
        [['a photo of a cat.']]

    """
    if path.suffix not in (".txt", ".json") or not path.is_file() or path.stat().st_size > MOST_BYTES:
        raise UserError(f"{path}: not a file of prompts; {_FORMS}")
    content = _read_lines(path) if path.suffix == ".txt" else read_json(path)
    if name is not None and isinstance(content, dict) and isinstance(content.get(name), list | dict):
        content = content[name]
    if not isinstance(content, dict):
        return Prompts(path, templates=_check_templates(path, content))
    if not content or not content.keys() <= {"classes", "templates"}:
        of_class = {key: _check_texts(path, repr(key), prompts) for key, prompts in content.items()}
        return Prompts(path, of_class=of_class)
    classes = content.get("classes")
    if classes is not None:
        names = _check_texts(path, "classes", classes)
        classes = dict(zip(classes, names, strict=True)) if isinstance(classes, dict) else names
    templates = _check_templates(path, content["templates"]) if "templates" in content else None
    return Prompts(path, templates, classes)


def _read_lines(path: Path) -> list[str]:
    lines = map(str.strip, read_text(path).splitlines())
    return [line for line in lines if line and not line.startswith("#")]
