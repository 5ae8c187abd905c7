"""A run at one glance: what it is, its headline numbers beside chance and baseline, where its time went."""

import math
from dataclasses import dataclass
from typing import Any

from nuclr.report import numbers
from nuclr.report.logs import RunLog

RECALLS = tuple(
    (f"{key}_R@{k}", f"{key}_chance@{k}", f"recall@{k}, {name}")
    for key, name in (("image_to_text", "image to text"), ("text_to_image", "text to image"))
    for k in (1, 5, 10)
)
SECTIONS = (
    ("data", "reading data", 3),
    ("encoders", "encoders", 1),
    ("objective", "objective, state, logging", 2),
    ("other", "checkpoints, evaluation, other", 8),
)
POPULARITY = (
    ("solver_on_true_scores", "solver fed with the true scores"),
    ("solver_on_features", "solver on the trained features"),
    ("training_zeta", "zeta as training left it"),
)


@dataclass(frozen=True)
class Tile:
    """A headline number."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Table:
    """Cells as they are shown; the first of each row is its name. `best` marks cells (row, column) to stress."""

    columns: list[str]
    rows: list[list[str]]
    best: set[tuple[int, int]]


def headline(run: RunLog) -> list[Tile]:
    """Recall at 1 in both directions, zero-shot accuracy, and the time it took."""
    found = run.last()
    other = run.baseline.last() if run.baseline else {}
    tiles = []
    for key, chance, label in (
        ("image_to_text_R@1", "image_to_text_chance@1", "Image to text, recall@1"),
        ("text_to_image_R@1", "text_to_image_chance@1", "Text to image, recall@1"),
        ("zero_shot_acc1", "zero_shot_chance", "Zero-shot accuracy"),
    ):
        if key in found:
            told = [f"chance {_chance(found.get(chance))}"]
            if key in other and run.baseline:
                told.append(f"{run.baseline.method} {numbers.percent(other[key])}")
            tiles.append(Tile(label, numbers.percent(found[key]), " · ".join(told)))
    if run.results:
        timing = run.results["timing"]
        speed = f"{numbers.count(timing['samples_per_second'])} pairs a second"
        tiles.append(Tile("Training time", numbers.duration(seconds(run)), speed))
    return tiles


def seconds(run: RunLog) -> float:
    """Of the whole run: results.json knows those since it was last gone on with, the log of laps the earlier ones."""
    laps = sum(float(line.get("seconds", 0)) for line in run.timing)
    return max(laps, float(run.results["timing"]["seconds"]) if run.results else 0.0)


def _chance(level: float | None) -> str:
    return numbers.percent(level, 2)


def sentence(run: RunLog) -> str:
    """Task, data and method in words."""
    config, results = run.config, run.results or {}
    model = config["model"]
    pairs = f"{numbers.count(results['pairs'])} pairs" if "pairs" in results else "pairs"
    both = " and ".join(str(model[side].get("encoder") or "its default") for side in ("x", "y"))
    towers = model.get("pretrained") or both
    encoders = "linear heads on vectors" if _is_vectors(config) else f"encoders {towers}"
    data = f"{pairs} of {config['data']['train']}"
    plan = f"{config['schedule']['epochs']} epochs in batches of {config['data']['batch_size']}"
    return f"{run.method} on {data}; {encoders}; {plan}."


def _is_vectors(config: dict[str, Any]) -> bool:
    return str(config["data"]["train"]).endswith((".npz", ".safetensors"))


def recall_table(run: RunLog) -> Table | None:
    """All numbers of the last evaluation, chance beside them; the better of run and baseline is stressed."""
    found = run.last()
    runs = [run] + ([run.baseline] if run.baseline else [])
    rows: list[list[str]] = []
    best: set[tuple[int, int]] = set()
    for key, chance, label in (*RECALLS, ("zero_shot_acc1", "zero_shot_chance", "zero-shot accuracy")):
        if key not in found:
            continue
        values = [r.last().get(key) for r in runs]
        rows.append([label, _chance(found.get(chance)), *(numbers.percent(v) for v in values)])
        known = [v for v in values if v is not None]
        if len(known) > 1 and max(known) > min(known):
            best.add((len(rows) - 1, 2 + values.index(max(known))))
    return Table(["", "chance", *(r.method for r in runs)], rows, best) if rows else None


def popularity_table(run: RunLog) -> Table | None:
    """Rank correlation with the true popularity, where the demo measured it."""
    if not run.demo:
        return None
    names = [name for name in run.demo if isinstance(run.demo[name], dict) and "popularity" in run.demo[name]]
    found = [run.demo[name]["popularity"] for name in names]
    rows = [[label, *(numbers.score(one.get(key, math.nan)) for one in found)] for key, label in POPULARITY]
    methods = [r.method for r in (run, run.baseline) if r is not None][: len(names)]
    return Table(["", *methods], rows, set()) if names else None


def time_shares(run: RunLog) -> list[tuple[str, float, int]]:
    """(what, share, color slot); from the logged laps where the run did not come to its end."""
    if run.results:
        shares = {key: run.results["timing"].get(f"share_{key}", 0.0) for key, _, _ in SECTIONS}
    else:
        total = seconds(run)
        if not total:
            return []
        shares = {
            key: sum(float(line.get(key, 0)) * float(line.get("seconds", 0)) for line in run.timing) / total
            for key, _, _ in SECTIONS
        }
    return [(name, shares[key], slot) for key, name, slot in SECTIONS]


def facts(run: RunLog) -> list[tuple[str, str]]:
    """Small print of the summary: counts that one looks up."""
    results = run.results or {}
    config = run.config
    found = [
        ("Method", run.method),
        ("Training pairs", numbers.count(results["pairs"]) if "pairs" in results else numbers.MISSING),
        ("Training data", str(config["data"]["train"])),
        ("Held-out data", str(config["data"].get("val") or "none")),
        ("Batch size", numbers.count(config["data"]["batch_size"])),
        ("Epochs", numbers.count(config["schedule"]["epochs"])),
        ("Steps", numbers.count(run.step())),
        ("Temperature", numbers.number(results.get("temperature", config["objective"].get("temperature")))),
        ("Trained parameters", numbers.count(results["parameters"]) if "parameters" in results else numbers.MISSING),
        ("Seed", str(config.get("seed", numbers.MISSING))),
        ("Processes", str(results.get("processes", numbers.MISSING))),
        ("Bad samples left out", numbers.count(len(run.bad))),
    ]
    return [(key, value) for key, value in found if value != numbers.MISSING]
