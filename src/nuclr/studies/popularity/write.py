"""The popularity command: embedding file in, folder with table, summary and histogram out."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import LogLocator

import nuclr
from nuclr.data.formats.embeddings import read_embeddings
from nuclr.popularity.false_negatives import false_negatives
from nuclr.runs.environment import environment
from nuclr.studies import figure_style, output
from nuclr.studies.popularity import keep
from nuclr.studies.popularity.names import Names, read_names
from nuclr.studies.popularity.sides import Align, Pairs, Side, Weights, make_pairs, solve_sides

COMMAND = "nuclr popularity"
SUMMARY, TABLE, PARQUET, HISTOGRAM = "popularity.json", "popularity.csv", "popularity.parquet", "histogram"
NEGATIVES, ANCHORS = 12, 2000  # likely false negatives to tell, and anchors among which they are looked for
FILES = (SUMMARY, TABLE, PARQUET, *(f"{HISTOGRAM}.{kind}" for kind in figure_style.FORMATS))


@dataclass(frozen=True)
class Keep:
    """Which pairs to write where: those whose `side` ("y", "x" or "both") lies in the band."""

    path: Path
    band: keep.Band
    side: str = "y"


def write(
    file: Path,
    folder: Path,
    temperature: float,
    weights: Weights = "pairs",
    align: Align = "none",
    captions: Path | None = None,
    images: Path | None = None,
    kept: Keep | None = None,
    top: int = 10,
    device: str = "cpu",
    numbers: dict[str, np.ndarray] | None = None,
    run: Path | None = None,
    **solver: Any,
) -> dict[str, Any]:
    """Solve both sides of `file`, write everything into `folder`, and return what popularity.json holds.

    `numbers`: what the rows of "x" and "y" are called in everything written, by default their place in the file.
    `run`: the training run whose pairs these are.
    `solver` options (tolerance, max_iterations, progress) go to `nuclr.popularity.solver`. All that can be wrong with
    the input is found before the solver starts.
    """
    embeddings = read_embeddings(file)
    names = read_names(captions, images, len(embeddings.x), embeddings.y_to_x.tolist(), numbers)
    if kept is not None:
        keep.check_target(kept.path, folder)
    pairs = make_pairs(embeddings, weights, align)
    output.prepare_folder(folder, COMMAND, SUMMARY, FILES)
    sides = solve_sides(pairs, temperature, device, **solver)

    content: dict[str, Any] = {
        "written_by": COMMAND,
        "version": nuclr.__version__,
        "command": environment()["command"],
        "file": str(file),
        "run": None if run is None else str(run),
        "temperature": temperature,
        "weights": weights,
        "pairs": len(embeddings.y),
        "x": len(embeddings.x),
        "x_without_y": len(embeddings.x) - len(pairs.x_number),
        "align": _align(align, pairs),
        "sides": {side.name: {**side.summary(), **extremes(side, names, top)} for side in sides.values()},
    }
    content["false_negatives"] = likely_false_negatives(pairs, sides["y"], names)
    if kept is not None:
        content["keep"] = _write_kept(kept, pairs, sides, names)
    _write_table(folder, sides, names)
    _write_histogram(folder, sides, temperature, file.name)
    output.write_json(folder / SUMMARY, content)
    return content


def extremes(side: Side, names: Names, top: int) -> dict[str, list[dict[str, Any]]]:
    """The `top` most and least popular samples; captions that occur several times once, with how often they do."""
    order = side.order()
    return {
        "most_popular": _distinct(side, order, names, top),
        "least_popular": _distinct(side, order[::-1], names, top),
    }


def _distinct(side: Side, order: np.ndarray, names: Names, top: int) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for place in order.tolist():
        row = int(side.number[place])
        labels = names.of(side.name, row)
        key = labels["caption"] if side.name == "y" and "caption" in labels else str(row)
        if key in found:
            found[key]["copies"] += 1
        elif len(found) < top:
            popularity, rank = float(side.popularity[place]), int(side.rank[place])
            number = names.number(side.name, row)
            found[key] = {"number": number, "popularity": popularity, "rank": rank, "copies": 1, **labels}
    return list(found.values())


def likely_false_negatives(pairs: Pairs, side: Side, names: Names) -> dict[str, Any]:
    """The strongest of them, see `nuclr.popularity.false_negatives`; of many anchors, among some drawn at random."""
    links = torch.stack([pairs.x_of_y, torch.arange(len(pairs.y))], dim=1)
    anchors = torch.randperm(len(pairs.x), generator=torch.Generator().manual_seed(0))[:ANCHORS]
    found = false_negatives(pairs.x, pairs.y, links, torch.from_numpy(side.popularity), NEGATIVES, anchors)
    rows = []
    columns = (found.x, found.y, found.own, found.score, found.own_score)
    for x, y, own, score, own_score in zip(*(column.tolist() for column in columns), strict=True):
        image = int(pairs.x_number[x])
        row: dict[str, Any] = {"x": names.number("x", image), "y": names.number("y", y), "own": names.number("y", own)}
        row |= {"score": score, "own_score": own_score, "popularity": float(side.popularity[y])}
        labels = {"caption": names.of("y", y).get("caption"), "own_caption": names.of("y", own).get("caption")}
        rows.append(row | {key: text for key, text in labels.items() if text is not None})
    return {"anchors": found.anchors, "share": found.share, "rows": rows}


def _align(align: Align, pairs: Pairs) -> dict[str, Any]:
    if pairs.alignment is None:
        return {"method": align}
    return {
        "method": align,
        "meaning": "each x replaced by its prediction of y, from a ridge regression on all other x of this file",
        "penalty": pairs.alignment.penalty,
        "explained_variance": pairs.alignment.explained,
    }


def _write_kept(kept: Keep, pairs: Pairs, sides: dict[str, Side], names: Names) -> dict[str, Any]:
    admitted = {
        "y": kept.band.admits(sides["y"].popularity),
        "x": kept.band.admits(sides["x"].popularity)[pairs.x_of_y.numpy()],
    }
    passing = admitted["y"] & admitted["x"] if kept.side == "both" else admitted[kept.side]
    chosen = np.array([names.number("y", row) for row in passing.nonzero()[0].tolist()], np.int64)
    keep.write_list(kept.path, chosen, len(passing))
    return {"file": str(kept.path), "side": kept.side, "pairs": int(passing.sum()), "of": len(passing)}


def _rows(sides: dict[str, Side], names: Names) -> Iterator[dict[str, Any]]:
    for side in sides.values():
        columns = (side.number, side.zeta, side.popularity, side.rank)
        for row, zeta, popularity, rank in zip(*(column.tolist() for column in columns), strict=True):
            number = names.number(side.name, row)
            x = names.number("x", names.y_to_x[row]) if side.name == "y" else number
            values = {"side": side.name, "number": number, "zeta": zeta, "popularity": popularity, "rank": rank, "x": x}
            yield {**values, **names.of(side.name, row)}


def _write_table(folder: Path, sides: dict[str, Side], names: Names) -> None:
    rows = list(_rows(sides, names))
    with output.replacing(folder / TABLE) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(
            {**row, "zeta": f"{row['zeta']:.8g}", "popularity": f"{row['popularity']:.8g}"} for row in rows
        )
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return
    with output.replacing(folder / PARQUET) as temporary:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), temporary)


def _write_histogram(folder: Path, sides: dict[str, Side], temperature: float, name: str) -> None:
    others = {"y": "x", "x": "y"}
    with figure_style.house_style():
        figure, [row] = figure_style.panels(
            1, 2, f"Popularity under this model: {name}, τ = {temperature:g}", (5.2, 3.9)
        )
        for axes, side in zip(row, sides.values(), strict=True):
            shown = np.maximum(side.popularity, 1e-30)  # at low temperatures the least popular are beyond any axis
            logs = np.log10(shown)
            edges = np.linspace(logs.min(), max(logs.max(), logs.min() + 1e-6), 61)
            axes.hist(shown, bins=(10**edges).tolist(), color=figure_style.SKY)
            median = float(np.median(side.popularity))
            axes.axvline(1, color=figure_style.ORANGE, label="mean 1")
            axes.axvline(median, color=figure_style.INK, linestyle="--", label=f"median {median:.2g}")
            axes.set(xscale="log", xlabel="popularity (1 = the mean over the samples)", ylabel="number of samples")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if np.ptp(logs) < 2.5 else (1,)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
            counted = f"{len(logs):,} samples, effectively {side.effective_number():,.0f}"
            axes.set_title(f"{side.name} among anchors {others[side.name]}: {counted}")
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
        figure_style.save(figure, folder, HISTOGRAM)
