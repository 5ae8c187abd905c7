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
from nuclr.data.formats.stored_texts import StoredTexts
from nuclr.errors import UserError, require
from nuclr.popularity.false_negatives import false_negatives
from nuclr.runs.features import links_of_groups
from nuclr.runs.folder import environment
from nuclr.studies import figure_style
from nuclr.studies.popularity import keep
from nuclr.studies.popularity.inputs import Names, PopularityInput
from nuclr.studies.popularity.sides import Align, SidePopularity, WeightedPairs, Weights, solve_sides, weigh_pairs
from nuclr.studies.popularity.viewer import write_viewer

COMMAND = "nuclr popularity"
SUMMARY, TABLE, PARQUET, HISTOGRAM = "popularity.json", "popularity.csv", "popularity.parquet", "histogram"
FALSE_NEGATIVES, ANCHORS = 12, 2000  # likely false negatives to report, and anchors among which they are searched
LARGE = 1_000_000  # pairs above which there is no CSV file, and no page, which is made from it
SCANNED = 10_000  # texts in files among which copies of the most popular ones are counted
WRITTEN = 2**16  # rows of the table that are written at a time
FILES = (SUMMARY, TABLE, PARQUET, *(f"{HISTOGRAM}.{kind}" for kind in figure_style.FORMATS))


