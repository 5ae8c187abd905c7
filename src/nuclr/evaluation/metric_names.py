"""One set of numbers under the names of three worlds, so that a table from any of them can be set beside ours.

- open_clip: `image_to_text_R@1`, `image_to_text_mean_rank`, ..., `zeroshot-val-top1`; fractions.
- CLIP_benchmark: `text_retrieval_recall@1` (the captions are retrieved: image to text), `image_retrieval_recall@1`,
  `acc1`, `acc5`, `mean_per_class_recall`; fractions.
- the paper: `r1`, `r5`, `r10`, mean of both directions, and `top1`, `top5`; percent.
"""

from collections.abc import Mapping

_RETRIEVED = {"image_to_text": "text_retrieval", "text_to_image": "image_retrieval"}
_ZERO_SHOT = "zero_shot_"


def conventions(found: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """What `retrieval` or `zero_shot` found, by all three names; what one of them has no name for is left out."""
    named: dict[str, dict[str, float]] = {"open_clip": {}, "clip_benchmark": {}, "paper": {}}
    for key, value in found.items():
        direction = next((name for name in _RETRIEVED if key.startswith(name)), None)
        kind, _, k = key.partition("_R@")
        if direction and "_chance@" not in key:
            named["open_clip"][key] = value
        if direction and k:
            named["clip_benchmark"][f"{_RETRIEVED[direction]}_recall@{k}"] = value
        if kind == "mean" and k:
            named["paper"][f"r{k}"] = 100 * value
        if key.startswith(_ZERO_SHOT) and not key.endswith("chance"):
            plain = key.removeprefix(_ZERO_SHOT)
            named["clip_benchmark"][plain] = value
            if plain.startswith("acc"):
                named["open_clip"][f"zeroshot-val-top{plain.removeprefix('acc')}"] = value
                named["paper"][f"top{plain.removeprefix('acc')}"] = 100 * value
    return named
