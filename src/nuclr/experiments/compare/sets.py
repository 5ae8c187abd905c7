"""What a trained model is measured on: held-out pairs, halves of them, test sets; and the outcome of every query.

Halves: the images of the held-out pairs, in an order drawn once and for all, are cut in two; each half is a gallery of
its own. An image's captions are always in its half.
"""

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from nuclr.data import Loader, open_labelled
from nuclr.data.builtin import BuiltinLabelled
from nuclr.data.images import SUFFIXES as IMAGES
from nuclr.data.pairs import Pairs
from nuclr.errors import UserError
from nuclr.evaluation import class_features
from nuclr.evaluation.ranks import Ranks, ranks_of_scores
from nuclr.evaluation.retrieval import both
from nuclr.models import DualEncoder
from nuclr.training import parts
from nuclr.training.features import encode_texts, encode_x, encode_y
from nuclr.training.launch import pick_device
from nuclr.training.settings import Settings

KS = (1, 5, 10)
VAL, HALVES = "val", ("val_a", "val_b")
HALVES_SEED = 20250
Hits = dict[str, np.ndarray]


@dataclass(frozen=True)
class TestSet:
    """`path`: pairs or an embedding file (retrieval); labelled images or `.npz` with x, labels, prompts (classes)."""

    name: str
    path: str
    kind: str
    fingerprint: str

    @property
    def key(self) -> str:
        """Name in hits.npz: another set of the same name has another one."""
        return f"test_{self.name}_{self.fingerprint[:8]}"


def parse_test(text: str, data: Any) -> TestSet:
    """From "PATH" or "NAME=PATH" to a test set that can be opened."""
    name, equals, path = text.partition("=")
    if not equals or "/" in name:
        name, path = "", text
    where = parts.below(data.root, path)
    builtin = path.partition(":")[0]
    try:
        if builtin == "builtin_classes":
            kind, fingerprint = "classes", BuiltinLabelled().fingerprint
        elif builtin != "builtin" and _is_classes(where):
            kind, opened = "classes", _open_classes(where)
            fingerprint = _fingerprint(where) if isinstance(opened, dict) else opened.fingerprint
        else:
            kind, fingerprint = "pairs", parts.open_source(data, path, None, check=False).pairs.fingerprint
    except UserError as error:
        raise UserError(f"--test {text}: {error}") from None
    stem = Path(path)
    name = name or ("_".join(part for part in (stem.parent.name, stem.stem) if part) if builtin == path else builtin)
    return TestSet(name.replace("/", "_"), path, kind, fingerprint)


