"""The model that is evaluated, a trained run or other encoders, and the test sets that it is evaluated on.

A test set is named by a path, whatever `nuclr.data.open` opens, or by NAME:FOLDER, a standard test set on disk. A BEIR
folder is read by `nuclr.data.formats.beir.read_beir`.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nuclr.data import check_samples, open_labeled, usable
from nuclr.data.builtin import BuiltinLabeled
from nuclr.data.labeled import ClassTexts, LabeledVectors, Prompts, read_prompts
from nuclr.data.pairs import SIDES, Labeled, Pairs, SideName
from nuclr.data.selection import Source
from nuclr.errors import UserError
from nuclr.evaluation import Bank, bank_rows, class_features
from nuclr.evaluation.metrics import Kind
from nuclr.evaluation.test_sets import (
    CLASSIFICATION,
    RETRIEVAL,
    open_standard_classes,
    open_standard_pairs,
    parse_standard,
)
from nuclr.files import is_run
from nuclr.models import DualEncoder, ImageFormat, build_model
from nuclr.models.towers import VectorTower
from nuclr.popularity.correction import BANK_SIZE
from nuclr.runs.components import check_tower_widths, make_class_loader, make_loader, open_pairs_like_run
from nuclr.runs.features import Encoding, PairFeatures, encode_items, encode_pairs, encode_side
from nuclr.runs.launch import pick_device
from nuclr.runs.run import Run
from nuclr.runs.settings import Data, Evaluate, content_hash

# What is done with items of side y that occur more than once.
DUPLICATES = {
    "merge": "every distinct y is in the gallery once and belongs to all x that have it",
    "miss": "the y of every pair is in the gallery and belongs to the x of its own pair only",
}
Need = tuple[SideName | None, str, int | None]  # side (None: any), modality, and width of vectors
BUILTIN_CLASSES = "builtin_classes"  # built-in pictures with their classes, where "builtin" are pairs
TEXTS: tuple[Need, Need] = (("x", "text", None), ("y", "text", None))  # of a BEIR folder


# ---------------------------------------------------------------------------------------------------------------------
# Test sets
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A test set of pairs to retrieve, or of labeled images or vectors.

    Attributes:
        name: name in tables.
        path: where it is.
        kind: "retrieval", "zero_shot" (prompts classify the items), or "labels" (nearest neighbors do).
        source: the pairs or labeled items, the numbers of those in use, and the bad ones with reasons.
        split: the split, if the pairs have several.
        duplicates: treatment of repeated y, a key of DUPLICATES.
        texts: prompts of the classes; None if the prompts are vectors.

    """

    name: str
    path: str
    kind: Kind
    source: Source
    split: str | None = None
    duplicates: str = "merge"
    texts: ClassTexts | None = None

    @property
    def classes(self) -> Labeled:
        """The labeled items."""
        assert isinstance(self.source.pairs, Labeled)
        return self.source.pairs

    @property
    def needs(self) -> list[Need]:
        """What the model has to take: both sides of pairs; labeled items and, for zero-shot, their prompts."""
        pairs = self.source.pairs
        if self.kind == "retrieval":
            return [(side, pairs.sides[side].modality.name, self.source.width(side)) for side in SIDES]
        zero_shot = self.kind == "zero_shot"
        if not isinstance(pairs, LabeledVectors):
            return [(None, "image", None), (None, "text", None)] if zero_shot else [(None, "image", None)]
        width = pairs.x.shape[1]
        if not zero_shot or pairs.prompt_vectors is None:
            return [(None, "vector", width)]
        return [("x", "vector", width), ("y", "vector", pairs.prompt_vectors.shape[2])]


def open_retrieval(
    text: str,
    data: Data,
    split: str | None = None,
) -> Task:
    """Open a path (see `nuclr.data.open`), or NAME:FOLDER with the name of a standard test set.

    Args:
        text: the path or name.
        data: settings of a run: the folder that names are relative to, the accepted share of bad samples, and columns,
            modalities and names of sides, which are used if the pairs have them.
        split: the split, if the pairs have several.

    """
    standard = parse_standard(text, RETRIEVAL, "--retrieval")
    if standard is not None:
        pairs, path = open_standard_pairs(*standard, "test", data.allow_outside)
        source = Source(pairs, np.arange(len(pairs)), {})
        # As in published results, a copy of a caption does not count as right.
        return Task(
            standard[0],
            str(path),
            "retrieval",
            source,
            "test",
            duplicates="miss",
        )
    columns = Data(allow_outside=data.allow_outside) if data.contrasts_views else data
    pairs = open_pairs_like_run(columns, text, data.root, split)
    return Task(
        text,
        text,
        "retrieval",
        without_bad(pairs, data),
        split,
    )


