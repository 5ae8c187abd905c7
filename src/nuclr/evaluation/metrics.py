"""The registry of metrics: everything that evaluate, compare, pages and JSON files show is one row here.

A row says what a metric is computed from (its kind), how the value of each query follows from that, what random results
would reach, and how a value is shown. Kinds, and what the functions of a row get:

- "retrieval": `Ranks` of one direction. In results, the name of the direction precedes the key (`image_to_text_R@1`),
  and `mean_` stands for the mean of both directions.
- "search": `DocumentRanks` of judged documents (BEIR).
- "zero_shot": `Classified`, images and the classes that their prompts are nearest to.
- "labels": `LabeledHalves`, labeled features of which one half is classified by means of the other.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["retrieval", "search", "zero_shot", "labels"]

KS = (1, 5, 10)  # lengths of result lists
SCORE = "mean_R@1"  # the best checkpoint is chosen by it
WIDTH = "width="  # in names of metrics of shorter features, such as "coco/width=64/mean_R@1"


@dataclass(frozen=True)
class Metric:
    """One row of the registry.

    Attributes:
        key: Name in results. For retrieval, a direction precedes it.
        label: Name in tables and on pages.
        kind: What it is computed from.
        values: From that to the value of each query, (n,); the metric is their mean.
        chance: The same for random results, if it is known.
        chance_key: Name of the chance level in results.
        higher_is_better: Direction of the metric.
        format: "percent" for a fraction that is shown in percent, "number" for any other number.
        median: Report the median over the queries instead of the mean.
        both: Whether retrieval also reports the mean of both directions.

    Example:
        >>> metric = METRICS["R@5"]
        >>> metric.label, metric.chance_key, metric.text(0.2471)
        ('recall@5', 'chance@5', '24.7 %')

    """

    key: str
    label: str
    kind: Kind
    values: Callable[[Any], Tensor]
    chance: Callable[[Any], Tensor] | None = None
    chance_key: str = ""
    higher_is_better: bool = True
    format: Literal["percent", "number"] = "percent"
    median: bool = False
    both: bool = True

    def measure(self, outcome: Any) -> dict[str, float]:
        """Return the value under its key and, if it is known, the chance level under its own."""
        values = self.values(outcome).double()
        measured = {self.key: float(torch.quantile(values, 0.5) if self.median else values.mean())}
        if self.chance is not None:
            measured[self.chance_key] = float(self.chance(outcome).double().mean())
        return measured

    def text(self, value: float, digits: int = 1) -> str:
        """Return a value as tables show it, percentages with this number of decimals."""
        return f"{100 * value:.{digits}f} %" if self.format == "percent" else f"{value:.1f}"


METRICS: dict[str, Metric] = {}


def register_metric(metric: Metric) -> None:
    """Add a metric. It appears in the results of its kind, in tables and on pages.

    Args:
        metric: The row. A plugin (setting `plugins`) may add one.

    Raises:
        ValueError: If the key is taken, or the chance level has no key.

    """
    if metric.key in METRICS or (metric.chance is not None and not metric.chance_key):
        raise ValueError(f"metric {metric.key!r} needs a key that is not taken, and a chance_key for its chance level")
    METRICS[metric.key] = metric


def metrics_of(kind: Kind) -> list[Metric]:
    """Return the metrics of a kind, in the order of registration."""
    return [metric for metric in METRICS.values() if metric.kind == kind]


def measure(kind: Kind, outcome: Any) -> dict[str, float]:
    """Return all metrics of a kind, with their chance levels.

    Args:
        kind: What is measured.
        outcome: What the metrics of this kind are computed from.

    Returns:
        Key -> value.

    """
    measured: dict[str, float] = {}
    for metric in metrics_of(kind):
        measured |= metric.measure(outcome)
    return measured


def find_metric(name: str) -> tuple[Metric, str] | None:
    """Return the metric that a name in results is about, and its direction.

    Args:
        name: Such as `image_to_text_R@1`, `mean_R@1`, `coco/mean_R@1` or `zero_shot_acc1`.

    Returns:
        The metric, and the direction (`image_to_text` or `mean`; empty if the kind has none); None for other names,
        such as chance levels.

    Example:
        >>> metric, direction = find_metric("coco/image_to_text_R@1")
        >>> metric.label, direction
        ('recall@1', 'image_to_text')
        >>> find_metric("mean_chance@1") is None
        True

    """
    name = name.rpartition("/")[2]
    for metric in METRICS.values():
        if name == metric.key and metric.kind != "retrieval":
            return metric, ""
        if metric.kind == "retrieval" and name.endswith(f"_{metric.key}"):
            return metric, name.removesuffix(f"_{metric.key}")
    return None


@dataclass(frozen=True)
class NamedMetric:
    """A metric under its name in results.

    Attributes:
        name: Such as `coco/image_to_text_R@1`.
        metric: Its row in the registry.
        direction: Such as "image_to_text" or "mean"; empty if the metric has none.

    """

    name: str
    metric: Metric
    direction: str

    @property
    def set(self) -> str:
        """The name of the held-out pairs, or the width of shorter features; empty if there is only one."""
        return self.name.rpartition("/")[0]

    @property
    def label(self) -> str:
        """What tables and pages call it, such as "recall@1, image to text (coco)"."""
        direction = f", {self.direction.replace('_to_', ' to ')}" if self.direction else ""
        return self.metric.label + direction + (f" ({self.set})" if self.set else "")

    def chance(self, metrics: Mapping[str, float]) -> float | None:
        """Return its chance level; None if it is not known."""
        return metrics.get(self.name.removesuffix(self.metric.key) + self.metric.chance_key)


def named_metrics(names: Iterable[str]) -> list[NamedMetric]:
    """Return the metrics among names in results, without chance levels."""
    return [NamedMetric(name, *known) for name in names if (known := find_metric(name))]


def is_near_chance(value: float, chance: float) -> bool:
    """Return whether a fraction of hits is hardly above what random results reach.

    It is if its odds are less than twice those of chance. For small values this is twice the chance level; a value of 1
    is never near chance.

    Args:
        value: Recall or accuracy, a fraction.
        chance: The same of random results.

    Example:
        >>> is_near_chance(0.015, 0.01), is_near_chance(0.03, 0.01), is_near_chance(1.0, 0.8)
        (True, False, False)

    """
    return value * (1 - chance) < 2 * chance * (1 - value)


def recall_is_near_chance(metrics: Mapping[str, float]) -> bool:
    """Return whether a set of pairs has a recall@10 (mean of both directions) that is hardly above chance."""
    return any(
        is_near_chance(metrics[f"{prefix}mean_R@10"], metrics[f"{prefix}mean_chance@10"])
        for prefix in set_prefixes(metrics)
    )


# ---------------------------------------------------------------------------------------------------------------------
# Names in results
# ---------------------------------------------------------------------------------------------------------------------


def set_prefixes(metrics: Iterable[str]) -> list[str]:
    """Return what the names of the retrieval metrics of each set begin with, in order.

    Args:
        metrics: names of metrics. If there are several sets of pairs, they begin with the name of the set and a slash.

    Example:
        >>> set_prefixes(["coco/mean_R@1", "coco/mean_R@5", "flickr30k/mean_R@1", "zero_shot_acc1"])
        ['coco/', 'flickr30k/']
        >>> set_prefixes(["mean_R@1", "zero_shot_acc1"])
        ['']

    """
    return [name.removesuffix(SCORE) for name in metrics if name.rpartition("/")[2] == SCORE]


def val_metrics(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of an evaluation in a line of metrics.jsonl, without their prefix "val/".

    Example:
        >>> val_metrics({"step": 7, "train/loss": 0.1, "val/mean_R@1": 0.5})
        {'mean_R@1': 0.5}

    """
    return {key.removeprefix("val/"): value for key, value in line.items() if key.startswith("val/")}


