"""`nuclr popularity`: solve both sides of the samples and write table, summary and histogram into a folder."""

import csv
import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import LogLocator

import nuclr
from nuclr import files
from nuclr.popularity.false_negatives import false_negatives
from nuclr.runs.features import links_of_groups
from nuclr.runs.folder import environment
from nuclr.studies import figure_style
from nuclr.studies.popularity import keep
from nuclr.studies.popularity.inputs import Names, PopularityInput
from nuclr.studies.popularity.sides import Align, SidePopularity, WeightedPairs, Weights, solve_sides, weigh_pairs

COMMAND = "nuclr popularity"
SUMMARY, TABLE, PARQUET, HISTOGRAM = "popularity.json", "popularity.csv", "popularity.parquet", "histogram"
FALSE_NEGATIVES, ANCHORS = 12, 2000  # likely false negatives to report, and anchors among which they are searched
FILES = (SUMMARY, TABLE, PARQUET, *(f"{HISTOGRAM}.{kind}" for kind in figure_style.FORMATS))


def write_popularity(
    samples: PopularityInput,
    folder: Path,
    temperature: float,
    weights: Weights = "pairs",
    align: Align = "none",
    kept: keep.Keep | None = None,
    top: int = 10,
    device: str = "cpu",
    **solver: Any,
) -> dict[str, Any]:
    """Solve both sides, write everything into `folder`, and return the content of popularity.json.

    Args:
        samples: embeddings and names.
        folder: created if necessary; files of an earlier `nuclr popularity` are replaced.
        temperature: of the popularity problem.
        weights: if an x has several y, whether pairs or x have equal weight.
        align: "ridge" maps x into the space of y first.
        kept: which pairs to list in a file.
        top: how many of the most and least popular samples to report.
        device: where to solve.
        solver: options of `nuclr.popularity.solve` (tolerance, max_iterations, progress).

    Raises:
        UserError: anything wrong with the input, before the solver starts.

    """
    embeddings, names = samples.embeddings, samples.names
    if kept is not None:
        keep.check_target(kept.path, folder)
    pairs = weigh_pairs(embeddings, weights, align)
    files.prepare_folder(folder, COMMAND, SUMMARY, FILES)
    sides = solve_sides(pairs, temperature, device, views=names.views, **solver)

    content: dict[str, Any] = {
        "written_by": COMMAND,
        "version": nuclr.__version__,
        "command": environment()["command"],
        "file": str(samples.origin),
        "run": names.origin.run,
        "items": {key: value for key, value in dataclasses.asdict(names.origin).items() if key != "run"},
        "names": names.describe(),
        "views": names.views,
        "temperature": temperature,
        "weights": weights,
        "pairs": len(embeddings.y),
        "x": len(embeddings.x),
        "x_without_y": len(embeddings.x) - len(pairs.x_row),
        "align": _describe_alignment(align, pairs),
        "sides": {side.name: {**side.summary(), **extremes(side, names, top)} for side in sides.values()},
    }
    if not names.views:  # nothing is more similar to an item than itself
        content["false_negatives"] = likely_false_negatives(pairs, sides["y"], names)
    with files.user_errors(folder):
        if kept is not None:
            content["keep"] = _write_kept(kept, pairs, sides, names)
        _write_table(folder, sides, names)
        _write_histogram(folder, sides, names, temperature, samples.origin.name)
        files.write_json(folder / SUMMARY, content)
    return content


def extremes(side: SidePopularity, names: Names, top: int) -> dict[str, list[dict[str, Any]]]:
    """Return the `top` most and least popular samples; equal texts appear once, with the number of copies."""
    order = side.order()
    return {
        "most_popular": _distinct(side, order, names, top),
        "least_popular": _distinct(side, order[::-1], names, top),
    }


