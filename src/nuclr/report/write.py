"""Which page a folder gets, by what lies in it."""

from pathlib import Path
from typing import Any

from nuclr.errors import UserError
from nuclr.report import page as html
from nuclr.report.training import Options, training_page
from nuclr.training import folder

REPORT = "report.html"
CSV_COLUMNS = ("side", "group", "number", "name", "caption", "popularity", "rank", "of", "copies", "zeta", "zeta_rank",
               "truth", "truth_rank")  # fmt: skip


def write_report(path: Path, out: Path | None = None, options: Options | None = None) -> Path:
    """Make the page of the run in `path`; returns where it is, by default report.html beside the run's files."""
    target = out or path / REPORT
    if target.is_dir():
        raise UserError(f"{target} is a folder; name a file with --out")
    html.write(target, make_page(path, options or Options()))
    return target


def make_page(path: Path, options: Options) -> str:
    """The page as text."""
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; name the folder that a nuclr command wrote")
    if folder.is_run(path):
        found = training_page(path, options)
        sections = [("summary", "Summary"), ("curves", "Curves")]
        sections += [("examples", "Examples")] if found.retrieval else []
        sections += [("zero-shot", "Zero-shot")] if found.confusion else []
        sections += [("popularity", "Popularity")] if found.popularity else []
        sections += [("time", "Time"), ("repeat", "Repeat")]
        cards = csv_rows(found.popularity["cards"] if found.popularity else [])
        return html.render("training.html", page=found, kind="training run", sections=sections, cards_data=cards)
    raise UserError(f"{path}: no run there; name the folder that nuclr train, compare, popularity or toy wrote")


def csv_rows(cards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the page's script sorts, filters and downloads: the cards without their pictures."""
    return [{key: card[key] for key in CSV_COLUMNS if key in card} for card in cards]