def _fingerprint(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_classes(path: Path) -> bool:
    if path.suffix == ".npz" and path.is_file():
        try:
            with np.load(path, allow_pickle=False) as archive:
                return "labels" in archive.files
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise UserError(f"{path}: cannot be read as .npz ({error})") from None
    folders = [inner for inner in path.iterdir() if inner.is_dir()] if path.is_dir() else []
    return len(folders) > 1 and any(file.suffix.lower() in IMAGES for file in folders[0].iterdir())


def _open_classes(path: Path) -> Any:
    """Labelled images, or the arrays x (n, d_x), labels (n,) and prompts (c, d_y) or (c, m, d_y)."""
    if path.is_dir():
        return open_labelled(path)
    with np.load(path, allow_pickle=False) as archive:
        missing = [key for key in ("x", "labels", "prompts") if key not in archive.files]
        if missing:
            raise UserError(f"{path}: no array named {missing[0]!r}; needs x, labels and prompts")
        arrays = {key: archive[key] for key in ("x", "labels", "prompts")}
    count, classes = len(arrays["x"]), len(arrays["prompts"])
    labels = arrays["labels"]
    if labels.shape != (count,) or labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= classes:
        raise UserError(f"{path}: labels must be {count} whole numbers, each below {classes}, the number of prompts")
    return arrays


@dataclass(frozen=True)
class Features:
    """Of distinct images x (n_x, d) and captions y (n_y, d), and which belong together: pairs (n, 2), by rows."""

    x: Tensor
    y: Tensor
    pairs: Tensor

    def of_images(self, chosen: Tensor) -> "Features":
        """Those of the images with these rows, and of their captions."""
        place = torch.full((len(self.x),), -1)
        place[chosen] = torch.arange(len(chosen))
        kept = self.pairs[place[self.pairs[:, 0]] >= 0]
        captions, row = torch.unique(kept[:, 1], return_inverse=True)
        return Features(self.x[chosen], self.y[captions], torch.stack([place[kept[:, 0]], row], dim=1))


def halves(images: int) -> tuple[Tensor, Tensor]:
    """Rows of the images in each half, ascending."""
    order = np.random.default_rng(HALVES_SEED).permutation(images)
    cut = images // 2
    return torch.from_numpy(np.sort(order[:cut])), torch.from_numpy(np.sort(order[cut:]))


def embed_source(model: DualEncoder, settings: Settings, source: parts.Source, loader: Loader) -> Features:
    """Features of every distinct image and caption in use."""
    pairs, numbers = source.pairs, source.numbers
    options = encoding(settings)
    _, first_x, x_row = np.unique(pairs.x_id[numbers], return_index=True, return_inverse=True)
    _, first_y, y_row = np.unique(pairs.y_id[numbers], return_index=True, return_inverse=True)
    x = encode_x(model, loader, numbers[first_x], *options)
    y = encode_y(model, pairs, numbers[first_y], *options)
    return Features(x, y, torch.from_numpy(np.stack([x_row, y_row], axis=1)))


def open_features(
    model: DualEncoder,
    settings: Settings,
    path: str,
    split: str | None,
    loaders: parts.Loaders,
    keep: str | None = None,
) -> Features:
    """The same for pairs on disk."""
    source = parts.open_source(settings.data, path, split, keep)
    return embed_source(model, settings, source, parts.make_loader(settings.data, source.pairs, model, loaders))


def retrieval_hits(features: Features, bias_x: Tensor | None = None, bias_y: Tensor | None = None) -> Hits:
    """Outcome of every query.

    i2t (n_x, 3) and t2i (n_y, 3): probability of a partner among the first 1, 5, 10; t2i_image (n_y,): the row of the
    image that a caption belongs to (its first one).
    """
    of_x, of_y = both(features.x, features.y, features.pairs, bias_x, bias_y)
    owner = torch.full((len(features.y),), len(features.x))
    owner.scatter_reduce_(0, features.pairs[:, 1], features.pairs[:, 0], "amin")
    return {
        "i2t": _hits(of_x),
        "i2t_image": of_x.query.numpy(),
        "t2i": _hits(of_y),
        "t2i_image": owner[of_y.query].numpy(),
    }


def _hits(ranks: Ranks) -> np.ndarray:
    return np.asarray(torch.stack([ranks.hits(k) for k in KS], dim=1).float().numpy())


def held_out_hits(features: Features) -> dict[str, Hits]:
    """On all held-out pairs, and on each half alone."""
    found = {VAL: retrieval_hits(features)}
    if len(features.x) >= 4:
        for name, rows in zip(HALVES, halves(len(features.x)), strict=True):
            found[name] = retrieval_hits(features.of_images(rows))
    return found


def class_hits(model: DualEncoder, settings: Settings, test: TestSet, loaders: parts.Loaders) -> Hits:
    """top (n, 3): probability of the right class among the first 1, 5, 10."""
    options = encoding(settings)
    if test.path.partition(":")[0] == "builtin_classes":
        source = parts.open_source(settings.data, str(settings.data.train), settings.data.split, check=False)
        opened: Any = BuiltinLabelled(size=getattr(source.pairs, "size", 32))
    else:
        opened = _open_classes(parts.below(settings.data.root, test.path))
    if isinstance(opened, dict):
        x = encode_vectors(model, opened["x"], settings)
        prompts = torch.from_numpy(opened["prompts"])
        groups = prompts if prompts.ndim == 3 else prompts[:, None]
        texts = encode_texts(model, list(groups.flatten(0, 1).numpy()), *options)
        classes = class_features(list(texts.split(groups.shape[1])))
        labels = torch.from_numpy(opened["labels"]).long()
    else:
        words = opened.prompts()
        texts = encode_texts(model, [text for group in words for text in group], *options)
        classes = class_features(list(texts.split([len(group) for group in words])))
        pairs = cast(Pairs, opened)
        x = encode_x(model, parts.make_loader(settings.data, pairs, model, loaders), np.arange(len(pairs)), *options)
        labels = torch.from_numpy(np.asarray(opened.y_id))
    links = torch.stack([torch.arange(len(x)), labels], dim=1)
    ranks = ranks_of_scores(x @ classes.T, links)
    return {"top": _hits(ranks), "top_image": ranks.query.numpy()}


@torch.no_grad()
def encode_vectors(model: DualEncoder, x: np.ndarray, settings: Settings) -> Tensor:
    """Features of images that are vectors already."""
    if model.images is not None:
        raise UserError("a test set of vectors needs a model of vectors, but this one takes images")
    model.eval()
    size, device, _ = encoding(settings)
    return torch.cat([model.x(part.to(device)).float().cpu() for part in torch.from_numpy(x).float().split(size)])


def encoding(settings: Settings) -> tuple[int, torch.device, str]:
    """How features are computed: batch, device, precision."""
    return settings.evaluate.batch_size, pick_device(settings.device), settings.precision
