"""The popularity command: embedding file in, folder with table, summary and histogram out."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import nuclr
from nuclr.data.embeddings import read_embeddings
from nuclr.experiments import output, style
from nuclr.experiments.popularity import keep
from nuclr.experiments.popularity.names import Names, read_names
from nuclr.experiments.popularity.sides import Align, Pairs, Side, Weights, make_pairs, solve_sides

COMMAND = "nuclr popularity"
SUMMARY, TABLE, PARQUET, HISTOGRAM = "popularity.json", "popularity.csv", "popularity.parquet", "histogram"
FILES = (SUMMARY, TABLE, PARQUET, *(f"{HISTOGRAM}.{kind}" for kind in style.FORMATS))


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
    **solver: Any,
) -> dict[str, Any]:
    """Solve both sides of `file`, write everything into `folder`, and return what popularity.json holds.

    `solver` options (tolerance, max_iterations, progress) go to `nuclr.popularity.solve`. All that can be wrong with
    the input is found before the solver starts.
    """
    embeddings = read_embeddings(file)
    names = read_names(captions, images, len(embeddings.x), embeddings.y_to_x.tolist())
    output.prepare_folder(folder, COMMAND, SUMMARY, FILES)
    if kept is not None:
        keep.check_target(kept.path)
    pairs = make_pairs(embeddings, weights, align)
    sides = solve_sides(pairs, temperature, device, **solver)

    content: dict[str, Any] = {
        "written_by": COMMAND,
        "version": nuclr.__version__,
        "file": str(file),
        "temperature": temperature,
        "weights": weights,
        "pairs": len(embeddings.y),
        "x": len(embeddings.x),
        "x_without_y": len(embeddings.x) - len(pairs.x_number),
        "align": _align(align, pairs),
        "sides": {
            side.name: {**side.summary(), **extremes(side, names, embeddings.y_to_x.tolist(), top)}
            for side in sides.values()
        },
    }
    if kept is not None:
        content["keep"] = _write_kept(kept, pairs, sides)
    _write_table(folder, sides, names, embeddings.y_to_x.tolist())
    _write_histogram(folder, sides, temperature, file.name)
    output.write_json(folder / SUMMARY, content)
    return content


def extremes(side: Side, names: Names, y_to_x: list[int], top: int) -> dict[str, list[dict[str, Any]]]:
    """The `top` most and least popular samples; those of the same name and popularity once, with how many they are."""
    order = side.order()
    return {
        "most_popular": _distinct(side, order, names, y_to_x, top),
        "least_popular": _distinct(side, order[::-1], names, y_to_x, top),
    }


def _distinct(side: Side, order: np.ndarray, names: Names, y_to_x: list[int], top: int) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for row in order.tolist():
        number = int(side.number[row])
        name = names.of(side.name, number)
        key = name or str(number)
        if key in found:
            found[key]["copies"] += 1
        elif len(found) < top:
            found[key] = {"number": number, "popularity": float(side.popularity[row]), "copies": 1}
            found[key] |= {"rank": int(side.rank[row]), **_labels(side.name, number, names, y_to_x)}
    return list(found.values())


def _labels(side: str, number: int, names: Names, y_to_x: list[int]) -> dict[str, str]:
    labels = {}
    if names.captions is not None and side == "y":
        labels["caption"] = names.captions[number]
    if names.images is not None:
        labels["image"] = names.images[y_to_x[number] if side == "y" else number]
    return labels


def _align(align: Align, pairs: Pairs) -> dict[str, Any]:
    if pairs.alignment is None:
        return {"method": align}
    return {
        "method": align,
        "meaning": "each x replaced by its prediction of y, from a ridge regression on all other x of this file",
        "penalty": pairs.alignment.penalty,
        "explained_variance": pairs.alignment.explained,
    }


def _write_kept(kept: Keep, pairs: Pairs, sides: dict[str, Side]) -> dict[str, Any]:
    admitted = {
        "y": kept.band.admits(sides["y"].popularity),
        "x": kept.band.admits(sides["x"].popularity)[pairs.x_of_y.numpy()],
    }
    passing = admitted["y"] & admitted["x"] if kept.side == "both" else admitted[kept.side]
    keep.write_list(kept.path, passing.nonzero()[0], len(passing))
    return {"file": str(kept.path), "side": kept.side, "pairs": int(passing.sum()), "of": len(passing)}


def _rows(sides: dict[str, Side], names: Names, y_to_x: list[int]) -> Iterator[dict[str, Any]]:
    for side in sides.values():
        columns = (side.number, side.zeta, side.popularity, side.rank)
        for number, zeta, popularity, rank in zip(*(column.tolist() for column in columns), strict=True):
            row = {"side": side.name, "number": number, "zeta": zeta, "popularity": popularity, "rank": rank}
            row["x"] = y_to_x[number] if side.name == "y" else number
            if names.captions is not None:
                row["caption"] = names.captions[number] if side.name == "y" else ""
            if names.images is not None:
                row["image"] = names.images[row["x"]]
            yield row


def _write_table(folder: Path, sides: dict[str, Side], names: Names, y_to_x: list[int]) -> None:
    rows = list(_rows(sides, names, y_to_x))
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
    titles = {"y": "popularity of y (anchors: x)", "x": "popularity of x (anchors: y)"}
    with style.style():
        figure, [row] = style.panels(1, 2, f"Popularity under this model: {name}, τ = {temperature:g}", (5.2, 3.6))
        for axes, side in zip(row, sides.values(), strict=True):
            logs = np.log10(side.popularity)
            edges = np.linspace(logs.min(), max(logs.max(), logs.min() + 1e-6), 61)
            axes.hist(side.popularity, bins=(10**edges).tolist(), color=style.BLUE)
            axes.axvline(1, color=style.ORANGE, label="mean, 1")
            median = float(np.median(side.popularity))
            axes.axvline(median, color=style.INK, linestyle="--", label=f"median, {median:.2g}")
            axes.set(title=titles[side.name], xscale="log", ylabel="samples")
            axes.set_xlabel("popularity (1 = the mean over the samples)")
            axes.legend(title=f"{len(logs):,} samples,\neffectively {side.effective_number():,.0f}", loc="upper right")
        style.save(figure, folder, HISTOGRAM)
