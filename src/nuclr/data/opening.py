"""Open what is at a path: pairs, or images or vectors with classes; the format is recognized from the path.

| path | format | module |
| --- | --- | --- |
| `.jsonl`, `.json` | list of entries, ALBEF's and Karpathy's lists | `formats.json_list` |
| `.csv`, `.tsv`, `.txt`, `.csv.gz` | table with a header | `formats.table` |
| `.parquet`, or a folder of them | texts, file names, vectors, encoded images | `formats.arrow` |
| a folder written by `save_to_disk` | Hugging Face dataset | `formats.arrow` |
| `.tar`, a folder or a pattern of them (`*.tar`), joined by `::` | img2dataset, webdataset | `formats.tars` |
| `.npz`, `.safetensors` | embedding file | `formats.embeddings` |
| a folder written by clip-retrieval | embeddings in parts | `formats.embeddings` |
| a folder with `corpus.jsonl`, `queries.jsonl`, `qrels/` | BEIR: queries and relevant documents | `formats.beir` |
| a folder of images | with `views`: images | `labeled` |
| a folder of folders of images, `.npz` with x and labels | labeled images or vectors | `labeled` |
| `.npy`, `.faiss`, PATH:COLUMN | vectors of one side | `vectors` |
| `builtin`, `builtin:n=20000,seed=0,split=train` | generated pictures | `builtin` |

The path of a file or of tars may be a URL (`s3://bucket/{00000..00009}.tar`): it is downloaded to a cache first, see
`nuclr.remote`.
"""

import glob
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nuclr.data.builtin import BuiltinPairs
from nuclr.data.formats.arrow import is_hf, open_arrow, open_dataset
from nuclr.data.formats.beir import BeirPairs, is_beir
from nuclr.data.formats.choose import ANY, Request, SideChoice
from nuclr.data.formats.embeddings import VectorPairs
from nuclr.data.formats.json_list import open_json_list
from nuclr.data.formats.table import open_table
from nuclr.data.formats.tars import expand, expand_braces, open_tars, split_parts
from nuclr.data.labeled import LabeledVectors, has_labels, is_class_folder, open_class_folder, open_image_folder
from nuclr.data.modalities.image import SUFFIXES
from nuclr.data.pairs import Labeled, Pairs, SideName, ViewPairs
from nuclr.data.vectors import Vectors, is_clip_retrieval, is_vectors, open_vectors
from nuclr.errors import UserError
from nuclr.remote import file_name, is_url, local_copy, show_urls, shown

_COMPRESSED = (".csv", ".tsv", ".txt", ".jsonl")  # lists that are read from .gz as well


def open(
    path: str | Path | Any,
    root: str | Path | None = None,
    x: SideChoice = ANY,
    y: SideChoice = ANY,
    split: str | None = None,
    allow_outside: bool = False,
    views: bool = False,
) -> Pairs | Labeled | Vectors:
    """Open what is at a path, in any of the formats above.

    Args:
        path: a file, a folder, a pattern of tars such as `cc3m/{00000..00331}.tar`, the URL of a file or of tars, or
            "builtin" with options, such as "builtin:n=20000,seed=0,split=train"; or a `datasets.Dataset`.
        root: the folder that `path` and the names of files are relative to (setting `data.root`); or the URL of one,
            for tars, embedding files and lists that do not name files.
        x: the column, modality and name of side x, if they are not the usual ones (settings `data.x.key`,
            `data.x.modality` and `data.x.name`); see `formats.choose`.
        y: the same for side y.
        split: the split to read, if the source has several (setting `data.split`).
        allow_outside: read files that a list names outside of `root`, or of the list's folder without a root (setting
            `data.allow_outside`). Otherwise they are bad samples.
        views: read only images, as pairs of an image and itself (setting `data.contrast=views`); see `ViewPairs`.

    Returns:
        Pairs, numbered from 0 (`nuclr.data.Pairs`), images or vectors with classes (`nuclr.data.Labeled`), or the rows
        of one array (`nuclr.data.Vectors`): those of `.npy`, of an index, and of a column that is named as PATH:COLUMN.

    Raises:
        UserError: if there is nothing at `path`, its format is unknown, or its content is wrong.

    Example:
        >>> from nuclr import data
        >>> pairs = data.open("builtin:n=1000,seed=0", split="val")
        >>> pairs
        BuiltinPairs('seed=0,split=val', 1,000 pairs, image to text)
        >>> pairs[0].y
        'yellow shape in the middle'

    """
    if is_vectors(str(path)):
        return open_vectors(path)
    sides: dict[SideName, SideChoice] = {"x": x, "y": y}
    request = Request(
        Path(),
        None,
        sides,
        split,
        allow_outside,
        views,
    )
    with show_urls():
        try:
            opened = _open(path, None if root is None else str(root), request)
        except OSError as error:
            raise UserError(f"{error.filename or path}: cannot be read ({error.strerror or error})") from None
    if isinstance(opened, Labeled):
        return opened
    if views and not isinstance(opened, ViewPairs):
        opened = ViewPairs(opened)
    for name, choice in sides.items():
        modality = opened.sides[name].modality.name
        if choice.modality not in (None, modality):
            raise UserError(f"data.{name}.modality={choice.modality}: {path} holds {modality}s on side {name}")
        if choice.name is not None:
            opened.sides[name] = replace(opened.sides[name], name=choice.name)
    if opened.sides["x"].name == opened.sides["y"].name and not views:
        raise UserError(f"{path}: both sides have one name; name them with data.x.name and data.y.name")
    return opened


