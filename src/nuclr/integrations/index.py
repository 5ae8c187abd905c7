"""Stable numbers for the pairs of other people's data sets: a column "index", and ids of the two samples of a pair.

Trainers hand on the columns that the model takes and drop all others. `add_index` adds the columns to a data set, and
`IndexCollator` carries them through any collator into the batch.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nuclr.errors import UserError

COLUMNS = ("index", "x_id", "y_id")
"""The columns that go to the objective and not to the model."""

HASHED_PAIRS = 64
"""The number of pairs that `hash_pairs` reads."""


def add_index(dataset: Any, x_id: str | None = None, y_id: str | None = None) -> Any:
    """Add the columns that an objective needs: the index of each pair, and ids of its two samples.

    The index is the position in the data set. It must be the same in every run that shares a checkpoint, so add it
    after filtering and before shuffling.

    Args:
        dataset: A `datasets.Dataset`, or a data set with `__len__` and `__getitem__` whose samples are dicts.
        x_id: A column that identifies the sample on side x, such as the file name of an image with several captions.
            Pairs with equal values are not negatives of each other. Integers are used as they are; other values are
            hashed as text.
        y_id: As `x_id` for side y, such as the caption itself.

    Returns:
        The data set with the columns "index" and, if asked for, "x_id" and "y_id".

    Raises:
        UserError: If the data set is a stream, already has such a column, or lacks the named one.

    Example:
        >>> pairs = add_index([{"caption": "a cat"}, {"caption": "a dog"}])
        >>> pairs[1]
        {'caption': 'a dog', 'index': 1}

    """
    named = {name: column for name, column in (("x_id", x_id), ("y_id", y_id)) if column is not None}
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserError(
            f"{type(dataset).__name__} is a stream, in which samples have no position; add a column 'index' with the "
            "stable number of each sample, for example by map()"
        )
    if not (hasattr(dataset, "add_column") and hasattr(dataset, "column_names")):
        return IndexedDataset(dataset, named)
    columns = list(dataset.column_names)
    if present := [name for name in ("index", *named) if name in columns]:
        raise UserError(f"the data set already has a column {present[0]!r}; remove or rename it")
    for name, column in named.items():
        if column not in columns:
            raise UserError(f"{name}={column!r} is not a column of the data set; it has {', '.join(columns)}")
        dataset = dataset.add_column(name, np.array([stable_id(value) for value in dataset[column]], dtype=np.int64))
    return dataset.add_column("index", np.arange(len(dataset)))


def stable_id(value: Any) -> int:
    """Return an integer for a value: integers themselves, and 64 bits of a hash for everything else.

    Example:
        >>> stable_id(7), stable_id("a cat") == stable_id("a cat"), stable_id("a cat") == stable_id("a dog")
        (7, True, False)

    """
    if isinstance(value, int | np.integer):
        return int(value)
    digest = hashlib.blake2b(str(value).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def hash_pairs(dataset: Any, index: np.ndarray, num_samples: int) -> dict[str, str]:
    """Return hashes of a few pairs, by which a checkpoint recognizes data that was numbered in another order.

    The pairs are evenly spaced over the numbers, so the rows of the data set may be in any order, and some may be
    missing. Only these rows are read.

    Args:
        dataset: A `datasets.Dataset`. Its columns of texts are hashed; without any, the result is empty.
        index: (rows,) the number of the pair in each row.
        num_samples: The number of pairs that got a number.

    Returns:
        "number column" -> hash of the text.

    Example:
        >>> from datasets import Dataset
        >>> pairs = Dataset.from_dict({"question": ["Why?", "How far?"], "answer": ["no", "a mile"]})
        >>> numbers = np.arange(2)
        >>> list(hash_pairs(pairs, numbers, 2))
        ['0 question', '1 question', '0 answer', '1 answer']
        >>> hash_pairs(pairs, numbers, 2) == hash_pairs(pairs.select([1, 0]), numbers[::-1], 2)
        True
        >>> hash_pairs(pairs, numbers, 2) == hash_pairs(pairs.select([1, 0]), numbers, 2)
        False

    """
    columns = [column for column in dataset.column_names if holds_text(dataset, column)]
    chosen = np.unique(np.linspace(0, num_samples - 1, HASHED_PAIRS).astype(np.int64))
    rows = np.flatnonzero(np.isin(index, chosen))
    if not columns or not len(rows):
        return {}
    texts = dataset.select_columns(columns).with_format(None)[rows.tolist()]
    return {
        f"{index[row]} {column}": f"{stable_id(text):x}"
        for column in columns
        for row, text in zip(rows, texts[column], strict=True)
    }


def arrow_chunks(dataset: Any, column: str) -> tuple[list[Any], np.ndarray | slice]:
    """Return a column of a `datasets.Dataset` as arrow arrays, and which of their rows are the data set's.

    Reading millions of rows through a shuffled data set takes minutes, and reading the table below it does not.
    """
    order = dataset._indices
    return dataset.data.column(column).chunks, slice(None) if order is None else order.column(0).to_numpy()


def holds_text(dataset: Any, column: str) -> bool:
    """Return whether a column of a `datasets.Dataset` holds texts."""
    return getattr(dataset.features[column], "dtype", None) in ("string", "large_string")


class IndexedDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """A map-style data set whose samples also hold their position; made by `add_index`."""

    def __init__(self, dataset: Any, named: Mapping[str, str]) -> None:
        self._dataset = dataset
        self._named = dict(named)

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._dataset)

    def __getitem__(self, position: int) -> dict[str, Any]:
        """Return a sample with its index and ids."""
        sample = self._dataset[position]
        if not isinstance(sample, Mapping):
            raise UserError(f"samples must be dicts to hold an index, but sample {position} is {type(sample).__name__}")
        ids = {}
        for name, column in self._named.items():
            if column not in sample:
                raise UserError(f"{name}={column!r} is not in sample {position}, which holds {', '.join(sample)}")
            ids[name] = stable_id(sample[column])
        if present := [name for name in ("index", *ids) if name in sample]:
            raise UserError(f"sample {position} already holds {present[0]!r}; remove or rename it")
        return {**sample, "index": position, **ids}


class IndexCollator:
    """A collator that hands the model's inputs to another collator and adds the index and the ids to the batch.

    Args:
        collate: The collator of the other columns; it does not see the index.

    Example:
        >>> collate = IndexCollator(lambda samples: {"width": torch.tensor([sample["width"] for sample in samples])})
        >>> collate([{"width": 3, "index": 8}, {"width": 4, "index": 2}])
        {'width': tensor([3, 4]), 'index': tensor([8, 2])}

    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Collate a list of samples."""
        if not all(isinstance(sample, Mapping) for sample in samples):
            return self.collate(list(samples))
        names = [name for name in COLUMNS if any(name in sample for sample in samples)]
        for name in names:
            if lacking := [position for position, sample in enumerate(samples) if name not in sample]:
                raise UserError(f"sample {lacking[0]} of the batch has no {name!r}, but others have")
        batch = self.collate([{key: sample[key] for key in sample if key not in names} for sample in samples])
        for name in names:
            batch[name] = torch.as_tensor(np.asarray([np.asarray(sample[name]) for sample in samples]))
        return batch
