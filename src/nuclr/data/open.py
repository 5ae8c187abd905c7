"""Open a path as pairs; the format is recognized from the path.

| path | format | module |
| --- | --- | --- |
| `.jsonl`, `.json` | list of entries, ALBEF's and Karpathy's lists | `formats.json_list` |
| `.csv`, `.tsv`, `.txt` | table with a header | `formats.table` |
| `.parquet`, or a folder of them | texts, file names, vectors, encoded images | `formats.arrow` |
| a folder written by `save_to_disk` | Hugging Face dataset | `formats.arrow` |
| `.tar`, a folder or a pattern of them (`*.tar`), joined by `::` | img2dataset, webdataset | `formats.tars` |
| `.npz`, `.safetensors` | embedding file | `formats.embeddings` |
| a folder written by clip-retrieval, DataComp's metadata | embeddings in parts | `formats.embedding_folders` |
| a folder with `corpus.jsonl`, `queries.jsonl`, `qrels/` | BEIR: queries and relevant documents | `formats.beir` |
| a folder of images | with `views`: images | `formats.views` |
| `builtin`, `builtin:n=20000,seed=0,split=train` | generated pictures | `builtin` |

The path of a file, and that of a folder of tars, may be a URL (`s3://bucket/{00000..00009}.tar`): it is downloaded to a
cache first, see `nuclr.remote`.
"""

import difflib
import glob
import inspect
from pathlib import Path

from nuclr.data.builtin import BuiltinPairs
from nuclr.data.formats import embeddings
from nuclr.data.formats.arrow import is_hf, open_hf, open_parquet
from nuclr.data.formats.beir import BeirPairs, is_beir
from nuclr.data.formats.choose import Choice, SideChoice
from nuclr.data.formats.embedding_folders import StackedPairs, is_embedding_folder
from nuclr.data.formats.embeddings import VectorPairs
from nuclr.data.formats.json_list import open_json_list
from nuclr.data.formats.listed import ListedPairs
from nuclr.data.formats.table import open_table
from nuclr.data.formats.tars import TarPairs, expand, expand_braces, open_tars, split_parts
from nuclr.data.formats.views import ViewPairs, open_image_folder
from nuclr.data.modalities.image import SUFFIXES
from nuclr.errors import UserError
from nuclr.remote import file_name, is_url, join_url, local_copy, show_urls

AnyPairs = ListedPairs | TarPairs | VectorPairs | StackedPairs | BeirPairs | BuiltinPairs | ViewPairs

_FILES = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet", ".tar", *embeddings.SUFFIXES)
_KNOWN = (
    ".jsonl, .json, .csv, .tsv, .parquet, .tar, .npz, .safetensors; folders of tars, of Parquet, or a saved dataset"
)


