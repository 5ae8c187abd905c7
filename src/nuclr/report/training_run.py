"""A training run as its page sees it: what it logged, and samples of its pairs with features."""

import time
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from nuclr import objectives
from nuclr.data.pairs import Pairs
from nuclr.data.selection import Source
from nuclr.data.side import SideName, SideWords, name_sides
from nuclr.evaluation.metrics import val_metrics
from nuclr.objectives.registry import Entry
from nuclr.report import numbers
from nuclr.report.items import Items
from nuclr.report.page import Item, LeaveOut, Options
from nuclr.runs.features import PairFeatures
from nuclr.runs.run import Run

SAMPLES = 3000  # pairs of a source that are encoded
PATIENCE = 20.0  # seconds that encoding them may take
PROBE = 16  # pairs whose encoding is timed to predict the time of all
FEWEST = 100


@dataclass(frozen=True)
class Sample:
    """Features of some pairs, drawn at random from `total` pairs of a source, and their items."""

    features: PairFeatures
    items: Items
    total: int

    def item(self, side: SideName, row: int) -> Item:
        """Return the item of a row of the features."""
        row_numbers = self.features.x_number if side == "x" else self.features.y_number
        return self.items.item(side, int(row_numbers[row]))

    def describe(self, which: str) -> str:
        """Say which pairs these are: "all 400 training pairs"."""
        count = numbers.count(len(self.features.numbers))
        total = numbers.count(self.total)
        return f"all {total} {which}" if count == total else f"{count} of the {total} {which}, drawn at random"


@dataclass
class TrainingRun:
    """What the sections of a training page are computed from.

    Args:
        run: the opened run.
        metrics: lines of metrics.jsonl: "step", "epoch", and values such as "train/loss", "val/mean_R@1" or
            "state/zeta_x_q50".
        timing: lines of timing.jsonl: the "seconds" since the line before, and the shares of "data", "encoders",
            "objective" and "other".
        options: what the user asked for.
        notes: what the reader should know.

    """

    run: Run
    metrics: list[dict[str, float]]
    timing: list[dict[str, float]]
    options: Options
    notes: list[str] = field(default_factory=list)

    @property
    def objective(self) -> Entry:
        """The objective's row of the registry."""
        return objectives.entry(self.run.settings.objective.name)

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return int(max((line["step"] for line in self.metrics), default=0))

    @cached_property
    def evaluation(self) -> dict[str, float]:
        """The metrics of the last evaluation, without their prefix "val/"."""
        return next(filter(None, map(val_metrics, reversed(self.metrics))), {})

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """Return the epochs and values of all lines that have this value."""
        lines = [line for line in self.metrics if name in line]
        return [line["epoch"] for line in lines], [line[name] for line in lines]

    @property
    def views(self) -> bool:
        """Whether both sides are views of the same items."""
        return self.run.settings.data.contrasts_views

    @cached_property
    def words(self) -> dict[SideName, SideWords]:
        """The words for both sides, even if the data is missing."""
        try:
            x, y = self.run.train.pairs.words
        except Exception:  # data of users can fail in any way
            x, y = name_sides("x", "item", "y", "item")
        return {"x": x, "y": y}

    @cached_property
    def train_sample(self) -> Sample:
        """A sample of the training pairs."""
        return self._encode(self.run.train)

    @cached_property
    def held_out_sample(self) -> Sample | None:
        """A sample of the held-out pairs; None if there are none."""
        return self._encode(self.run.val) if self.run.val else None

    def _encode(self, source: Source) -> Sample:
        """Encode pairs of a source, drawn at random; fewer if the model is slow, such as a large one on a CPU."""
        if not self.options.model:
            raise LeaveOut("This page was made without the model (--no-model): it has no examples and no popularity.")
        most = SAMPLES
        if len(source.numbers) > most:
            self.run.features(source, source.numbers[:PROBE])  # the first call is slower
            begin = time.perf_counter()
            self.run.features(source, source.numbers[PROBE : 2 * PROBE])
            pace = (time.perf_counter() - begin) / PROBE
            most = max(FEWEST, min(most, int(PATIENCE / pace)))
        chosen = choose_pairs(source.pairs, source.numbers, most)
        items = Items(source.pairs, self.options.pictures)
        return Sample(self.run.features(source, chosen), items, len(source.numbers))


def choose_pairs(
    pairs: Pairs,
    chosen: np.ndarray,
    most: int,
) -> np.ndarray:
    """Return the numbers of about `most` pairs: all pairs of groups (or of x) drawn at random, in ascending order."""
    if len(chosen) <= most:
        return chosen
    group = (pairs.sides["x"].ids if pairs.group is None else pairs.group)[chosen]
    drawn = np.random.default_rng(0).permutation(np.unique(group))
    each = max(1, round(len(chosen) / len(drawn)))
    return chosen[np.isin(group, drawn[: max(2, most // each)])]
