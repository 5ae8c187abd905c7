"""A path -> pairs, by what lies there.

| path | format | module |
| --- | --- | --- |
| `.jsonl`, `.json` | caption list: ours, ALBEF's, Karpathy's | `caption_list` |
| `.csv`, `.tsv`, `.txt` | table with a header | `table` |
| `.parquet`, or a folder of them | file names or images' bytes | `parquet` |
| a folder from `save_to_disk` | Hugging Face dataset | `hf` |
| `.tar`, a folder or a pattern of them, joined by `::` | img2dataset, webdataset | `tars` |
| `.npz`, `.safetensors` | embedding file | `vectors` |
| `builtin`, `builtin:n=20000,seed=0,split=train` | pictures made on the fly | `builtin` |
"""

import difflib
import inspect
from pathlib import Path

from nuclr.data.builtin import BuiltinPairs
from nuclr.data.formats import embeddings
from nuclr.data.formats.arrow import ArrowPairs, is_hf, open_hf, open_parquet
from nuclr.data.formats.caption_list import open_caption_list
from nuclr.data.formats.embeddings import VectorPairs
from nuclr.data.formats.listed import ListedPairs
from nuclr.data.formats.table import open_table
from nuclr.data.formats.tars import TarPairs, expand, open_tars
from nuclr.errors import UserError

AnyPairs = ListedPairs | ArrowPairs | TarPairs | VectorPairs | BuiltinPairs

_KNOWN = (
    ".jsonl, .json, .csv, .tsv, .parquet, .tar, .npz, .safetensors; folders of tars, of Parquet, or a saved dataset"
)


def open_pairs(
    path: str | Path,
    root: str | Path | None = None,
    x_key: str | None = None,
    y_key: str | None = None,
    split: str | None = None,
) -> AnyPairs:
    """Open pairs in any of the formats above.

    `path` is a file, a folder, a pattern of tars (see `tars`), or "builtin" with options, as in
    "builtin:n=20000,seed=0,split=train". `root` is the folder that `path` and the images' names are relative to.
    `x_key` and `y_key` name columns where they are not the usual ones; `split` picks one where the source has
    several.
    """
    name, folder = str(path), Path(root) if root is not None else None
    if name.partition(":")[0] == "builtin":
        return _builtin(name.partition(":")[2], split)
    if folder is not None and not folder.is_dir():
        raise UserError(f"{folder}: no such folder (root of the data)")
    parts = [_below(folder, part) for part in name.split("::")]
    if len(parts) > 1 or "{" in name:
        return open_tars(expand("::".join(parts)), x_key, y_key)
    return _open_one(Path(parts[0]), folder, x_key, y_key, split)


def _open_one(path: Path, root: Path | None, x_key: str | None, y_key: str | None, split: str | None) -> AnyPairs:
    if not path.exists():
        near = difflib.get_close_matches(
            path.name, [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        )
        raise UserError(f"{path}: no such file or folder{f'; did you mean {near[0]}?' if near else ''}")
    if path.is_dir():
        if is_hf(path):
            return open_hf(path, root, x_key, y_key, split)
        if any(path.glob("*.tar")):
            return open_tars(expand(str(path)), x_key, y_key)
        if any(path.rglob("*.parquet")):
            return open_parquet(path, root, x_key, y_key, split)
        raise UserError(f"{path}: a folder without tars, Parquet files or a dataset on disk; known: {_KNOWN}")
    suffix = path.suffix.lower()
    if path.stat().st_size == 0:
        raise UserError(f"{path}: empty file")
    if suffix in (".jsonl", ".json"):
        return open_caption_list(path, root, x_key, y_key, split)
    if suffix in (".csv", ".tsv", ".txt"):
        return open_table(path, root, x_key, y_key)
    if suffix == ".parquet":
        return open_parquet(path, root, x_key, y_key, split)
    if suffix == ".tar":
        return open_tars([path], x_key, y_key)
    if suffix in embeddings.SUFFIXES:
        return VectorPairs(path)
    raise UserError(f"{path}: unknown kind of data; known: {_KNOWN}")


def _below(folder: Path | None, part: str) -> str:
    """`part` relative to the root, unless it is only there without it."""
    if folder is None or (Path(part).exists() and not (folder / part).exists()):
        return part
    return str(folder / part)


def _builtin(options: str, split: str | None) -> BuiltinPairs:
    """BuiltinPairs from "n=20000,seed=0,split=train"."""
    kinds = {key: type(value.default) for key, value in inspect.signature(BuiltinPairs).parameters.items()}
    found: dict[str, int | str] = {} if split is None else {"split": split}
    for option in filter(None, options.split(",")):
        key, _, value = option.partition("=")
        if key not in kinds:
            raise UserError(f"builtin:{options}: unknown option {key!r}; allowed: {', '.join(kinds)}")
        try:
            found[key] = kinds[key](value)
        except ValueError:
            raise UserError(f"builtin:{options}: {key}={value!r} is no whole number") from None
    return BuiltinPairs(**found)  # type: ignore[arg-type]
