"""Vectors in files, named as PATH or PATH:COLUMN; the path of a file may be a URL.

| path | what it holds |
| --- | --- |
| `.npy` | one array, which is memory-mapped, so it may be larger than memory |
| `.npz`, `.safetensors` | named arrays; x, y and y_to_x of an embedding file are pairs |
| `.parquet`, a folder of them, a dataset on disk, one of Lance | columns of lists, copied once to mapped `.npy` files |
| `.faiss`, `.index` | the vectors that an index of faiss holds, with the ids of its items |
| a folder of `.npy` files | one array in parts, in the order of their names, which are memory-mapped |
| a folder of clip-retrieval | x in `img_emb`, y in `text_emb`: folders of `.npy` files |
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nuclr.arrays import Features, Norms, Rows, as_rows, free_memory
from nuclr.errors import UserError, printable, require
from nuclr.files import npz_sizes, open_regular, read_npz, readable
from nuclr.remote import is_url, local_copy, show_urls
from nuclr.stacked import Stacked, StoredMatrix, stored_npy

SIDES = ("x", "y")
LINKS = "y_to_x"  # an array of an embedding file that is not one of vectors
INDEXES = (".faiss", ".index")
CLIP_RETRIEVAL = {"x": "img_emb", "y": "text_emb"}  # the folders of parts that it writes


@dataclass(frozen=True, repr=False)
class Vectors:
    """The rows of an array, with what is known about them.

    Attributes:
        rows: (n, d), an array, a memory-mapped file, or several of them.
        source: the path or URL, without the column.
        column: the array, column or side; None if the file holds only one.
        ids: what people call the rows: texts, file names of images, ids of an index; None if it is not known.
        links: (m, 2), rows (row, key): rows of one source with an equal key belong together; None if it is not known.
        numbers: (n,), the numbers of the pairs that the rows come from; None if the rows are not those of pairs.
        words: what the rows are, such as "captions"; None if it is not known.
        compressed: class of the index, such as "IndexPQ", if it holds compressed vectors and `rows` are approximate.

    """

    rows: Any
    source: str
    column: str | None = None
    ids: Sequence[str] | None = None
    links: np.ndarray | None = None
    numbers: np.ndarray | None = None
    words: str | None = None
    compressed: str | None = None

    def __repr__(self) -> str:
        return f"Vectors({self.name!r}, {len(self.rows)} x {self.rows.shape[1]})"

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    @property
    def name(self) -> str:
        """The argument that gives these vectors."""
        return self.source if self.column is None else f"{self.source}:{self.column}"

    def shares_source(self, other: "Vectors") -> bool:
        """Return whether both come from one file, folder or run."""
        return Path(self.source).resolve() == Path(other.source).resolve()

    def is_same(self, other: "Vectors") -> bool:
        """Return whether both are the same rows."""
        return self.rows is other.rows or (self.column == other.column and self.shares_source(other))


def checked_rows(
    name: str,
    rows: Features,
    norms: Norms,
    hint: str = "",
) -> Rows:
    """Check all rows once; functions that take features do not check them again.

    Args:
        name: where they come from, for the message.
        rows: (n, d), in any precision.
        norms: "unit" refuses other norms than 1, "normalize" scales rows when they are read, "any" takes all norms.
        hint: how the user asks for normalized rows.

    Raises:
        UserError: names the first wrong row.

    """
    try:
        return as_rows(name, rows, norms, hint=hint)
    except ValueError as error:
        raise UserError(str(error)) from None


def open_vectors(argument: str | Path, preferred: str = "x") -> Vectors:
    """Open the vectors that an argument names. Their numbers are not checked.

    Args:
        argument: PATH or PATH:COLUMN.
        preferred: the array to take if no column is named and there are several: "x" or "y".

    Raises:
        UserError: if there is nothing to read, or it does not hold vectors.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(Path(folder, "pairs.npz"), x=np.eye(3), y=np.eye(3)[:2])
        ...     len(open_vectors(f"{folder}/pairs.npz:y"))
        2

    """
    source, column = split_argument(str(argument))
    with show_urls():
        path = local_copy(source) if is_url(source) else Path(source)
        vectors = _reader(path)(path, column, preferred)
    vectors = replace(vectors, source=source)
    require_vectors(vectors.name, vectors.rows)
    return vectors


def require_vectors(name: str, rows: Any) -> None:
    """Refuse what is not a matrix of floating-point numbers with at least one row.

    Args:
        name: where it comes from, for the message.
        rows: an array, or `nuclr.stacked.Stacked`.

    Raises:
        UserError: names its type and shape.

    """
    if rows.ndim != 2 or rows.dtype.kind != "f" or rows.dtype.itemsize > 8 or 0 in rows.shape:
        needs = "needs floating-point numbers (n, d), at least one row"
        raise UserError(f"{name}: {rows.dtype} of shape {rows.shape}; {needs}")


def is_vectors(argument: str) -> bool:
    """Return whether a path holds one array, to judge by its name: `.npy`, an index, or PATH:COLUMN."""
    source, column = split_argument(argument)
    return Path(source).suffix in (".npy", *INDEXES) or (column is not None and Path(source).exists())


def open_sides(argument: str) -> tuple[Vectors, Vectors]:
    """Open both sides of pairs: x and y of an embedding file, or of a folder of clip-retrieval.

    Args:
        argument: the file or folder.

    Raises:
        UserError: if there is nothing to read, or it does not hold pairs.

    """
    if Path(argument).suffix in (".npy", *INDEXES):
        raise UserError(f"{argument}: one array, and pairs have two sides; name a file or folder for each")
    x = open_vectors(f"{argument}:x")
    y = open_vectors(f"{argument}:y")
    if isinstance(x.rows, Stacked):
        for part_of_x, part_of_y in zip(x.rows.parts, y.rows.parts, strict=False):
            if part_of_x.shape[0] != part_of_y.shape[0]:
                sizes = f"{part_of_x.shape[0]:,} and {part_of_y.shape[0]:,}"
                raise UserError(f"{part_of_x.source} and {part_of_y.source} have {sizes} rows; needs one length")
    return x, y


def pair_rows(x: Vectors, y: Vectors) -> np.ndarray:
    """Return the row of x that each row of y belongs to, (n_y,) int64.

    Args:
        x: side x of pairs, as `open_sides` returns it.
        y: side y.

    Raises:
        UserError: if `y_to_x` is missing and the sides differ in length, or names a row that does not exist.

    """
    if y.links is None:
        if len(x) != len(y):
            raise UserError(
                f"{x.source}: x has {len(x)} rows and y {len(y)}; add {LINKS}, the row of x for each y, or name the "
                "arrays otherwise if they are not pairs"
            )
        return np.arange(len(y))
    rows: np.ndarray = y.links[:, 1]
    outside = ((rows < 0) | (rows >= len(x))).nonzero()[0]
    if len(outside):
        raise UserError(f"{x.source}: {LINKS}[{outside[0]}] is {rows[outside[0]]}; allowed: 0 to {len(x) - 1}")
    return rows


def split_argument(argument: str) -> tuple[str, str | None]:
    """Return the path or URL, and the column, of PATH or PATH:COLUMN; a file whose name has a colon is a file."""
    path, colon, column = argument.rpartition(":")
    if not colon or not column or Path(argument).exists() or (is_url(argument) and "/" in column):
        return argument, None
    return path, column


def _reader(path: Path) -> Callable[[Path, str | None, str], Vectors]:
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    if path.is_dir():
        return _read_folder
    if path.suffix.lower() not in _READERS:
        kinds = f"{', '.join(_READERS)}, a dataset on disk, a folder of embeddings"
        raise UserError(f"{path}: not a file of vectors; allowed: {kinds}; embed texts first (nuclr embed)")
    try:
        open_regular(path).close()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    return _READERS[path.suffix.lower()]


def is_clip_retrieval(path: Path) -> bool:
    """Return whether a folder has the form of clip-retrieval's output."""
    return any(any((path / name).glob("*.npy")) for name in CLIP_RETRIEVAL.values())


