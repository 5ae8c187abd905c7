"""The page of `nuclr hubness`, from hubness.json."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nuclr import files
from nuclr.data.modalities.base import boundary, read_file
from nuclr.data.modalities.image import open_image
from nuclr.errors import UserError
from nuclr.report import numbers
from nuclr.report.charts.lines import Chart, Series, line_chart
from nuclr.report.items import BROKEN, Item, Items, show_item
from nuclr.report.render import Context, LeaveOut, Options, Page, Section, Table, Tile, describe
from nuclr.runs import folder as run_folder
from nuclr.runs.run import Run

SUMMARY = "hubness.json"
KEYS = {"queries", "gallery", "bank", "same", "k", "plain", "corrected", "chance", "hubs", "found_again", "version"}
ReadItem = Callable[[str, dict[str, Any]], Item]  # from "queries" or "gallery", and an entry of the summary


@dataclass
class HubnessFolder(Context):
    """What `nuclr hubness` wrote, and how its items are shown."""

    content: dict[str, Any] = field(kw_only=True)
    item: ReadItem = field(kw_only=True)
    options: Options = field(kw_only=True)


@dataclass(frozen=True)
class HubnessSummary:
    """Content of the section "summary"."""

    tiles: list[Tile]
    table: Table
    charts: list[Chart]
    k: int
    correlation: str | None
    bank: str
    same: bool
    advice: list[str]


@dataclass(frozen=True)
class HubCard:
    """An item of the gallery with its N_k before and after; `before` and `after` are shares of the largest."""

    item: Item
    plain: str
    corrected: str
    before: float
    after: float
    wrong: str = ""


@dataclass(frozen=True)
class Crowded:
    """A query, the hub that it found, and what it finds instead."""

    query: Item
    hub: Item
    rank: int
    instead: Item
    right: bool


@dataclass(frozen=True)
class HubCards:
    """Content of the sections "hubs" and "found"."""

    cards: list[HubCard]
    k: int


@dataclass(frozen=True)
class HubnessCommand:
    """Content of the section "repeat"."""

    command: str
    table: Table
    versions: str


def _open(path: Path, options: Options) -> HubnessFolder:
    try:
        content: dict[str, Any] = files.parse_json((path / SUMMARY).read_text(encoding="utf-8"))
        if missing := KEYS - content.keys():
            raise ValueError(f"{sorted(missing)[0]} is missing")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path / SUMMARY} was not written by nuclr hubness, or is damaged ({error})") from None
    queries, gallery = content["queries"], content["gallery"]
    notes: list[str] = []
    context = HubnessFolder(
        title=_title(content),
        sentence=f"{numbers.count(queries['counted'])} {_what(queries, 'queries')} search "
        f"{numbers.count(gallery['rows'])} {_what(gallery, 'items')}.",
        notes=notes,
        content=content,
        item=_reader(content, options, notes),
        options=options,
    )
    if not gallery.get("run") and not any("name" in hub for hub in content["hubs"]):
        context.note("The items have no names; --names FILE shows their texts, and --images FOLDER their pictures.")
    return context


def _title(content: dict[str, Any]) -> str:
    """Return who searches what: "Captions searched by images", or the names of the files."""
    queries, gallery = content["queries"], content["gallery"]
    if content["same"]:
        return f"{_name(gallery)}, searched by one another"
    title = f"{_name(gallery)} searched by {_name(queries)}"
    return title[:1].upper() + title[1:] if gallery.get("words") in ("images", "captions", "texts") else title


def _name(side: dict[str, Any]) -> str:
    return str(side.get("words") or Path(side["name"]).name)


def _what(side: dict[str, Any], word: str) -> str:
    """Return what the rows of a side are: "captions of the run demo", "items of gallery.npy"."""
    if side.get("words"):
        return f"{side['words']} of the run {Path(side['run']).name}"
    return f"{word} of {Path(side['name']).name}"


def _reader(content: dict[str, Any], options: Options, notes: list[str]) -> ReadItem:
    """Return how items are shown: those of a run from its data, pictures from their folder, else as text or number."""
    shown: dict[str, Items] = {}
    for role in ("queries", "gallery"):
        run = content[role].get("run")
        try:
            if run and run_folder.is_run(Path(run)) and (source := Run.open(run).val) is not None:
                shown[role] = Items(source.pairs, options.pictures)
        except Exception as error:  # the data may have changed in any way
            notes.append(f"The data of the run is missing: {describe(error)}")
    folder = content["gallery"].get("images")

    def item(role: str, entry: dict[str, Any]) -> Item:
        label = f"{'query' if role == 'queries' else 'item'} {entry['row']}"
        if role in shown and "number" in entry:
            item = shown[role].item(content[role]["side"], entry["number"])
            return replace(item, label=entry["name"]) if item.kind == "picture" and "name" in entry else item
        pictures = role == "gallery" or content["same"]
        if folder and pictures and "name" in entry:
            try:
                picture = open_image(read_file(Path(folder) / entry["name"], boundary(Path(folder), False)))
                return show_item(picture, entry["name"], options.pictures)
            except BROKEN:  # including a file that is missing
                return Item("picture", entry["name"])
        return show_item(entry["name"], label) if "name" in entry else Item("text", label, text=label)

    return item


def _change(content: dict[str, Any], read: Callable[[dict[str, Any]], str]) -> str:
    return f"{read(content['plain'])} → {read(content['corrected'])}"


def hubness_summary(context: HubnessFolder) -> HubnessSummary:
    """Return the main measures before and after correction, and the distribution of N_k."""
    content = context.content
    plain, corrected, chance, k = content["plain"], content["corrected"], content["chance"], content["k"]
    three = (plain, corrected, chance)
    tiles = [
        Tile(
            "Items that nobody finds",
            _change(content, lambda m: numbers.percent(m["never_found"])),
            f"not among the first {k} of any query; {numbers.percent(chance['never_found'])} by chance",
        ),
        Tile(
            "The largest hub is found by",
            _change(content, lambda m: numbers.count(m["largest"])),
            f"queries; {numbers.number(plain['mean'])} on average, {numbers.count(chance['largest'])} by chance",
        ),
    ]
    rows = [
        ["items that nobody finds", *(numbers.percent(m["never_found"]) for m in three)],
        ["results that are the 1 % largest hubs", *(numbers.percent(m["top_share"]) for m in three)],
        ["queries that find the largest hub", *(numbers.count(m["largest"]) for m in three)],
        [f"skewness of N_{k}", *(numbers.number(m["skewness"]) for m in three)],
    ]
    if "recall" in plain:
        tiles.append(
            Tile(
                "Recall@1",
                _change(content, lambda m: numbers.percent(m["recall"]["1"])),
                f"of {numbers.count(content['labeled'])} queries with a known answer",
            )
        )
        for depth in plain["recall"]:
            rows.append([f"recall@{depth}", *(numbers.percent(m["recall"][depth]) for m in three)])
    correlation = content.get("correlation")
    bank = content["bank"]
    described = (
        "a random half of the queries, which are not counted"
        if bank["name"] is None
        else f"the queries of {Path(bank['name']).name}"
    )
    return HubnessSummary(
        tiles=tiles,
        table=Table(["", "plain", "corrected", "by chance"], rows),
        charts=[_distribution(content), _tail(content)],
        k=k,
        correlation=None if correlation is None else numbers.number(correlation),
        bank=described,
        same=bool(content["same"]),
        advice=content.get("advice", []),
    )


def _distribution(content: dict[str, Any]) -> Chart:
    """Draw how many items have each N_k, up to three times the mean."""
    most = max(5, round(3 * content["plain"]["mean"]))
    series = []
    for name, color in (("plain", 2), ("corrected", 1)):
        tally = (content[name]["histogram"] + [0] * (most + 1))[: most + 1]
        series.append(Series(name, [float(n) for n in range(most + 1)], [float(n) for n in tally], color))
    title = f"How many items are found by how many queries (N_{content['k']})"
    return line_chart(title, series, "queries that find the item", zero=True, whole_x=True)


def _tail(content: dict[str, Any]) -> Chart:
    """Draw, on logarithmic axes, how many items are found by at least so many queries."""
    series = []
    for name, color in (("plain", 2), ("corrected", 1)):
        tally = content[name]["histogram"]
        above = [sum(tally[n:]) for n in range(len(tally))]
        points = [(float(n), float(a)) for n, a in enumerate(above) if n and a]
        series.append(Series(name, [n for n, _ in points], [a for _, a in points], color))
    title = "Items that are found by at least so many queries"
    return line_chart(title, series, "queries that find the item", log_x=True, log_y=True)


def _cards(context: HubnessFolder, key: str) -> list[HubCard]:
    entries = context.content[key][: context.options.gallery]
    largest = max((max(entry["plain"], entry["corrected"]) for entry in entries), default=1) or 1
    return [
        HubCard(
            item=context.item("gallery", entry),
            plain=numbers.count(entry["plain"]),
            corrected=numbers.count(entry["corrected"]),
            before=round(entry["plain"] / largest, 4),
            after=round(entry["corrected"] / largest, 4),
            wrong=numbers.count(entry["wrong"]) if "wrong" in entry else "",
        )
        for entry in entries
    ]


def largest_hubs(context: HubnessFolder) -> HubCards:
    """Return the items that most queries find."""
    return HubCards(_cards(context, "hubs"), context.content["k"])


def crowded_out(context: HubnessFolder) -> list[Crowded]:
    """Return queries that find something else once the hub is gone: first those with a right answer."""
    rows = [
        Crowded(
            query=context.item("queries", example["query"]),
            hub=context.item("gallery", hub),
            rank=example["rank"],
            instead=context.item("gallery", example["instead"]),
            right=example["right"],
        )
        for hub in context.content["hubs"]
        for example in hub["crowds_out"][:1]
    ]
    if not rows:
        raise LeaveOut("The correction removes no hub from a list.")
    return sorted(rows, key=lambda row: not row.right)[:12]


def found_again(context: HubnessFolder) -> HubCards:
    """Return items that nobody found before the correction."""
    cards = _cards(context, "found_again")
    if not cards:
        raise LeaveOut("")
    return HubCards(cards, context.content["k"])


def how_measured(context: HubnessFolder) -> HubnessCommand:
    """Return the correction's settings and the command."""
    content = context.content
    rows = [
        ["queries that fit the correction", numbers.count(content["bank"]["queries"])],
        ["candidates that they choose from", numbers.count(content["bank"]["candidates"])],
        ["temperature", numbers.number(content["temperature"])],
        ["strength", numbers.number(content["strength"])],
    ]
    return HubnessCommand(str(content.get("command", "")), Table(["", "value"], rows), f"nuclr {content['version']}")


PAGE = Page(
    kind="hubness",
    files=(SUMMARY,),
    open=_open,
    sections=[
        Section("summary", "Summary", "sections/hubness_summary.html", hubness_summary, heading=False),
        Section("hubs", "Largest hubs", "sections/hubness_cards.html", largest_hubs, menu="Hubs"),
        Section("crowded", "What they crowd out", "sections/hubness_crowded.html", crowded_out, menu="Crowded out"),
        Section("found", "Found again", "sections/hubness_found.html", found_again),
        Section("repeat", "How it was measured", "sections/hubness_command.html", how_measured, menu="Command"),
    ],
)
