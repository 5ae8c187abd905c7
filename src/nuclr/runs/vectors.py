"""Vectors of any file or run, named on the command line as PATH or PATH:COLUMN; the path of a file may be a URL.

`.npy` files are memory-mapped, so they may be larger than memory. `.npz` and `.safetensors` files have named arrays,
Parquet files and datasets on disk have columns, and runs have the sides x and y of their held-out pairs. Folders of
embeddings in parts (clip-retrieval, DataComp) have arrays, which are memory-mapped as well. Indexes of faiss
(`.faiss`) are asked for their vectors.
"""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import safetensors
import torch

from nuclr.data.formats import arrow
from nuclr.data.formats.embedding_folders import EmbeddingFolder, is_embedding_folder
from nuclr.errors import UserError
from nuclr.files import read_npz
from nuclr.popularity.correction import BANK_SIZE
from nuclr.popularity.kernel import free_memory
from nuclr.remote import is_url, local_copy, show_urls
from nuclr.runs import folder as run_folder
from nuclr.runs import index_vectors
from nuclr.runs.components import SIDES, Source
from nuclr.runs.features import PairFeatures
from nuclr.runs.run import Run
from nuclr.runs.side_words import words_of_pairs
from nuclr.stacked import Stacked

ROWS = 2**16  # of a block that is checked at once
TEXT_FILES = (".csv", ".tsv", ".txt", ".json", ".jsonl")


@dataclass(frozen=True)
class Vectors:
    """Vectors with what is known about them.

    Attributes:
        features: (n, d), an array, a memory-mapped file, or several of them.
        path: the file or folder.
        column: the array, column or side; None for `.npy`.
        group: (n,), equal for rows that belong together, comparable within one file; None if it is not known.
        texts: what people call the rows: texts, file names of images, ids; None if it is not known.
        pairs: features of both sides, if they come from a run.
        numbers: of the pairs that the rows come from, if they come from a run.
        url: of the file, if `path` is a local copy of it.
        ids: of the rows, if they come from an index with ids of its own.
        index: class of the index, such as "IndexPQ", if it stores compressed vectors and `features` are approximate.
        words: what the rows are, such as "captions", if they come from a run.

    """

    features: np.ndarray | Stacked
    path: Path
    column: str | None = None
    group: np.ndarray | None = None
    texts: Sequence[str] | None = None
    pairs: PairFeatures | None = None
    numbers: np.ndarray | None = None
    url: str | None = None
    ids: np.ndarray | None = None
    index: str | None = None
    words: str | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.features)

    @property
    def name(self) -> str:
        """The argument that gives these vectors."""
        return self.source if self.column is None else f"{self.source}:{self.column}"

    @property
    def source(self) -> str:
        """The path or the URL, without the column."""
        return self.url or str(self.path)

    def is_same(self, other: "Vectors") -> bool:
        """Return whether both are the same rows."""
        return (self.path.resolve(), self.column) == (other.path.resolve(), other.column)


def split_argument(argument: str) -> tuple[str, str | None]:
    """Return the path or URL, and the column, of PATH or PATH:COLUMN; a file whose name has a colon is a file."""
    path, colon, column = argument.rpartition(":")
    if not colon or not column or Path(argument).exists() or (is_url(argument) and "/" in column):
        return argument, None
    return path, column


def local_path(path: str) -> Path:
    """Return the path of a file or folder; a URL is downloaded to the cache."""
    return local_copy(path) if is_url(path) else Path(path)


def open_vectors(argument: str, preferred: str, training: bool = False) -> Vectors:
    """Open the vectors that an argument names.

    Args:
        argument: PATH or PATH:COLUMN.
        preferred: the array to take if no column is named and there are several: "x" or "y".
        training: of a run, take the training pairs instead of the held-out ones.

    Raises:
        UserError: if there is nothing to read, or it does not hold vectors.

    """
    name, column = split_argument(argument)
    path = local_path(name)
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    if path.is_dir() and run_folder.is_run(path):
        return _of_run(path, column or preferred, training)
    if is_embedding_folder(path):
        return _of_folder(path, column, preferred)
    with show_urls():
        try:
            vectors = replace(_of_file(path, column, preferred), url=name if is_url(name) else None)
        except MemoryError:
            raise _too_large(path, path.stat().st_size) from None
    features = vectors.features
    if features.ndim != 2 or features.dtype.kind != "f" or features.dtype.itemsize > 8:
        raise UserError(
            f"{vectors.name}: {features.dtype} of shape {features.shape}; needs floating-point numbers (rows, width)"
        )
    if not len(features):
        raise UserError(f"{vectors.name}: has no rows")
    return vectors


