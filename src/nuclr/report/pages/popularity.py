"""The page of `nuclr popularity`, from popularity.json and popularity.csv."""

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from nuclr import files
from nuclr.data import open_pairs
from nuclr.data.builtin import BuiltinPairs
from nuclr.data.formats.embeddings import Embeddings, read_embeddings
from nuclr.data.modalities.base import boundary, read_file
from nuclr.data.modalities.image import open_image
from nuclr.data.pairs import Pairs
from nuclr.errors import UserError
from nuclr.remote import copies_only
from nuclr.report import numbers
from nuclr.report.charts.lines import Chart
from nuclr.report.items import BROKEN, Item, Items, shorten, show_item
from nuclr.report.render import Context, LeaveOut, Options, Page, Section, Table, Tile, describe
from nuclr.report.sections.gallery import Face, Gallery, GallerySide, make_cards, make_face, popularity_charts
from nuclr.report.sections.popularity import FalseNegative, FalseNegativeList, Findings, list_duplicates
from nuclr.runs import folder as run_folder
from nuclr.runs.run import Run
from nuclr.runs.side_words import SideWords, name_sides

SUMMARY, TABLE = "popularity.json", "popularity.csv"
MOST_DUPLICATES = 100_000  # texts among which near-duplicates are searched

Rows = dict[str, dict[int, dict[str, str]]]  # rows of popularity.csv by side and number
ReadItem = Callable[[str, int], Item]  # from a side, "x" or "y", and a number


@dataclass
class PopularityFolder(Context):
    """What `nuclr popularity` wrote: the summary, both sides, and the rows of the table by side and number."""

    content: dict[str, Any] = field(kw_only=True)
    words: dict[str, SideWords] = field(kw_only=True)
    sides: dict[str, GallerySide] = field(kw_only=True)
    rows: Rows = field(kw_only=True)
    item: ReadItem = field(kw_only=True)
    options: Options = field(kw_only=True)

    @cached_property
    def first_y(self) -> dict[int, int]:
        """The number of the first y of each x."""
        return {int(row["x"]): number for number, row in reversed(list(self.rows.get("y", {}).items()))}

    def texts(self, side: str) -> list[str]:
        """Return the texts of a side; an empty list if the table has none."""
        words = self.words[side]
        if side not in self.sides or words.kind != "text" or not has_labels(self.rows, side, words):
            return []
        return [self.rows[side][int(number)][words.column] for number in self.sides[side].number]


@dataclass(frozen=True)
class PopularitySummary:
    """Content of the section "summary"."""

    x: SideWords
    y: SideWords
    tiles: list[Tile]
    charts: list[Chart]
    sides: list[GallerySide]


@dataclass(frozen=True)
class Solver:
    """Content of the section "repeat"."""

    table: Table
    command: str
    versions: str


def _open(path: Path, options: Options) -> PopularityFolder:
    content = _read_summary(path / SUMMARY)
    table = _read_table(path / TABLE)
    rows = {side: {int(row["number"]): row for row in own} for side, own in table.items() if own}
    notes: list[str] = []
    run, pairs = _open_pairs(content, notes)
    names = content["names"]
    words = dict(zip("xy", name_sides(*(names[s][k] for s in "xy" for k in ("name", "kind"))), strict=True))
    sides = {side: read_side(side, table, content, words[side]) for side in rows}
    if run is not None and pairs is not None and "y" in sides:
        sides["y"] = _with_training(sides["y"], run, pairs)
    origin = content.get("run") or content["file"]
    context = PopularityFolder(
        title=Path(origin).name,
        sentence=f"Popularity of {numbers.count(content['pairs'])} {words['y'].many if content['views'] else 'pairs'} "
        f"of {content['file']}, temperature {numbers.number(content['temperature'])}.",
        notes=notes,
        content=content,
        words=words,
        sides=sides,
        rows=rows,
        item=_items_of_pairs(pairs, options) if pairs is not None else _items_of_files(content, rows, words, options),
        options=options,
    )
    _add_notes(context, pairs)
    return context


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = files.parse_json(path.read_text(encoding="utf-8"))
        keys = {"sides", "file", "pairs", "temperature", "weights", "align", "version", "names", "views", "items"}
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
                rows[row["side"]].append(
                    {files.read_csv_cell(key): files.read_csv_cell(cell) for key, cell in row.items()}
                )
    except (OSError, KeyError, ValueError, AttributeError, csv.Error) as error:
        raise UserError(f"{path} was not written by nuclr popularity, or is damaged ({error})") from None
    if not rows["y"]:
        raise UserError(f"{path} has no rows")
    return rows