def open_pairs(
    path: str | Path,
    root: str | Path | None = None,
    x_key: str | None = None,
    y_key: str | None = None,
    split: str | None = None,
    allow_outside: bool = False,
    x_kind: str | None = None,
    y_kind: str | None = None,
    x_name: str | None = None,
    y_name: str | None = None,
    views: bool = False,
) -> AnyPairs:
    """Open pairs in any of the formats above.

    Args:
        path: a file, a folder, a pattern of tars such as `cc3m/{00000..00331}.tar`, the URL of a file or of tars, or
            "builtin" with options, such as "builtin:n=20000,seed=0,split=train".
        root: the folder that `path` and the names of files are relative to (setting `data.root`); or the URL of one,
            for tars, embedding files and lists that do not name files.
        x_key: the column of x, if it does not have a usual name (setting `data.x.key`); see `formats.choose`.
        y_key: the column of y (setting `data.y.key`).
        split: the split to read, if the source has several (setting `data.split`).
        allow_outside: read files that a list names outside of `root`, or of the list's folder without a root (setting
            `data.allow_outside`). Otherwise they are bad samples.
        x_kind: the modality of x, if it is not recognized (setting `data.x.modality`).
        y_kind: the modality of y (setting `data.y.modality`).
        x_name: the name of side x, by default that of its column (setting `data.x.name`).
        y_name: the name of side y (setting `data.y.name`).
        views: read only images, as pairs of an image and itself (setting `data.contrast=views`); see `formats.views`.

    Returns:
        The pairs, numbered from 0; see `nuclr.data.Pairs`.

    Raises:
        UserError: if there is nothing at `path`, its format is unknown, or its content is wrong.

    Example:
        >>> pairs = open_pairs("builtin:n=1000,seed=0", split="val")
        >>> pairs
        BuiltinPairs('seed=0,split=val', 1,000 pairs, image to text)
        >>> pairs[0].y
        'yellow shape in the middle'

    """
    choice = Choice(SideChoice("x", x_key, x_kind, x_name), SideChoice("y", y_key, y_kind, y_name), views)
    with show_urls():
        try:
            pairs = _open(str(path), None if root is None else str(root), choice, split, allow_outside)
        except OSError as error:
            raise UserError(f"{error.filename or path}: cannot be read ({error.strerror or error})") from None
    if views and not isinstance(pairs, ViewPairs):
        pairs = ViewPairs(pairs)
    for side in (choice.x, choice.y):
        kind = getattr(pairs, f"{side.side}_kind")
        if side.kind not in (None, kind):
            raise UserError(f"data.{side.side}.modality={side.kind}: {path} holds {kind}s on side {side.side}")
        if side.name is not None:
            setattr(pairs, f"{side.side}_name", side.name)
    if pairs.x_name == pairs.y_name and not views:
        raise UserError(f"{path}: both sides are called {pairs.x_name!r}; name them with data.x.name and data.y.name")
    return pairs


def _open(name: str, base: str | None, choice: Choice, split: str | None, allow_outside: bool) -> AnyPairs:
    if name.partition(":")[0] == "builtin":
        return _builtin(name.partition(":")[2], split)
    root = None if base is None or is_url(base) else Path(base)
    if root is not None and not root.is_dir():
        raise UserError(f"data.root={root}: no such folder")
    parts = [locate(base, part) for part in split_parts(name)]
    is_pattern = "{" in name or (glob.has_magic(name) and not Path(parts[0]).exists())
    if len(parts) > 1 or is_pattern or (is_url(parts[0]) and not _is_file_url(parts[0])):
        _refuse_several_lists(name, parts)
        for part, place in zip(split_parts(name), parts, strict=True):
            if root is not None and not is_url(place) and not _exists(place):
                raise UserError(_not_found(part, root))
        return open_tars(expand("::".join(parts)), choice)
    path = local_copy(parts[0]) if is_url(parts[0]) else Path(parts[0])
    if not path.exists():
        raise UserError(_not_found(name, root))
    if path.is_dir():
        return _open_folder(path, root, choice, split, allow_outside)
    suffix = path.suffix.lower()
    if path.stat().st_size == 0:
        raise UserError(f"{path}: empty file")
    if suffix in (".jsonl", ".json"):
        return open_json_list(path, root, choice, split, allow_outside)
    if suffix in (".csv", ".tsv", ".txt"):
        return open_table(path, root, choice, allow_outside)
    if suffix == ".parquet":
        return open_parquet(path, root, choice, split, allow_outside)
    if suffix == ".tar":
        return open_tars([path], choice)
    if suffix in embeddings.SUFFIXES:
        return VectorPairs(path)
    raise UserError(f"{path}: unknown format; known formats: {_KNOWN}")


def is_pairs(name: str) -> bool:
    """Return whether a path, to judge by its name alone, is that of pairs: built-in, or a file in a known format."""
    return name.partition(":")[0] == "builtin" or Path(name).suffix.lower() in _FILES


def _is_file_url(url: str) -> bool:
    """Return whether a URL is that of a file in a known format; others are taken for folders of tars."""
    return not url.endswith("/") and Path(file_name(url)).suffix.lower() in _FILES


