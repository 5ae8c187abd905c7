"""The model that is evaluated, a trained run or other encoders, and its features of test sets."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nuclr.data import Loader
from nuclr.data.formats.beir import BeirSet
from nuclr.data.pairs import Pairs
from nuclr.errors import UserError
from nuclr.evaluation import class_features, links_with_copies
from nuclr.models import DualEncoder, ImageFormat, build_model
from nuclr.models.towers import VectorTower
from nuclr.runs.components import SIDES, check_tower_widths, make_class_loader, make_loader
from nuclr.runs.content import content_hash
from nuclr.runs.features import (
    Encoding,
    PairFeatures,
    encode_items,
    encode_pairs,
    encode_side,
    encode_texts,
    side_that_takes,
)
from nuclr.runs.launch import pick_device
from nuclr.runs.run import Run, opens_as_run
from nuclr.runs.settings import Data
from nuclr.studies.evaluate.tasks import ClassificationTask, LabeledVectors, ProbeTask, VectorClasses

# What is done with items of side y that occur more than once.
DUPLICATES = {
    "merge": "every distinct y is in the gallery once and belongs to all x that have it",
    "miss": "the y of every pair is in the gallery and belongs to the x of its own pair only",
    "hit": "the y of every pair is in the gallery, and copies of it belong to the same x",
}


@dataclass(frozen=True)
class Subject:
    """A model with the settings of its data; `run` is None for encoders that do not come from a run."""

    path: Path
    model: DualEncoder
    data: Data
    encoding: Encoding
    run: Run | None = None

    def loader(self, pairs: Pairs) -> Loader:
        """Return a loader that reads pairs as training did, without augmentation; images are read once and not kept."""
        return make_loader(dataclasses.replace(self.data.outside_training(), memory=0), pairs, self.model)

    @property
    def takes(self) -> str:
        """What the sides take, in words: "images and texts", "texts on both sides"."""
        x, y = (f"{getattr(self.model, side).modality or 'tensor'}s" for side in SIDES)
        return f"{x} on both sides" if x == y else f"{x} and {y}"

    def check_kinds(self, name: str, pairs: Pairs) -> None:
        """Refuse pairs that the model does not take: images instead of vectors, vectors of another width."""
        for side, kind in (("x", pairs.x_kind), ("y", pairs.y_kind)):
            takes = getattr(self.model, side).modality
            if takes not in (None, kind):
                raise UserError(f"{name}: holds {kind}s on side {side}, but {self.path} takes {takes}s")
        if pairs.x_kind == "vector":
            self.check_width(name, "x", len(pairs.x(0)))
        if pairs.y_kind == "vector":
            self.check_width(name, "y", len(pairs.y(0)))
        if not self.encoding.head:
            check_tower_widths(self.model)

    def check_width(self, name: str, side: str, width: int, key: str | None = None) -> None:
        """Refuse vectors, in the array `key`, of another width than the model's."""
        takes = self._vector_width(side)
        if takes not in (None, width):
            raise UserError(f"{name}: {key or side} has {width} coordinates, but {self.path} takes {takes}")

    def _vector_width(self, side: str) -> int | None:
        tower = getattr(self.model, side).tower
        return len(tower.mean) if isinstance(tower, VectorTower) else None

    def check_beir(self, path: Path) -> None:
        """Refuse a BEIR folder if a side of the model does not take texts."""
        if (self.model.x.modality, self.model.y.modality) != ("text", "text"):
            raise UserError(f"--beir {path}: needs a model of texts on both sides, but {self.path} takes {self.takes}")
        if not self.encoding.head:
            check_tower_widths(self.model)

    def check_zero_shot(self, task: ClassificationTask) -> None:
        """Refuse zero-shot classification unless one side takes images and the other texts, or both take vectors."""
        if isinstance(task.classes, VectorClasses):
            if (self.model.x.modality, self.model.y.modality) != ("vector", "vector"):
                raise UserError(f"{task.path}: holds vectors, but {self.path} takes {self.takes}")
            self.check_width(task.path, "x", task.classes.x.shape[1])
            self.check_width(task.path, "y", task.classes.prompts.shape[2])
        elif not (self.model.takes("image") and self.model.takes("text")):
            hint = f"; --classes {task.path} classifies by neighbors" if self.model.takes("image") else ""
            raise UserError(
                f"{task.path}: zero-shot classification needs images on one side and texts on the other, "
                f"but {self.path} takes {self.takes}{hint}"
            )
        if not self.encoding.head:
            check_tower_widths(self.model)

    def check_probe(self, task: ProbeTask) -> None:
        """Refuse labeled items that no side takes."""
        if isinstance(task.classes, LabeledVectors):
            if not self.model.takes("vector"):
                raise UserError(f"--classes {task.path}: holds vectors, but {self.path} takes {self.takes}")
            width = task.classes.x.shape[1]
            self.check_width(f"--classes {task.path}", self.vector_side(width), width, key="x")
        elif not self.model.takes("image"):
            raise UserError(f"--classes {task.path}: holds images, but {self.path} takes {self.takes}")

    def vector_side(self, width: int) -> str:
        """Return the side that takes vectors of this width, or the first one that takes vectors."""
        sides = [side for side in SIDES if getattr(self.model, side).modality == "vector"]
        return next((side for side in sides if self._vector_width(side) == width), sides[0])

    def describe(self) -> dict[str, Any]:
        """Return how inputs become features, for the protocol."""
        formats = (side.inputs for side in (self.model.x, self.model.y))
        images = next((inputs for inputs in formats if isinstance(inputs, ImageFormat)), None)
        facts = {
            "path": str(self.path),
            "kind": "run" if self.run is not None else "encoders",
            "width": self.model.width,
            "head": self.encoding.head,
            "precision": self.encoding.precision,
        }
        if self.run is not None:
            settings = self.run.settings
            facts |= {"objective": settings.objective.name, "seed": settings.seed, "settings": content_hash(settings)}
        if images is None:
            return facts
        preparation = {"size": images.size, "mean": list(images.mean), "std": list(images.std)}
        preparation |= {"fit": self.data.outside_training().fit, "fit_of_labeled_images": self.data.fit}
        return facts | {"images": preparation}


