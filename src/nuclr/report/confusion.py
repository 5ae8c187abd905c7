"""Zero-shot classification that one can look at: which class is taken for which."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import escape

from nuclr.data import Loader
from nuclr.evaluation import class_features
from nuclr.models import DualEncoder
from nuclr.report import charts, numbers
from nuclr.runs.features import encode_texts, encode_x

LARGEST = 24  # classes that a heat map shows legibly
MOST_IMAGES = 1500


@dataclass(frozen=True)
class Confusion:
    """`table` (c, c): how many pictures of class i (row) were taken for class j; `total`: how many there are in all."""

    classes: list[str]
    table: np.ndarray
    total: int

    def accuracy(self) -> float:
        """Share on the diagonal."""
        return float(np.trace(self.table) / max(1, self.table.sum()))

    def mistakes(self, most: int = 8) -> list[tuple[str, str, int, float]]:
        """(class, taken for, how often, share of its class), the most frequent first."""
        wrong = self.table * (1 - np.eye(len(self.table), dtype=self.table.dtype))
        order = np.argsort(-wrong, axis=None, kind="stable")[:most]
        places = [np.unravel_index(k, wrong.shape) for k in order.tolist()]
        return [
            (self.classes[i], self.classes[j], int(wrong[i, j]), float(wrong[i, j] / max(1, self.table[i].sum())))
            for i, j in places
            if wrong[i, j] > 0
        ]


def confusion(model: DualEncoder, labeled: Any, most: int, fit: Any, workers: int) -> Confusion:
    """Classify labeled pictures, of many `most` drawn at random."""
    device = next(model.parameters()).device
    chosen = np.arange(len(labeled))
    if len(chosen) > most:
        chosen = np.sort(np.random.default_rng(0).permutation(len(labeled))[:most])
    prompts = labeled.prompts()
    texts = encode_texts(model, [text for group in prompts for text in group], 256, device, "float32")
    classes = class_features(list(texts.split([len(group) for group in prompts])))
    size = model.images.size if model.images is not None else 224
    x = encode_x(model, Loader(labeled, size, fit, workers, memory=0), chosen, 256, device, "float32")
    found = (x @ classes.T).argmax(dim=1).numpy()
    return Confusion(list(labeled.classes), tally(labeled.y_id[chosen], found, len(prompts)), len(labeled))


def tally(labels: np.ndarray, found: np.ndarray, classes: int) -> np.ndarray:
    """(classes, classes), rows are the true ones."""
    table = np.zeros((classes, classes), np.int64)
    np.add.at(table, (labels, found), 1)
    return table


def heat_map(found: Confusion) -> charts.Chart | None:
    """Rows are the true classes, columns what they were taken for; None where there are too many classes."""
    c = len(found.classes)
    if c > LARGEST:
        return None
    left, top = 78, 6
    cell = min(26.0, (charts.WIDTH - left - 6) / c)
    below = top + c * cell
    shares = found.table / np.maximum(found.table.sum(axis=1, keepdims=True), 1)
    parts = []
    for i, name in enumerate(found.classes):
        parts.append(charts.text(left - 6, top + (i + 0.5) * cell + 3.5, _short(name), "tick end"))
        x, y = left + (i + 0.5) * cell + 3, below + 9
        parts.append(
            f'<text class="tick end" transform="translate({x:.1f} {y:.1f}) rotate(-45)">{escape(_short(name))}</text>'
        )
        for j, other in enumerate(found.classes):
            share = float(shares[i, j])
            hint = f"{name} taken for {other}: {numbers.percent(share, 0)} ({found.table[i, j]})"
            kind = "cell right" if i == j else "cell"
            parts.append(
                f'<rect class="{kind}" x="{left + j * cell + 0.5:.1f}" y="{top + i * cell + 0.5:.1f}" '
                f'width="{cell - 1:.1f}" height="{cell - 1:.1f}" rx="1.5" style="--v:{share:.3f}">'
                f"<title>{escape(hint)}</title></rect>"
            )
            if cell >= 20 and share >= 0.005:
                strong = " strong" if share > 0.55 else ""
                at = (left + (j + 0.5) * cell, top + (i + 0.5) * cell + 3.2)
                parts.append(charts.text(*at, f"{100 * share:.0f}", f"in middle{strong}"))
    told = f"Confusion of {c} classes, {numbers.percent(found.accuracy())} right"
    title = "True class by row, taken for by column, in percent"
    return charts.Chart(title, charts.figure(parts, told, height=round(below + 56)))


def _short(name: str, most: int = 13) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
