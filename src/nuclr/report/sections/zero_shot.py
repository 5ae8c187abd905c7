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
    """Counts `table` (c, c) of images by true class (row) and predicted class; `total`: labeled images in all."""

    classes: list[str]
    table: np.ndarray
    total: int

    @property
    def images(self) -> int:
        """The number of classified images."""
        return int(self.table.sum())

    @property
    def accuracy(self) -> float:
        """The share of images on the diagonal."""
        return float(np.trace(self.table) / max(1, self.images))

    @property
    def chance(self) -> float:
        """The accuracy of a guess."""
        return 1 / len(self.classes)

    @property
    def mistakes(self) -> list[Mistake]:
        """The most frequent confusions, at most eight."""
        wrong = self.table * (1 - np.eye(len(self.table), dtype=self.table.dtype))
        order = np.argsort(-wrong, axis=None, kind="stable")[:8]
        cells = [np.unravel_index(k, wrong.shape) for k in order.tolist()]
        return [
            Mistake(self.classes[i], self.classes[j], int(wrong[i, j]), float(wrong[i, j] / self.table[i].sum()))
            for i, j in cells
            if wrong[i, j] > 0
        ]

    @property
    def chart(self) -> Chart | None:
        """A heat map, or None if there are too many classes."""
        if len(self.classes) > MOST_CLASSES:
            return None
        title = "True class by row, predicted class by column, in percent"
        described = f"Confusion of {len(self.classes)} classes, {numbers.percent(self.accuracy)} right"
        return heat_map(title, self.classes, self.table, described)


def zero_shot_confusion(context: TrainingRun) -> Confusion:
    """Classify the labeled images of the run, or some of them if there are many."""
    if context.log.settings.data.classes is None:
        raise LeaveOut("No labeled images were named (data.classes), so there is no zero-shot classification.")
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
    return Confusion(
        list(labeled.classes), count_confusions(labeled.y_id[chosen], predicted, len(prompts)), len(labeled)
    )


def count_confusions(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Return the (classes, classes) counts; rows are true classes."""
    table = np.zeros((classes, classes), np.int64)
    np.add.at(table, (labels, predicted), 1)
    return table
