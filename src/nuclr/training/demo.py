"""The demo: NUCLR and SogCLR on built-in pairs, and how well popularity is estimated where the truth is known."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from nuclr import files
from nuclr.data.builtin import FLOOR, BuiltinPairs
from nuclr.evaluation import rank_correlation
from nuclr.popularity import solve
from nuclr.runs import folder
from nuclr.runs.components import Loaders
from nuclr.runs.features import encode_x, encode_y
from nuclr.runs.launch import on_first, pick_device, processes
from nuclr.runs.run import Run
from nuclr.runs.settings import Settings
from nuclr.training.loop import train

BASELINE = "sogclr"
LARGEST = 4000  # pairs on which popularity is solved: enough for a correlation, and a second of work


def is_demo(settings: Settings) -> bool:
    """Return whether the settings train NUCLR on pairs whose true popularity is known."""
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
            results[name]["popularity"] = popularity(Run.open(path, device=chosen.device, loaders=loaders))
        on_first(lambda: files.write_json(out / "demo.json", results))
    return results


def popularity(run: Run) -> dict[str, float]:
    """Return rank correlations with the true popularity: of the solver on true scores and on features, and of zeta."""
    source = run.train
    pairs = source.pairs
    assert isinstance(pairs, BuiltinPairs)
    numbers = source.numbers[:LARGEST]
    x = encode_x(run.model, run.loader(pairs), numbers, *run.encoding)
    y = encode_y(run.model, run.loader(pairs), numbers, *run.encoding)
    tau = run.temperature
    truth = pairs.truth.popularity(numbers)
    scores = torch.from_numpy(pairs.truth.log_p(numbers, numbers, FLOOR)) * tau
    correlations = {
        "solver_on_true_scores": rank_correlation(solve(scores=scores, temperature=tau).zeta.numpy(), truth),
        "solver_on_features": rank_correlation(solve(x, y, temperature=tau).zeta.numpy(), truth),
    }
    state = run.objective_state or {}
    if "zeta_y" in state:
        correlations["training_zeta"] = rank_correlation(state["zeta_y"].numpy()[numbers], truth)
    return correlations


def table(results: dict[str, Any], out: Path) -> str:
    """Return the table that the demo prints at its end."""
    names = list(results)
    first = results[names[0]]
    lines = [f"{'':38}{'chance':>9}" + "".join(f"{name:>9}" for name in names)]

    def row(label: str, values: list[float], chance: float | None, percent: bool = True) -> None:
        cells = [chance, *values]
        shown = ["" if v is None else f"{100 * v:.1f} %" if percent else f"{v:.3f}" for v in cells]
        lines.append(f"{label:38}" + "".join(f"{cell:>9}" for cell in shown))

    for direction, label in (("image_to_text", "image to text"), ("text_to_image", "text to image")):
        for k in (1, 5, 10):
            values = [results[name]["val"][f"{direction}_R@{k}"] for name in names]
            row(f"recall@{k}, {label}", values, first["val"][f"{direction}_chance@{k}"])
    if "zero_shot_acc1" in first["val"]:
        values = [results[name]["val"]["zero_shot_acc1"] for name in names]
        row("zero-shot accuracy", values, first["val"]["zero_shot_chance"])
    lines.append("rank correlation with the true popularity of the captions")
    for key, label in (
        ("solver_on_true_scores", "  solver on the true scores"),
        ("solver_on_features", "  solver on the trained features"),
        ("training_zeta", "  zeta at the end of training"),
    ):
        row(label, [results[name]["popularity"].get(key) for name in names], None, percent=False)
    seconds = sum(results[name]["timing"]["seconds"] for name in names)
    lines.append(f"\nThe runs are in {out} and {out / BASELINE} ({seconds:.0f} s)")
    return "\n".join(lines)