def _open_pairs(content: dict[str, Any], notes: list[str]) -> tuple[Run | None, Pairs | None]:
    """Return the run whose training pairs these are, and the pairs, if they exist."""
    path, options = content.get("run"), content["items"].get("pairs")
    try:
        if path and run_folder.is_run(Path(path)):
            run = Run.open(path)
            return run, run.train.pairs
        with copies_only():  # the URL in a summary is not the user's
            return None, open_pairs(options.pop("path"), options.pop("root"), **options) if options else None
    except Exception as error:  # the data may have changed in any way
        notes.append(f"The data of {'the run' if path else '--pairs'} is missing: {describe(error)}")
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


def _items_of_pairs(pairs: Pairs, options: Options) -> ReadItem:
    """Return the items of pairs: x are counted by distinct x, y by pairs."""
    items = Items(pairs, options.pictures)
    distinct, first = np.unique(pairs.x_id, return_index=True)
    pair_of = dict(zip(distinct.tolist(), first.tolist(), strict=True))
    return lambda side, number: items.item(side, pair_of[number] if side == "x" else number)


def _items_of_files(content: dict[str, Any], rows: Rows, words: dict[str, SideWords], options: Options) -> ReadItem:
    """Return the items that popularity.csv names: texts, and files of images; otherwise rows of the embedding file.

    Files outside of the folder of the images are not shown, unless the user allowed them.
    """
    items = content["items"]
    folder = Path(items.get("images") or ".")
    inside = boundary(folder, items.get("allow_outside") is True)
    made: dict[tuple[str, str], Item] = {}

    @cache
    def embeddings() -> Embeddings:
        with copies_only():
            return read_embeddings(content["file"])

    def make(side: str, number: int, label: str) -> Item:
        kind, named = words[side].kind, f"{words[side].one} {number}"
        if kind == "text" and label:
            return show_item(label, named)
        try:
            if kind == "image":
                return show_item(open_image(read_file(folder / label, inside)), named, options.pictures)
            return show_item(getattr(embeddings(), side)[number].numpy(), named)
        except BROKEN:  # including a file that is missing
            return Item("picture" if kind == "image" else "numbers", named)

    def item(side: str, number: int) -> Item:
        label = rows.get(side, {}).get(number, {}).get(words[side].column, "")
        key = side, label or str(number)
        if key not in made:
            made[key] = make(side, number, label)
        return made[key]

    return item


def has_labels(rows: Rows, side: str, words: SideWords) -> bool:
    """Return whether the table has a column with the texts or file names of a side."""
    return words.column in next(iter(rows.get(side, {}).values()), {})


def _add_notes(context: PopularityFolder, pairs: Pairs | None) -> None:
    content, words = context.content, context.words
    images = [side for side in context.sides if words[side].kind == "image"]
    if images and not context.options.pictures:
        context.note("This page was made without pictures (--no-pictures).")
    elif images and not any(context.item(images[0], int(k)).picture for k in context.sides[images[0]].number[:100]):
        context.note(f"There are no pictures: {TABLE} names no image files that exist (--images FOLDER adds them).")
    if pairs is None and not any(has_labels(context.rows, side, words[side]) for side in context.sides):
        context.note("The embedding file has no texts or pictures; --pairs or --captions shows them.")
    elif words["y"].one == "caption" and not context.texts("y") and pairs is None:
        context.note("No captions were given (--captions), so samples are named by their numbers.")
    for name, solved in content["sides"].items():
        if not solved["converged"]:
            residual = numbers.number(solved["residual"], 2)
            context.note(f"The solver did not converge for the {words[name].many}: residual {residual}.")
    x, y = words["x"], words["y"]
    if content["align"]["method"] == "ridge":
        explained = numbers.percent(content["align"]["explained_variance"], 0)
        context.note(
            f"{x.title} and {y.many} were embedded by unrelated models. Each {x.one} was therefore mapped to {y.many} "
            f"by a ridge regression on all other {x.many}, which explains {explained} of the {y.many}' variance."
        )
    if content.get("x_without_y"):
        context.note(f"{numbers.count(content['x_without_y'])} {x.many} have no {y.one} and are left out.")


