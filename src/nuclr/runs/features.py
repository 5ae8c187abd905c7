"""Features of many pairs. The work is shared by all processes; each gets all features, on the CPU."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nuclr import distributed
from nuclr.data import Loader, all_batches
from nuclr.data.pairs import Pairs
from nuclr.models import DualEncoder
from nuclr.runs.components import to_device


class Encoding(NamedTuple):
    """How features are computed; the precision is "float32" or "bfloat16"."""

    batch_size: int
    device: torch.device
    precision: str = "float32"


@dataclass(frozen=True)
class PairFeatures:
    """Features of n pairs, with every distinct x once.

    Attributes:
        x: (n_x, d), features of the distinct x.
        y: (n_y, d), features of the distinct y, or of every pair's y if they were not merged.
        links: (n, 2) int64, per pair the row of its x and the row of its y.
        numbers: (n,), the numbers of the pairs.
        x_number: (n_x,), the number of a pair that has this x.
        y_number: (n_y,), the number of a pair that has this y.

    """

    x: Tensor
    y: Tensor
    links: Tensor
    numbers: np.ndarray
    x_number: np.ndarray
    y_number: np.ndarray

    def of_x(self, rows: Tensor) -> "PairFeatures":
        """Return the features of the x with these rows and of all y that belong to them."""
        new_row = torch.full((len(self.x),), -1)
        new_row[rows] = torch.arange(len(rows))
        kept = new_row[self.links[:, 0]] >= 0
        links = self.links[kept]
        y_rows, y_row = torch.unique(links[:, 1], return_inverse=True)
        return PairFeatures(
            x=self.x[rows],
            y=self.y[y_rows],
            links=torch.stack([new_row[links[:, 0]], y_row], dim=1),
            numbers=self.numbers[kept.numpy()],
            x_number=self.x_number[rows.numpy()],
            y_number=self.y_number[y_rows.numpy()],
        )


def encode_pairs(
    model: DualEncoder, loader: Loader, numbers: np.ndarray, encoding: Encoding, merge_y: bool = True
) -> PairFeatures:
    """Return the features of the pairs with these numbers.

    Args:
        model: the encoders; left in eval mode. loader: reads the pairs. numbers: (n,), numbers of pairs. encoding:
            batch size, device, precision. merge_y: True: one row per distinct y. False: one row per pair, in the
            order of `numbers`; equal y are encoded once.

    """
    pairs = loader.pairs
    _, first_x, x_row = np.unique(pairs.x_id[numbers], return_index=True, return_inverse=True)
    _, first_y, y_row = np.unique(pairs.y_id[numbers], return_index=True, return_inverse=True)
    x = encode_x(model, loader, numbers[first_x], *encoding)
    y = encode_y(model, pairs, numbers[first_y], *encoding)
    y_number = numbers[first_y]
    if not merge_y:
        y, y_number, y_row = y[torch.from_numpy(y_row)], numbers, np.arange(len(numbers))
    links = torch.from_numpy(np.stack([x_row, y_row], axis=1))
    return PairFeatures(x, y, links, numbers, numbers[first_x], y_number)


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return a context in which the towers run in bfloat16 if that is the precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


@torch.no_grad()
def encode_x(
    model: DualEncoder, loader: Loader, numbers: np.ndarray, batch: int, device: torch.device, precision: str
) -> Tensor:
    """Return features (len(numbers), d) of the x of these pairs."""
    model.eval()
    parts = []
    for loaded in loader.load(_share(numbers, batch)):
        x = loaded.x.to(device)
        with autocast(device, precision):
            parts.append(model.x(x if model.images is None else model.prepare_images(x)).float().cpu())
    return gather(parts)


@torch.no_grad()
def encode_y(
    model: DualEncoder, pairs: Pairs, numbers: np.ndarray, batch: int, device: torch.device, precision: str
) -> Tensor:
    """Return features (len(numbers), d) of the y of these pairs, without reading any x."""
    return encode_texts(model, [pairs.y(int(number)) for number in numbers], batch, device, precision)


@torch.no_grad()
def encode_texts(model: DualEncoder, texts: list[Any], batch: int, device: torch.device, precision: str) -> Tensor:
    """Return features (len(texts), d) of texts or vectors."""
    model.eval()
    parts = []
    for rows in _share(np.arange(len(texts)), batch):
        chosen = [texts[row] for row in rows]
        inputs = torch.from_numpy(np.stack(chosen)) if model.tokenizer is None else model.prepare_texts(chosen)
        with autocast(device, precision):
            parts.append(model.y(to_device(inputs, device)).float().cpu())
    return gather(parts)


def _share(numbers: np.ndarray, batch: int) -> Iterator[np.ndarray]:
    return all_batches(numbers, batch, distributed.rank(), distributed.world_size())


def gather(parts: list[Tensor]) -> Tensor:
    """Return the rows of all processes in rank order; the number of rows may differ between processes."""
    own = torch.cat(parts) if parts else torch.empty(0, 0)
    if distributed.world_size() == 1:
        return own
    sizes = distributed.exchange([len(own), own.shape[1]])
    longest, width = (max(column) for column in zip(*sizes, strict=True))
    padded = torch.zeros(longest, width)
    padded[: len(own), : own.shape[1]] = own
    device = torch.device("cuda", torch.cuda.current_device()) if torch.distributed.get_backend() == "nccl" else "cpu"
    everyone = distributed.all_gather(padded.to(device)).cpu().split(longest)
    return torch.cat([rows[:count] for rows, (count, _) in zip(everyone, sizes, strict=True)])
