"""Which page a folder gets, by what lies in it."""

from pathlib import Path
from typing import Any

from nuclr.errors import UserError
from nuclr.report import comparison, popularity_folder, toy
from nuclr.report import page as html
from nuclr.report.training import Options, TrainingPage, training_page
from nuclr.runs import folder

REPORT = "report.html"
CSV_COLUMNS = (
    *("side", "group", "number", "name", "caption", "popularity", "rank", "of", "copies"),
    *("zeta", "zeta_rank", "truth", "truth_rank"),
)


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
        run = training_page(path, options)
        cards = csv_rows(run.popularity["cards"] if run.popularity else [])
        return html.render("training.html", page=run, kind="training run", sections=_sections(run), cards_data=cards)
    if comparison.is_comparison(path):
        found = comparison.comparison_page(path)
        sections = [("summary", "Summary"), *((s.key, s.title) for s in found.studies), ("repeat", "Settings")]
        return html.render("comparison.html", page=found, kind="comparison", sections=sections)
    if (path / popularity_folder.SUMMARY).is_file():
        solved = popularity_folder.popularity_page(path, options)
        sections = [
            ("summary", "Summary"),
            ("gallery", "Gallery"),
            ("details", "What to look at"),
            ("repeat", "Solver"),
        ]
        cards = csv_rows(solved.popularity["cards"])
        return html.render("popularity.html", page=solved, kind="popularity", sections=sections, cards_data=cards)
    if (path / toy.SUMMARY).is_file():
        sections = [("summary", "Summary"), ("error", "Error"), ("popularity", "Popularity")]
        sections += [("theory", "Theory"), ("repeat", "Repeat")]
        return html.render("toy.html", page=toy.toy_page(path), kind="toy study", sections=sections)
    raise UserError(f"{path}: no run there; name the folder that nuclr train, compare, popularity or toy wrote")


def _sections(run: TrainingPage) -> list[tuple[str, str]]:
    found = [("summary", "Summary"), ("curves", "Curves")]
    found += [("examples", "Examples")] if run.retrieval else []
    found += [("zero-shot", "Zero-shot")] if run.confusion else []
    found += [("popularity", "Popularity")] if run.popularity else []
    return [*found, ("time", "Time"), ("repeat", "Repeat")]


def csv_rows(cards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the page's script sorts, filters and downloads: the cards without their pictures."""
    return [{key: card[key] for key in CSV_COLUMNS if key in card} for card in cards]
