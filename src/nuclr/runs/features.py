"""Features of many pairs, and embedding files. All processes share the work and get all features, on the CPU."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nuclr import distributed, files
from nuclr.data import Loader, all_batches, check_samples, open_pairs, usable
from nuclr.data.formats.views import open_image_folder
from nuclr.data.modalities.image import SUFFIXES
from nuclr.data.pairs import Pairs
from nuclr.errors import UserError
from nuclr.models import DualEncoder
from nuclr.runs.components import Source, make_loader, to_device
from nuclr.runs.launch import on_first
from nuclr.runs.settings import Data


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
        model: the encoders; left in eval mode.
        loader: reads the pairs.
        numbers: (n,), numbers of pairs.
        encoding: batch size, device, precision.
        merge_y: True: one row per distinct y. False: one row per pair, in the order of `numbers`; equal y are still
            encoded only once.

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
        x = to_device(loaded.x, device)
        with autocast(device, precision):
            parts.append(model.x(model.prepare_x(x)).float().cpu())
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
        inputs = model.prepare_y(chosen)
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


# -- embedding files ---------------------------------------------------------------------------------------------------


def check_target(out: Path) -> None:
    """Refuse, before any work, an embedding file that exists, cannot be written or has an unknown suffix."""
    if out.suffix not in (".npz", ".safetensors"):
        raise UserError(f"--out {out}: unknown kind of embedding file; allowed: .npz, .safetensors")
    if out.exists():
        raise UserError(f"--out {out}: the file exists; remove it or name another one")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: the folder {out.parent} does not exist")


def open_source(model: DualEncoder, pairs: str, root: str | None, split: str | None, data: Data) -> Source:
    """Open pairs that are not a run's own, with the columns that `data` names, and check that the model takes them."""
    source = open_pairs(pairs, root, data.x.key, data.y.key, split, data.allow_outside)
    for side, kind in (("x", source.x_kind), ("y", source.y_kind)):
        if kind != getattr(model, side).modality:
            raise UserError(f"--pairs {pairs}: side {side} holds {kind}s, which this model does not take")
    bad = check_samples(source, max_bad_share=data.max_bad_share)
    return Source(source, usable(source, bad), bad)


def embed_pairs(model: DualEncoder, loader: Loader, numbers: np.ndarray, encoding: Encoding) -> dict[str, Tensor]:
    """Return arrays x (per distinct x, in the order of their first pair), y (per pair), y_to_x and number."""
    features = encode_pairs(model, loader, numbers, encoding, merge_y=False)
    first = torch.full((len(features.x),), len(numbers)).scatter_reduce(
        0, features.links[:, 0], torch.arange(len(numbers)), "amin"
    )
    order = first.argsort()
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order))
    return {
        "x": features.x[order],
        "y": features.y,
        "y_to_x": position[features.links[:, 0]],
        "number": torch.from_numpy(numbers),
    }


def embed_images(model: DualEncoder, path: Path, encoding: Encoding, data: Data) -> tuple[dict[str, Tensor], list[str]]:
    """Return the features of all images in a folder, and their names relative to it."""
    if model.x.modality != "image":
        raise UserError(f"--images: this model takes {model.x.modality}s on side x, not images; use --pairs FILE.npz")
    if not path.is_dir():
        raise UserError(f"--images {path}: no such folder")
    if not any(file.suffix.lower() in SUFFIXES for file in path.rglob("*")):
        raise UserError(f"--images {path}: the folder has no images ({', '.join(sorted(SUFFIXES))})")
    images = open_image_folder(path, allow_outside=True)
    loader = make_loader(data, images, model)
    numbers = np.arange(len(images))
    return {"x": encode_x(model, loader, numbers, *encoding)}, [images.name(number) for number in numbers.tolist()]


def embed_texts(model: DualEncoder, path: Path, encoding: Encoding) -> dict[str, Tensor]:
    """Return the features of the lines of a text file."""
    if model.y.modality != "text":
        raise UserError(f"--texts: this model takes {model.y.modality}s on side y, not texts; use --pairs FILE.npz")
    if not path.is_file():
        raise UserError(f"--texts {path}: no such file; it needs one text per line")
    lines = files.read_text(path).splitlines()
    if not lines:
        raise UserError(f"--texts {path}: the file is empty")
    return {"y": encode_texts(model, lines, *encoding)}


def write_embeddings(out: Path, arrays: dict[str, Tensor], names: list[str] | None = None) -> None:
    """Write an embedding file atomically, and the names of its rows to a .txt next to it; the first process writes."""

    def write() -> None:
        try:
            with files.write_atomically(out) as file:
                if out.suffix == ".npz":
                    np.savez(file, **{name: array.numpy() for name, array in arrays.items()})  # type: ignore[arg-type]
                else:
                    from safetensors.torch import save

                    file.write(save({name: array.contiguous() for name, array in arrays.items()}))
            if names is not None:
                files.write_text(out.with_suffix(".txt"), "\n".join(names) + "\n")
        except OSError as error:
            raise UserError(f"--out {out}: cannot be written ({error.strerror})") from None

    on_first(write)
    if distributed.world_size() > 1:
        distributed.exchange([0])
