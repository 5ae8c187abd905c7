"""The section "zero-shot" of a training page: which classes are confused with which."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from nuclr.evaluation import class_features
from nuclr.report import numbers
from nuclr.report.charts.lines import Chart
from nuclr.report.charts.spreads import heat_map
from nuclr.report.render import LeaveOut
from nuclr.report.training_run import TrainingRun
from nuclr.runs.features import encode_texts, encode_x
from nuclr.runs.run import Run

MOST_CLASSES = 24  # that a heat map shows legibly
MOST_IMAGES = 1500


@dataclass(frozen=True)
class Mistake:
    """Images of class `name` that were classified as `other`, and their share of the images of their class."""

    name: str
    other: str
    count: int
    share: float


@dataclass(frozen=True)
class Confusion:
    """How many images of each class were classified as each class.

    Args:
        classes: names of the c classes.
        counts: (m, 3) true class, predicted class and number of images, for the combinations that occur. With
            thousands of classes, a (c, c) table would not fit into memory.
        total: labeled images in all.

    """

    classes: list[str]
    counts: np.ndarray
    total: int

    @property
    def images(self) -> int:
        """The number of classified images."""
        return int(self.counts[:, 2].sum())

    @property
    def accuracy(self) -> float:
        """The share of images that were classified as their own class."""
        right = self.counts[:, 0] == self.counts[:, 1]
        return float(self.counts[right, 2].sum() / max(1, self.images))

    @property
    def chance(self) -> float:
        """The accuracy of a guess."""
        return 1 / len(self.classes)

    @property
    def mistakes(self) -> list[Mistake]:
        """The most frequent confusions, at most eight."""
        wrong = self.counts[self.counts[:, 0] != self.counts[:, 1]]
        most = wrong[np.argsort(-wrong[:, 2], kind="stable")[:8]]
        images = np.bincount(self.counts[:, 0], self.counts[:, 2], len(self.classes))
        return [Mistake(self.classes[i], self.classes[j], n, float(n / images[i])) for i, j, n in most.tolist()]

    @property
    def chart(self) -> Chart | None:
        """A heat map, or None if there are too many classes."""
        if len(self.classes) > MOST_CLASSES:
            return None
        title = "True class by row, predicted class by column, in percent"
        described = f"Confusion of {len(self.classes)} classes, {numbers.percent(self.accuracy)} right"
        table = np.zeros((len(self.classes), len(self.classes)), np.int64)
        table[self.counts[:, 0], self.counts[:, 1]] = self.counts[:, 2]
        return heat_map(title, self.classes, table, described)


def zero_shot_confusion(context: TrainingRun) -> Confusion:
    """Classify the labeled images of the run, or some of them if there are many."""
    if context.views or context.log.settings.data.classes is None:
        raise LeaveOut  # nobody asked for this section
    context.require_model()
    return classify(context.run, context.run.classes, context.affordable(context.train, MOST_IMAGES))


def classify(run: Run, labeled: Any, most: int) -> Confusion:
    """Classify labeled images, `most` of them drawn at random if there are more.

    Args:
        run: its model classifies.
        labeled: labeled images with prompts, as `Run.classes`.
        most: the largest number of images.

    """
    chosen = np.arange(len(labeled))
    if len(chosen) > most:
        chosen = np.sort(np.random.default_rng(0).permutation(len(labeled))[:most])
    prompts = labeled.prompts()
    texts = encode_texts(run.model, [text for group in prompts for text in group], *run.encoding)
    classes = class_features(list(texts.split([len(group) for group in prompts])))
    x = encode_x(run.model, run.loader(labeled), chosen, *run.encoding)
    predicted = (x @ classes.T).argmax(dim=1).numpy()
    return Confusion(list(labeled.classes), count_confusions(labeled.y_id[chosen], predicted), len(labeled))


def count_confusions(labels: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Return (m, 3): true class, predicted class and number of images, for the m combinations that occur, in order."""
    pairs, counts = np.unique(np.stack([labels, predicted], axis=1), axis=0, return_counts=True)
    return np.column_stack([pairs, counts])
