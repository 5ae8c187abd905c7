"""Features of many pairs, the work shared among the processes; all of them get all features, on the CPU."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nuclr import distributed
from nuclr.data import Loader, all_batches
from nuclr.data.pairs import Pairs
from nuclr.models import DualEncoder
from nuclr.runs.components import to_device

Autocast = Callable[[], AbstractContextManager[Any]]


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """bf16 where asked for."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


@torch.no_grad()
def encode_x(
    model: DualEncoder, loader: Loader, numbers: np.ndarray, batch: int, device: torch.device, precision: str
) -> Tensor:
    """Features (len(numbers), d) of the x of these pairs."""
    model.eval()
    found = []
    for loaded in loader.load(_share(numbers, batch)):
        x = loaded.x.to(device)
        with autocast(device, precision):
            found.append(model.x(x if model.images is None else model.prepare_images(x)).float().cpu())
    return gather(found)


@torch.no_grad()
def encode_y(
    model: DualEncoder, pairs: Pairs, numbers: np.ndarray, batch: int, device: torch.device, precision: str
) -> Tensor:
    """Features (len(numbers), d) of the y of these pairs; no image is read."""
    return encode_texts(model, [pairs.y(int(number)) for number in numbers], batch, device, precision)


@torch.no_grad()
def encode_texts(model: DualEncoder, texts: list[Any], batch: int, device: torch.device, precision: str) -> Tensor:
    """Features (len(texts), d) of texts or vectors."""
    model.eval()
    found = []
    for numbers in _share(np.arange(len(texts)), batch):
        chosen = [texts[number] for number in numbers]
        inputs = torch.from_numpy(np.stack(chosen)) if model.tokenizer is None else model.prepare_texts(chosen)
        with autocast(device, precision):
            found.append(model.y(to_device(inputs, device)).float().cpu())
    return gather(found)


def _share(numbers: np.ndarray, batch: int) -> Any:
    return all_batches(numbers, batch, distributed.rank(), distributed.world_size())


def gather(parts: list[Tensor]) -> Tensor:
    """Rows of all processes in rank order, each of which may have another number of them."""
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
