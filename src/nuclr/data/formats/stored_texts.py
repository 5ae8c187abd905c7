"""A column of texts in several Parquet files, of which a few row groups are in memory at a time."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np

from nuclr.data.formats.arrow import first_line, load_pyarrow, validate_column
from nuclr.data.formats.columns import decode_text
from nuclr.data.texts import MAX_CHARACTERS
from nuclr.errors import UserError
from nuclr.files import refuse_expansion

GROUPS = 4  # row groups in memory
BATCH = 2**14  # rows after which the size of a row group is checked again


def open_table(path: Path) -> Any:
    """Open a Parquet file and read its footer.

    Raises:
        UserError: if it cannot be read.

    """
    pyarrow = load_pyarrow(path)
    try:
        return pyarrow.parquet.ParquetFile(path)
    except Exception as error:  # pyarrow raises many types on damaged files
        raise UserError(f"{path}: cannot be read as Parquet ({first_line(error)})") from None


class StoredTexts(Sequence[str]):
    """A column of texts in several Parquet files, read a row group at a time. Missing texts are empty.

    Args:
        tables: the files.
        column: the column, which all of them have.

    Example:
        >>> import tempfile
        >>> import pyarrow as pa, pyarrow.parquet as pq
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pq.write_table(pa.table({"text": ["a cat", "a dog"]}), f"{folder}/0.parquet")
        ...     pq.write_table(pa.table({"text": ["a fox"]}), f"{folder}/1.parquet")
        ...     texts = StoredTexts([Path(folder, "0.parquet"), Path(folder, "1.parquet")], "text")
        ...     len(texts), texts[1], texts.take([2, 0])
        (3, 'a dog', ['a fox', 'a cat'])

    """

    def __init__(self, tables: Sequence[Path], column: str) -> None:
        self._tables, self.column = list(tables), column
        self._read: OrderedDict[int, Any] = OrderedDict()

    @cached_property
    def _groups(self) -> list[tuple[Path, int]]:
        """File and number of each row group."""
        return [(table, group) for table in self._tables for group in range(open_table(table).metadata.num_row_groups)]

    @cached_property
    def _starts(self) -> np.ndarray:
        sizes = []
        for table in self._tables:
            metadata = open_table(table).metadata
            sizes += [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        return np.cumsum([0, *sizes])

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self._starts[-1])

    @overload
    def __getitem__(self, rows: int) -> str: ...
    @overload
    def __getitem__(self, rows: slice) -> list[str]: ...
    def __getitem__(self, rows: int | slice) -> str | list[str]:
        """Return a text, or the texts of a slice."""
        if isinstance(rows, slice):
            return self.take(range(*rows.indices(len(self))))
        return self.take([rows])[0]

    def __iter__(self) -> Iterator[str]:
        """Yield all texts."""
        for start in range(0, len(self), BATCH):
            yield from self[start : start + BATCH]

    def take(self, rows: Iterable[int] | np.ndarray) -> list[str]:
        """Return the texts of some rows; each row group is read once.

        Raises:
            IndexError: if a row does not exist.
            UserError: if a file is damaged.

        """
        index = np.array(rows if isinstance(rows, np.ndarray) else list(rows), np.int64)
        index = np.where(index < 0, index + len(self), index)
        if len(index) and (index.min() < 0 or index.max() >= len(self)):
            raise IndexError(f"a row outside of 0 to {len(self) - 1}")
        texts = [""] * len(index)
        order = np.argsort(index, kind="stable")
        edges = np.searchsorted(index[order], self._starts)
        for group in np.flatnonzero(np.diff(edges)).tolist():
            own = order[edges[group] : edges[group + 1]]
            for position, cell in zip(own.tolist(), self._cells(group, index[own] - self._starts[group]), strict=True):
                texts[position] = _as_text(cell)
        return texts

    def _cells(self, group: int, rows: np.ndarray) -> list[Any]:
        if group not in self._read:
            self._read[group] = self._read_group(*self._groups[group])
            while len(self._read) > GROUPS:
                self._read.popitem(last=False)
        self._read.move_to_end(group)
        column = self._read[group]
        if len(column) != self._starts[group + 1] - self._starts[group]:
            raise UserError(f"{self._groups[group][0]}: the file is damaged: a row group has {len(column)} rows")
        cells: list[Any] = column.take(rows).to_pylist()
        return cells

    def _read_group(self, path: Path, group: int) -> Any:
        pyarrow = load_pyarrow(path)
        try:
            source, batches, expanded = open_table(path), [], 0
            for batch in source.iter_batches(BATCH, row_groups=[group], columns=[self.column]):
                expanded += batch.nbytes
                refuse_expansion(path, "the table", path.stat().st_size, expanded, "write it again")
                batches.append(batch)
            table = pyarrow.Table.from_batches(batches)
            column = validate_column(path, table, self.column)
            if str(column.type).endswith("_view"):  # rows of such a column cannot be taken
                column = column.cast(pyarrow.large_binary())
            return column.combine_chunks()
        except UserError:
            raise
        except Exception as error:  # pyarrow raises many types on damaged files
            raise UserError(f"{path}: cannot be read as Parquet ({first_line(error)})") from None


def _as_text(cell: Any) -> str:
    text, _ = decode_text(cell, "text")
    if not isinstance(text, str):
        return ""
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} [cut]"
