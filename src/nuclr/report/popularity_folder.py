"""The page of `nuclr popularity`: popularity.json and popularity.csv -> what the template shows."""

import csv
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nuclr.data.builtin import BuiltinPairs
from nuclr.data.pairs import Pairs
from nuclr.errors import UserError
from nuclr.report import gallery, numbers, popularity, sample
from nuclr.report.logs import read_run
from nuclr.report.popularity_pictures import Labels, Picture, pictures
from nuclr.report.summary import Table, Tile
from nuclr.report.training import Options
from nuclr.runs import folder as run_folder

SUMMARY, TABLE = "popularity.json", "popularity.csv"
NAMES = {"y": "captions", "x": "images"}
MOST_DUPLICATES = 100_000  # captions among which near-duplicates are looked for


@dataclass
class PopularityPage:
    """All that the template needs."""

    title: str
    sentence: str
    tiles: list[Tile]
    notes: list[str]
    solver: Table
    popularity: dict[str, Any]
    command: str
    versions: str


def popularity_page(path: Path, options: Options) -> PopularityPage:
    """Read the folder; pictures from the files that its table names, or from the run that it is of."""
    content = _read(path)
    rows = _read_table(path / TABLE)
    labels = {name: {int(row["number"]): row for row in own} for name, own in rows.items() if own}
    has_captions = "caption" in next(iter(rows["y"]), {})
    notes = _notes(content, has_captions)
    run, pairs = _run_of(content, notes)
    sides = {name: _side(name, rows, content) for name in labels}
    if run is not None and pairs is not None and "y" in sides:
        sides["y"] = _beside_training(sides["y"], run, pairs)
    picture = pictures(pairs, labels, notes, options.pictures)
    captions = sides.get("y")
    texts = None
    if has_captions and captions is not None:
        texts = [labels["y"][int(number)]["caption"] for number in captions.number[:MOST_DUPLICATES]]
        if len(captions.number) > MOST_DUPLICATES:
            notes.append(f"Near-duplicates were looked for among the first {numbers.count(MOST_DUPLICATES)} captions.")
    return PopularityPage(
        title=Path(content["file"]).name if not content.get("run") else Path(content["run"]).name,
        sentence=f"Popularity of {numbers.count(content['pairs'])} pairs of {content['file']}, "
        f"temperature {numbers.number(content['temperature'])}.",
        tiles=_tiles(sides),
        notes=notes,
        solver=_solver(content),
        popularity={
            "cards": [card for name, side in sides.items() for card in _cards(name, side, labels, picture, options)],
            "sides": list(sides.values()),
            "charts": [chart for side in sides.values() for chart in gallery.pictures_of_side(side)],
            "negatives": _negatives(content, picture),
            "duplicates": popularity.duplicate_rows(texts, captions) if texts and captions else None,
        },
        command=str(content.get("command", "")),
        versions=f"nuclr {content['version']}",
    )


def _cards(name: str, side: gallery.Side, labels: Labels, picture: Picture, options: Options) -> list[dict[str, Any]]:
    known = labels[name]
    return gallery.cards(
        side,
        options.gallery,
        lambda number: known[number].get("caption"),
        lambda number: known[number].get("image"),
        lambda number: picture(name, number),
    )


def _notes(content: dict[str, Any], has_captions: bool) -> list[str]:
    notes = []
    if not has_captions:
        notes.append("No captions were given (--captions), so samples are called by their numbers.")
    for name, told in content["sides"].items():
        if not told["converged"]:
            residual = numbers.number(told["residual"], 2)
            notes.append(f"The {NAMES[name]} are not solved to the end: residual {residual}.")
    if content["align"]["method"] == "ridge":
        explained = numbers.percent(content["align"]["explained_variance"], 0)
        notes.append(
            "Images and captions come from models that never met: each image was mapped to captions by a ridge "
            f"regression that left it out (it explains {explained} of the captions' variance)."
        )
    if content.get("x_without_y"):
        notes.append(f"{numbers.count(content['x_without_y'])} images have no caption and are left out.")
    return notes


