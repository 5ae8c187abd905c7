"""What the reports on items share: vectors with their names and right answers, and the files of a report."""

import contextlib
import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import torch

import nuclr
from nuclr import files
from nuclr.arrays import BLOCK, Features, as_links, evenly_spaced, join_keys
from nuclr.data.vectors import SIDES, Vectors, checked_rows, open_vectors, pair_rows, split_argument
from nuclr.errors import UserError
from nuclr.popularity.correction import BANK_SIZE

if TYPE_CHECKING:
    from nuclr.data.pairs import Pairs
    from nuclr.runs.features import PairFeatures

NO_ARRAY: Any = None  # in place of the arrays of a report that was read from a folder
# Columns (query, item, relevance) of a text file of links, by its number of columns; four are TREC's qrels.
LINK_COLUMNS = {2: (0, 1, None), 3: (0, 1, 2), 4: (0, 2, 3)}

Source = str | Path | Features  # PATH, PATH:COLUMN, or the rows themselves
Role = Literal["queries", "gallery", "bank", "candidates"]


# For dataclasses with arrays next to what their JSON holds; see `files.from_record`.
ARRAYS = {"arbitrary_types_allowed": True}


@dataclass(frozen=True, kw_only=True)
class Item:
    """An item of a report.

    Attributes:
        row: its row in the vectors.
        number: its number in the data, if it is not the row: of a pair that it belongs to, for items of a run.
        name: what people call it: a text, a file name, an id; None if it is not known.

    """

    row: int
    number: int | None = None
    name: str | None = None

    @classmethod
    def of(
        cls,
        vectors: Vectors,
        row: int,
        **more: Any,
    ) -> Self:
        """Return a row of vectors, with what a subclass knows about it."""
        return cls(
            row=row,
            number=None if vectors.numbers is None else int(vectors.numbers[row]),
            name=None if vectors.ids is None else vectors.ids[row],
            **more,
        )


@dataclass(frozen=True)
class Origin:
    """Where items come from, so that messages and pages can refer to them.

    Attributes:
        name: the argument that names their vectors.
        rows: number of items.
        side: the array, column or side.
        run: folder of the run, if they come from one.
        words: what they are, such as "captions", if it is known.
        index: class of the index, if it holds compressed vectors.
        images: folder of the pictures that the names are files of.

    """

    name: str
    rows: int
    side: str | None = None
    run: str | None = None
    words: str | None = None
    index: str | None = None
    images: str | None = None

    @classmethod
    def of(cls, vectors: Vectors, images: Path | None = None) -> "Origin":
        """Return where vectors come from."""
        return cls(
            name=vectors.name,
            rows=len(vectors),
            side=vectors.column,
            run=vectors.source if files.is_run(vectors.source) else None,
            words=vectors.words,
            index=vectors.compressed,
            images=None if images is None else str(images),
        )


@dataclass(frozen=True, repr=False, kw_only=True)
class ItemReport:
    """A report on items. Its folder has a summary, KIND.json, a table of all items, KIND.csv, and files of its kind.

    Attributes:
        command: the command line.
        version: of nuclr.

    """

    KIND: ClassVar[str]
    FILES: ClassVar[tuple[str, ...]] = ()  # besides the summary and the table
    __pydantic_config__ = ARRAYS

    command: str = field(default_factory=files.command_line)
    version: str = nuclr.__version__

    def to_json(self) -> dict[str, Any]:
        """Return the content of the summary: everything but the arrays."""
        return {"written_by": f"nuclr {self.KIND}", **files.to_record(self)}

    @classmethod
    def check_folder(cls, folder: Path | None, create: bool) -> None:
        """Refuse a folder that holds something else, and create it if it does not exist."""
        if folder is not None:
            summary = f"{cls.KIND}.json"
            files.check_folder(
                folder,
                f"nuclr {cls.KIND}",
                summary,
                (summary, f"{cls.KIND}.csv", *cls.FILES),
                create,
            )

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the report in a folder; it has no arrays."""
        return files.read_record(cls, folder / f"{cls.KIND}.json")

    @contextlib.contextmanager
    def publish(self, folder: Path, table: Sequence[Mapping[str, Any]]) -> Iterator[Path]:
        """Write the summary and the table, in parts with the same columns; the block writes the files of its kind."""
        summary = f"{self.KIND}.json"
        with files.publish_folder(folder, summary, f"nuclr {self.KIND}") as new:
            write_table(new / f"{self.KIND}.csv", table)
            files.write_json(new / summary, self.to_json())
            yield new


def write_table(path: Path, parts: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file.

    Args:
        path: the file.
        parts: columns by name, of one length: arrays of numbers, or sequences of texts. All parts have the same
            columns, and follow one another.

    """
    with files.write_atomically(path) as file:
        text = io.TextIOWrapper(
            file,
            "utf-8",
            "replace",
            newline="",
        )
        writer = csv.writer(text)
        writer.writerow(parts[0])
        for columns in parts:
            length = len(next(iter(columns.values())))
            for start in range(0, length, BLOCK):  # because all cells of millions of rows would not fit into memory
                block = [values[start : start + BLOCK] for values in columns.values()]
                writer.writerows(zip(*map(_cells, block), strict=True))
        text.flush()
        text.detach()  # otherwise it would close the file before it is renamed