def _open_folder(path: Path, root: Path | None, choice: Choice, split: str | None, allow_outside: bool) -> AnyPairs:
    if is_beir(path):
        return BeirPairs(path, split)
    if is_hf(path):
        return open_hf(path, root, choice, split, allow_outside)
    if is_embedding_folder(path):
        return StackedPairs(path, choice.x.key, choice.y.key)
    if any(path.glob("*.tar")):
        return open_tars(expand(str(path)), choice)
    if any(path.rglob("*.parquet")):
        return open_parquet(path, root, choice, split, allow_outside)
    if choice.views:
        return open_image_folder(path, allow_outside)
    problem = f"{path}: a folder without tars, Parquet files or a saved dataset"
    if _has_images(path):
        raise UserError(f"{problem}; it holds images: data.contrast=views contrasts views of them; or name a list")
    raise UserError(f"{problem}; known formats: {_KNOWN}")


def _not_found(name: str, root: Path | None) -> str:
    """Return the message for a path or pattern without a file: the folders that were searched, and similar names."""
    folders = [Path()] if root is None or Path(name).is_absolute() else [root, Path()]
    siblings = dict.fromkeys(
        other.name
        for folder in folders
        if (parent := (folder / name).parent).is_dir()
        for other in parent.iterdir()
        if other.is_dir() or other.suffix.lower() in _FILES
    )
    nearest = difflib.get_close_matches(Path(name).name, siblings, n=1)
    hint = f"; did you mean {Path(name).parent / nearest[0]}?" if nearest else ""
    what = "no file matches this pattern" if "{" in name or glob.has_magic(name) else "no such file or folder"
    where = "" if len(folders) == 1 else f", neither in data.root={root} nor in the working directory"
    return f"{name}: {what}{where}{hint}"


def _refuse_several_lists(name: str, places: list[str]) -> None:
    """Refuse a pattern, or parts joined by `::`, of files that are not tars, and say how to join them."""
    for part in places:
        suffix = "" if part.endswith("/") else Path(part).suffix.lower()  # a folder of a URL ends with a slash
        joined = f"{' '.join(places)} > {Path(part).parent / 'all'}{suffix}"
        if suffix in (".csv", ".tsv", ".txt"):
            fix = f"join the files first: awk 'FNR > 1 || NR == 1' {joined}"
        elif suffix == ".jsonl":
            fix = f"join the files first: cat {joined}"
        elif suffix == ".parquet":
            fix = f"name the folder that holds them, such as {Path(part).parent}"
        elif suffix in _FILES and suffix != ".tar":
            fix = "join them to one file first"
        else:
            continue
        raise UserError(f"{name}: several files, and patterns, are for tars only; {fix}")


def is_image_folder(name: str, root: str | Path | None = None) -> bool:
    """Return whether a path is a folder of images, and of no pairs in another format.

    Args:
        name: the path, as for `open_pairs`.
        root: the folder that it is relative to (setting `data.root`).

    """
    place = locate(None if root is None else str(root), name)
    path = Path(place)
    if is_url(place) or not path.is_dir() or is_beir(path) or is_hf(path):
        return False
    if any(path.glob("*.tar")) or any(path.rglob("*.parquet")):
        return False
    return _has_images(path)


def _has_images(folder: Path) -> bool:
    return any(file.suffix.lower() in SUFFIXES for file in folder.rglob("*"))


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
        return name if Path(name).is_absolute() else join_url(root, name)
    below = str(Path(root) / name)
    return name if _exists(name) and not _exists(below) else below


def _exists(path: str) -> bool:
    """Return whether there is such a file or folder, or one that matches a pattern."""
    if Path(path).exists():
        return True
    if "{" in path:
        return any(_exists(name) for name in expand_braces(path) if name != path)
    return glob.has_magic(path) and next(glob.iglob(path), None) is not None  # noqa: PTH207 (it may be absolute)


def _builtin(options: str, split: str | None) -> BuiltinPairs:
    """Return the pairs of "n=20000,seed=0,split=train"; `split` applies if the options do not name one."""
    types = {key: type(value.default) for key, value in inspect.signature(BuiltinPairs).parameters.items()}
    arguments: dict[str, int | str] = {} if split is None else {"split": split}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key not in types:
            raise UserError(f"builtin:{options}: unknown option {key!r}; allowed: {', '.join(types)}")
        try:
            arguments[key] = types[key](value)
        except ValueError:
            raise UserError(f"builtin:{options}: {key}={value!r} is not a whole number") from None
    return BuiltinPairs(**arguments)  # type: ignore[arg-type]