def _read_npy(
    path: Path,
    column: str | None,
    _: str,
) -> Vectors:
    if column is not None:
        raise UserError(f"{path}:{column}: the file holds one array; name it without :{column}")
    return Vectors(Stacked([stored_npy(path)]), str(path))


def _read_arrays(
    path: Path,
    column: str | None,
    preferred: str,
) -> Vectors:
    """Read an array of `.npz` or `.safetensors`: its key is the row of the x that each row belongs to."""
    if path.suffix.lower() == ".npz":
        sizes = npz_sizes(path)
        name = _choose(path, column, preferred, list(sizes))
        _refuse_larger_than_memory(path, sizes[name])
        arrays = read_npz(path, (name, LINKS))
    else:
        _refuse_larger_than_memory(path, path.stat().st_size)  # opening it reserves as much
        tensors = _read_safetensors(path)
        name = _choose(path, column, preferred, list(tensors))
        arrays = {key: tensors[key].numpy() for key in (name, LINKS) if key in tensors}
    rows = arrays[name]
    require_vectors(f"{path}:{name}", rows)
    key = np.arange(len(rows)) if name == "x" else None
    if name == "y" and LINKS in arrays:
        key = arrays[LINKS]
        if key.shape != (len(rows),) or key.dtype.kind not in "iu":
            raise UserError(f"{path}: {LINKS} is {key.dtype} of shape {key.shape}; needs whole numbers ({len(rows)},)")
    links = None if key is None else np.stack([np.arange(len(rows)), key.astype(np.int64)], axis=1)
    return Vectors(
        rows,
        str(path),
        name,
        links=links,
    )


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    import safetensors.torch

    with readable(path, "tensors"):
        tensors = safetensors.torch.load_file(path)
    return {key: tensor.float() if tensor.dtype == torch.bfloat16 else tensor for key, tensor in tensors.items()}


