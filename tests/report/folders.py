"""Small folders of every kind that has a page."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from nuclr.report.render import Options, compute_sections
from nuclr.report.write import PAGES

HOSTILE = "<script>alert(1)</script>"
QUOTED = 'it\'s "7" <b>.png'


def write_pictures(folder: Path, count: int = 24, size: int = 32, noise: bool = False) -> list[str]:
    """Write pictures of one color, or of noise that does not compress; one file name has quotes."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [QUOTED if k == 7 else f"{k}.png" for k in range(count)]
    rng = np.random.default_rng(0)
    for name in names:
        pixels = rng.integers(256, size=(size, size, 3) if noise else (1, 1, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((size, size)).save(folder / name)
    return names


def write_captions(folder: Path, count: int = 24) -> Path:
    """Write a caption list with two captions per picture; one caption is markup."""
    lines = []
    for k, name in enumerate(write_pictures(folder / "images", count)):
        captions = [HOSTILE if k == 3 else f"a thing of kind {k}, seen", f"thing {k % 5} & others"]
        lines.append(json.dumps({"image": name, "captions": captions}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder / "train.jsonl"


def spread(mean: float) -> dict:
    return {"mean": mean, "std": 0.5, "per_seed": [mean - 0.5, mean + 0.5]}


def comparison(label: str = "NUCLR") -> dict:
    """Return the smallest content of compare.json."""
    metrics = [f"{d}_R@{k}" for d in ("image_to_text", "text_to_image", "mean") for k in (1, 5, 10)]

    def row(method: str, name: str, mean: float) -> dict:
        return {
            "method": method,
            "label": name,
            "metrics": {"val": {metric: spread(mean) for metric in metrics}},
            "corrected": {"val": {"train": {"mean_R@1": spread(mean), "gain": difference}}},
            "false_negatives": None,
            "tuning": {"chosen": {"val": {"objective.temperature": 0.03}}, "tried": []},
            "curve": {"epochs": [1, 2, 3], "per_seed": [[mean - 2, mean - 1, mean], [mean - 3, mean - 2, mean - 1]]},
            "runs": {},
        }

    difference = {"difference": 1.25, "low": 0.5, "high": 2.0, "outside": True}
    return {
        "written_by": "nuclr compare", "title": "Methods", "command": "nuclr compare", "version": "0", "torch": "2",
        "numpy": "2", "python": "3", "unit": "percent", "protocol": ["Tuned alike."], "settings": {"data.train": "t"},
        "chance": 1.0,
        "seeds": [0, 1], "baseline": "sogclr", "averages": [], "sides": ["image", "text"],
        "sets": [{"name": "val", "label": "held-out pairs", "kind": "pairs", "main": True}],
        "rows": {"sogclr": row("sogclr", "SogCLR", 20.0), "nuclr": row("nuclr", label, 21.25)},
        "missing": ["clip"], "failed": {"clip 1": "killed"},
        "differences": [{"row": "nuclr", "to": "sogclr", "set": "val", **difference}],
    }  # fmt: skip


def toy() -> dict:
    """Return the content of toy.json for two sizes."""
    methods = ("mle", "gcl", "gcl_constant", "true_q", "nuclr", "nuclr_area")
    content: dict[str, Any] = {"written_by": "nuclr toy", "seed": 0, "seconds": 1.5, "figures": ["error.svg"]}
    parts = ("records", "sampling", "bias", "exponents", "constant", "learning", "finite", "slopes", "shown")
    content |= {part: [] for part in parts}
    for tau in (0.2, 1.0):
        for n in (100, 200):
            setting = {"tau": tau, "n": n, "seeds": 2}
            for method in methods:
                record = {**setting, "method": method, "rank_correlation_mean": 0.99}
                content["records"].append(record | _spreads(n, "error", "bound_term", "error_term"))
            for method in ("mle", "gcl", "nuclr"):
                record = {**setting, "method": method, "bayes": 0.5, "w_mean": [[1.0, 0.0], [0.0, 1.0]]}
                content["learning"].append(record | _spreads(n, "excess_risk", "zero_one", "bound"))
            for method in ("mle", "gcl", "nuclr", "counts"):
                record = {**setting, "method": method, "seen": 1.0}
                content["finite"].append(record | _spreads(n, "error", "difference", "error_term"))
            for weights in ("balance", "uniform", "single"):
                record = {"tau": tau, "n": n, "m": 1, "weights": weights, "source": "quadrature"}
                record |= {f"relative_variance_{q}": v / n for q, v in (("median", 1), ("q10", 0.5), ("q90", 2))}
                content["sampling"].append(record)
        bias = {"tau": tau, "n": 100, "bias": 0.001, "low": -0.001, "high": 0.003, "repeats": 7}
        content["bias"] += [bias | {"weights": weights} for weights in ("balance", "uniform")]
        moments = {"tau": tau, "n": 100, "variance": 0.1, "second_moment": 0.2}
        content["exponents"] += [moments | {"exponent": exponent} for exponent in (0.0, 1.0, 2.0)]
        losses = {name: [0.1, 0.0, 0.1] for name in ("mle", "gcl", "nuclr")}
        minimum = dict.fromkeys(losses, 1.0) | {"gcl": 0.625}
        content["constant"].append({"tau": tau, "alpha": [0.5, 1.0, 1.5], "minimum": minimum, **losses})
        fit = {"part": "records", "tau": tau, "quantity": "error", "slope": -0.515, "low": -0.6, "high": -0.4}
        content["slopes"] += [fit | {"method": method} for method in methods]
        points = [[0.5, 0.5], [-0.5, 0.5]]
        shown = {
            "tau": tau,
            "n": 2,
            "x": points,
            "y": [[0.1, 0.9], [0.5, 0.5]],
            "true": [1.0, 2.0],
            "estimated": [1.1, 1.9],
        }
        maps = {"true_map": [[1.0, 2.0], [3.0, 4.0]], "estimated_map": [[1.0, 2.0], [3.0, 4.5]]}
        content["shown"].append(shown | maps | {"rank_correlation": 0.9})
    return content


def _spreads(n: int, *names: str) -> dict[str, float]:
    return {key: value for name in names for key, value in ((f"{name}_mean", 1 / n), (f"{name}_std", 0.1 / n))}


def write_json(path: Path, content: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def open_page(kind: str, path: Path, options: Options | None = None) -> tuple[Any, dict[str, Any]]:
    """Return the context of a folder's page and the content of its sections by key."""
    page = PAGES[kind]
    assert page.accepts(path)
    context = page.open(path, options or Options())
    return context, {section.key: content for section, content in compute_sections(page, context)}