def _cells(values: Any) -> Any:
    if not isinstance(values, np.ndarray):
        return map(files.csv_cell, values)
    return map("{:.8g}".format, values) if values.dtype.kind == "f" else values.tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Vectors
# ---------------------------------------------------------------------------------------------------------------------


def open_rows(source: Source, role: Role = "queries") -> Vectors:
    """Open the rows of a file, a folder or a run.

    Args:
        source: PATH or PATH:COLUMN; or an array, which is then called by its role.
        role: what they are for. If no column is named, queries and a bank are x, a gallery and candidates are y. Of a
            run, queries and a gallery are held-out pairs, a bank and candidates are training pairs (of many, an evenly
            spaced sample).

    Raises:
        UserError: if there is nothing to read, or it does not hold vectors.

    """
    if not isinstance(source, str | Path):
        return Vectors(source, role)
    preferred = "x" if role in ("queries", "bank") else "y"
    path, column = split_argument(str(source))
    if not files.is_run(path):
        return open_vectors(source, preferred)
    side = column or preferred
    if side not in SIDES:
        raise UserError(f"{source}: a run has the sides x and y; name {path}:x or {path}:y")
    return _encode_run(path, role in ("bank", "candidates"))[side]


@lru_cache(maxsize=2)  # the held-out and the training pairs of one run: both sides are encoded together
def _encode_run(path: str, training: bool) -> dict[str, Vectors]:
    from nuclr.runs.run import Run

    run = Run.open_finished(path)
    source = run.train if training else run.val
    if source is None:
        raise UserError(f"{path}: the run has no held-out pairs (data.val), so there are no queries to try")
    numbers = source.numbers
    if training:
        numbers = numbers[evenly_spaced(len(numbers), BANK_SIZE).numpy()]
    return vectors_of_pairs(path, source.pairs, run.features(source, numbers))


def vectors_of_pairs(
    path: str,
    pairs: "Pairs",
    features: "PairFeatures",
) -> dict[str, Vectors]:
    """Return both sides of a run's pairs, with their names and their links.

    Args:
        path: the folder of the run.
        pairs: the pairs that were encoded.
        features: their features.

    """
    key = np.arange(len(features.links))
    sides = {}
    for column, side in enumerate(SIDES):
        numbers = (features.x_number, features.y_number)[column]
        sides[side] = Vectors(
            rows=(features.x, features.y)[column].numpy(),
            source=path,
            column=side,
            ids=names_of_pairs(pairs, side, numbers),
            links=np.stack([features.links[:, column].numpy(), key], axis=1),
            numbers=numbers,
            words=pairs.words[column].many,
        )
    return sides


def check_rows(vectors: Vectors, normalize: bool) -> Vectors:
    """Check all rows once; the functions of `nuclr.popularity` do not check them again.

    Args:
        vectors: in any precision.
        normalize: scale rows to unit norm when they are read. Otherwise other norms are refused.

    Raises:
        UserError: names the first wrong row and the fix.

    """
    rows = checked_rows(
        vectors.name,
        vectors.rows,
        "normalize" if normalize else "unit",
        "add --normalize",
    )
    return replace(vectors, rows=rows)


# ---------------------------------------------------------------------------------------------------------------------
# Names
# ---------------------------------------------------------------------------------------------------------------------


