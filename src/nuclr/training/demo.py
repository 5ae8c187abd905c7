"""The demo: NUCLR and SogCLR on built-in pairs, and what correcting the popularity of the captions changes."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from nuclr import files
from nuclr.evaluation import hubness_change
from nuclr.evaluation.metric_names import set_prefixes
from nuclr.runs import folder
from nuclr.runs.components import Loaders
from nuclr.runs.launch import on_first, pick_device, processes
from nuclr.runs.run import Run
from nuclr.runs.settings import Settings
from nuclr.training.loop import train

BASELINE = "sogclr"
LARGEST = 4000  # training pairs on which popularity is solved: enough for a correction, and a second of work
HUBNESS_ROWS = (
    ("recall@1_corrected", "recall@1, image to text, corrected", True),
    ("never_found", "never in the first ten", True),
    ("never_found_corrected", "never in the first ten, corrected", True),
    ("skewness", "skewness of N_10", False),
    ("skewness_corrected", "skewness of N_10, corrected", False),
    ("correlation", "popularity's rank correlation, N_10", False),
)


def is_demo(settings: Settings) -> bool:
    """Return whether the settings train NUCLR on the built-in pairs."""
    return settings.objective.name == "nuclr" and str(settings.data.train).partition(":")[0] == "builtin"


def demo(settings: Settings, out: Path, resume: bool = False) -> dict[str, Any]:
    """Train both objectives, the baseline in a folder inside the first run's; return the results of each by name."""
    other = dataclasses.replace(settings.objective, name=BASELINE)
    runs = {
        "nuclr": (settings, out),
        BASELINE: (
            dataclasses.replace(settings, name=f"{settings.name} ({BASELINE})", objective=other),
            out / BASELINE,
        ),
    }
    results: dict[str, Any] = {}
    loaders: Loaders = {}
    with processes(pick_device(settings.device)):
        for name, (chosen, path) in runs.items():
            finished = folder.read_results(path) if resume else None
            results[name] = finished or train(chosen, path, resume, loaders)
        for name, (chosen, path) in runs.items():
            run = Run.open(path, device=chosen.device, loaders=loaders)
            if run.val is not None:
                results[name]["hubness"] = caption_hubness(run)
        on_first(lambda: files.write_json(out / "demo.json", results))
    return results


def caption_hubness(run: Run) -> dict[str, float]:
    """Return the hubness of the held-out captions before and after correction with training pairs as the bank."""
    assert run.val is not None
    train, val = run.features(run.train, run.train.numbers[:LARGEST]), run.features(run.val)
    change = hubness_change((train.x, train.y), val.x, val.y, val.links)
    return {key: value for key, value in change.items() if math.isfinite(value)}


def table(results: dict[str, Any], out: Path) -> str:
    """Return the table that the demo prints at its end."""
    names = list(results)
    first = results[names[0]]
    lines = [f"{'':38}{'chance':>9}" + "".join(f"{name:>9}" for name in names)]

    def row(label: str, values: list[float], chance: float | None, percent: bool = True) -> None:
        cells = [chance, *values]
        shown = ["" if v is None else f"{100 * v:.1f} %" if percent else f"{v:.3f}" for v in cells]
        lines.append(f"{label:38}" + "".join(f"{cell:>9}" for cell in shown))

    for prefix in set_prefixes(first["val"]):
        if prefix:
            lines.append(prefix.rstrip("/"))
        for direction, label in (("image_to_text", "image to text"), ("text_to_image", "text to image")):
            for k in (1, 5, 10):
                values = [results[name]["val"][f"{prefix}{direction}_R@{k}"] for name in names]
                row(f"recall@{k}, {label}", values, first["val"][f"{prefix}{direction}_chance@{k}"])
    if "zero_shot_acc1" in first["val"]:
        values = [results[name]["val"]["zero_shot_acc1"] for name in names]
        row("zero-shot accuracy", values, first["val"]["zero_shot_chance"])
    if all("hubness" in results[name] for name in names):
        lines.append("captions as search results of the held-out images, corrected by popularity")
        for key, label, percent in HUBNESS_ROWS:
            row(f"  {label}", [results[name]["hubness"].get(key) for name in names], None, percent)
    seconds = sum(results[name]["timing"]["seconds"] for name in names)
    lines.append(f"\nThe runs are in {out} and {out / BASELINE} ({seconds:.0f} s)")
    return "\n".join(lines)
