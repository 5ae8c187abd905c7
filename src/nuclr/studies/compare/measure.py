"""What a trained model is measured on: held-out pairs, halves of them, test sets; and the outcome of every query.

Halves: the images of the held-out pairs, in an order drawn once and for all, are cut in two; each half is a gallery of
its own. An image's captions are always in its half.
"""

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nuclr.data import Loader
from nuclr.data.modalities.image import SUFFIXES as IMAGES
from nuclr.errors import UserError
from nuclr.evaluation.ranks import Ranks, ranks
from nuclr.evaluation.retrieval import both
from nuclr.evaluation.test_sets import CLASSIFICATION, RETRIEVAL
from nuclr.models import DualEncoder
from nuclr.runs import components as parts
from nuclr.runs.features import encode_x, encode_y
from nuclr.runs.launch import pick_device
from nuclr.runs.settings import Data, Settings
from nuclr.studies.evaluate.features import class_task_features, pair_features
from nuclr.studies.evaluate.subject import Subject
from nuclr.studies.evaluate.tasks import ClassificationTask, open_classification, open_retrieval
from nuclr.studies.evaluate.vectors import VectorClasses

KS = (1, 5, 10)
VAL, HALVES = "val", ("val_a", "val_b")
HALVES_SEED = 20250
BUILTIN_CLASSES = "builtin_classes"
Hits = dict[str, np.ndarray]


@dataclass(frozen=True)
class TestSet:
    """`path`: pairs or an embedding file (retrieval); labeled images or `.npz` with x, labels, prompts (classes)."""

    name: str
    path: str
    kind: str
    fingerprint: str

    @property
    def key(self) -> str:
        """Name in hits.npz: another set of the same name has another one."""
        return f"test_{self.name}_{self.fingerprint[:8]}"


def parse_test(text: str, data: Data) -> TestSet:
    """From "PATH" or "NAME=PATH" to a test set that can be opened; PATH also as `nuclr evaluate` takes it."""
    name, equals, path = text.partition("=")
    if not equals or "/" in name or ":" in name:
        name, path = "", text
    kind = "classes" if _is_classes(path, data) else "pairs"
    try:
        if kind == "pairs":
            fingerprint = open_retrieval(path, data.root, None, data.max_bad_share).pairs.fingerprint
        else:
            classes = _open_classes(path, data, 32).classes
            vectors = isinstance(classes, VectorClasses)
            fingerprint = _hash_of(parts.below(data.root, path)) if vectors else getattr(classes, "fingerprint", "")
    except UserError as error:
        raise UserError(f"--test {text}: {error}") from None
    stem = Path(path)
    usual = path.partition(":")[0]
    name = name or (usual if usual != path else "_".join(part for part in (stem.parent.name, stem.stem) if part))
    return TestSet(name.replace("/", "_"), path, kind, fingerprint)


def _is_classes(path: str, data: Data) -> bool:
    usual, where = path.partition(":")[0], parts.below(data.root, path)
    if usual in RETRIEVAL or usual == "builtin":
        return False
    if usual in CLASSIFICATION or usual == BUILTIN_CLASSES:
        return True
    if where.suffix == ".npz" and zipfile.is_zipfile(where):
        with zipfile.ZipFile(where) as archive:
            return "labels.npy" in archive.namelist()
    folders = [inner for inner in where.iterdir() if inner.is_dir()] if where.is_dir() else []
    return len(folders) > 1 and any(file.suffix.lower() in IMAGES for file in folders[0].iterdir())


def _open_classes(path: str, data: Data, size: int) -> ClassificationTask:
    if path == BUILTIN_CLASSES:
        return open_classification("builtin", None, None, data.max_bad_share, size)
    named = path.partition(":")[0] in CLASSIFICATION
    return open_classification(path if named else str(parts.below(data.root, path)), None, None, data.max_bad_share)


def _hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


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


def test_hits(model: DualEncoder, settings: Settings, test: TestSet) -> Hits:
    """The outcome on a test set; of classes: top (n, 3), probability of the right one among the first 1, 5, 10."""
    if test.kind == "pairs":
        return retrieval_hits(test_features(model, settings, test))
    size = model.images.size if model.images is not None else 32
    task = _open_classes(test.path, settings.data, size)
    x, classes, labels = class_task_features(subject_of(model, settings), task)
    ranked = ranks(x, classes, torch.stack([torch.arange(len(x)), labels], dim=1))
    return {"top": _hits(ranked), "top_image": ranked.query.numpy()}


def test_features(model: DualEncoder, settings: Settings, test: TestSet) -> Features:
    """Features of a test set of pairs."""
    data, subject = settings.data, subject_of(model, settings)
    task = open_retrieval(test.path, data.root, None, data.max_bad_share)
    subject.check_kinds(test.name, task.pairs)
    found = pair_features(subject, task.pairs, task.numbers, "merge")
    return Features(found.x, found.y, found.pairs)


def subject_of(model: DualEncoder, settings: Settings) -> Subject:
    """The model as `nuclr evaluate` knows it."""
    size, device, _ = encoding(settings)
    return Subject(Path(settings.name), model, settings.data, size, device)


def encoding(settings: Settings) -> tuple[int, torch.device, str]:
    """How features are computed: batch, device, precision."""
    return settings.evaluate.batch_size, pick_device(settings.device), settings.precision
