"""The page of `nuclr popularity`, from popularity.json and popularity.csv."""

import csv
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nuclr import files
from nuclr.data.builtin import BuiltinPairs
from nuclr.data.pairs import Pairs
from nuclr.errors import UserError
from nuclr.report import numbers
from nuclr.report.charts.lines import Chart
from nuclr.report.pictures import LabelRows, SidePictures, pictures_of_files, pictures_of_sides
from nuclr.report.render import Context, LeaveOut, Options, Page, Section, Table, Tile, describe
from nuclr.report.sections.gallery import Gallery, GallerySide, make_cards, popularity_charts
from nuclr.report.sections.popularity import FalseNegative, FalseNegativeList, Findings, list_duplicates
from nuclr.runs import folder as run_folder
from nuclr.runs.run import Run

SUMMARY, TABLE = "popularity.json", "popularity.csv"
NAMES = {"y": "captions", "x": "images"}
MOST_DUPLICATES = 100_000  # captions among which near-duplicates are searched


@dataclass
class PopularityFolder(Context):
    """What `nuclr popularity` wrote: the summary, both sides, and the rows of the table by side and number."""

    content: dict[str, Any] = field(kw_only=True)
    sides: dict[str, GallerySide] = field(kw_only=True)
    labels: LabelRows = field(kw_only=True)
    picture: SidePictures = field(kw_only=True)
    options: Options = field(kw_only=True)

    @property
    def has_captions(self) -> bool:
        """Whether the table has a column of captions."""
        return "caption" in next(iter(self.labels.get("y", {}).values()), {})


@dataclass(frozen=True)
class PopularitySummary:
    """Content of the section "summary"."""

    tiles: list[Tile]
    charts: list[Chart]


@dataclass(frozen=True)
class Solver:
    """Content of the section "repeat"."""

    table: Table
    command: str
    versions: str


def _open(path: Path, options: Options) -> PopularityFolder:
    content = _read_summary(path / SUMMARY)
    rows = _read_table(path / TABLE)
    labels = {side: {int(row["number"]): row for row in own} for side, own in rows.items() if own}
    notes: list[str] = []
    run, pairs = _open_run(content, notes)
    sides = {side: read_side(side, rows, content) for side in labels}
    if run is not None and pairs is not None and "y" in sides:
        sides["y"] = _with_training(sides["y"], run, pairs)
    origin = content.get("run") or content["file"]
    context = PopularityFolder(
        title=Path(origin).name,
        sentence=f"Popularity of {numbers.count(content['pairs'])} pairs of {content['file']}, "
        f"temperature {numbers.number(content['temperature'])}.",
        notes=notes,
        content=content,
        sides=sides,
        labels=labels,
        picture=_pictures(pairs, labels, notes, options),
        options=options,
    )
    _add_notes(context)
    return context


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = files.parse_json(path.read_text(encoding="utf-8"))
        keys = {"sides", "file", "pairs", "temperature", "weights", "align", "version"}
        if missing := keys - content.keys():
            raise ValueError(f"{sorted(missing)[0]} is missing")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path} was not written by nuclr popularity, or is damaged ({error})") from None
    return content


def _read_table(path: Path) -> dict[str, list[dict[str, str]]]:
    rows: dict[str, list[dict[str, str]]] = {"y": [], "x": []}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                rows[row["side"]].append({key: files.read_csv_cell(cell) for key, cell in row.items()})
    except (OSError, KeyError, ValueError, AttributeError, csv.Error) as error:
        raise UserError(f"{path} was not written by nuclr popularity, or is damaged ({error})") from None
    if not rows["y"]:
        raise UserError(f"{path} has no rows")
    return rows


def _open_run(content: dict[str, Any], notes: list[str]) -> tuple[Run | None, Pairs | None]:
    """Return the run whose pairs these are, and its training pairs, if both exist."""
    path = Path(content["run"]) if content.get("run") else None
    if path is None or not run_folder.is_run(path):
        return None, None
    try:
        run = Run.open(path)
        return run, run.train.pairs
    except Exception as error:  # the data may have changed in any way
        notes.append(f"The data of the run is missing: {describe(error)}")
        return None, None


def _with_training(side: GallerySide, run: Run, pairs: Pairs) -> GallerySide:
    """Add the zeta at the end of training and, for the built-in pairs, the true popularity."""
    table = (run.objective_state or {}).get("zeta_y")
    if table is not None and len(table) == len(pairs):
        side = replace(side, zeta=table.double().numpy()[side.number])
    if isinstance(pairs, BuiltinPairs):
        q = pairs.truth.popularity()
        side = replace(side, truth=(q / q.mean())[side.number])
    return side


def _pictures(pairs: Pairs | None, labels: LabelRows, notes: list[str], options: Options) -> SidePictures:
    pictures: SidePictures | None = None
    if not options.pictures:
        notes.append("This page was made without pictures (--no-pictures).")
    elif pairs is None:
        pictures = pictures_of_files(labels)
        if pictures is None:
            notes.append(f"There are no pictures: {TABLE} names no image files that exist (--images FOLDER adds them).")
    elif pairs.x_kind == "image":
        pictures = pictures_of_sides(pairs)
    else:
        notes.append("The run's data holds vectors, so there are no pictures.")
    return pictures or (lambda _side, _number: None)