def without_bad(pairs: Pairs, data: Data) -> Source:
    """Return pairs without bad samples."""
    bad = check_samples(pairs, max_bad_share=data.max_bad_share)
    return Source(pairs, usable(pairs, bad), bad)


def open_labels(
    text: str,
    data: Data,
    kind: Kind,
    prompts: Path | None = None,
    size: int = 32,
) -> Task:
    """Open labeled images or vectors.

    Args:
        text: a folder of classes, `.npz` with x, labels and prompts, "builtin", or NAME:FOLDER (standard sets).
        data: settings of a run: the accepted share of bad samples, and whether files outside of the folder are read.
        kind: "zero_shot" or "labels", as in `Task`.
        prompts: a prompt file, see `nuclr.data.labeled`; by default, the set's own prompts.
        size: height and width of built-in images.

    """
    standard = parse_standard(text, CLASSIFICATION, "--classification" if kind == "zero_shot" else "--classes")
    if standard is not None:
        images, numbers, path = open_standard_classes(*standard, data.allow_outside)
        return add_prompts(Task(standard[0], str(path), kind, Source(images, numbers, {})), prompts)
    builtin = text.partition(":")[0] in ("builtin", BUILTIN_CLASSES)
    classes = BuiltinLabeled(size=size) if builtin else open_labeled(text, data.allow_outside)
    return add_prompts(Task(text, text, kind, without_bad(classes, data)), prompts)


def add_prompts(task: Task, prompts: Path | None) -> Task:
    """Return a test set with the prompts that it needs: from a file, or the set's own."""
    classes = task.classes
    if task.kind == "labels":
        if np.bincount(classes.labels[task.source.numbers]).max() < 2:
            raise UserError(f"{task.path}: no class has two usable items; neighbors need one to ask and one to find")
        return task
    if isinstance(classes, LabeledVectors):
        if prompts is not None or classes.prompt_vectors is None:
            raise UserError(f"{task.path}: zero-shot classification of vectors needs an array 'prompts', and no file")
        return task
    if prompts is None and isinstance(classes, BuiltinLabeled):
        texts = ClassTexts(list(classes.classes), None, classes.prompts())
    else:
        own = list(classes.templates)
        chosen = Prompts(templates=own) if prompts is None else read_prompts(prompts, task.name)
        texts = chosen.texts(classes.keys, classes.classes, own)
    return dataclasses.replace(task, texts=texts)