def _choose(
    path: Path,
    column: str | None,
    preferred: str,
    names: Sequence[str],
) -> str:
    """Return the array to read."""
    arrays = [name for name in names if name != LINKS]
    if column is None and preferred in arrays:
        return preferred
    if column is None and len(arrays) == 1:
        return arrays[0]
    if column is None or column not in names:
        wrong = "name one of its arrays" if column is None else f"no array named {column!r}; name one"
        raise UserError(f"{path}: {wrong} as {path}:NAME; found: {', '.join(names) or 'nothing'}")
    return column


def _read_folder(
    path: Path,
    column: str | None,
    preferred: str,
) -> Vectors:
    if is_clip_retrieval(path):
        side = column or preferred
        if side not in CLIP_RETRIEVAL:
            raise UserError(f"{path}:{side}: a folder of clip-retrieval has the sides {path}:x and {path}:y")
        parts = path / CLIP_RETRIEVAL[side]
        return replace(_reader(parts)(parts, None, side), column=side)
    if shards := sorted(path.glob("*.npy")):
        if column is not None:
            raise UserError(f"{path}:{column}: the folder holds one array in parts, which has no columns")
        return Vectors(_stack(path, [stored_npy(shard) for shard in shards]), str(path))
    if not any(file.suffix in (".parquet", ".arrow", ".lance") for file in path.rglob("*")):
        raise UserError(f"{path}: not a folder of embeddings, of .npy or Parquet files, a dataset on disk or a run")
    return _read_table(path, column, preferred)


def _read_table(
    path: Path,
    column: str | None,
    _: str,
) -> Vectors:
    from nuclr.data.formats.arrow import stored_vectors

    return Vectors(_stack(path, stored_vectors(path, column)), str(path), column)


def _stack(path: Path, parts: Sequence[StoredMatrix]) -> Stacked:
    try:
        return Stacked(parts)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _refuse_larger_than_memory(path: Path, size: int) -> None:
    free = free_memory(torch.device("cpu"))
    if size > 0.8 * free:
        raise UserError(
            f"{path}: needs {size / 2**30:.1f} GiB and {free / 2**30:.1f} GiB of memory are free; "
            "save the vectors with numpy.save as .npy, which is read in parts"
        )


def _read_index(
    path: Path,
    column: str | None,
    _: str,
) -> Vectors:
    """Read the vectors of an index of faiss; inverted lists must not have ids of their own."""
    faiss = require("faiss", purpose=str(path))
    kind = "the file"
    ids = None
    try:
        if column is not None:
            raise RuntimeError(f"it has no column {column}")
        outer = faiss.read_index(str(path))  # it owns the indexes inside, so it must outlive them
        index = outer
        # `reconstruct_n` of IndexIDMap ends the process, so the index inside is read.
        while isinstance(index, faiss.IndexIDMap):
            ids = [str(number) for number in faiss.vector_to_array(index.id_map).tolist()]
            index = faiss.downcast_index(index.index)
        kind = type(index).__name__
        if isinstance(index, faiss.IndexIVFFastScan):  # faiss 1.15 crashes
            raise RuntimeError("not implemented for fast scan")
        if isinstance(index, faiss.IndexIVF):
            index.make_direct_map()
        rows = index.reconstruct_n(0, index.ntotal)
    except RuntimeError as error:
        reason = printable(str(error).splitlines()[0].rpartition(": ")[2][:200])  # without the place in faiss' source
        raise UserError(f"{path}: {kind} gives no vectors ({reason}); save the vectors themselves as .npy") from None
    return Vectors(
        rows,
        str(path),
        ids=ids,
        compressed=None if "Flat" in kind else kind,
    )


_READERS: dict[str, Callable[[Path, str | None, str], Vectors]] = {
    ".npy": _read_npy,
    ".npz": _read_arrays,
    ".safetensors": _read_arrays,
    ".parquet": _read_table,
    **dict.fromkeys(INDEXES, _read_index),
}
