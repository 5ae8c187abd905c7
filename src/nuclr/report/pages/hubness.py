"""The page of `nuclr hubness`, and how pages show the items of a report."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from nuclr import files
from nuclr.report import numbers
from nuclr.report.charts import Chart, Series, line_chart
from nuclr.report.page import (
    Block,
    Card,
    Gallery,
    Item,
    LeaveOut,
    Options,
    Page,
    SearchBox,
    Section,
    Table,
    Text,
    Tile,
    describe,
    shorten,
)
from nuclr.studies.items import rows
from nuclr.studies.items.hubness_report import SEARCHES, FoundItem, HubnessReport
from nuclr.studies.items.searches import Searches

if TYPE_CHECKING:
    from nuclr.report.items import Items

PICTURES = 2_300_000  # characters of all pictures in the search box
CARDS = {
    "hubs": "The items that most queries find, before and after the correction.",
    "suspicious": "Items that attract unusually many queries: of a topic, or a little of all. The median of all items "
    "has the score 0, and 1 % are above 1. Every gallery has such items, so a high score is a reason to read the item, "
    "and no proof that somebody planted it.",
    "found_again": "Items that no query found before the correction, those that are found most often after it first.",
}
UNNAMED = "The items have no names; --names FILE shows their texts, and --images FOLDER their pictures."

R = TypeVar("R", bound=rows.ItemReport)


class ItemView(Generic[R]):
    """A report, and its items as a page shows them: a run's from its data, pictures from their folder, others by name.

    Args:
        report: the report.
        pictures: whether the page contains pictures.
        training: whether items of a run belong to its training pairs, not to its held-out ones.
        items: the items of runs that are open already, by folder.

    """

    def __init__(
        self,
        report: R,
        pictures: bool,
        training: bool = False,
        items: "dict[str, Items | None] | None" = None,
    ) -> None:
        self.report = report
        self.pictures = pictures
        self.training = training
        self.notes: list[str] = []
        self._runs = items or {}

    def show(
        self,
        origin: rows.Origin,
        item: rows.Item,
        word: str = "item",
    ) -> Item:
        """Return an item for the page; `word` is what one without a name is called."""
        pairs = None if origin.run is None else self._open_run(origin.run)
        if pairs is not None and item.number is not None:
            side: Any = origin.side
            shown = pairs.item(side, item.number)
            return replace(shown, label=item.name or shown.label)
        if origin.images is not None and item.name is not None:
            return self._show_picture(Path(origin.images), item.name)
        return named(item, word)

    def _open_run(self, path: str) -> "Items | None":
        if path not in self._runs:
            from nuclr.report.items import Items
            from nuclr.runs.run import Run

            self._runs[path] = None
            try:
                run = Run.open(path)
                source = run.train if self.training else run.val
                if source is not None:
                    self._runs[path] = Items(source.pairs, self.pictures)
            except Exception as error:  # the data may have changed in any way
                self.notes.append(f"The data of the run is missing: {describe(error)}")
        return self._runs[path]

    def _show_picture(self, folder: Path, name: str) -> Item:
        """Return the picture in a file; files outside of the folder are not shown."""
        from nuclr.data.modalities.base import boundary
        from nuclr.image_files import open_image, read_file
        from nuclr.report.items import BROKEN, show_item

        try:
            picture = open_image(read_file(folder / name, boundary(folder, False)))
            return show_item(picture, name, self.pictures)
        except BROKEN:  # including a file that is missing
            return Item("text", name, text=name)

    def command(self) -> Iterator[Block]:
        """Show how the report was made."""
        yield Text(self.report.command, "code")
        yield Text(f"nuclr {self.report.version}", "small")


HubnessView = ItemView[HubnessReport]


def open_folder(path: Path, options: Options) -> HubnessView:
    """Read what `nuclr hubness` wrote."""
    report = HubnessReport.read(path)
    if (path / SEARCHES).is_file():
        report = replace(report, searches=files.read_record(Searches, path / SEARCHES))
    return ItemView(report, options.pictures)


def make_page(view: HubnessView) -> Page:
    """Return the page of a report."""
    report = view.report
    names = [origin.words or Path(origin.name).name for origin in (report.gallery, report.queries)]
    title = f"{names[0]}, searched by {'one another' if report.same else names[1]}"
    page = Page(
        kind="hubness",
        title=title[:1].upper() + title[1:] if report.gallery.words else title,
        verdict=report.advice[0],
        sections=[
            Section("summary", "Summary", summary),
            Section("try", "Try it", try_searches, menu="Try"),
            Section("hubs", "Largest hubs", partial(show_items, "hubs"), menu="Hubs"),
            Section("suspicious", "Suspicious items", partial(show_items, "suspicious"), menu="Suspicious"),
            Section("found", "Found again", partial(show_items, "found_again")),
            Section("repeat", "How it was measured", how_measured, menu="Command"),
        ],
        notes=view.notes,
    )
    if not any(hub.name for hub in report.hubs):
        page.note(UNNAMED)
    return page


def summary(view: HubnessView) -> Iterator[Block]:
    """Show the main measures before and after correction, and the distribution of N_k."""
    report = view.report
    plain = report.plain
    corrected = report.corrected
    yield Tile(
        "Items that nobody finds",
        f"{numbers.percent(plain.never_found)} → {numbers.percent(corrected.never_found)}",
        f"not among the first {report.k} of any query; {numbers.percent(report.chance.never_found)} by chance",
    )
    yield Tile(
        "The largest hub is found by",
        f"{numbers.count(plain.largest)} → {numbers.count(corrected.largest)}",
        f"queries; {numbers.number(plain.mean)} on average, {numbers.count(report.chance.largest)} by chance",
    )
    if plain.recall and corrected.recall:
        yield Tile(
            "Recall@1",
            f"{numbers.percent(plain.recall['1'])} → {numbers.percent(corrected.recall['1'])}",
            f"of {numbers.count(report.labeled)} queries with a known answer",
        )
    for sentence in report.advice[1:]:
        yield Text(sentence)
    itself = ", except itself" if report.same else ""
    yield Text(
        f"{numbers.count(report.counted)} queries look at their first {report.k} of "
        f"{numbers.count(report.gallery.rows)} items{itself}. N_{report.k} of an item is the number of queries that "
        "find it. The correction subtracts a bias from the scores of each item: large for hubs, small for items that "
        "are hardly found."
    )
    yield Table("Before and after the correction", ["", "plain", "corrected", "by chance"], report.table())
    yield sorted_counts(report)


def try_searches(view: HubnessView) -> Iterator[Block]:
    """Let the reader pick queries, and compare what they find before and after the correction."""
    report = view.report
    searches = report.searches
    if searches is None:
        raise LeaveOut
    yield Text(
        f"Type a word, or pick a query, to compare its first {report.k} results with those after the correction. Click "
        "on an item to see whom it crowds out: the queries that no longer find it, and what they find instead. "
        f"{numbers.count(len(searches.queries))} of the {numbers.count(report.counted)} queries are in this page, "
        "first those whose first result became right or wrong, then those that lose the largest hubs."
    )
    items = [named(item, "item") for item in searches.items]
    queries = [named(query, "query") for query in searches.queries]
    if view.pictures and (report.gallery.run or report.gallery.images):
        most_found = sorted(range(len(items)), key=lambda at: -searches.counts[at][0])
        space = _add_pictures(view, report.gallery, searches.items, items, most_found, PICTURES)
        origin = report.gallery if report.same else report.queries
        _add_pictures(view, origin, searches.queries, queries, range(len(queries)), space)
    yield SearchBox(
        queries,
        items,
        searches.counts,
        searches.plain,
        searches.corrected,
        searches.right,
    )


def _add_pictures(
    view: HubnessView,
    origin: rows.Origin,
    items: Sequence[rows.Item],
    shown: list[Item],
    order: Iterable[int],
    space: int,
) -> int:
    """Replace items by their small pictures, in `order` while these fit into `space`; return what is left of it."""
    from nuclr.report.items import thumbnail

    for at in order:
        if space <= 0:
            break
        item = thumbnail(view.show(origin, items[at]))
        if item.picture is not None:
            shown[at] = item
            space -= len(item.picture)
    return space


def named(item: rows.Item, word: str) -> Item:
    """Return an item that the page calls by its name."""
    label = item.name or f"{word} {item.row}"
    return Item("text", label, text=shorten(label))


def sorted_counts(report: HubnessReport) -> Chart:
    """Draw N_k of all items, the largest first, on logarithmic axes."""
    series = []
    for name, measures, color in (("plain", report.plain, 2), ("corrected", report.corrected, 1)):
        histogram = np.array(measures.histogram)
        count = np.append(len(histogram) - 1, np.flatnonzero(histogram[1:])[::-1] + 1)
        at_least = np.append(1, histogram[::-1].cumsum()[::-1][count[1:]])  # items with at least this N_k
        series.append(Series(name, at_least.astype(float).tolist(), count.astype(float).tolist(), color))
    return line_chart(
        f"N_{report.k} of the items, the largest first",
        series,
        "items, from the largest hub",
        log_x=True,
        log_y=True,
    )


def show_items(name: str, view: HubnessView) -> Iterator[Block]:
    """Show the items in a list of the report, such as its hubs."""
    items: list[FoundItem] = getattr(view.report, name)
    if not items:
        raise LeaveOut
    yield Text(CARDS[name])
    largest = max(max(item.plain, item.corrected, 1) for item in items)
    cards = []
    for item in items:
        facts = {f"N_{view.report.k}": f"{numbers.count(item.plain)} → {numbers.count(item.corrected)}"}
        if name == "suspicious":
            facts["score"] = numbers.number(item.suspicion)
        cards.append(
            Card(
                view.show(view.report.gallery, item),
                facts=facts,
                bars=(item.plain / largest, item.corrected / largest),
            )
        )
    yield Gallery(cards)


def how_measured(view: HubnessView) -> Iterator[Block]:
    """Show the correction's settings and the command."""
    report = view.report
    bank = report.bank
    fitted = "a random half of the queries, which are not counted" if bank.name is None else Path(bank.name).name
    facts = [
        ["queries that fit the correction", f"{numbers.count(bank.queries)}: {fitted}"],
        ["different ones that were used", numbers.count(bank.used)],
        ["candidates that they choose from", numbers.count(bank.candidates)],
        ["temperature", numbers.number(report.temperature)],
        ["strength", numbers.number(report.strength)],
    ]
    if report.correlation is not None:
        facts.append([f"rank correlation of the bias with N_{report.k}", numbers.number(report.correlation)])
    yield Table("Correction", [], facts)
    yield from view.command()
