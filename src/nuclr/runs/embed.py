"""Features as an embedding file: of pairs, of images alone, or of texts alone. Under torchrun the work is shared."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nuclr import distributed, files
from nuclr.data import Loader, check_samples, open_pairs, usable
from nuclr.data.modalities.image import SUFFIXES, open_image, read_file
from nuclr.errors import UserError
from nuclr.models import DualEncoder
from nuclr.runs.components import Source, make_loader
from nuclr.runs.features import Encoding, encode_pairs, encode_texts, encode_x
from nuclr.runs.launch import on_first
from nuclr.runs.settings import Data


class ImageFolder:
    """The images of a folder as pairs whose y is the file name."""

    x_kind, y_kind = "image", "text"

    def __init__(self, path: Path) -> None:
        self.files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
        if not self.files:
            raise UserError(f"--images {path}: the folder has no images ({', '.join(sorted(SUFFIXES))})")
        self.x_id = self.y_id = np.arange(len(self.files))
        self.fingerprint = ""

    def __len__(self) -> int:
        return len(self.files)

    def x(self, number: int) -> Image.Image:
        """Return the image, not yet decoded."""
        return open_image(read_file(self.files[number]))

    def y(self, number: int) -> str:
        """Return the file name."""
        return self.files[number].name

    def name(self, number: int) -> str:
        """Return the path."""
        return str(self.files[number])


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
    source = open_pairs(pairs, root, data.x.key, data.y.key, split)
    for side, kind, takes in (("x", source.x_kind, model.images), ("y", source.y_kind, model.tokenizer)):
        if (kind == "vector") != (takes is None):
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
    if model.images is None:
        raise UserError("--images: this model takes vectors on side x, not images; use --pairs FILE.npz")
    if not path.is_dir():
        raise UserError(f"--images {path}: no such folder")
    images: Any = ImageFolder(path)
    loader = make_loader(data, images, model)
    features = encode_x(model, loader, np.arange(len(images)), *encoding)
    return {"x": features}, [str(file.relative_to(path)) for file in images.files]


def embed_texts(model: DualEncoder, path: Path, encoding: Encoding) -> dict[str, Tensor]:
    """Return the features of the lines of a text file."""
    if model.tokenizer is None:
        raise UserError("--texts: this model takes vectors on side y, not texts; use --pairs FILE.npz")
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
