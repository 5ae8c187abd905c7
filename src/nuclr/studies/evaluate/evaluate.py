"""All of `nuclr evaluate`: a subject, its test sets, plain and corrected figures, and the file with the protocol."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from nuclr import __version__
from nuclr.data.pairs import Pairs
from nuclr.errors import UserError
from nuclr.evaluation import metrics_by_convention, retrieval_metrics, zero_shot_metrics
from nuclr.popularity.correction import BANK_SIZE
from nuclr.runs import components as parts
from nuclr.studies.evaluate.correct import Corrector, make_corrector
from nuclr.studies.evaluate.features import DUPLICATES, class_task_features, pair_features
from nuclr.studies.evaluate.subject import Subject
from nuclr.studies.evaluate.tasks import ClassificationTask, RetrievalTask, classification_task
from nuclr.studies.evaluate.vectors import VectorClasses

COMMAND = "nuclr evaluate"
PROTOCOL = {
    "scores": "cosine similarity of the features",
    "hit": "a query is right where one of its partners is among the k best",
    "ties": "equal scores count as a random order of them would on average",
    "rank": "expected rank of the best partner, from 1; mean and median over the queries",
    "prompts": "features of all templates normalized, averaged, normalized",
    "numbers": "fractions, except those named as in the paper: percent",
}
Told = Callable[[str], None]


def own_sets(subject: Subject) -> tuple[list[RetrievalTask], list[ClassificationTask]]:
    """The validation pairs and the classes that the run was trained with."""
    data = subject.data
    if data is None or (data.val is None and data.classes is None):
        why = "is no run" if data is None else "has no data.val"
        raise UserError(
            f"{subject.path} {why}, so there is nothing to evaluate on; give --retrieval or --classification"
        )
    pairs, classes = [], []
    if data.val is not None:
        source = parts.open_val(data)
        pairs = [RetrievalTask("val", data.val, data.val_split, source.pairs, source.numbers, source.bad, known=False)]
    if data.classes is not None and data.train is not None:
        trained = parts.open_train(data, check=False).pairs
        opened = parts.open_classes(data, trained)
        classes = [classification_task("classes", data.classes, opened, np.arange(len(opened)), data.max_bad_share)]
    return pairs, classes


def evaluate(
    subject: Subject,
    retrievals: Sequence[RetrievalTask],
    classifications: Sequence[ClassificationTask],
    banks: Sequence[str] = (),
    duplicates: str | None = None,
    bank_size: int = BANK_SIZE,
    told: Told = lambda _: None,
) -> dict[str, Any]:
    """Every figure; `duplicates` None: "miss" for the usual sets, as others report them, else "merge"."""
    for task in retrievals:
        subject.check_kinds(task.path, task.pairs)
    for labeled in classifications:
        _check_classes(subject, labeled)
    correctors = []
    for bank in banks:
        told(f"--correct bank={bank}: encoding the bank, choosing temperature and strength")
        correctors.append(make_corrector(subject, bank, bank_size))
    content: dict[str, Any] = {
        "written_by": COMMAND,
        "version": __version__,
        "subject": subject.describe(),
        "protocol": PROTOCOL,
        "corrections": {of.bank: of.describe() for of in correctors},
        "retrieval": {},
        "classification": {},
    }
    for task in retrievals:
        told(f"retrieval: {task.name}")
        content["retrieval"][_free(task.name, content["retrieval"])] = _retrieval(subject, task, correctors, duplicates)
    for labeled in classifications:
        told(f"classification: {labeled.name}")
        content["classification"][_free(labeled.name, content["classification"])] = _classification(subject, labeled)
    return content


def _retrieval(
    subject: Subject, task: RetrievalTask, correctors: Sequence[Corrector], duplicates: str | None
) -> dict[str, Any]:
    way = duplicates or task.duplicates
    found = pair_features(subject, task.pairs, task.numbers, way)
    if correctors and min(len(found.x), len(found.y)) < 2:
        raise UserError(f"{task.path}: --correct needs at least two images and two captions")
    plain = retrieval_metrics(found.x, found.y, found.pairs)
    # On the pairs that the correction is chosen on, each half of the images is ranked under the other half's choice.
    crossed = any(of.val == task.pairs.fingerprint for of in correctors)
    outcomes = {of.bank: of.crossed(found) if crossed else (of(found), None) for of in correctors}
    corrected = {bank: figures for bank, (figures, _) in outcomes.items()}
    return {
        "path": task.path,
        "split": task.split,
        "fingerprint": task.pairs.fingerprint,
        "images": len(found.x),
        "captions": len(found.y),
        "bad_samples": len(task.bad),
        "duplicates": {"way": way, "told": DUPLICATES[way]},
        "correction_crossed": crossed,
        "corrections_of_halves": {bank: chosen for bank, (_, chosen) in outcomes.items() if chosen is not None},
        "plain": plain,
        "corrected": corrected,
        "names": {
            "plain": metrics_by_convention(plain),
            **{bank: metrics_by_convention(values) for bank, values in corrected.items()},
        },
    }


def _classification(subject: Subject, task: ClassificationTask) -> dict[str, Any]:
    x, classes, labels = class_task_features(subject, task)
    plain = zero_shot_metrics(x, classes, labels)
    return {
        "path": task.path,
        "images": len(x),
        "classes": len(classes),
        "class_names": None if isinstance(task.classes, VectorClasses) else list(task.classes.classes),
        "templates": task.templates,
        "bad_samples": len(task.bad),
        "smallest_class": int(np.bincount(labels.numpy(), minlength=len(classes)).min()),
        "plain": plain,
        "names": {"plain": metrics_by_convention(plain)},
    }


def _check_classes(subject: Subject, task: ClassificationTask) -> None:
    if isinstance(task.classes, VectorClasses):
        if subject.model.images is not None or subject.model.tokenizer is not None:
            raise UserError(f"{task.path}: holds vectors, but {subject.path} takes images and texts")
        subject.check_width(task.path, "x", task.classes.x.shape[1])
        subject.check_width(task.path, "y", task.classes.prompts.shape[2])
    else:
        subject.check_kinds(task.path, cast(Pairs, task.classes))


def _free(name: str, taken: dict[str, Any]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name} ({number})"
    return free
