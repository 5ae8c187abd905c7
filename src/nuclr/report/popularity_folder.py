"""The page of `nuclr popularity`: popularity.json and popularity.csv -> what the template shows."""

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from nuclr.data.images import open_image, read_file
from nuclr.data.pairs import BadSample, Pairs
from nuclr.errors import UserError
from nuclr.report import gallery, numbers, popularity, sample
from nuclr.report.logs import read_run
from nuclr.report.pictures import Pictures, data_uri, pictures_of
from nuclr.report.summary import Table, Tile
from nuclr.report.training import Options
from nuclr.training import folder as run_folder

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
    temperature: float = 0.0
    facts: list[tuple[str, str]] = field(default_factory=list)


def popularity_page(path: Path, options: Options) -> PopularityPage:
    """Read the folder; pictures from the files that its table names, or from the run that it is of."""
    content = _read(path)
    rows = _read_table(path / TABLE)
    notes: list[str] = []
    sides = {name: _side(name, rows, content) for name in ("y", "x") if rows[name]}
    labels = {name: {int(row["number"]): row for row in rows[name]} for name in sides}
    has_captions = bool(rows["y"]) and "caption" in rows["y"][0]
    if not has_captions:
        notes.append("No captions were given (--captions), so samples are called by their numbers.")
    picture = _pictures(content, labels, notes, options)
    cards = []
    for name, side in sides.items():
        known = labels[name]
        cards += gallery.cards(
            side,
            options.gallery,
            lambda number, known=known: known[number].get("caption"),  # type: ignore[misc]
            lambda number, known=known: known[number].get("image"),  # type: ignore[misc]
            lambda number, name=name: picture(name, number),  # type: ignore[misc]
        )
    captions = sides.get("y")
    texts = None
    if has_captions and captions is not None:
        texts = [labels["y"][int(number)]["caption"] for number in captions.number[:MOST_DUPLICATES]]
        if len(captions.number) > MOST_DUPLICATES:
            notes.append(f"Near-duplicates were looked for among the first {numbers.count(MOST_DUPLICATES)} captions.")
    for name, told in content["sides"].items():
        if not told["converged"]:
            notes.append(
                f"The {NAMES[name]} are not solved to the end: residual {numbers.number(told['residual'], 2)}."
            )
    if content["align"]["method"] == "ridge":
        explained = numbers.percent(content["align"]["explained_variance"], 0)
        notes.append(
            "Images and captions come from models that never met: each image was mapped to captions by a ridge "
            f"regression that left it out (it explains {explained} of the captions' variance)."
        )
    if content.get("x_without_y"):
        notes.append(f"{numbers.count(content['x_without_y'])} images have no caption and are left out.")
    return PopularityPage(
        title=Path(content["file"]).name if not content.get("run") else Path(content["run"]).name,
        sentence=f"Popularity of {numbers.count(content['pairs'])} pairs of {content['file']}, "
        f"temperature {numbers.number(content['temperature'])}.",
        tiles=_tiles(sides),
        notes=notes,
        solver=_solver(content),
        popularity={
            "cards": cards,
            "sides": list(sides.values()),
            "charts": [chart for side in sides.values() for chart in gallery.pictures_of_side(side)],
            "negatives": _negatives(content, picture),
            "duplicates": popularity.duplicate_rows(texts, captions) if texts and captions else None,
        },
        command=str(content.get("command", "")),
        versions=f"nuclr {content['version']}",
        temperature=float(content["temperature"]),
    )


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


def _pictures(
    content: dict[str, Any], labels: dict[str, dict[int, dict[str, str]]], notes: list[str], options: Options
) -> Callable[[str, int], str | None]:
    """From a side and a number to a picture."""
    if not options.pictures:
        notes.append("Made without pictures, as asked for.")
        return lambda _side, _number: None
    run = Path(content["run"]) if content.get("run") else None
    if run is not None and run_folder.is_run(run):
        try:
            return _of_run(sample.open_train(read_run(run, alone=True))[0], notes)
        except UserError as error:
            notes.append(f"There are no pictures: {error}.")
            return lambda _side, _number: None
    files = [row["image"] for row in next(iter(labels.values())).values() if row.get("image")]
    if not any(Path(file).is_file() for file in files[:100]):
        notes.append("There are no pictures: the table names no image files that are there (--images FOLDER).")
        return lambda _side, _number: None
    made: dict[str, str | None] = {}

    def picture(side: str, number: int) -> str | None:
        file = labels[side].get(number, {}).get("image", "")
        if file not in made:
            made[file] = _read_picture(Path(file))
        return made[file]

    return picture


def _of_run(pairs: Pairs, notes: list[str]) -> Callable[[str, int], str | None]:
    if pairs.x_kind != "image":
        notes.append("The run's data holds vectors, so there are no pictures.")
        return lambda _side, _number: None
    by_number: Pictures = pictures_of(pairs)
    images, first = np.unique(pairs.x_id, return_index=True)
    pair_of = dict(zip(images.tolist(), first.tolist(), strict=True))
    return lambda side, number: by_number(pair_of[number] if side == "x" else number)


def _read_picture(path: Path) -> str | None:
    try:
        found = open_image(read_file(path))
        return data_uri(found) if isinstance(found, Image.Image) else None
    except (BadSample, OSError, ValueError):
        return None


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


def _negatives(content: dict[str, Any], picture: Callable[[str, int], str | None]) -> dict[str, Any] | None:
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
