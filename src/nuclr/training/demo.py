"""The demo: NUCLR and SogCLR on the built-in pairs, and how well popularity is found where the truth is known."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import torch

from nuclr.data.builtin import FLOOR, BuiltinPairs
from nuclr.evaluation import rank_correlation
from nuclr.models import DualEncoder
from nuclr.popularity import solve
from nuclr.runs import checkpoint, folder
from nuclr.runs import components as parts
from nuclr.runs.features import encode_x, encode_y
from nuclr.runs.launch import on_first, pick_device, processes
from nuclr.runs.settings import Settings
from nuclr.training.loop import train

BASELINE: Literal["sogclr"] = "sogclr"
LARGEST = 4000  # pairs on which popularity is solved: enough for a correlation, and a second's work


def is_demo(settings: Settings) -> bool:
    """Whether there is a truth to compare with and a NUCLR to compare."""
    return settings.objective.name == "nuclr" and str(settings.data.train).partition(":")[0] == "builtin"


def demo(settings: Settings, out: Path, resume: bool = False) -> dict[str, Any]:
    """Train both, the baseline in a folder within the first; returns the results of each by name."""
    other = dataclasses.replace(settings.objective, name=BASELINE)
    runs = {
        "nuclr": (settings, out),
        BASELINE: (
            dataclasses.replace(settings, name=f"{settings.name} ({BASELINE})", objective=other),
            out / BASELINE,
        ),
    }
    found: dict[str, Any] = {}
    loaders: parts.Loaders = {}
    with processes(pick_device(settings.device)):
        for name, (chosen, place) in runs.items():
            done = folder.read_results(place) if resume else None
            found[name] = done or train(chosen, place, resume, loaders)
        for name, (chosen, place) in runs.items():
            found[name]["popularity"] = popularity(chosen, place, loaders)
        on_first(lambda: (out / "demo.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8"))
    return found


def popularity(settings: Settings, run: Path, loaders: parts.Loaders) -> dict[str, float]:
    """Rank correlation with the true popularity: of the solver on true scores and on features, and of zeta."""
    source = parts.open_train(settings.data)
    pairs = source.pairs
    assert isinstance(pairs, BuiltinPairs)
    device = pick_device(settings.device)
    numbers = source.numbers[:LARGEST]
    model = DualEncoder.from_pretrained(run / folder.MODEL).to(device)
    options = (settings.evaluate.batch_size, device, settings.precision)
    x = encode_x(model, parts.make_loader(settings.data, pairs, model, loaders), numbers, *options)
    y = encode_y(model, pairs, numbers, *options)
    tau = parts.make_objective(settings.objective, len(pairs)).temperature
    truth = pairs.truth.popularity(numbers)
    scores = torch.from_numpy(pairs.truth.log_p(numbers, numbers, FLOOR)) * tau
    state = checkpoint.load(checkpoint.newest_first(run / folder.CHECKPOINTS)[0])["objective"]
    found = {
        "solver_on_true_scores": rank_correlation(solve(scores=scores, temperature=tau).zeta.numpy(), truth),
        "solver_on_features": rank_correlation(solve(x, y, temperature=tau).zeta.numpy(), truth),
    }
    if "zeta_y" in state:
        found["training_zeta"] = rank_correlation(state["zeta_y"].numpy()[numbers], truth)
    return found


def table(found: dict[str, Any], out: Path) -> str:
    """The small table that the demo ends with."""
    names = list(found)
    first = found[names[0]]
    lines = [f"{'':38}{'chance':>9}" + "".join(f"{name:>9}" for name in names)]

    def row(label: str, values: list[float], chance: float | None, percent: bool = True) -> None:
        cells = [chance, *values]
        shown = ["" if v is None else f"{100 * v:.1f} %" if percent else f"{v:.3f}" for v in cells]
        lines.append(f"{label:38}" + "".join(f"{cell:>9}" for cell in shown))

    for direction, told in (("image_to_text", "image to text"), ("text_to_image", "text to image")):
        for k in (1, 5, 10):
            values = [found[name]["val"][f"{direction}_R@{k}"] for name in names]
            row(f"recall@{k}, {told}", values, first["val"][f"{direction}_chance@{k}"])
    if "zero_shot_acc1" in first["val"]:
        values = [found[name]["val"]["zero_shot_acc1"] for name in names]
        row("zero-shot accuracy", values, first["val"]["zero_shot_chance"])
    lines.append("rank correlation with the true popularity of the captions")
    for key, told in (
        ("solver_on_true_scores", "  solver fed with the true scores"),
        ("solver_on_features", "  solver on the trained features"),
        ("training_zeta", "  zeta as training left it"),
    ):
        values = [found[name]["popularity"].get(key) for name in names]
        row(told, values, None, percent=False)
    seconds = sum(found[name]["timing"]["seconds"] for name in names)
    lines.append(f"\nThe runs are in {out} and {out / BASELINE} ({seconds:.0f} s)")
    return "\n".join(lines)