def subject_of_run(run: Run, batch_size: int | None = None) -> Subject:
    """Return a run as a subject."""
    encoding = run.encoding if batch_size is None else run.encoding._replace(batch_size=batch_size)
    return Subject(run.folder, run.model, run.settings.data, encoding, run)


def open_subject(path: Path, best: bool, batch_size: int | None, device: str, head: bool | None = None) -> Subject:
    """Open a run, or a folder of encoders (nuclr's, a CLIP or SigLIP); `head` overrides `evaluate.head`."""
    if opens_as_run(path):
        subject = subject_of_run(Run.open_finished(path, best, device), batch_size)
    elif best:
        raise UserError(f"--best needs a run folder; {path} is not one")
    else:
        where = pick_device(device)
        model = build_model(pretrained=str(path)).to(where).eval()
        subject = Subject(path, model, Data(), Encoding(batch_size or 256, where))
    if head is None:
        return subject
    return dataclasses.replace(subject, encoding=subject.encoding._replace(head=head))


# -- features ----------------------------------------------------------------------------------------------------------


def pair_features(subject: Subject, pairs: Pairs, numbers: np.ndarray, duplicates: str) -> PairFeatures:
    """Return the features of these pairs; `duplicates` is a key of DUPLICATES."""
    loader = subject.loader(pairs)
    features = encode_pairs(subject.model, loader, numbers, subject.encoding, merge_y=duplicates == "merge")
    if duplicates != "hit":
        return features
    _, copies = np.unique(pairs.y_id[numbers], return_inverse=True)
    return dataclasses.replace(features, links=links_with_copies(features.links, torch.from_numpy(copies)))


def query_bank(subject: Subject, pairs: Pairs, numbers: np.ndarray, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the features of up to `size` distinct x and as many distinct y of these pairs, drawn at random."""
    rng = np.random.default_rng(seed)
    chosen = []
    for ids in (pairs.x_id[numbers], pairs.y_id[numbers]):
        _, first = np.unique(ids, return_index=True)
        kept = first if len(first) <= size else rng.choice(first, size, replace=False)
        chosen.append(numbers[np.sort(kept)])
    loader, model = subject.loader(pairs), subject.model
    x = encode_side(model.x, loader, "x", chosen[0], subject.encoding)
    return x, encode_side(model.y, loader, "y", chosen[1], subject.encoding)


def class_task_features(subject: Subject, task: ClassificationTask) -> tuple[Tensor, Tensor, Tensor]:
    """Return images x (n, d), classes (c, d) and labels (n,)."""
    model, encoding, classes = subject.model, subject.encoding, task.classes
    if isinstance(classes, VectorClasses):
        x = encode_items(model.x, list(classes.x.numpy()), encoding)
        texts = encode_items(model.y, list(classes.prompts.flatten(0, 1).numpy()), encoding)
        return x, class_features(list(texts.split(classes.prompts.shape[1]))), classes.labels
    assert task.texts is not None  # only vectors have none
    prompts = task.texts.prompts
    texts = encode_texts(model, [text for group in prompts for text in group], *encoding)
    x, labels = _labeled_images(subject, classes, task.numbers)
    return x, class_features(list(texts.split([len(group) for group in prompts]))), labels


def probe_features(subject: Subject, task: ProbeTask) -> tuple[Tensor, Tensor]:
    """Return the features x (n, d) and the labels (n,) of labeled images or vectors."""
    if isinstance(task.classes, LabeledVectors):
        vectors = task.classes.x.numpy()
        encoder = getattr(subject.model, subject.vector_side(vectors.shape[1]))
        return encode_items(encoder, list(vectors), subject.encoding), task.classes.labels
    return _labeled_images(subject, task.classes, task.numbers)


def _labeled_images(subject: Subject, classes: Any, numbers: np.ndarray) -> tuple[Tensor, Tensor]:
    loader = make_class_loader(dataclasses.replace(subject.data, memory=0), classes, subject.model)
    encoder = getattr(subject.model, side_that_takes(subject.model, "image"))
    x = encode_side(encoder, loader, "x", numbers, subject.encoding)
    return x, torch.from_numpy(np.asarray(classes.y_id)[numbers])


def beir_features(subject: Subject, task: BeirSet) -> tuple[Tensor, Tensor]:
    """Return the features of the queries, by side x, and of the documents, by side y."""
    texts: Any = task.queries, task.documents  # read one at a time: a corpus of texts need not be a list
    queries = encode_items(subject.model.x, texts[0], subject.encoding)
    return queries, encode_items(subject.model.y, texts[1], subject.encoding)