def _run_of(content: dict[str, Any], notes: list[str]) -> tuple[Path | None, Pairs | None]:
    """The run that these pairs were trained in, and its pairs, where both are there."""
    run = Path(content["run"]) if content.get("run") else None
    if run is None or not run_folder.is_run(run):
        return None, None
    try:
        return run, sample.open_train(read_run(run, alone=True))[0]
    except UserError as error:
        notes.append(f"The run's data is missing: {error}.")
        return run, None


def _beside_training(side: gallery.Side, run: Path, pairs: Pairs) -> gallery.Side:
    """With the zeta that training left, and for the built-in pairs with the truth."""
    table = ((sample.newest_state(run) or {}).get("objective") or {}).get("zeta_y")
    if table is not None and len(table) == len(pairs):
        side = replace(side, zeta=table.double().numpy()[side.number])
    if isinstance(pairs, BuiltinPairs):
        q = pairs.truth.popularity()
        side = replace(side, truth=(q / q.mean())[side.number])
    return side


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
        if missing := {"sides", "file", "temperature", "weights", "align"} - content.keys():
            raise ValueError(f"{sorted(missing)[0]} is missing")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path / SUMMARY}: not what nuclr popularity writes ({error})") from None
    return content


def _read_table(path: Path) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {"y": [], "x": []}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                found[row["side"]].append(row)
    except (OSError, KeyError, csv.Error) as error:
        raise UserError(f"{path}: not what nuclr popularity writes ({error})") from None
    return found


def _side(name: str, rows: dict[str, list[dict[str, str]]], content: dict[str, Any]) -> gallery.Side:
    """One side; captions that occur several times are taken together."""
    count = np.array([int(row["x"]) for row in rows["y"]])
    by_x = dict(zip(*(part.tolist() for part in np.unique(count, return_counts=True)), strict=True))
    own = rows[name]
    even = content["weights"] == "x"
    weight = (
        [1.0 / by_x[int(row["x"])] if even else 1.0 for row in own]
        if name == "y"
        else [1.0 if even else float(by_x.get(int(row["number"]), 1)) for row in own]
    )
    first: dict[str, int] = {}
    total: list[float] = []
    kept: list[dict[str, str]] = []
    for row, w in zip(own, weight, strict=True):
        key = row["caption"] if name == "y" and "caption" in row else row["number"]
        if key in first:
            total[first[key]] += w
        else:
            first[key] = len(kept)
            kept.append(row)
            total.append(w)
    told = content["sides"][name]
    return gallery.Side(
        name=NAMES[name],
        number=np.array([int(row["number"]) for row in kept]),
        popularity=np.array([float(row["popularity"]) for row in kept]),
        weight=np.array(total),
        anchors=told["anchors"],
        residual=told["residual"],
        converged=told["converged"],
    )


def _tiles(sides: dict[str, gallery.Side]) -> list[Tile]:
    found = []
    for side in sides.values():
        name = side.name.capitalize()
        found.append(
            Tile(f"{name}: the most popular 1\u202f%", numbers.percent(side.top_share(), 0), "of all popularity")
        )
        worth = f"of {numbers.count(len(side.number))}, were all equally popular"
        found.append(Tile(f"{name}: worth", numbers.count(side.effective_number()), worth))
    return found


def _solver(content: dict[str, Any]) -> Table:
    rows = [
        [
            NAMES[name],
            numbers.count(told["candidates"]),
            numbers.count(told["anchors"]),
            numbers.count(told["iterations"]),
            numbers.number(told["residual"], 2),
            numbers.duration(told["seconds"]),
        ]
        for name, told in content["sides"].items()
    ]
    return Table(["", "samples", "anchors", "passes", "residual", "time"], rows, set())


def _negatives(content: dict[str, Any], picture: Picture) -> dict[str, Any] | None:
    found = content.get("false_negatives")
    if not found:
        return None
    rows = [
        {
            "picture": picture("x", row["x"]),
            "image": row["x"],
            "caption": row.get("caption") or f"caption {row['y']}",
            "own": row.get("own_caption") or f"caption {row['own']}",
            "score": row["score"],
            "own_score": row["own_score"],
            "popularity": row["popularity"],
            "fits": None,
        }
        for row in found["rows"]
    ]
    return {"share": found["share"], "anchors": found["anchors"], "rows": rows, "true": None}
