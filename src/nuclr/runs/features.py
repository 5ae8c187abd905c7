"""Features of many pairs, and embedding files. All processes share the work and get all features, on the CPU."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from nuclr import distributed, files
from nuclr.data import Loader, all_batches, check_samples, usable
from nuclr.data.formats.views import open_image_folder
from nuclr.data.modalities.image import SUFFIXES
from nuclr.data.pairs import Pairs
from nuclr.errors import UserError
from nuclr.models import DualEncoder, Encoder
from nuclr.runs.components import SIDES, Side, Source, make_loader, open_pairs_of_run, to_device
from nuclr.runs.launch import on_first
from nuclr.runs.settings import Data


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
        x_name: name of side x.
        y_name: name of side y.

    """

    x: Tensor
    y: Tensor
    links: Tensor
    pair_rows: Tensor
    numbers: np.ndarray
    x_number: np.ndarray
    y_number: np.ndarray
    x_group: Tensor
    x_name: str = "x"
    y_name: str = "y"

    @property
    def sides(self) -> tuple[str, str]:
        """The names of both sides."""
        return self.x_name, self.y_name

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
    model: DualEncoder, loader: Loader, numbers: np.ndarray, encoding: Encoding, merge_y: bool = True
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
    _, first_x, x_row = np.unique(pairs.x_id[numbers], return_index=True, return_inverse=True)
    _, first_y, y_row = np.unique(pairs.y_id[numbers], return_index=True, return_inverse=True)
    x = encode_x(model, loader, numbers[first_x], *encoding)
    y = encode_y(model, loader, numbers[first_y], *encoding)
    y_number = numbers[first_y]
    if not merge_y:
        y, y_number, y_row = y[torch.from_numpy(y_row)], numbers, np.arange(len(numbers))
    pair_rows = torch.from_numpy(np.stack([x_row, y_row], axis=1))
    links, x_group = pair_rows, torch.arange(len(x))
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
        pairs.x_name,
        pairs.y_name,
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
    _, group = torch.unique(group, return_inverse=True)
    (x_group, x), (y_group, y) = (
        torch.unique(torch.stack([group, rows], dim=1), dim=0).unbind(1) for rows in pair_rows.unbind(1)
    )
    size = torch.bincount(y_group)
    first = size.cumsum(0) - size  # where the y of each group begin
    count = size[x_group]
    begin = count.cumsum(0) - count
    step = torch.arange(int(count.sum())) - torch.repeat_interleave(begin, count)
    y_rows = y[torch.repeat_interleave(first[x_group], count) + step]
    return torch.unique(torch.stack([torch.repeat_interleave(x, count), y_rows], dim=1), dim=0)


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
        of_x = torch.full((int(x_row.max()) + 1,), len(distinct)).scatter_reduce(0, x_row, merged[group], "amin")
        smallest = merged.scatter_reduce(0, group, of_x[x_row], "amin")
        if torch.equal(smallest, merged):
            return merged[group]
        merged = smallest


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return a context in which the towers run in bfloat16 if that is the precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def encode_x(
    model: DualEncoder,
    loader: Loader,
    numbers: np.ndarray,
    batch: int,
    device: torch.device,
    precision: str,
    head: bool = True,
) -> Tensor:
    """Return features (len(numbers), d) of the x of these pairs."""
    return encode_side(model.x, loader, "x", numbers, Encoding(batch, device, precision, head))


def encode_y(
    model: DualEncoder,
    loader: Loader,
    numbers: np.ndarray,
    batch: int,
    device: torch.device,
    precision: str,
    head: bool = True,
) -> Tensor:
    """Return features (len(numbers), d) of the y of these pairs, without reading any x."""
    return encode_side(model.y, loader, "y", numbers, Encoding(batch, device, precision, head))


@torch.no_grad()
def encode_side(encoder: Encoder, loader: Loader, side: Side, numbers: np.ndarray, encoding: Encoding) -> Tensor:
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
def encode_items(encoder: Encoder, items: list[Any], encoding: Encoding) -> Tensor:
    """Return features (len(items), d) of items that are not part of a source of pairs, such as texts."""
    encoder.eval()
    shares = _share(np.arange(len(items)), encoding.batch_size)
    return gather([_encode(encoder, [items[row] for row in rows], encoding) for rows in shares])


def encode_texts(
    model: DualEncoder, texts: list[str], batch: int, device: torch.device, precision: str, head: bool = True
) -> Tensor:
    """Return features (len(texts), d) of texts, by the side of the model that takes texts."""
    encoder = getattr(model, side_that_takes(model, "text"))
    return encode_items(encoder, texts, Encoding(batch, device, precision, head))


def side_that_takes(model: DualEncoder, modality: str) -> Side:
    """Return the side of the model that takes a modality; x if both do.

    Raises:
        UserError: if neither does.

    """
    for side in SIDES:
        if getattr(model, side).modality == modality:
            return side
    raise UserError(f"this model does not take {modality}s")


