"""What `nuclr evaluate` found, for people: plain and corrected figures side by side."""

from collections.abc import Iterator
from typing import Any

COLUMNS = {"plain": "plain", "train": "corrected", "queries": "transductive"}
_ROWS = (
    ("image_to_text", "image to text"),
    ("text_to_image", "text to image"),
    ("mean", "mean"),
)


def table(content: dict[str, Any]) -> str:
    """Percent, with two decimals; ranks from 1."""
    return "\n".join(_lines(content))


def _lines(content: dict[str, Any]) -> Iterator[str]:
    for name, task in content["retrieval"].items():
        found = {"plain": task["plain"], **task["corrected"]}
        yield f"{name}: {task['images']:,} images, {task['captions']:,} captions"
        yield f"  {'':28}" + "".join(f"{COLUMNS[column]:>14}" for column in found) + f"{'chance':>10}"
        for key, told in _ROWS:
            for k in (1, 5, 10):
                values = [100 * of[f"{key}_R@{k}"] for of in found.values()]
                chance = 100 * task["plain"][f"{key}_chance@{k}"]
                yield f"  {f'recall@{k}, {told}':28}" + "".join(f"{v:>12.2f} %" for v in values) + f"{chance:>8.2f} %"
            if key != "mean":
                for kind in ("mean", "median"):
                    values = [of[f"{key}_{kind}_rank"] for of in found.values()]
                    yield f"  {f'{kind} rank, {told}':28}" + "".join(f"{value:>12.1f}  " for value in values)
        if task["correction_crossed"]:
            yield "  The validation pairs: the correction of each half of the images was chosen on the other half;"
            yield "  the one told below was chosen on all of them, for other sets."
        yield ""
    for name, task in content["classification"].items():
        found = task["plain"]
        chance = 100 * found["zero_shot_chance"]
        yield f"{name}: {task['images']:,} images, {task['classes']} classes"
        for key, told in (("acc1", "top-1"), ("acc5", "top-5"), ("mean_per_class_recall", "mean per-class recall")):
            yield f"  {told:28}{100 * found[f'zero_shot_{key}']:>12.2f} %"
        yield f"  {'chance':28}{chance:>12.2f} %"
        yield ""
    for correction in content["corrections"].values():
        column, temperature = COLUMNS[correction["bank"]], correction["temperature"]
        at = f"temperature {temperature:g}" if temperature is not None else "the default temperature"
        yield (
            f"{column}: score - {correction['strength']:g} * zeta (popularity), solved at {at}, "
            f"bank: {correction['told']}; chosen on {correction['chosen_on']}"
        )
