"""What the demo prints: a few words before each part, three tables, and what to do next."""

import statistics
from collections.abc import Iterable
from pathlib import Path

from nuclr.data.open import open_pairs
from nuclr.objectives import entry
from nuclr.runs.settings import Settings
from nuclr.studies.demo.study import MAIN, METHODS, SEEDS, Results

OTHERS = [method for method in METHODS if method != MAIN]
INDENT = "   "
FIRST_COLUMN, RECALL_COLUMN = 26, 22
DIRECTIONS = {"image_to_text": "picture to caption", "text_to_image": "caption to picture"}
LABELS = {method: entry(method).label for method in METHODS}


def opening(settings: Settings) -> str:
    """Return what is about to happen."""
    pairs = open_pairs(str(settings.data.train))
    *others, last = LABELS.values()
    lines = [
        f'nuclr demo: {len(pairs):,} small drawings with captions, such as "{pairs.y(0)}"',
        "",
        f"1. Training at a small batch size. {', '.join(others)} and {last} train the same model on the same pairs,",
        f"{INDENT}{settings.data.batch_size} at a time, with {SEEDS} seeds each: {SEEDS * len(METHODS)} models, "
        "about a minute and a half on two cores.",
    ]
    return "\n".join(lines)


def results_text(results: Results) -> str:
    """Return the three parts of the results."""
    return "\n\n".join([_recall(results), _correction(results), _popularity(results)])


def closing(out: Path, page: bool, seconds: float) -> str:
    """Return where everything is, and commands for the user's own data."""
    lines = [f"\nDone in {seconds:.0f} s. The first {LABELS[MAIN]} run is in {out}, the others are in {out}/seeds."]
    if page:
        lines.append(f"Its page, {out}/report.html, shows curves, examples with mistakes, popular and rare items.")
    commands = {
        "nuclr train data.train=pairs.csv data.val=held_out.csv": "train on your pairs (columns: image, text)",
        "nuclr hubness queries.npy gallery.npy": "correct a search with any model's vectors",
        f"nuclr export {out} --to onnx --out model": "use a trained model elsewhere",
    }
    lines += ["Next:", *(f"{INDENT}{command:56} {purpose}" for command, purpose in commands.items())]
    return "\n".join(lines)


def _recall(results: Results) -> str:
    pairs, chance = results[MAIN][0]["search"]["image_to_text"]["queries"], results[MAIN][0]["val"]
    lines = [
        f"{INDENT}Recall@1 in %: how often the first result is the right one, on {pairs:,} pairs not used in training.",
        f"{INDENT}Mean ± standard deviation over {SEEDS} seeds; differences are taken seed by seed.",
        _row("", DIRECTIONS.values(), RECALL_COLUMN),
        _row("chance", [f"{100 * chance[f'{direction}_chance@1']:.2f}" for direction in DIRECTIONS], RECALL_COLUMN),
    ]
    recall = {
        method: [_values(results, method, direction, "recall@1", 100) for direction in DIRECTIONS] for method in METHODS
    }
    lines += [_row(LABELS[method], map(_spread, recall[method]), RECALL_COLUMN) for method in METHODS]
    for method in OTHERS:
        gains = [_minus(*ends) for ends in zip(recall[MAIN], recall[method], strict=True)]
        cells = [_spread(gain, "+") for gain in gains]
        lines.append(_row(f"{LABELS[MAIN]} - {LABELS[method]}", cells, RECALL_COLUMN))
    return "\n".join(lines)


def _correction(results: Results) -> str:
    lines = [
        "2. Search, corrected. Some items are close to far too many queries (hubs), and others are never found. The",
        f"{INDENT}popularity of items is solved on training pairs, without labels, and subtracted from their scores.",
        f"{INDENT}The models stay as they are. N_10 of an item: how many queries have it in their first ten results.",
        _row("", LABELS.values()),
    ]

    for direction, label in DIRECTIONS.items():
        recall, corrected = (
            [_values(results, method, direction, key, 100) for method in METHODS]
            for key in ("recall@1", "recall@1_corrected")
        )
        lines += [
            f"{INDENT}{label}",
            _row("  recall@1 in %", _changes(results, direction, "recall@1", 100, 1)),
            _row("    change", [_spread(_minus(*ends), "+") for ends in zip(corrected, recall, strict=True)]),
            _row("  never found, in %", _changes(results, direction, "never_found", 100, 1)),
            _row("  N_10 of the worst hub", _changes(results, direction, "largest", 1, 0)),
        ]
    return "\n".join(lines)


def _changes(results: Results, direction: str, key: str, scale: float, digits: int) -> list[str]:
    """Return "mean before -> mean after correction" per method."""
    cells = []
    for method in METHODS:
        means = [statistics.mean(_values(results, method, direction, key + end, scale)) for end in ("", "_corrected")]
        cells.append(" -> ".join(f"{mean:.{digits}f}" for mean in means))
    return cells


def _popularity(results: Results) -> str:
    items = results[MAIN][0]["search"]["image_to_text"]["items"]
    correlation = _values(results, MAIN, "image_to_text", "correlation")
    lines = [
        f"3. What is popular. The popularity of captions under {LABELS[MAIN]}, solved on training pairs, has a rank",
        f"{INDENT}correlation of {_spread(correlation, digits=2)} with N_10 in the search of the held-out pictures.",
    ]
    for label, key in (("most popular captions", "most"), ("least popular captions", "least")):
        lines.append(f"{INDENT}N_10   {label}")
        lines += [f"{INDENT}{count:>4}   {text}" for text, count in items[key]]
    return "\n".join(lines)


def _values(results: Results, method: str, direction: str, key: str, scale: float = 1.0) -> list[float]:
    return [scale * run["search"][direction][key] for run in results[method]]


def _minus(first: list[float], second: list[float]) -> list[float]:
    return [a - b for a, b in zip(first, second, strict=True)]


def _spread(values: list[float], sign: str = "", digits: int = 1) -> str:
    """Return "mean ± standard deviation"."""
    return f"{statistics.mean(values):{sign}.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def _row(label: str, cells: Iterable[str], width: int = 15) -> str:
    return f"{INDENT}{label:{FIRST_COLUMN}}" + "".join(f"{cell:>{width}}" for cell in cells)
