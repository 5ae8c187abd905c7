"""Test sets -> features: every image once, and the captions by the protocol's way with copies."""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from nuclr.data.pairs import Pairs
from nuclr.evaluation import class_features, links_with_copies
from nuclr.runs.features import encode_texts, encode_x, encode_y
from nuclr.studies.evaluate.subject import Subject
from nuclr.studies.evaluate.tasks import ClassificationTask
from nuclr.studies.evaluate.vectors import VectorClasses

# What is done with captions that occur more than once.
DUPLICATES = {
    "merge": "every distinct caption is once in the gallery, and belongs to all images that have it",
    "miss": "every caption of every image is in the gallery, and belongs to that image alone",
    "hit": "every caption of every image is in the gallery, and copies of it belong to the same images",
}


@dataclass(frozen=True)
class PairFeatures:
    """Images x (n_x, d), captions y (n_y, d), and which belong together: pairs (n, 2), by rows."""

    x: Tensor
    y: Tensor
    pairs: Tensor


def pair_features(subject: Subject, pairs: Pairs, numbers: np.ndarray, duplicates: str) -> PairFeatures:
    """Features of these pairs."""
    _, first_x, x_row = np.unique(pairs.x_id[numbers], return_index=True, return_inverse=True)
    _, first_y, y_id = np.unique(pairs.y_id[numbers], return_index=True, return_inverse=True)
    x = encode_x(subject.model, subject.loader(pairs), numbers[first_x], *subject.options)
    distinct = encode_y(subject.model, pairs, numbers[first_y], *subject.options)
    if duplicates == "merge":
        return PairFeatures(x, distinct, torch.from_numpy(np.stack([x_row, y_id], axis=1)))
    links = torch.from_numpy(np.stack([x_row, np.arange(len(numbers))], axis=1))
    copies = torch.from_numpy(y_id)
    return PairFeatures(x, distinct[copies], links_with_copies(links, copies) if duplicates == "hit" else links)


def query_bank(subject: Subject, pairs: Pairs, numbers: np.ndarray, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features of up to `size` distinct images and as many distinct captions of these pairs, drawn at random."""
    drawn = np.random.default_rng(seed)
    chosen = []
    for ids in (pairs.x_id[numbers], pairs.y_id[numbers]):
        _, first = np.unique(ids, return_index=True)
        kept = first if len(first) <= size else drawn.choice(first, size, replace=False)
        chosen.append(numbers[np.sort(kept)])
    x = encode_x(subject.model, subject.loader(pairs), chosen[0], *subject.options)
    return x, encode_y(subject.model, pairs, chosen[1], *subject.options)


def class_task_features(subject: Subject, task: ClassificationTask) -> tuple[Tensor, Tensor, Tensor]:
    """Images x (n, d), classes (c, d) and labels (n,)."""
    options, classes = subject.options, task.classes
    if isinstance(classes, VectorClasses):
        x = _encode_vectors(subject, classes.x)
        texts = encode_texts(subject.model, list(classes.prompts.flatten(0, 1).numpy()), *options)
        return x, class_features(list(texts.split(classes.prompts.shape[1]))), classes.labels
    prompts = classes.prompts()
    texts = encode_texts(subject.model, [text for group in prompts for text in group], *options)
    x = encode_x(subject.model, subject.loader(cast(Pairs, classes)), task.numbers, *options)
    labels = torch.from_numpy(np.asarray(classes.y_id)[task.numbers])
    return x, class_features(list(texts.split([len(group) for group in prompts]))), labels


@torch.no_grad()
def _encode_vectors(subject: Subject, x: Tensor) -> Tensor:
    return torch.cat([subject.model.x(part.to(subject.device)).float().cpu() for part in x.split(subject.batch_size)])