def _distinct(side: SidePopularity, order: np.ndarray, names: Names, top: int) -> list[dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for position in order.tolist():
        row = int(side.row[position])
        labels, text = names.of(side.name, row), names.text(side.name, row)
        key = f"row {row}" if text is None else f"text {text}"
        if key in entries:
            entries[key]["copies"] += 1
        elif len(entries) < top:
            popularity, rank = float(side.popularity[position]), int(side.rank[position])
            number = names.number(side.name, row)
            entries[key] = {"number": number, "popularity": popularity, "rank": rank, "copies": 1, **labels}
    return list(entries.values())


def likely_false_negatives(pairs: WeightedPairs, side: SidePopularity, names: Names) -> dict[str, Any]:
    """Return the strongest likely false negatives, searched among at most ANCHORS random anchors."""
    anchors = torch.randperm(len(pairs.x), generator=torch.Generator().manual_seed(0))[:ANCHORS]
    links = pairs.links if names.group is None else links_of_groups(pairs.links, torch.from_numpy(names.group))
    likely = false_negatives(pairs.x, pairs.y, links, torch.from_numpy(side.popularity), FALSE_NEGATIVES, anchors)
    rows = []
    columns = (likely.x, likely.y, likely.own, likely.score, likely.own_score)
    for x, y, own, score, own_score in zip(*(column.tolist() for column in columns), strict=True):
        x_row = int(pairs.x_row[x])
        row: dict[str, Any] = {"x": names.number("x", x_row), "y": names.number("y", y), "own": names.number("y", own)}
        row |= {"score": score, "own_score": own_score, "popularity": float(side.popularity[y])}
        labels = (("query", "x", x_row), ("candidate", "y", y), ("own_label", "y", own))
        known = {key: names.label(side_name, number) for key, side_name, number in labels}
        rows.append(row | {key: label for key, label in known.items() if label is not None})
    return {"anchors": likely.anchors, "share": likely.share, "rows": rows}


def _describe_alignment(align: Align, pairs: WeightedPairs) -> dict[str, Any]:
    if pairs.alignment is None:
        return {"method": align}
    return {
        "method": align,
        "meaning": "each x is replaced by its prediction of y, from a ridge regression on all other x of this file",
        "penalty": pairs.alignment.penalty,
        "explained_variance": pairs.alignment.explained,
    }


def _write_kept(
    kept: keep.Keep, pairs: WeightedPairs, sides: dict[str, SidePopularity], names: Names
) -> dict[str, Any]:
    inside = {"y": kept.band.contains(sides["y"].popularity)}
    if "x" in sides:
        inside["x"] = kept.band.contains(sides["x"].popularity)[pairs.links[:, 0].numpy()]
    passing = inside[kept.side] if kept.side in inside else np.logical_and.reduce(list(inside.values()))
    numbers = np.array([names.number("y", row) for row in passing.nonzero()[0].tolist()], np.int64)
    keep.write_list(kept.path, numbers, len(passing))
    return {"file": str(kept.path), "side": kept.side, "pairs": int(passing.sum()), "of": len(passing)}


def _table_rows(sides: dict[str, SidePopularity], names: Names) -> Iterator[dict[str, Any]]:
    for side in sides.values():
        columns = (side.row, side.zeta, side.popularity, side.rank)
        for row, zeta, popularity, rank in zip(*(column.tolist() for column in columns), strict=True):
            number = names.number(side.name, row)
            x = names.number("x", names.y_to_x[row]) if side.name == "y" else number
            values = {"side": side.name, "number": number, "zeta": zeta, "popularity": popularity, "rank": rank, "x": x}
            yield {**values, **names.of(side.name, row)}


def _write_table(folder: Path, sides: dict[str, SidePopularity], names: Names) -> None:
    rows = list(_table_rows(sides, names))
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writerow({key: files.csv_cell(key) for key in rows[0]})
    columns = {words.column for words in names.words.values()}
    rows_of_text = ({**row, **{key: files.csv_cell(row[key]) for key in columns & row.keys()}} for row in rows)
    writer.writerows(
        {**row, "zeta": f"{row['zeta']:.8g}", "popularity": f"{row['popularity']:.8g}"} for row in rows_of_text
    )
    files.write_text(folder / TABLE, text.getvalue())
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return
    with files.write_atomically(folder / PARQUET) as file:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def _write_histogram(
    folder: Path, sides: dict[str, SidePopularity], names: Names, temperature: float, name: str
) -> None:
    anchors = {"y": "x", "x": "y"}
    with figure_style.house_style():
        figure, [row] = figure_style.panels(
            1, len(sides), f"Popularity under this model: {name}, τ = {temperature:g}", (5.2, 3.9)
        )
        for axes, side in zip(row, sides.values(), strict=True):
            shown = np.maximum(side.popularity, 1e-30)  # at low temperatures the smallest values leave every axis
            logs = np.log10(shown)
            edges = np.linspace(logs.min(), max(logs.max(), logs.min() + 1e-6), 61)
            axes.hist(shown, bins=(10**edges).tolist(), color=figure_style.SKY)
            median = float(np.median(side.popularity))
            axes.axvline(1, color=figure_style.ORANGE, label="mean 1")
            axes.axvline(median, color=figure_style.INK, linestyle="--", label=f"median {median:.2g}")
            axes.set(xscale="log", xlabel="popularity (1 = mean over the samples)", ylabel="number of samples")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if np.ptp(logs) < 2.5 else (1,)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
            counted = f"{len(logs):,} samples, effectively {side.effective_number():,.0f}"
            named, among = (_plain(names.words[key].name) for key in (side.name, anchors[side.name]))
            axes.set_title(f"{named}: {counted}" if names.views else f"{named} among anchors {among}: {counted}")
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
        figure_style.save(figure, folder, HISTOGRAM)


def _plain(name: str) -> str:
    return name.replace("$", r"\$")  # matplotlib would read a formula between two dollar signs