def name_rows(
    vectors: Vectors,
    argument: str | Path | None,
    numbers: np.ndarray | None = None,
) -> Vectors:
    """Add names to vectors.

    Args:
        vectors: the rows.
        argument: a `.txt` with one name per line, FILE:COLUMN of a table, or pairs in any format that training takes,
            whose texts or file names are the names. None: nothing is added.
        numbers: (n,), the pair that each row belongs to. None: the rows are the y of all pairs, or the distinct x.

    Raises:
        UserError: if the file cannot be read, or has another number of names.

    """
    if argument is None:
        return vectors
    path, column = split_argument(str(argument))
    names: Sequence[str] | None
    if column is not None:
        from nuclr.data.formats import arrow, table

        read = table.read_column if Path(path).suffix.lower() in table.TABLES else arrow.read_texts
        names = read(Path(path), column)
    elif path.endswith(".txt"):
        names = files.read_lines(Path(path))
    else:
        names = _read_pairs(path, vectors, numbers)
    if names is not None and len(names) != len(vectors):
        raise UserError(f"{argument}: {len(names):,} names, but {vectors.name} has {len(vectors):,} rows")
    return replace(vectors, ids=names)


def _read_pairs(
    path: str,
    vectors: Vectors,
    numbers: np.ndarray | None,
) -> list[str] | None:
    """Return the names of the rows in a list of pairs: of side x if there is a row per distinct x, else of side y."""
    from nuclr.data import SideChoice, open_pairs

    as_text = SideChoice(modality="text")  # names of files that need not exist
    pairs = open_pairs(
        path,
        x=as_text,
        y=as_text,
    )
    distinct = np.unique(pairs.sides["x"].ids, return_index=True)[1]
    choices = {"x": distinct, "y": np.arange(len(pairs))} if numbers is None else {str(vectors.column): numbers}
    for side in ("x", "y") if vectors.column == "x" else ("y", "x"):
        chosen = choices.get(side)
        if chosen is not None and len(chosen) == len(vectors) and chosen.max() < len(pairs):
            return names_of_pairs(pairs, side, chosen)
    raise UserError(f"{path}: {len(pairs):,} pairs, but {vectors.name} has {len(vectors):,} rows")


def names_of_pairs(
    pairs: "Pairs",
    side: Any,
    numbers: np.ndarray,
) -> list[str] | None:
    """Return the texts of a side, or the names of its files; None if it has neither."""
    from nuclr.data import BadSample

    read: Any = pairs.item if pairs.sides[side].modality.in_memory else pairs.item_name
    names: list[str] = []
    for number in numbers.tolist():
        try:
            name = read(side, number)
        except BadSample:  # such as an empty text
            name = ""
        if not isinstance(name, str):
            return None
        names.append(name)
    return names


# ---------------------------------------------------------------------------------------------------------------------
# Right answers
# ---------------------------------------------------------------------------------------------------------------------


def find_links(queries: Vectors, gallery: Vectors) -> np.ndarray:
    """Return which rows belong together, (n, 2) of (query, right answer), if both are sides of one file or run.

    Raises:
        UserError: if both are the x and y of a file whose y_to_x is wrong, or missing for sides of different lengths.

    """
    if queries.shares_source(gallery) and {queries.column, gallery.column} == set(SIDES) and queries.numbers is None:
        pair_rows(*sorted((queries, gallery), key=lambda side: str(side.column)))
    own = _keys(queries, gallery)
    others = _keys(gallery, queries)
    if own is None or others is None or not queries.shares_source(gallery):
        return np.empty((0, 2), np.int64)
    joined = join_keys(torch.from_numpy(own[:, 1]), torch.from_numpy(others[:, 1])).numpy()
    links = np.stack([own[joined[:, 0], 0], others[joined[:, 1], 0]], axis=1)
    return links[links[:, 0] != links[:, 1]] if queries.is_same(gallery) else links


def _keys(vectors: Vectors, other: Vectors) -> np.ndarray | None:
    """Return rows (row, key); without known links, those of two sides of one length belong together by position."""
    if vectors.links is not None:
        return vectors.links
    if vectors.column not in SIDES or len(vectors) != len(other):
        return None
    return np.stack([np.arange(len(vectors)), np.arange(len(vectors))], axis=1)