def _of_file(path: Path, column: str | None, preferred: str) -> Vectors:
    if path.suffix == ".npy":
        if column is not None:
            raise UserError(f"{path}:{column}: a .npy file holds one array; name it without :{column}")
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # numpy raises many types for damaged files
            raise UserError(f"{path}: cannot be read as .npy with numbers ({error})") from None
        if not isinstance(array, np.ndarray):
            array.close()
            raise UserError(f"{path}: this is an .npz archive; rename it to {path.with_suffix('.npz').name}")
        return Vectors(array, path)
    if path.suffix == ".npz":
        shapes = _npz_sizes(path)
        name = _choose(path, column, preferred, list(shapes))
        _refuse_larger_than_memory(path, shapes[name])
        arrays = read_npz(path, (name, "y_to_x"))
        return Vectors(arrays[name], path, name, _group(name, arrays))
    if path.suffix == ".safetensors":
        _refuse_larger_than_memory(path, path.stat().st_size)  # opening it reserves as much
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                name = _choose(path, column, preferred, list(file.keys()))
                tensors = {key: file.get_tensor(key) for key in {name, "y_to_x"} & set(file.keys())}
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{path}: cannot be read as .safetensors ({error})") from None
        arrays = {key: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for key, t in tensors.items()}
        return Vectors(arrays[name], path, name, _group(name, arrays))
    if path.suffix == ".parquet" or path.is_dir():
        tables = (
            [path] if path.is_file() else [file for file in path.rglob("*") if file.suffix in (".parquet", ".arrow")]
        )
        if tables:
            _refuse_larger_than_memory(path, sum(file.stat().st_size for file in tables))
            return Vectors(arrow.read_vectors(path, column), path, column)
    if path.suffix in index_vectors.SUFFIXES:
        if column is not None:
            raise UserError(f"{path}:{column}: an index holds one array; name it without :{column}")
        return _of_index(path)
    if path.suffix.lower() in TEXT_FILES:
        raise _no_vectors(path)
    if path.is_dir() and not any(path.iterdir()):
        raise UserError(f"{path}: the folder is empty; name a file of vectors, a dataset on disk or a run")
    raise UserError(
        f"{path}: unknown kind of {'folder' if path.is_dir() else 'file'}; allowed: .npy, .npz, .safetensors, "
        ".parquet, .faiss, a dataset on disk, a folder of embeddings, a run"
    )


def _of_index(path: Path) -> Vectors:
    _refuse_larger_than_memory(path, 2 * path.stat().st_size)  # the index, and its vectors
    read = index_vectors.read_index_vectors(path)
    texts = None if read.ids is None else [str(number) for number in read.ids.tolist()]
    return Vectors(read.features, path, texts=texts, ids=read.ids, index=None if read.exact else read.kind)


def _no_vectors(path: Path) -> UserError:
    """Return the error for a text file: it has numbers, which have to be converted, or texts."""
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = list(islice(filter(str.strip, file), 2))
    for separator in (",", "\t", ";", None):
        header, *rest = [_are_numbers(line.split(separator)) for line in lines] or [False]
        if any(rest) or header:
            options = ("" if separator is None else f", delimiter={separator!r}") + ("" if header else ", skiprows=1")
            return UserError(
                f'{path}: numbers as text; convert them: python -c "import numpy as np; '
                f"np.save('{path.stem}.npy', np.loadtxt('{path}', dtype='float32'{options}))\""
            )
    return UserError(f"{path}: these are texts, not vectors; embed them first, and save the vectors with numpy.save")


def _are_numbers(cells: list[str]) -> bool:
    try:
        return len([float(cell) for cell in cells]) > 1
    except ValueError:
        return False


def _of_folder(path: Path, column: str | None, preferred: str) -> Vectors:
    folder = EmbeddingFolder(path)
    if column in SIDES or (column is None and len(folder.keys) > 1):
        column = folder.sides()[SIDES.index(column or preferred)]
    column = column or folder.keys[0]
    if column not in folder.keys:
        raise UserError(f"{path}: no array named {column!r}; found: {', '.join(folder.keys)}")
    features = folder.features(column)
    return Vectors(features, path, column, np.arange(len(features)), folder.labels(column))


