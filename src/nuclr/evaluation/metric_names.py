"""Names of the metrics in three conventions, so that results can be compared with tables of other projects.

- open_clip: `image_to_text_R@1`, `image_to_text_mean_rank`, ..., `zeroshot-val-top1`; fractions.
- CLIP_benchmark: `text_retrieval_recall@1` (captions are retrieved: image to text), `image_retrieval_recall@1`, `acc1`,
  `acc5`, `mean_per_class_recall`; fractions.
- the paper: `r1`, `r5`, `r10` (mean of both directions), `top1`, `top5`; percent.

All three are about images and texts. Retrieval between other sides has no names in them.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

_RETRIEVED = {"image_to_text": "text_retrieval", "text_to_image": "image_retrieval"}
_DIRECTED = re.compile(r"(image_to_text|text_to_image)_(?:R@(?P<k>\d+)|mean_rank|median_rank)")
_ZERO_SHOT = "zero_shot_"
_SCORE = "mean_R@1"


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
    return [name.removesuffix(_SCORE) for name in metrics if name.rpartition("/")[2] == _SCORE]


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
    keys = [f"{prefix}{_SCORE}" for prefix in set_prefixes(metrics)[:1]]
    return next((metrics[key] for key in (*keys, "zero_shot_acc1", "knn_acc1") if key in metrics), None)


def metrics_by_convention(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Rename metrics to the names of open_clip, CLIP_benchmark and the paper.

    Args:
        metrics: Result of `retrieval_metrics` or `zero_shot_metrics`.

    Returns:
        Convention ("open_clip", "clip_benchmark", "paper") -> name -> value. A convention leaves out the metrics that
        it has no name for.

    Example:
        >>> metrics_by_convention({"image_to_text_R@1": 0.5})["clip_benchmark"]
        {'text_retrieval_recall@1': 0.5}

    """
    named: dict[str, dict[str, float]] = {"open_clip": {}, "clip_benchmark": {}, "paper": {}}
    for key, value in metrics.items():
        directed = _DIRECTED.fullmatch(key)
        if directed:
            named["open_clip"][key] = value
            if k := directed["k"]:
                named["clip_benchmark"][f"{_RETRIEVED[directed[1]]}_recall@{k}"] = value
                mean = metrics.get(f"mean_R@{k}")
                named["paper"] |= {} if mean is None else {f"r{k}": 100 * mean}
        if key.startswith(_ZERO_SHOT) and not key.endswith("chance"):
            plain = key.removeprefix(_ZERO_SHOT)
            named["clip_benchmark"][plain] = value
            if plain.startswith("acc"):
                named["open_clip"][f"zeroshot-val-top{plain.removeprefix('acc')}"] = value
                named["paper"][f"top{plain.removeprefix('acc')}"] = 100 * value
    return named