def read_links(
    path: Path,
    queries: Vectors,
    gallery: Vectors,
) -> np.ndarray:
    """Read rows (query, right answer) from a `.npy` file or from text.

    Args:
        path: the file. An array is (n, 2), or (queries,) with one right answer per query. Text has lines of two row
            numbers or ids, of three with a relevance, or of four as in TREC's qrels: query, anything, item, relevance.
            Lines with a relevance of 0 or less do not count. Cells are separated by tabs, commas or spaces. A first
            line that starts with "q" or "topic" and not with an id names the columns. Cells of a side are its ids (the
            names of its rows) if one of them is not a number, or if its names are distinct and one of the cells is a
            name; else they are row numbers.
        queries: the queries.
        gallery: the items.

    Returns:
        (n, 2) int64.

    Raises:
        UserError: if the file cannot be read, or a row or an id does not exist.

    """
    array = files.read_npy(path) if path.suffix == ".npy" else _read_link_lines(path, set(queries.ids or ()))
    if array.ndim == 1 and len(array) == len(queries):
        array = np.stack([np.arange(len(queries)), array], axis=1)
    if array.dtype.kind in "US" and array.ndim == 2 and array.shape[1] == 2:
        query_cells, item_cells = array.astype(str).T.tolist()
        rows = _numbered(path, query_cells, queries, gallery), _numbered(path, item_cells, gallery, queries)
        array = np.stack(rows, axis=1)
    if array.dtype.kind == "f" and np.array_equal(array, np.round(array)) and np.isfinite(array).all():
        array = array.astype(np.int64)
    try:
        return as_links(str(path), array, len(queries), len(gallery), ("queries", "gallery")).numpy()
    except ValueError as error:
        hint = "a row is (query, item), numbered from 0"
        if _fits_swapped(array, len(queries), len(gallery)):
            hint = f"they fit if {gallery.name} are the queries and {queries.name} the gallery: are the files swapped?"
        raise UserError(f"{error}; {hint}") from None


def _fits_swapped(links: np.ndarray, queries: int, gallery: int) -> bool:
    """Return whether links (n, 2) name existing rows if queries and gallery change places."""
    if links.ndim != 2 or links.shape[1] != 2 or not len(links) or links.dtype.kind not in "iu":
        return False
    return bool((links >= 0).all() and (links < [gallery, queries]).all())


def _numbered(path: Path, cells: list[str], vectors: Vectors, others: Vectors) -> np.ndarray:
    """Return row numbers for one side of links: the cells themselves, or the rows whose names they are."""
    known: dict[str, int] = {}
    for row, name in enumerate(vectors.ids or ()):
        if known.setdefault(name, row) != row:
            known[name] = -1  # several rows have this name
    are_distinct = -1 not in known.values()
    if not (are_distinct and any(cell in known for cell in cells)):
        try:
            return np.array([float(cell) for cell in cells])
        except ValueError:
            pass  # ids
    if unknown := [cell for cell in cells if known.get(cell, -1) < 0]:
        cell = min(unknown, key=str.isdecimal)  # the first that cannot be a row number either
        reason = "several rows" if cell in known else "no row" if known else "no names, and so no row"
        is_swapped = others.ids is not None and cell in set(others.ids)
        hint = f"; {others.name} has one: are the files swapped?" if is_swapped else " (--names, --query-names)"
        raise UserError(
            f"{path}: {cell!r} is neither a row number nor an id: {vectors.name} has {reason} of that name{hint}"
        )
    return np.array([known[cell] for cell in cells])


def _read_link_lines(path: Path, query_ids: set[str]) -> np.ndarray:
    rows = []
    for number, line in enumerate(files.read_lines(path), start=1):
        cells = _split_cells(line)
        if number == 1 and cells and cells[0] not in query_ids and cells[0].lower().startswith(("q", "topic")):
            continue  # a header
        try:
            query, item, relevance = LINK_COLUMNS[len(cells)]
            if relevance is None or float(cells[relevance]) > 0:
                rows.append((cells[query], cells[item]))
        except (KeyError, ValueError):
            raise UserError(
                f"{path}: line {number} is {line[:80]!r}; needs a query and an item, or four cells as in qrels"
            ) from None
    return np.array(rows)


def _split_cells(line: str) -> list[str]:
    """Divide a line at tabs, else at commas, else at spaces; a name may contain what does not divide."""
    if "\t" in line or "," in line:
        row = next(csv.reader([line], delimiter="\t" if "\t" in line else ","))
        return [cell.strip() for cell in row]
    return line.replace('"', " ").split()
