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
    """Write the table in all formats; table.json last."""
    with files.user_errors(out):
        for name, make in WRITTEN.items():
            files.write_text(out / name, make(content))
        files.write_json(out / SUMMARY, content)
