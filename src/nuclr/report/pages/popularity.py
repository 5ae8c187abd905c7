"""The page of `nuclr popularity`."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from nuclr.report import numbers
from nuclr.report.charts import Chart, Series, line_chart
from nuclr.report.page import (
    Answer,
    Block,
    Card,
    Example,
    Gallery,
    LeaveOut,
    Options,
    Page,
    Section,
    Table,
    Text,
    Tile,
)
from nuclr.report.pages.hubness import UNNAMED, ItemView
from nuclr.studies.items.popularity_report import PopularityReport, RankedItem, SidePopularity

FLOOR = 1e-6  # the smallest popularity on an axis

PopularityView = ItemView[PopularityReport]


def open_folder(path: Path, options: Options) -> PopularityView:
    """Read what `nuclr popularity` wrote."""
    return ItemView(PopularityReport.read(path), options.pictures, training=True)


def make_page(view: PopularityView) -> Page:
    """Return the page of a report."""
    report = view.report
    page = Page(
        kind="popularity",
        title=Path(report.file).name,
        verdict=f"Popularity of {numbers.count(report.pairs)} pairs of {report.file}, temperature "
        f"{numbers.number(report.temperature)}.",
        sections=[
            Section("summary", "Summary", summary),
            Section("most", "Most popular", partial(show_ranked, "most_popular")),
            Section("least", "Least popular", partial(show_ranked, "least_popular")),
            Section("negatives", "Likely false negatives", likely_false_negatives, menu="False negatives"),
            Section("repeat", "How it was solved", how_solved, menu="Solver"),
        ],
        notes=view.notes,
    )
    if not any(sample.name for side in report.sides.values() for sample in side.most_popular):
        page.note(UNNAMED)
    return page


def summary(view: PopularityView) -> Iterator[Block]:
    """Show how unequal the popularity of each side is, and how well it predicts a search."""
    sides = view.report.sides.values()
    for solved in sides:
        share = numbers.percent(solved.top_share, 0)
        yield Tile(f"The most popular 1 % of the {solved.words}", share, "of all popularity")
        effective = numbers.count(solved.effective_number)
        yield Tile(f"Effective number of {solved.words}", effective, f"of {numbers.count(solved.origin.rows)}")
    for solved in sides:
        if not solved.converged:
            yield Text(
                f"The solver did not converge for the {solved.words}: residual {numbers.number(solved.residual, 2)}."
            )
        if solved.agreement is not None:
            yield Text(
                f"Does it predict what a search finds? Popularity of the {solved.words}, solved with half of the "
                f"queries, has rank correlation {numbers.number(solved.agreement, 2)} with N_10 of the other half: the "
                "number of queries that have the item among their first ten."
            )
    yield Text(
        "The popularity of an item is how many queries would pick it, relative to the mean: 1 is the mean of all items "
        "of its side. It holds under this model, at this temperature."
    )
    yield from map(quantile_chart, sides)


def quantile_chart(solved: SidePopularity) -> Chart:
    """Draw the popularity of the samples from the least to the most popular."""
    shares = [float(share) for share in solved.quantiles]
    values = [max(value, FLOOR) for value in solved.quantiles.values()]
    return line_chart(
        f"Popularity of the {solved.words}",
        [Series("popularity", shares, values)],
        "share of the samples that are less popular",
        log_y=True,
        reference=(1.0, "mean"),
    )


def show_ranked(name: str, view: PopularityView) -> Iterator[Block]:
    """Show a list of each side, `most_popular` or `least_popular`, with the other side of each pair."""
    sides = view.report.sides
    for side, solved in sides.items():
        other = "y" if side == "x" else "x"
        samples: list[RankedItem] = getattr(solved, name)
        cards = []
        for sample in samples:
            facts = {"popularity": numbers.times(sample.popularity), "rank": numbers.count(sample.rank)}
            if sample.copies > 1:
                facts["copies"] = numbers.count(sample.copies)
            pair = None if sample.pair is None else view.show(sides[other].origin, sample.pair, other)
            cards.append(Card(view.show(solved.origin, sample, side), pair, facts))
        yield Text(solved.words.capitalize(), "heading")
        yield Gallery(cards)


def likely_false_negatives(view: PopularityView) -> Iterator[Block]:
    """Show y that may belong to an x that they are not paired with, next to the x's own y."""
    sides = view.report.sides
    likely = view.report.false_negatives
    if likely is None or not likely.rows:
        raise LeaveOut
    x = sides["x"].words
    yield Text(
        f"These {sides['y'].words} belong to others of the {x}, but score higher than the own one, so they may fit as "
        f"well; training pushes them apart. {numbers.percent(likely.share)} of {numbers.count(likely.anchors)} {x} "
        "have one. The list has those with the largest score times popularity."
    )
    for row in likely.rows:
        shown_x, shown_y, own = (
            view.show(sides[side].origin, item, side) for side, item in (("x", row.x), ("y", row.y), ("y", row.own))
        )
        note = f"score {numbers.score(row.score)}, popularity {numbers.times(row.popularity)}"
        own_note = f"score {numbers.score(row.own_score)}"
        yield Example(shown_x, [Answer(shown_y, "also fits?", note), Answer(own, "own", own_note)])


def how_solved(view: PopularityView) -> Iterator[Block]:
    """Show the solver's numbers and the command."""
    table = []
    for solved in view.report.sides.values():
        counts = map(numbers.count, (solved.origin.rows, solved.anchors, solved.iterations))
        table.append([solved.words, *counts, numbers.number(solved.residual, 2)])
    yield Table("Solver", ["", "samples", "anchors", "passes", "residual"], table)
    yield from view.command()