def write_popularity(
    samples: PopularityInput,
    folder: Path,
    temperature: float,
    weights: Weights = "pairs",
    align: Align = "none",
    kept: keep.Keep | None = None,
    table: Path | None = None,
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
        table: a Parquet file for viewers of embeddings (`viewer`).
        top: how many of the most and least popular samples to report.
        device: where to solve.
        solver: options of `nuclr.popularity.solve` (tolerance, max_iterations, progress).

    Raises:
        UserError: anything wrong with the input, before the solver starts.

    """
    embeddings, names = samples.embeddings, samples.names
    uids = check_outputs(samples, folder, kept, table)
    pairs = weigh_pairs(embeddings, weights, align)
    files.prepare_folder(folder, COMMAND, SUMMARY, FILES)
    sides = solve_sides(pairs, temperature, device, views=names.views, **solver)

    content: dict[str, Any] = {
        "written_by": COMMAND,
        "version": nuclr.__version__,
        "command": environment()["command"],
        "file": samples.origin,
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
            content["keep"] = _write_kept(kept, pairs, sides, names, uids)
        if table is not None:
            write_viewer(table, pairs, sides, names, samples.uids)
            content["table"] = str(table)
        _write_tables(folder, sides, names, large=content["pairs"] > LARGE)
        _write_histogram(folder, sides, names, temperature, Path(samples.origin).name)
        files.write_json(folder / SUMMARY, content)
    return content


def check_outputs(
    samples: PopularityInput, folder: Path, kept: keep.Keep | None, table: Path | None
) -> np.ndarray | None:
    """Refuse, before any work, files that cannot be written, and return the uids if they are asked for.

    Raises:
        UserError: names the option.

    """
    if kept is not None:
        kept.check_targets(folder)
    if table is not None:
        keep.check_new("--table", table, ".parquet", folder)
        require("pyarrow.parquet", purpose=f"--table {table}")
    if kept is None or kept.uids is None:
        return None
    if samples.uids is None:
        raise UserError(f"--uids {kept.uids}: {samples.origin} has no metadata with a column 'uid', as DataComp's has")
    return keep.parse_uids(samples.uids)


def extremes(side: SidePopularity, names: Names, top: int) -> dict[str, list[dict[str, Any]]]:
    """Return the `top` most and least popular samples; equal texts appear once, with the number of copies.

    Copies are counted among all samples or, if the texts are in files, among the 10,000 most (or least) popular ones.
    """
    order = side.order()
    return {
        "most_popular": _distinct(side, order, names, top),
        "least_popular": _distinct(side, order[::-1], names, top),
    }


def _distinct(side: SidePopularity, order: np.ndarray, names: Names, top: int) -> list[dict[str, Any]]:
    if isinstance(names.labels[side.name], StoredTexts):
        order = order[: max(SCANNED, top)]
    rows = side.row[order].tolist()
    is_text = names.words[side.name].kind == "text" and len(names.labels[side.name]) > 0
    texts: list[Any] = names.labels_of_rows(side.name, rows) if is_text else rows
    first: dict[Any, int] = {}  # position in `order` of the first sample with this text
    copies: dict[Any, int] = {}
    for position, text in enumerate(texts):
        if text in first:
            copies[text] += 1
        elif len(first) < top:
            first[text], copies[text] = position, 1
    chosen = [rows[position] for position in first.values()]
    labels = names.of_rows(side.name, chosen)
    return [
        {
            "number": names.number(side.name, rows[position]),
            "popularity": float(side.popularity[order[position]]),
            "rank": int(side.rank[order[position]]),
            "copies": copies[text],
            **{column: own[entry] for column, own in labels.items()},
        }
        for entry, (text, position) in enumerate(first.items())
    ]


def likely_false_negatives(pairs: WeightedPairs, side: SidePopularity, names: Names) -> dict[str, Any]:
    """Return the strongest likely false negatives, searched among at most ANCHORS random anchors."""
    anchors = torch.randperm(len(pairs.x), generator=torch.Generator().manual_seed(0))[:ANCHORS]
    links = pairs.links if names.group is None else links_of_groups(pairs.links, torch.from_numpy(names.group))
    weight = torch.from_numpy(side.popularity)
    likely = false_negatives(pairs.x, pairs.y, links, weight, FALSE_NEGATIVES, anchors, normalize=pairs.normalize)
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
    kept: keep.Keep,
    pairs: WeightedPairs,
    sides: dict[str, SidePopularity],
    names: Names,
    uids: np.ndarray | None,
) -> dict[str, Any]:
    inside = {"y": kept.band.contains(sides["y"].popularity)}
    if "x" in sides:
        inside["x"] = kept.band.contains(sides["x"].popularity)[pairs.links[:, 0].numpy()]
    passing = inside[kept.side] if kept.side in inside else np.logical_and.reduce(list(inside.values()))
    content: dict[str, Any] = {"side": kept.side, "pairs": int(passing.sum()), "of": len(passing)}
    if kept.path is not None:
        keep.write_list(kept.path, names.numbers_of_rows("y", passing.nonzero()[0]), len(passing))
        content["file"] = str(kept.path)
    if kept.uids is not None and uids is not None:
        content["distinct_uids"] = keep.write_uids(kept.uids, uids[passing])
        content["uids"] = str(kept.uids)
    return content


def _table_blocks(sides: dict[str, SidePopularity], names: Names) -> Iterator[dict[str, list[Any]]]:
    """Yield the columns of the table, some rows at a time."""
    for side in sides.values():
        for start in range(0, len(side.row), WRITTEN):
            block = slice(start, start + WRITTEN)
            rows = side.row[block].tolist()
            number = names.numbers_of_rows(side.name, side.row[block]).tolist()
            x = number
            if side.name == "y":
                x = names.numbers_of_rows("x", np.array([names.y_to_x[row] for row in rows])).tolist()
            yield {
                "side": [side.name] * len(rows),
                "number": number,
                "zeta": side.zeta[block].tolist(),
                "popularity": side.popularity[block].tolist(),
                "rank": side.rank[block].tolist(),
                "x": x,
                **names.of_rows(side.name, rows),
            }


def _write_tables(folder: Path, sides: dict[str, SidePopularity], names: Names, large: bool) -> None:
    """Write the CSV file, unless there are too many rows for one, and the Parquet file if pyarrow is installed."""
    if large:
        (folder / TABLE).unlink(missing_ok=True)  # of an earlier call
    else:
        _write_csv(folder / TABLE, sides, names)
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return
    with files.write_atomically(folder / PARQUET) as file:
        writer = None
        for columns in _table_blocks(sides, names):
            table = pyarrow.table(columns)
            writer = pyarrow.parquet.ParquetWriter(file, table.schema) if writer is None else writer
            writer.write_table(table)
        if writer is not None:
            writer.close()


def _write_csv(path: Path, sides: dict[str, SidePopularity], names: Names) -> None:
    named = {words.column for words in names.words.values()}
    with files.write_atomically(path) as file:
        text = io.TextIOWrapper(file, "utf-8", "replace", newline="")
        writer = csv.writer(text)
        header = False
        for columns in _table_blocks(sides, names):
            if not header:
                writer.writerow([files.csv_cell(key) for key in columns])
                header = True
            cells = [
                [files.csv_cell(value) for value in values]
                if key in named
                else [f"{value:.8g}" for value in values]
                if key in ("zeta", "popularity")
                else values
                for key, values in columns.items()
            ]
            writer.writerows(zip(*cells, strict=True))
        text.flush()
        text.detach()  # otherwise it would close the file before it is renamed


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
