"""Features of pairs, of images alone or of texts alone, as an embedding file; work is shared under torchrun."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import yaml
from PIL import Image
from torch import Tensor

from nuclr import distributed
from nuclr.data import Loader, check_samples, open_pairs, usable
from nuclr.files import read_text
from nuclr.data.modalities.image import SUFFIXES
from nuclr.data.pairs import Pairs
from nuclr.errors import UserError
from nuclr.models import DualEncoder, build_model
from nuclr.runs import checkpoint
from nuclr.runs import folder
from nuclr.runs.features import encode_texts, encode_x, encode_y
from nuclr.runs.launch import on_first


@dataclass(frozen=True)
class Run:
    """A trained run: its model, its settings as written in config.yaml, and its objective's temperature."""

    model: DualEncoder
    config: dict[str, Any]
    temperature: float


def open_run(path: Path, best: bool = False) -> Run:
    """A finished run, or a running one that has a checkpoint and a finished model beside it."""
    if not folder.is_run(path):
        raise UserError(f"{path}: no run there (no {folder.CONFIG}); name the folder that nuclr train wrote")
    results = folder.read_results(path)
    if results is None:
        raise UserError(f"{path}: this run is not finished; go on with it by nuclr train {path} --resume")
    model = DualEncoder.from_pretrained(path / folder.MODEL)
    if best:
        try:
            model.load_state_dict(checkpoint.load(path / folder.CHECKPOINTS / checkpoint.BEST)["model"])
        except checkpoint.BadCheckpoint as bad:
            raise UserError(f"{path / folder.CHECKPOINTS / checkpoint.BEST}: {bad}") from None
    config = yaml.safe_load((path / folder.CONFIG).read_text(encoding="utf-8"))
    return Run(model, config, float(results["temperature"]))


def open_encoders(name: str, width: int | None = None) -> DualEncoder:
    """A dual encoder that is no run: a folder written by save_pretrained, a CLIP or SigLIP."""
    return build_model(pretrained=name, width=width)


class _Pictures:
    """Images of a folder as pairs, with their names for captions."""

    x_kind, y_kind = "image", "text"

    def __init__(self, path: Path) -> None:
        self.files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES)
        if not self.files:
            raise UserError(f"{path}: no images in it ({', '.join(sorted(SUFFIXES))})")
        self.x_id = self.y_id = np.arange(len(self.files))
        self.fingerprint = ""

    def __len__(self) -> int:
        return len(self.files)

    def x(self, number: int) -> Image.Image:
        from nuclr.data.modalities.image import open_image, read_file

        return open_image(read_file(self.files[number]))

    def y(self, number: int) -> str:
        return self.files[number].name

    def name(self, number: int) -> str:
        return str(self.files[number])


def embed_pairs(
    model: DualEncoder,
    pairs: Pairs,
    numbers: np.ndarray,
    batch: int,
    device: torch.device,
    workers: int = 2,
) -> dict[str, Tensor]:
    """Arrays x (of every distinct image), y (of every pair, in the order of the numbers), y_to_x and number."""
    _, first, row = np.unique(pairs.x_id[numbers], return_index=True, return_inverse=True)
    order = np.argsort(first)  # images in the order of their first pair
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    loader = Loader(pairs, model.images.size if model.images else 224, workers=workers, memory=0)
    return {
        "x": encode_x(model, loader, numbers[np.sort(first)], batch, device, "float32"),
        "y": encode_y(model, pairs, numbers, batch, device, "float32"),
        "y_to_x": torch.from_numpy(place[row]),
        "number": torch.from_numpy(numbers),
    }


def embed(
    model: DualEncoder,
    out: Path,
    *,
    pairs: str | None = None,
    images: Path | None = None,
    texts: Path | None = None,
    root: str | None = None,
    split: str | None = None,
    batch: int = 256,
    device: torch.device,
    max_bad_share: float = 0.05,
) -> dict[str, Any]:
    """Write the features to `out`; returns their shapes and how many samples were bad."""
    if out.suffix not in (".npz", ".safetensors"):
        raise UserError(f"{out}: unknown kind of embedding file; allowed: .npz, .safetensors")
    if out.exists():
        raise UserError(f"{out} exists; remove it or name another file with --out")
    if not out.parent.is_dir():
        raise UserError(f"{out}: the folder {out.parent} does not exist")
    model = model.to(device).eval()
    bad: dict[int, str] = {}
    if pairs is not None:
        source = cast(Pairs, open_pairs(pairs, root, split=split))
        for side, kind, takes in (("x", source.x_kind, model.images), ("y", source.y_kind, model.tokenizer)):
            if (kind == "vector") != (takes is None):
                raise UserError(f"{pairs}: holds {kind}s on side {side}, which this model does not take")
        bad = check_samples(source, max_bad_share=max_bad_share)
        found = embed_pairs(model, source, usable(source, bad), batch, device)
    elif images is not None:
        if model.images is None:
            raise UserError("--images: this model takes vectors on side x, no pictures; give --pairs FILE.npz")
        if not images.is_dir():
            raise UserError(f"{images}: no such folder of images")
        pictures: Any = _Pictures(images)
        loader = Loader(pictures, model.images.size, memory=0)
        found = {"x": encode_x(model, loader, np.arange(len(pictures)), batch, device, "float32")}
        names = [str(file.relative_to(images)) for file in pictures.files]
        if distributed.rank() == 0:
            out.with_suffix(".txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    else:
        assert texts is not None
        if model.tokenizer is None:
            raise UserError("--texts: this model takes vectors on side y, no texts; give --pairs FILE.npz")
        if not texts.is_file():
            raise UserError(f"{texts}: no such file of texts, one a line")
        lines = read_text(texts).splitlines()
        if not lines:
            raise UserError(f"{texts}: holds no texts")
        found = {"y": encode_texts(model, lines, batch, device, "float32")}
    on_first(lambda: write(out, found))
    return {"bad_samples": bad, **{name: tuple(array.shape) for name, array in found.items()}}


def write(out: Path, arrays: dict[str, Tensor]) -> None:
    """An embedding file, whole or not at all."""
    temporary = out.with_name(f".{out.name}.tmp{out.suffix}")
    try:
        if out.suffix == ".npz":
            np.savez(temporary, **{name: array.numpy() for name, array in arrays.items()})  # type: ignore[arg-type]
        else:
            from safetensors.torch import save_file

            save_file({name: array.contiguous() for name, array in arrays.items()}, temporary)
        temporary.replace(out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from None
    finally:
        temporary.unlink(missing_ok=True)