# ---------------------------------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A model with the settings of its data; `run` is None for encoders that do not come from a run."""

    path: Path
    model: DualEncoder
    data: Data
    encoding: Encoding
    run: Run | None = None

    @classmethod
    def of_run(cls, run: Run) -> "Subject":
        """Return a run as a subject."""
        return cls(
            run.folder,
            run.model,
            run.settings.data,
            run.encoding,
            run,
        )

    @property
    def image_size(self) -> int:
        """Height and width of the images that the model takes; 32 if it takes none."""
        sizes = [
            encoder.inputs.size for encoder in (self.model.x, self.model.y) if isinstance(encoder.inputs, ImageFormat)
        ]
        return sizes[0] if sizes else 32

    @property
    def widths(self) -> Sequence[int]:
        """Numbers of coordinates that the features of the heads may be shortened to."""
        return () if self.run is None or not self.encoding.head else self.run.settings.model.matryoshka

    def check(self, name: str, needs: Sequence[Need]) -> None:
        """Refuse a test set that the model does not take; two needs are two sides that are compared."""
        for need in needs:
            self.side(name, need)
        if len(needs) == 2 and not self.encoding.head:
            check_tower_widths(self.model)

    def side(self, name: str, need: Need) -> SideName:
        """Return the side that takes these items.

        Raises:
            UserError: if none does: they have another modality, or are vectors of another width.

        """
        wanted, modality, width = need
        takes = []
        for side, encoder in zip(SIDES, (self.model.x, self.model.y), strict=True):
            # Only the towers of vectors have a fixed width of inputs.
            own = len(encoder.tower.mean) if isinstance(encoder.tower, VectorTower) else None
            fits = own is None or width in (None, own)
            if wanted in (None, side) and encoder.modality in (None, modality) and fits:
                return side
            takes.append(f"{side}: {encoder.modality or 'tensor'}s" + (f" of width {own}" if own is not None else ""))
        needed = f"{modality}s" if width is None else f"{modality}s of width {width}"
        where = "" if wanted is None else f" on side {wanted}"
        raise UserError(f"{name}: needs {needed}{where}, but {self.path} takes {', '.join(takes)}")

    def describe(self) -> dict[str, Any]:
        """Return how inputs become features, for the JSON file."""
        facts: dict[str, Any] = {
            "path": str(self.path),
            "kind": "encoders",
            "width": self.model.width,
            "head": self.encoding.head,
            "precision": self.encoding.precision,
        }
        if self.run is not None:
            settings = self.run.settings
            facts |= {
                "kind": "run",
                "objective": settings.objective.name,
                "seed": settings.seed,
                "settings": content_hash(settings),
            }
        for encoder in (self.model.x, self.model.y):
            if isinstance(encoder.inputs, ImageFormat):
                facts["images"] = {
                    "size": encoder.inputs.size,
                    "mean": list(encoder.inputs.mean),
                    "std": list(encoder.inputs.std),
                    "fit": self.data.outside_training().fit,
                    "fit_of_labeled_images": self.data.fit,
                }
        return facts

    # -- features ------------------------------------------------------------------------------------------------------

    def pair_features(self, source: Source, duplicates: str = "merge") -> PairFeatures:
        """Return the features of pairs; `duplicates` is a key of DUPLICATES."""
        loader = self._loader(source.pairs)
        return encode_pairs(
            self.model,
            loader,
            source.numbers,
            self.encoding,
            merge_y=duplicates == "merge",
        )

    def _loader(self, pairs: Pairs) -> Any:
        """Return a loader that reads pairs as training did, without augmentation; images are read once and not kept."""
        return make_loader(dataclasses.replace(self.data.outside_training(), memory=0), pairs, self.model)

    def query_bank(self, source: Source, size: int = BANK_SIZE) -> Bank:
        """Return a bank of up to `size` distinct x, and as many y, of pairs (`bank_rows`)."""
        loader = self._loader(source.pairs)
        features = []
        for side, encoder in zip(SIDES, (self.model.x, self.model.y), strict=True):
            chosen = source.numbers[bank_rows(source.pairs.sides[side].ids[source.numbers], size).numpy()]
            features.append(encode_side(encoder, loader, side, chosen, self.encoding))
        return Bank(features[0], features[1])

    def labeled_features(self, task: Task) -> tuple[Tensor, Tensor]:
        """Return the features x (n, d) and the labels (n,) of labeled images or vectors."""
        classes = task.classes
        numbers = task.source.numbers
        labels = torch.from_numpy(classes.labels[numbers])
        encoder = getattr(self.model, self.side(task.path, task.needs[0]))
        if isinstance(classes, LabeledVectors):
            return encode_items(encoder, list(classes.x[numbers]), self.encoding), labels
        loader = make_class_loader(dataclasses.replace(self.data, memory=0), classes, self.model)
        return encode_side(encoder, loader, "x", numbers, self.encoding), labels

    def class_features(self, task: Task) -> Tensor:
        """Return the features of the classes (c, d): the means of those of their prompts."""
        groups: Any = task.texts.prompts if task.texts is not None else getattr(task.classes, "prompt_vectors", None)
        prompts = [prompt for group in groups for prompt in group]
        encoder = getattr(self.model, self.side(task.path, task.needs[1]))
        features = encode_items(encoder, prompts, self.encoding)
        return class_features(list(features.split([len(group) for group in groups])))


def open_subject(
    path: Path,
    best: bool = False,
    batch_size: int | None = None,
    device: str = "auto",
    head: bool | None = None,
) -> Subject:
    """Open a finished run, or a folder of encoders (nuclr's, a CLIP or SigLIP).

    Args:
        path: RUN on the command line of commands that take either.
        best: use the weights of the best checkpoint; only of a run.
        batch_size: samples per batch. By default that of the run's evaluation.
        device: as in `Run.open`.
        head: overrides `evaluate.head`.

    Raises:
        UserError: if the folder holds neither.

    """
    if is_run(path):
        subject = Subject.of_run(Run.open_finished(path, best, device))
    elif (path / "config.json").is_file() and not best:
        where = pick_device(device)
        model = build_model(pretrained=str(path)).to(where).eval()
        subject = Subject(
            path,
            model,
            Data(),
            Encoding(Evaluate().batch_size, where),
        )
    else:
        raise UserError(f"{path}: neither a run (config.yaml; --best needs one) nor encoders (config.json)")
    encoding = subject.encoding
    encoding = encoding if head is None else encoding._replace(head=head)
    encoding = encoding if batch_size is None else encoding._replace(batch_size=batch_size)
    return dataclasses.replace(subject, encoding=encoding)