def read_side(
    name: str, rows: dict[str, list[dict[str, str]]], content: dict[str, Any], words: SideWords
) -> GallerySide:
    """Return one side of the table. Texts that occur several times are merged."""
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
        key = row[words.column] if words.kind == "text" and words.column in row else row["number"]
        if key in first:
            total[first[key]] += weight
        else:
            first[key] = len(kept)
            kept.append(row)
            total.append(weight)
    solved = content["sides"][name]
    return GallerySide(
        words=words,
        number=np.array([int(row["number"]) for row in kept]),
        popularity=np.array([float(row["popularity"]) for row in kept]),
        weight=np.array(total),
        anchors=solved["anchors"],
        residual=solved["residual"],
        converged=solved["converged"],
        agreement=math.nan if (agreement := solved.get("agreement")) is None else float(agreement),
    )


def popularity_summary(context: PopularityFolder) -> PopularitySummary:
    """Return how unequal the popularity is: headline numbers and histograms."""
    tiles = []
    for side in context.sides.values():
        name = side.words.title
        share = numbers.percent(side.top_share(), 0)
        tiles.append(Tile(f"{name}: the most popular 1\u202f%", share, "of all popularity"))
        effective = numbers.count(side.effective_number())
        tiles.append(Tile(f"{name}: effective number", effective, f"of {numbers.count(len(side.number))} {side.name}"))
    charts = [chart for side in context.sides.values() for chart in popularity_charts(side)]
    return PopularitySummary(context.words["x"], context.words["y"], tiles, charts, list(context.sides.values()))


def popularity_gallery(context: PopularityFolder) -> Gallery:
    """Return the cards of both sides."""

    def face(side: str, number: int) -> Face:
        row = context.rows[side][number]
        other = None
        if not context.content["views"]:
            partner = int(row["x"]) if side == "y" else context.first_y.get(number)
            other = None if partner is None else context.item("x" if side == "y" else "y", partner)
        own_first = (context.words[side], *context.words.values())
        named = {w.column: row[w.column] for w in own_first if w.kind == "image" and w.column in row}
        file = next(iter(named.values()), "")
        labels = {"name": file} if file else {}
        labels |= {w.column: shorten(row[w.column]) for w in context.words.values() if w.column in row.keys() - named}
        return make_face(context.item(side, number), other, file, labels)

    cards = [
        card
        for name, side in context.sides.items()
        for card in make_cards(side, context.options.gallery, partial(face, name))
    ]
    return Gallery(list(context.sides.values()), cards)


def popularity_findings(context: PopularityFolder) -> Findings:
    """Return likely false negatives and near-duplicate texts."""
    duplicates = []
    for key, side in context.sides.items():
        if texts := context.texts(key):
            if len(texts) > MOST_DUPLICATES:
                limit = numbers.count(MOST_DUPLICATES)
                context.note(f"Near-duplicates were searched among the first {limit} {side.name}.")
            duplicates.append(list_duplicates(texts[:MOST_DUPLICATES], side))
    negatives = _false_negatives(context)
    if negatives is None and not duplicates:
        raise LeaveOut("" if context.content["views"] else "Without texts and false negatives, nothing stands out.")
    return Findings(negatives, duplicates)


def _false_negatives(context: PopularityFolder) -> FalseNegativeList | None:
    listed = context.content.get("false_negatives")
    if not listed:
        return None
    rows = [
        FalseNegative(
            query=context.item("x", row["x"]),
            candidate=context.item("y", row["y"]),
            own=context.item("y", row["own"]),
            score=row["score"],
            own_score=row["own_score"],
            popularity=row["popularity"],
        )
        for row in listed["rows"]
    ]
    return FalseNegativeList(context.words["x"], context.words["y"], listed["share"], listed["anchors"], rows)


def solver_table(context: PopularityFolder) -> Solver:
    """Return how the popularity was solved, and the command."""
    rows = [
        [
            context.words[name].many,
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
