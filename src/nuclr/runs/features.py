"""Features of many pairs, and embedding files. All processes share the work and get all features, on the CPU."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from nuclr import distributed, files
from nuclr.arrays import join_keys
from nuclr.data import Loader, all_batches
from nuclr.data.pairs import SideName
from nuclr.models import DualEncoder, Encoder
from nuclr.runs.components import to_device


class Encoding(NamedTuple):
    """How features are computed; the precision is "float32" or "bfloat16", `head` whether the heads are used."""

    batch_size: int
    device: torch.device
    precision: str = "float32"
    head: bool = True


@dataclass(frozen=True)
class PairFeatures:
    """Features of n pairs, with every distinct x once.

    Attributes:
        x: (n_x, d), features of the distinct x.
        y: (n_y, d), features of the distinct y, or of every pair's y if they were not merged.
        links: (m, 2) int64, which x and y belong together: rows (row of x, row of y). These are the pairs and, if the
            pairs have groups, all x with all y of each group.
        pair_rows: (n, 2) int64, per pair the row of its x and the row of its y.
        numbers: (n,), the numbers of the pairs.
        x_number: (n_x,), the number of a pair that has this x.
        y_number: (n_y,), the number of a pair that has this y.
        x_group: (n_x,) int64, equal for the x of one group, and of groups that share an x; without groups all differ.
            What belongs together must not be divided, for example into halves.
        sides: the names of both sides.

    """

    x: Tensor
    y: Tensor
    links: Tensor
    pair_rows: Tensor
    numbers: np.ndarray
    x_number: np.ndarray
    y_number: np.ndarray
    x_group: Tensor
    sides: tuple[str, str] = ("x", "y")

    @property
    def y_group(self) -> Tensor:
        """(n_y,), the group of the first x that each y belongs to."""
        first_x = torch.full((len(self.y),), len(self.x))
        return self.x_group[first_x.scatter_reduce(0, self.links[:, 1], self.links[:, 0], "amin")]

    def of_x(self, rows: Tensor) -> "PairFeatures":
        """Return the features of the x with these rows and of all y that belong to them."""
        new_row = torch.full((len(self.x),), -1)
        new_row[rows] = torch.arange(len(rows))
        links = self.links[new_row[self.links[:, 0]] >= 0]
        y_rows = torch.unique(links[:, 1])
        new_y_row = torch.full((len(self.y),), -1)
        new_y_row[y_rows] = torch.arange(len(y_rows))
        kept = new_row[self.pair_rows[:, 0]] >= 0

        def renumber(old: Tensor) -> Tensor:
            return torch.stack([new_row[old[:, 0]], new_y_row[old[:, 1]]], dim=1)

        return dataclasses.replace(
            self,
            x=self.x[rows],
            y=self.y[y_rows],
            links=renumber(links),
            pair_rows=renumber(self.pair_rows[kept]),
            numbers=self.numbers[kept.numpy()],
            x_number=self.x_number[rows.numpy()],
            y_number=self.y_number[y_rows.numpy()],
            x_group=self.x_group[rows],
        )


def encode_pairs(
    model: DualEncoder,
    loader: Loader,
    numbers: np.ndarray,
    encoding: Encoding,
    merge_y: bool = True,
) -> PairFeatures:
    """Return the features of the pairs with these numbers.

    Args:
        model: the encoders; left in eval mode.
        loader: reads the pairs.
        numbers: (n,), numbers of pairs.
        encoding: batch size, device, precision, and whether the heads are used.
        merge_y: True: one row per distinct y. False: one row per pair, in the order of `numbers`; equal y are still
            encoded only once.

    """
    pairs = loader.pairs
    _, first_x, x_row = np.unique(
        pairs.sides["x"].ids[numbers],
        return_index=True,
        return_inverse=True,
    )
    _, first_y, y_row = np.unique(
        pairs.sides["y"].ids[numbers],
        return_index=True,
        return_inverse=True,
    )
    x = encode_side(
        model.x,
        loader,
        "x",
        numbers[first_x],
        encoding,
    )
    y = encode_side(
        model.y,
        loader,
        "y",
        numbers[first_y],
        encoding,
    )
    y_number = numbers[first_y]
    if not merge_y:
        y = y[torch.from_numpy(y_row)]
        y_number = numbers
        y_row = np.arange(len(numbers))
    pair_rows = torch.from_numpy(np.stack([x_row, y_row], axis=1))
    links = pair_rows
    x_group = torch.arange(len(x))
    if pairs.group is not None:
        group = torch.from_numpy(pairs.group[numbers])
        links = links_of_groups(pair_rows, group)
        x_group = merge_groups(pair_rows[:, 0], group)[torch.from_numpy(first_x)]
    return PairFeatures(
        x,
        y,
        links,
        pair_rows,
        numbers,
        numbers[first_x],
        y_number,
        x_group,
        pairs.side_names,
    )


def links_of_groups(pair_rows: Tensor, group: Tensor) -> Tensor:
    """Return all (x, y) whose x and y occur in one group, each once.

    Args:
        pair_rows: (n, 2), per pair the row of its x and of its y.
        group: (n,), equal for pairs of one group.

    Example:
        >>> links_of_groups(torch.tensor([[0, 0], [1, 1], [2, 2]]), torch.tensor([5, 5, 9])).tolist()
        [[0, 0], [0, 1], [1, 0], [1, 1], [2, 2]]

    """
    (x_group, x), (y_group, y) = (
        torch.unique(torch.stack([group, rows], dim=1), dim=0).unbind(1) for rows in pair_rows.unbind(1)
    )
    x_row, y_row = join_keys(x_group, y_group).unbind(1)
    return torch.unique(torch.stack([x[x_row], y[y_row]], dim=1), dim=0)


def merge_groups(x_row: Tensor, group: Tensor) -> Tensor:
    """Return the group of each pair, where groups that share an x are one.

    Args:
        x_row: (n,), per pair the row of its x.
        group: (n,), equal for pairs of one group.

    Example:
        >>> merge_groups(torch.tensor([0, 1, 1, 2]), torch.tensor([5, 5, 7, 9])).tolist()
        [0, 0, 0, 2]

    """
    distinct, group = torch.unique(group, return_inverse=True)
    merged = torch.arange(len(distinct))
    while True:  # each round takes over the smallest number among the groups that share an x
        of_x = torch.full((int(x_row.max()) + 1,), len(distinct)).scatter_reduce(
            0,
            x_row,
            merged[group],
            "amin",
        )
        smallest = merged.scatter_reduce(
            0,
            group,
            of_x[x_row],
            "amin",
        )
        if torch.equal(smallest, merged):
            return merged[group]
        merged = smallest


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return a context in which the towers run in bfloat16 if that is the precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


@torch.no_grad()
def encode_side(
    encoder: Encoder,
    loader: Loader,
    side: SideName,
    numbers: np.ndarray,
    encoding: Encoding,
) -> Tensor:
    """Return features (len(numbers), d) of one side of these pairs.

    Args:
        encoder: a side of the model, not necessarily the same side: it must take the modality of the pairs' side.
        loader: reads the pairs.
        side: "x" or "y".
        numbers: numbers of the pairs.
        encoding: batch size, device, precision, and whether the head is used.

    """
    encoder.eval()
    loaded = loader.load(_share(numbers, encoding.batch_size), side)
    return gather([_encode(encoder, getattr(batch, side), encoding) for batch in loaded])


@torch.no_grad()
def encode_items(
    encoder: Encoder,
    items: list[Any],
    encoding: Encoding,
) -> Tensor:
    """Return features (len(items), d) of items that are not part of a source of pairs, such as texts."""
    encoder.eval()
    shares = _share(np.arange(len(items)), encoding.batch_size)
    return gather([_encode(encoder, [items[row] for row in rows], encoding) for rows in shares])


def _encode(
    encoder: Encoder,
    items: Any,
    encoding: Encoding,
) -> Tensor:
    items = to_device(items, encoding.device)
    inputs = items if encoder.inputs is None else to_device(encoder.inputs.prepare(items), encoding.device)
    with autocast(encoding.device, encoding.precision):
        return encoder.features(inputs, encoding.head).float().cpu()


def _share(numbers: np.ndarray, batch: int) -> Iterator[np.ndarray]:
    return all_batches(
        numbers,
        batch,
        distributed.rank(),
        distributed.world_size(),
    )


def gather(parts: list[Tensor]) -> Tensor:
    """Return the rows of all processes in rank order; the number of rows may differ between processes."""
    own = torch.cat(parts) if parts else torch.empty(0, 0)
    if distributed.world_size() == 1:
        return own
    everyone: list[Any] = [None] * distributed.world_size()
    torch.distributed.all_gather_object(everyone, own)
    return torch.cat([rows for rows in everyone if len(rows)] or [own])


# -- embedding files ---------------------------------------------------------------------------------------------------


def write_embeddings(
    out: Path,
    arrays: Mapping[str, Tensor],
    names: Mapping[str, Sequence[str]],
) -> None:
    """Write an embedding file atomically, and files with the names of its rows.

    Args:
        out: the file, `.npz` or `.safetensors`.
        arrays: the features of a side by its letter; of pairs also `y_to_x` and `number`.
        names: one line per row, by the end of the name of a file next to the embeddings, such as ".x.txt".

    """
    with files.write_atomically(out) as file:
        if out.suffix == ".npz":
            np.savez(file, **{name: array.numpy() for name, array in arrays.items()})  # type: ignore[arg-type]
        else:
            file.write(save({name: array.contiguous() for name, array in arrays.items()}))
    for end, lines in names.items():
        files.write_text(out.with_suffix(end), "\n".join(lines) + "\n")


def embed_pairs(
    model: DualEncoder,
    loader: Loader,
    numbers: np.ndarray,
    encoding: Encoding,
) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Return arrays x (per distinct x), y (per pair), y_to_x and number; and names of images, and texts, per row."""
    pairs = loader.pairs
    features = encode_pairs(
        model,
        loader,
        numbers,
        encoding,
        merge_y=False,
    )
    order = torch.from_numpy(features.x_number).argsort()  # that of the pairs, instead of that of the ids
    arrays = {
        "x": features.x[order],
        "y": features.y,
        "y_to_x": order.argsort()[features.pair_rows[:, 0]],
        "number": torch.from_numpy(numbers),
    }
    rows: dict[SideName, np.ndarray] = {"x": features.x_number[order.numpy()], "y": numbers}
    names = {}
    for side, chosen in rows.items():
        kind = pairs.sides[side].modality.name
        if kind == "image":
            names[f".{side}.txt"] = [pairs.item_name(side, number) or pairs.name(number) for number in chosen.tolist()]
        elif kind == "text":
            names[f".{side}.txt"] = [" ".join(str(text).split()) for text in pairs.items(side, chosen)]
    return arrays, names