def _add_notes(context: PopularityFolder) -> None:
    content = context.content
    if not context.has_captions:
        context.note("No captions were given (--captions), so samples are named by their numbers.")
    for name, solved in content["sides"].items():
        if not solved["converged"]:
            residual = numbers.number(solved["residual"], 2)
            context.note(f"The solver did not converge for the {NAMES[name]}: residual {residual}.")
    if content["align"]["method"] == "ridge":
        explained = numbers.percent(content["align"]["explained_variance"], 0)
        context.note(
            "Images and captions were embedded by unrelated models. Each image was therefore mapped to captions by a "
            f"ridge regression on all other images, which explains {explained} of the captions' variance."
        )
    if content.get("x_without_y"):
        context.note(f"{numbers.count(content['x_without_y'])} images have no caption and are left out.")


def read_side(name: str, rows: dict[str, list[dict[str, str]]], content: dict[str, Any]) -> GallerySide:
    """Return one side of the table. Captions that occur several times are merged."""
    x_of_y = np.array([int(row["x"]) for row in rows["y"]])
    y_per_x = dict(zip(*(part.tolist() for part in np.unique(x_of_y, return_counts=True)), strict=True))
    own = rows[name]
    equal_x = content["weights"] == "x"
    weights = (
        [1.0 / y_per_x[int(row["x"])] if equal_x else 1.0 for row in own]
        if name == "y"
        else [1.0 if equal_x else float(y_per_x.get(int(row["number"]), 1)) for row in own]
    )
    first: dict[str, int] = {}
    total: list[float] = []
    kept: list[dict[str, str]] = []
    for row, weight in zip(own, weights, strict=True):
        key = row["caption"] if name == "y" and "caption" in row else row["number"]
        if key in first:
            total[first[key]] += weight
        else:
            first[key] = len(kept)
            kept.append(row)
            total.append(weight)
    solved = content["sides"][name]
    return GallerySide(
        name=NAMES[name],
        number=np.array([int(row["number"]) for row in kept]),
        popularity=np.array([float(row["popularity"]) for row in kept]),
        weight=np.array(total),
        anchors=solved["anchors"],
        residual=solved["residual"],
        converged=solved["converged"],
    )


def popularity_summary(context: PopularityFolder) -> PopularitySummary:
    """Return how unequal the popularity is: headline numbers and histograms."""
    tiles = []
    for side in context.sides.values():
        name = side.name.capitalize()
        share = numbers.percent(side.top_share(), 0)
        tiles.append(Tile(f"{name}: the most popular 1\u202f%", share, "of all popularity"))
        effective = numbers.count(side.effective_number())
        tiles.append(Tile(f"{name}: effective number", effective, f"of {numbers.count(len(side.number))} {side.name}"))
    charts = [chart for side in context.sides.values() for chart in popularity_charts(side)]
    return PopularitySummary(tiles, charts)


def popularity_gallery(context: PopularityFolder) -> Gallery:
    """Return the cards of both sides."""
    cards = []
    for name, side in context.sides.items():
        rows = context.labels[name]
        cards += make_cards(
            side,
            context.options.gallery,
            caption=lambda number, rows=rows: rows[number].get("caption"),  # type: ignore[misc]
            name=lambda number, rows=rows: rows[number].get("image"),  # type: ignore[misc]
            picture=lambda number, name=name: context.picture(name, number),  # type: ignore[misc]
        )
    return Gallery(list(context.sides.values()), cards)


def popularity_findings(context: PopularityFolder) -> Findings:
    """Return likely false negatives and near-duplicate captions."""
    captions = context.sides.get("y")
    duplicates = None
    if context.has_captions and captions is not None:
        texts = [context.labels["y"][int(number)]["caption"] for number in captions.number[:MOST_DUPLICATES]]
        if len(captions.number) > MOST_DUPLICATES:
            limit = numbers.count(MOST_DUPLICATES)
            context.note(f"Near-duplicates were searched among the first {limit} captions.")
        duplicates = list_duplicates(texts, captions)
    negatives = _false_negatives(context)
    if negatives is None and duplicates is None:
        raise LeaveOut("Without captions and false negatives, there is no section on what to look at.")
    return Findings(negatives, duplicates)


def _false_negatives(context: PopularityFolder) -> FalseNegativeList | None:
    listed = context.content.get("false_negatives")
    if not listed:
        return None
    rows = [
        FalseNegative(
            picture=context.picture("x", row["x"]),
            image=row["x"],
            caption=row.get("caption") or f"caption {row['y']}",
            own=row.get("own_caption") or f"caption {row['own']}",
            score=row["score"],
            own_score=row["own_score"],
            popularity=row["popularity"],
        )
        for row in listed["rows"]
    ]
    return FalseNegativeList(listed["share"], listed["anchors"], rows)


def solver_table(context: PopularityFolder) -> Solver:
    """Return how the popularity was solved, and the command."""
    rows = [
        [
            NAMES[name],
            numbers.count(solved["candidates"]),
            numbers.count(solved["anchors"]),
            numbers.count(solved["iterations"]),
            numbers.number(solved["residual"], 2),
            numbers.duration(solved["seconds"]),
        ]
        for name, solved in context.content["sides"].items()
    ]
    return Solver(
        table=Table(["", "samples", "anchors", "passes", "residual", "time"], rows),
        command=str(context.content.get("command", "")),
        versions=f"nuclr {context.content['version']}",
    )


PAGE = Page(
    kind="popularity",
    files=(SUMMARY,),
    open=_open,
    sections=[
        Section("summary", "Summary", "sections/popularity_summary.html", popularity_summary, heading=False),
        Section("gallery", "Gallery", "sections/popularity_gallery.html", popularity_gallery),
        Section("details", "What to look at", "sections/popularity_findings.html", popularity_findings),
        Section("repeat", "How it was solved", "sections/popularity_solver.html", solver_table, menu="Solver"),
    ],
)