def open_pairs(
    path: str | Path | Any,
    root: str | Path | None = None,
    x: SideChoice = ANY,
    y: SideChoice = ANY,
    split: str | None = None,
    allow_outside: bool = False,
    views: bool = False,
) -> Pairs:
    """Open pairs: as `open`, and refuse what does not hold pairs.

    Args:
        path: as in `open`.
        root: as in `open`.
        x: the choices of side x, as in `open`.
        y: the choices of side y, as in `open`.
        split: as in `open`.
        allow_outside: as in `open`.
        views: as in `open`.

    Returns:
        Pairs, numbered from 0.

    Raises:
        UserError: as `open`, or if the path holds no pairs.

    """
    opened = open(path, root, x, y, split, allow_outside, views)
    if isinstance(opened, Vectors | LabeledVectors):
        raise UserError(f"{path}: holds vectors of one side; pairs need the arrays x and y in one file")
    if isinstance(opened, Labeled):
        raise UserError(f"{path}: holds images and no pairs; name a list of pairs, or set data.contrast=views")
    return opened


def open_labeled(path: str | Path, allow_outside: bool = False) -> Labeled:
    """Open images in one folder per class, or vectors with labels.

    Args:
        path: the folder (setting `data.classes`), or the `.npz` file.
        allow_outside: follow symbolic links that lead out of the folder (setting `data.allow_outside`). Otherwise such
            images are bad samples.

    Returns:
        The labeled images or vectors.

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
    opened = open(path, allow_outside=allow_outside)
    if not isinstance(opened, Labeled):
        raise UserError(f"{path}: needs one folder of images per class, or .npz with x and labels")
    return opened


def _open(
    source: Any,
    base: str | None,
    request: Request,
) -> Pairs | Labeled:
    if not isinstance(source, str | Path):
        return open_dataset(source, request)
    name = str(source)
    if name.partition(":")[0] == "builtin":
        return _builtin(name.partition(":")[2], request.split)
    root = None if base is None or is_url(base) else Path(base)
    if root is not None and not root.is_dir():
        raise UserError(f"data.root={root}: no such folder")
    parts = split_parts(name)
    places = [locate(base, part) for part in parts]
    for part, place in zip(parts, places, strict=True):
        if not is_url(place) and not _exists(place):
            where = "" if root is None else f", neither in data.root={root} nor in the working directory"
            raise UserError(f"{part}: no such file or folder{where}")
    is_pattern = "{" in name or (glob.has_magic(name) and not Path(places[0]).exists())
    if is_url(places[0]) and (places[0].endswith("/") or not is_pairs(file_name(places[0]))):
        raise UserError(f"{shown(places[0])}: not a file of a known format; name tars as FOLDER/{{00000..00009}}.tar")
    if len(parts) > 1 or is_pattern:
        if any(is_pairs(part) and file_suffix(part) != ".tar" for part in parts):
            fix = "join them to one file first, or name the folder of Parquet files"
            raise UserError(f"{name}: several files, and patterns, are for tars only; {fix}")
        return open_tars(expand("::".join(places)), request)
    path = local_copy(places[0]) if is_url(places[0]) else Path(places[0])
    request = replace(
        request,
        path=path,
        root=root,
    )
    if path.is_dir():
        return _open_folder(request)
    if path.stat().st_size == 0:
        raise UserError(f"{path}: empty file")
    if file_suffix(path) not in _OPENERS:
        raise UserError(f"{path}: unknown format; known formats: {', '.join(_OPENERS)}, and folders of these")
    return _OPENERS[file_suffix(path)](request)


def _open_arrays(request: Request) -> Pairs | Labeled:
    return LabeledVectors(request.path) if has_labels(request.path) else VectorPairs(request.path)


_OPENERS: dict[str, Callable[[Request], Pairs | Labeled]] = {
    ".jsonl": open_json_list,
    ".json": open_json_list,
    ".csv": open_table,
    ".tsv": open_table,
    ".txt": open_table,
    ".parquet": open_arrow,
    ".tar": lambda request: open_tars([request.path], request),
    ".npz": _open_arrays,
    ".safetensors": _open_arrays,
}


def file_suffix(path: str | Path) -> str:
    """Return the suffix that shows the format of a file, in lower case: that of a list without `.gz`.

    Example:
        >>> file_suffix("pairs.CSV.gz"), file_suffix("pairs.tar.gz")
        ('.csv', '.gz')

    """
    path = Path(path)
    inner = Path(path.stem).suffix.lower()
    return inner if path.suffix.lower() == ".gz" and inner in _COMPRESSED else path.suffix.lower()


def is_pairs(name: str) -> bool:
    """Return whether a path, to judge by its name alone, is that of pairs: built-in, or a file in a known format."""
    return name.partition(":")[0] == "builtin" or file_suffix(name) in _OPENERS


def _open_folder(request: Request) -> Pairs | Labeled:
    path = request.path
    if is_beir(path):
        return BeirPairs(path, request.split)
    if is_clip_retrieval(path):
        return VectorPairs(path)
    if any(path.glob("*.tar")):
        return open_tars(expand(str(path)), request)
    if is_hf(path) or any(path.rglob("*.parquet")):
        return open_arrow(request)
    if request.views:
        return open_image_folder(path, request.allow_outside)
    if is_class_folder(path):
        return open_class_folder(path, request.allow_outside)
    fix = "name a list of pairs, sort images into one folder per class, or set data.contrast=views for images"
    raise UserError(f"{path}: a folder without tars, Parquet files or a saved dataset; {fix}")


def is_image_folder(name: str, root: str | Path | None = None) -> bool:
    """Return whether a path is a folder of images, and of no pairs in another format.

    Args:
        name: the path, as for `open_pairs`.
        root: the folder that it is relative to (setting `data.root`).

    """
    path = Path(locate(None if root is None else str(root), name))
    if not path.is_dir() or is_beir(path) or is_hf(path) or any(path.glob("*.tar")) or any(path.rglob("*.parquet")):
        return False
    return any(file.suffix.lower() in SUFFIXES for file in path.rglob("*"))


def locate(root: str | None, name: str) -> str:
    """Return the path or the URL of a name.

    Args:
        root: the folder that it is relative to, or the URL of one (setting `data.root`).
        name: a path or a URL.

    Returns:
        `name` relative to the root, unless it is a URL or exists only without the root. Below the URL of a root is
        every name that is not absolute.

    """
    if root is None or is_url(name):
        return name
    if is_url(root):
        return name if Path(name).is_absolute() else f"{root.rstrip('/')}/{name.removeprefix('./')}"
    below = str(Path(root) / name)
    return name if _exists(name) and not _exists(below) else below


def _exists(path: str) -> bool:
    """Return whether there is such a file or folder, or one that matches a pattern."""
    names = expand_braces(path) if "{" in path else [path]
    return any(Path(name).exists() or next(glob.iglob(name), None) is not None for name in names)  # noqa: PTH207


def _builtin(options: str, split: str | None) -> BuiltinPairs:
    """Return the pairs of "n=20000,seed=0,split=train"; `split` applies if the options do not name one."""
    arguments: dict[str, Any] = {} if split is None else {"split": split}
    try:
        for option in filter(None, options.split(",")):
            key, _, value = option.partition("=")
            arguments[key] = value if key == "split" else int(value)
        return BuiltinPairs(**arguments)
    except (TypeError, ValueError):
        allowed = "n=int, seed=int, split=train, size=int, shapes=int"
        raise UserError(f"builtin:{options}: wrong option; allowed: {allowed}") from None
