"""The model that is evaluated, a trained run or other encoders, and its features of test sets."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from nuclr.data import Loader
from nuclr.data.pairs import Pairs
from nuclr.errors import UserError
from nuclr.evaluation import class_features, links_with_copies
from nuclr.models import DualEncoder, ImageFormat, build_model
from nuclr.models.towers import VectorTower
from nuclr.runs import folder
from nuclr.runs.components import make_loader
from nuclr.runs.features import Encoding, PairFeatures, encode_items, encode_pairs, encode_texts, encode_x, encode_y
from nuclr.runs.launch import pick_device
from nuclr.runs.run import Run
from nuclr.runs.settings import Data
from nuclr.studies.evaluate.tasks import ClassificationTask, VectorClasses

# What is done with captions that occur more than once.
DUPLICATES = {
    "merge": "every distinct caption is in the gallery once and belongs to all images that have it",
    "miss": "every caption of every image is in the gallery and belongs to that image only",
    "hit": "every caption of every image is in the gallery, and copies of it belong to the same images",
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
        return make_loader(dataclasses.replace(self.data, memory=0), pairs, self.model)

    def check_kinds(self, name: str, pairs: Pairs) -> None:
        """Refuse pairs that the model does not take: images instead of vectors, vectors of another width."""
        for side, kind in (("x", pairs.x_kind), ("y", pairs.y_kind)):
            takes = getattr(self.model, side).modality
            if kind != takes:
                raise UserError(f"{name}: holds {kind}s on side {side}, but {self.path} takes {takes}s")
        if pairs.x_kind == "vector":
            self.check_width(name, "x", len(pairs.x(0)))
        if pairs.y_kind == "vector":
            self.check_width(name, "y", len(pairs.y(0)))

    def check_width(self, name: str, side: str, width: int) -> None:
        """Refuse vectors of another width than the model's."""
        tower = getattr(self.model, side).tower
        if isinstance(tower, VectorTower) and width != len(tower.mean):
            raise UserError(f"{name}: {side} has {width} coordinates, but {self.path} takes {len(tower.mean)}")

    def describe(self) -> dict[str, Any]:
        """Return how inputs become features, for the protocol."""
        images = self.model.x.inputs
        return {
            "path": str(self.path),
            "kind": "run" if self.run is not None else "encoders",
            "width": self.model.width,
            "images": {"size": images.size, "mean": list(images.mean), "std": list(images.std), "fit": self.data.fit}
            if isinstance(images, ImageFormat)
            else None,
            "precision": self.encoding.precision,
        }


def subject_of_run(run: Run, batch_size: int | None = None) -> Subject:
    """Return a run as a subject."""
    encoding = run.encoding if batch_size is None else run.encoding._replace(batch_size=batch_size)
    return Subject(run.folder, run.model, run.settings.data, encoding, run)


def open_subject(path: Path, best: bool, batch_size: int | None, device: str) -> Subject:
    """Open a run, or a folder of encoders (nuclr's, a CLIP or SigLIP)."""
    if folder.is_run(path):
        return subject_of_run(Run.open_finished(path, best, device), batch_size)
    if best:
        raise UserError(f"--best needs a run folder; {path} is not one")
    if path.is_dir() and not (path / "config.json").is_file():
        raise UserError(
            f"{path}: neither a run folder (no {folder.CONFIG}) nor encoders (no config.json); name a folder that "
            "nuclr train wrote"
        )
    where = pick_device(device)
    model = build_model(pretrained=str(path)).to(where).eval()
    return Subject(path, model, Data(), Encoding(batch_size or 256, where))


# -- features ----------------------------------------------------------------------------------------------------------


def pair_features(subject: Subject, pairs: Pairs, numbers: np.ndarray, duplicates: str) -> PairFeatures:
    """Return the features of these pairs; `duplicates` is a key of DUPLICATES."""
    loader = subject.loader(pairs)
    features = encode_pairs(subject.model, loader, numbers, subject.encoding, merge_y=duplicates == "merge")
    if duplicates != "hit":
        return features
    _, copies = np.unique(pairs.y_id[numbers], return_inverse=True)
    links = links_with_copies(features.links, torch.from_numpy(copies))
    return dataclasses.replace(features, links=links)


def query_bank(subject: Subject, pairs: Pairs, numbers: np.ndarray, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the features of up to `size` distinct x and as many distinct y of these pairs, drawn at random."""
    rng = np.random.default_rng(seed)
    chosen = []
    for ids in (pairs.x_id[numbers], pairs.y_id[numbers]):
        _, first = np.unique(ids, return_index=True)
        kept = first if len(first) <= size else rng.choice(first, size, replace=False)
        chosen.append(numbers[np.sort(kept)])
    x = encode_x(subject.model, subject.loader(pairs), chosen[0], *subject.encoding)
    return x, encode_y(subject.model, subject.loader(pairs), chosen[1], *subject.encoding)


def class_task_features(subject: Subject, task: ClassificationTask) -> tuple[Tensor, Tensor, Tensor]:
    """Return images x (n, d), classes (c, d) and labels (n,)."""
    encoding, classes = subject.encoding, task.classes
    if isinstance(classes, VectorClasses):
        x = encode_items(subject.model.x, list(classes.x.numpy()), encoding)
        texts = encode_items(subject.model.y, list(classes.prompts.flatten(0, 1).numpy()), encoding)
        return x, class_features(list(texts.split(classes.prompts.shape[1]))), classes.labels
    prompts = classes.prompts()
    texts = encode_texts(subject.model, [text for group in prompts for text in group], *encoding)
    x = encode_x(subject.model, subject.loader(cast(Pairs, classes)), task.numbers, *encoding)
    labels = torch.from_numpy(np.asarray(classes.y_id)[task.numbers])
    return x, class_features(list(texts.split([len(group) for group in prompts]))), labels