def _encode(encoder: Encoder, items: Any, encoding: Encoding) -> Tensor:
    items = to_device(items, encoding.device)
    inputs = items if encoder.inputs is None else to_device(encoder.inputs.prepare(items), encoding.device)
    with autocast(encoding.device, encoding.precision):
        return encoder.features(inputs, encoding.head).float().cpu()


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
    source = open_pairs_of_run(data, pairs, root, split)
    for side in SIDES:
        kind, takes = getattr(source, f"{side}_kind"), getattr(model, side).modality
        if takes not in (None, kind):
            raise UserError(f"--pairs {pairs}: side {side} holds {kind}s, but this model takes {takes}s there")
    bad = check_samples(source, max_bad_share=data.max_bad_share)
    return Source(source, usable(source, bad), bad)


def embed_pairs(model: DualEncoder, loader: Loader, numbers: np.ndarray, encoding: Encoding) -> dict[str, Tensor]:
    """Return arrays x (per distinct x, in the order of their first pair), y (per pair), y_to_x and number."""
    features = encode_pairs(model, loader, numbers, encoding, merge_y=False)
    first = torch.full((len(features.x),), len(numbers)).scatter_reduce(
        0, features.pair_rows[:, 0], torch.arange(len(numbers)), "amin"
    )
    order = first.argsort()
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order))
    return {
        "x": features.x[order],
        "y": features.y,
        "y_to_x": position[features.pair_rows[:, 0]],
        "number": torch.from_numpy(numbers),
    }


def pair_names(pairs: Pairs, arrays: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return what the rows of x and y in an embedding file are: the names of images, and texts as one line each.

    Args:
        pairs: the pairs that were embedded.
        arrays: from `embed_pairs`.

    Returns:
        Lines by the side's name, without sides of other modalities.

    """
    numbers = arrays["number"].numpy()
    _, first = np.unique(arrays["y_to_x"].numpy(), return_index=True)
    rows: dict[Side, np.ndarray] = {"x": numbers[first], "y": numbers}
    names = {}
    for side, chosen in rows.items():
        kind = getattr(pairs, f"{side}_kind")
        if kind == "image":
            names[side] = [pairs.item_name(side, number) or pairs.name(number) for number in chosen.tolist()]
        elif kind == "text":
            names[side] = [" ".join(str(text).split()) for text in pairs.items(side, chosen)]
    return {str(side): lines for side, lines in names.items()}


def choose_side(model: DualEncoder, modality: str, side: str | None) -> Side:
    """Return the side whose encoder is used for items of one modality (option --side).

    Raises:
        UserError: if this side does not take the modality, or `side` is needed because both do.

    """
    takes = [name for name in SIDES if getattr(model, name).modality == modality]
    option = f"--{modality}s"
    if not takes:
        kinds = " and ".join(f"{getattr(model, name).modality or 'tensor'}s on side {name}" for name in SIDES)
        raise UserError(f"{option}: this model takes {kinds}, not {modality}s; use --pairs")
    if side is None:
        if len(takes) == 2 and not model.shared:
            raise UserError(
                f"{option}: both sides of this model take {modality}s; choose one with --side x or --side y"
            )
        return takes[0]
    if side not in takes:
        raise UserError(f"--side {side}: this side of the model does not take {modality}s; use --side {takes[0]}")
    return cast(Side, side)


def embed_images(
    model: DualEncoder, path: Path, encoding: Encoding, data: Data, side: str | None = None
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the features of all images in a folder, and their names relative to it."""
    chosen = choose_side(model, "image", side)
    if not path.is_dir():
        raise UserError(f"--images {path}: no such folder")
    if not any(file.suffix.lower() in SUFFIXES for file in path.rglob("*")):
        raise UserError(f"--images {path}: the folder has no images ({', '.join(sorted(SUFFIXES))})")
    images = open_image_folder(path, allow_outside=True)
    encoder = getattr(model, chosen)
    loader = make_loader(data.outside_training(), images, model, encoders=(encoder, encoder))
    features = encode_side(encoder, loader, "x", np.arange(len(images)), encoding)
    return {chosen: features}, [images.name(number) for number in range(len(images))]


def embed_texts(model: DualEncoder, path: Path, encoding: Encoding, side: str | None = None) -> dict[str, Tensor]:
    """Return the features of the lines of a text file."""
    chosen = choose_side(model, "text", side)
    if not path.is_file():
        raise UserError(f"--texts {path}: no such file; it needs one text per line")
    lines = files.read_lines(path)
    if not lines:
        raise UserError(f"--texts {path}: the file is empty")
    return {chosen: encode_items(getattr(model, chosen), lines, encoding)}


def write_embeddings(out: Path, arrays: dict[str, Tensor], names: Mapping[Path, list[str]] | None = None) -> None:
    """Write an embedding file atomically, and files with the names of its rows; the first process writes."""

    def write() -> None:
        try:
            with files.write_atomically(out) as file:
                if out.suffix == ".npz":
                    np.savez(file, **{name: array.numpy() for name, array in arrays.items()})  # type: ignore[arg-type]
                else:
                    from safetensors.torch import save

                    file.write(save({name: array.contiguous() for name, array in arrays.items()}))
            for path, lines in (names or {}).items():
                files.write_text(path, "\n".join(lines) + "\n")
        except OSError as error:
            raise UserError(f"--out {out}: cannot be written ({error.strerror})") from None

    on_first(write)
    if distributed.world_size() > 1:
        distributed.exchange([0])