def _npz_sizes(path: Path) -> dict[str, int]:
    try:
        with zipfile.ZipFile(path) as archive:
            return {member.filename.removesuffix(".npy"): member.file_size for member in archive.infolist()}
    except Exception as error:  # zipfile raises many types for damaged files
        raise UserError(f"{path}: cannot be read as .npz ({error})") from None


def _choose(path: Path, column: str | None, preferred: str, names: list[str]) -> str:
    found = ", ".join(names) or "nothing"
    if column is not None and column not in names:
        raise UserError(f"{path}: no array named {column!r}; found: {found}")
    candidates = [name for name in names if name != "y_to_x"]
    if column is None and preferred not in names and len(candidates) != 1:
        raise UserError(f"{path}: name one of its arrays as {path}:NAME; found: {found}")
    return column or (preferred if preferred in names else candidates[0])


def _group(name: str, arrays: dict[str, np.ndarray]) -> np.ndarray | None:
    """Return the row of x that each row belongs to."""
    y_to_x = arrays.get("y_to_x")
    if name == "y" and y_to_x is not None and y_to_x.shape == (len(arrays["y"]),) and y_to_x.dtype.kind in "iu":
        return y_to_x.astype(np.int64)
    return np.arange(len(arrays[name])) if name in SIDES and (name == "x" or y_to_x is None) else None


def _refuse_larger_than_memory(path: Path, size: int) -> None:
    if size > 0.8 * free_memory(torch.device("cpu")):
        raise _too_large(path, size)


def _too_large(path: Path, size: int) -> UserError:
    free = free_memory(torch.device("cpu")) / 2**30
    return UserError(
        f"{path}: needs {size / 2**30:.1f} GiB and {free:.1f} GiB of memory are free; "
        "save the vectors with numpy.save as .npy, which is read in parts"
    )


def _of_run(path: Path, side: str, training: bool) -> Vectors:
    if side not in SIDES:
        raise UserError(f"{path}:{side}: a run has the sides x and y; name {path}:x or {path}:y")
    run, features = _encode_run(path, training)
    pairs = (run.train if training else run.val or run.train).pairs
    first = side == "x"
    numbers = features.x_number if first else features.y_number
    words = words_of_pairs(pairs)[SIDES.index(side)]
    texts = None
    if words.kind == "text":
        texts = [str(pairs.x(number) if first else pairs.y(number)) for number in numbers.tolist()]
    elif words.kind == "image":
        texts = [pairs.item_name(side, number) or pairs.name(number) for number in numbers.tolist()]
    array = (features.x if first else features.y).numpy()
    return Vectors(array, path, side, None, texts, features, numbers, words=words.many)


@lru_cache(maxsize=2)
def _encode_run(path: Path, training: bool) -> tuple[Run, PairFeatures]:
    """Encode the pairs of a run once for both sides."""
    run = Run.open_finished(path)
    source: Source | None = run.train if training else run.val
    if source is None:
        raise UserError(f"{path}: the run has no held-out pairs (data.val), so there are no queries to try")
    numbers = source.numbers
    if training and len(numbers) > BANK_SIZE:
        numbers = numbers[np.linspace(0, len(numbers) - 1, BANK_SIZE).round().astype(np.int64)]
    return run, run.features(source, numbers)


def check_rows(vectors: Vectors, normalize: bool) -> None:
    """Refuse rows that are not finite or cannot be compared, by their numbers.

    Raises:
        UserError: names the first wrong row and the fix.

    """
    uneven, example, norm = 0, -1, 0.0
    for start in range(0, len(vectors), ROWS):
        block = np.asarray(vectors.features[start : start + ROWS])
        finite = np.isfinite(block).all(axis=1)
        if not finite.all():
            row = start + int(np.argmin(finite))
            raise UserError(f"{vectors.name}: row {row} holds a NaN or an infinity; fix or remove it")
        norms = np.linalg.norm(block.astype(np.float64), axis=1)
        if not norms.all():
            row = start + int(np.argmin(norms))
            raise UserError(f"{vectors.name}: row {row} is all zeros and has no direction; remove it")
        wrong = np.abs(norms - 1) > 1e-2
        if wrong.any() and example < 0:
            example, norm = start + int(np.argmax(wrong)), float(norms[np.argmax(wrong)])
        uneven += int(wrong.sum())
    if uneven and not normalize:
        raise UserError(
            f"{vectors.name}: row {example} has norm {norm:.4g} ({uneven:,} of {len(vectors):,} rows are not unit "
            "norm); to compare by cosine, add --normalize"
        )