def score(metrics: Mapping[str, float]) -> float | None:
    """Return the value that the best checkpoint is chosen by; None if nothing was measured.

    It is the mean recall@1 on the held-out pairs (of the first set, if there are several); without pairs, zero-shot
    accuracy or that of nearest neighbors.

    Example:
        >>> score({"coco/mean_R@1": 0.3, "flickr30k/mean_R@1": 0.4, "zero_shot_acc1": 0.5})
        0.3

    """
    return next(iter(scores(metrics).values()), None)


def scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return `score` on each set of held-out pairs, by the name of the set; a single set has the name "".

    Those of shorter features (`width=64/mean_R@1`) are left out.

    Example:
        >>> scores({"coco/mean_R@1": 0.3, "flickr30k/mean_R@1": 0.4, "zero_shot_acc1": 0.5})
        {'coco': 0.3, 'flickr30k': 0.4}

    """
    prefixes = set_prefixes(name for name in metrics if WIDTH not in name)
    by_set = {prefix.rstrip("/"): metrics[f"{prefix}{SCORE}"] for prefix in prefixes}
    for key in ("zero_shot_acc1", "knn_acc1"):
        if key in metrics and not by_set:
            by_set[""] = metrics[key]
    return by_set


# ---------------------------------------------------------------------------------------------------------------------
# The rows
# ---------------------------------------------------------------------------------------------------------------------


def recall_at(k: int) -> Metric:
    """Return the row of recall@k: the share of queries that have a partner among their first k.

    Example:
        >>> recall_at(20).key
        'R@20'

    """
    return Metric(
        f"R@{k}",
        f"recall@{k}",
        "retrieval",
        lambda ranks: ranks.hits(k),
        chance=lambda ranks: ranks.chance(k),
        chance_key=f"chance@{k}",
    )


def _rank(
    key: str,
    label: str,
    median: bool,
) -> Metric:
    """Return the row of a summary of the ranks of the best partners."""
    return Metric(
        key,
        label,
        "retrieval",
        lambda ranks: ranks.expected(),
        higher_is_better=False,
        format="number",
        median=median,
        both=False,
    )


def _accuracy(k: int) -> Metric:
    """Return the row of zero-shot accuracy among the first k classes."""
    return Metric(
        f"zero_shot_acc{k}",
        "zero-shot accuracy" if k == 1 else f"zero-shot accuracy, first {k}",
        "zero_shot",
        lambda classified: classified.ranks.hits(k),
        chance=(lambda classified: classified.chance()) if k == 1 else None,
        chance_key="zero_shot_chance",
    )


_ROWS = (
    *map(recall_at, KS),
    _rank("mean_rank", "mean rank", median=False),
    _rank("median_rank", "median rank", median=True),
    Metric("nDCG@10", "nDCG@10", "search", lambda ranks: ranks.ndcg(10)),
    Metric("MRR@10", "MRR@10", "search", lambda ranks: ranks.reciprocal_rank(10)),
    Metric("recall@100", "recall@100", "search", lambda ranks: ranks.recall(100)),
    Metric("MAP", "MAP", "search", lambda ranks: ranks.average_precision()),
    _accuracy(1),
    _accuracy(5),
    Metric(
        "zero_shot_mean_per_class_recall",
        "zero-shot accuracy, mean of the classes",
        "zero_shot",
        lambda classified: classified.ranks.hits(1) * classified.class_weights(),
    ),
    Metric(
        "knn_acc1",
        "k-nearest neighbors",
        "labels",
        lambda halves: halves.neighbor_hits(),
        chance=lambda halves: halves.chance(),
        chance_key="knn_chance",
    ),
    Metric("linear_probe_acc1", "linear probe", "labels", lambda halves: halves.probe_hits()),
)
for _row in _ROWS:
    register_metric(_row)
