"""The folder of a table: `plan.json`, `runs/`, `results/`, `logs/`, and the table as JSON, Markdown, LaTeX and CSV.

plan.json holds the settings of every run. A run that exists is never continued with other settings.
"""

import contextlib
import fcntl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nuclr
from nuclr import files
from nuclr.errors import UserError
from nuclr.studies.table import render
from nuclr.studies.table.aggregate import COMMAND
from nuclr.studies.table.plan import RESULTS, RUNS, PlannedRun, check_same, plain_content, read_plan

PLAN, SUMMARY, LOCK = "plan.json", "table.json", ".lock"
WRITTEN = {"table.md": render.markdown, "table.tex": render.latex, "table.csv": render.comma_separated}


@contextlib.contextmanager
def opened(out: Path, runs: Sequence[PlannedRun]) -> Iterator[None]:
    """Lock the folder of a table, after a check that existing runs have the settings of the table file.

    Raises:
        UserError: The folder belongs to another command or is in use, or a run in it has other settings.

    """
    files.prepare_folder(out, COMMAND, PLAN, [PLAN, SUMMARY, RUNS, RESULTS, *WRITTEN])
    with (out / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"--out {out}: another {COMMAND} is using this folder; wait for it or name another folder"
            ) from None
        stored = read_plan(out / PLAN)
        check_same(runs, stored)
        now = stored | {run.name: plain_content(run.settings) for run in runs}
        with files.user_errors(out / PLAN):
            files.write_json(out / PLAN, {"written_by": COMMAND, "version": nuclr.__version__, "runs": now})
        yield


def write(out: Path, content: dict[str, Any]) -> None:
    """Write the table in all formats; table.json last.

    Raises:
        UserError: The folder has a table with more values: this command looks for the results elsewhere.

    """
    stored = _read_summary(out / SUMMARY)
    before, now = _values(stored), _values(content)
    if stored.get("title") == content["title"] and before - now and len(now) < len(before):
        block, row, column = sorted(before - now)[0]
        raise UserError(
            f"{out / SUMMARY} has {len(before)} values, and this command finds {len(now)} of them, not {column} of "
            f"{' '.join(filter(None, (block, row)))}; give --tests as before, or remove that file to replace the table"
        )
    with files.user_errors(out):
        for name, make in WRITTEN.items():
            files.write_text(out / name, make(content))
        files.write_json(out / SUMMARY, content)


def _read_summary(path: Path) -> dict[str, Any]:
    """Return an earlier table.json; empty if there is none that can be read."""
    try:
        content = files.parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _values(content: dict[str, Any]) -> set[tuple[str, str, str]]:
    """Return the block, row and column of every value in a table."""
    try:
        return {
            (block["title"], row["label"], column)
            for block in content.get("blocks", [])
            for row in block["rows"]
            for column, cell in row["cells"].items()
            if cell is not None
        }
    except (AttributeError, LookupError, TypeError):
        return set()
