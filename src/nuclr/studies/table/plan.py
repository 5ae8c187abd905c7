"""What a table needs: one run per row and seed, its commands, and how far each run is.

Everything is an ordinary command: `nuclr train` writes a run into OUT/runs, `nuclr evaluate` its results into
OUT/results. The same commands are run here, or printed for the scheduler of a cluster.
"""

import hashlib
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nuclr import files
from nuclr.errors import UserError
from nuclr.objectives import entry
from nuclr.runs import config, folder
from nuclr.runs.content import content as content_of
from nuclr.runs.settings import Settings
from nuclr.studies.table import evaluations
from nuclr.studies.table.columns import PROMPTS_OPTION, locate
from nuclr.studies.table.table_file import Block, Column, Row, Table

RUNS, RESULTS, LOGS = "runs", "results", "logs"
PROGRAM = ("nuclr",)


@dataclass(frozen=True)
class PlannedRun:
    """One training of a row with one seed.

    Attributes:
        block: Title of the block.
        label: Label of the row.
        seed: The seed.
        name: Name of the run's folder, of its results and of its log.
        config: The config file.
        overrides: Texts KEY=VALUE, without seed and out.
        settings: The settings that result.
        columns: The block's columns.
        out: Folder of the table.
        tests: Folder that test sets are relative to.
        hours: Time of one training elsewhere, and its source; None if unknown.

    """

    block: str
    label: str
    seed: int
    name: str
    config: Path
    overrides: tuple[str, ...]
    settings: Settings
    columns: tuple[Column, ...]
    out: Path
    tests: Path
    hours: tuple[float, str] | None = None

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return self.out / RUNS / self.name

    @property
    def results(self) -> Path:
        """Folder of its results."""
        return self.out / RESULTS / self.name

    @property
    def log(self) -> Path:
        """File for what its commands print."""
        return self.out / LOGS / f"{self.name}.log"

    @property
    def trained(self) -> bool:
        """Whether the run is finished."""
        return folder.is_finished(self.folder)

    def missing_columns(self) -> list[Column]:
        """Return the columns without a result."""
        return [column for column in self.columns if self.result(column) is None]

    def result(self, column: Column) -> tuple[evaluations.Evaluation, dict[str, Any]] | None:
        """Return the stored result on a column, with its file; None if there is none."""
        paths = sorted(self.results.glob(f"{_prompt_key(column)}-*.json"))
        return evaluations.find([evaluations.read(path) for path in paths], self.located(column))

    def located(self, column: Column) -> Column:
        """Return the column with its test set as `nuclr evaluate` is asked for it."""
        return locate(column, self.tests)

    def state(self) -> str:
        """Return "done", "partial (...)" or "missing"."""
        if self.trained:
            missing = [column.title for column in self.missing_columns()]
            return f"partial (trained; not evaluated on {', '.join(missing)})" if missing else "done"
        if not folder.is_run(self.folder):
            return "missing"
        return f"partial ({100 * self.progress():.0f} % of the training)"

    def progress(self) -> float:
        """Return the share of the epochs that a started run has completed, by its last line of metrics."""
        try:
            lines = (self.folder / folder.METRICS).read_text(encoding="utf-8").splitlines()
            done = float(json.loads(lines[-1])["epoch"])
        except (OSError, ValueError, LookupError, TypeError):
            return 0.0
        return min(max(done / self.settings.schedule.epochs, 0.0), 1.0)

    # -- commands ------------------------------------------------------------------------------------------------------

    def train_command(self, processes: int = 1, here: bool = False) -> list[str]:
        """Return the command that trains the run or resumes it.

        Args:
            processes: Number of processes; more than one are started by torchrun.
            here: Whether the command is run by this program, with its Python, instead of printed.

        """
        arguments = ["train", str(self.config), "report=false", *self.overrides]
        arguments += [f"seed={self.seed}", f"out={self.folder}", "--resume"]
        if processes == 1:
            return [*_program(here), *arguments]
        launcher = [sys.executable, "-m", "torch.distributed.run"] if here else ["torchrun"]
        return [*launcher, "--standalone", "--nproc_per_node", str(processes), "-m", "nuclr", *arguments]

    def evaluate_commands(self, columns: Sequence[Column], here: bool = False) -> list[tuple[list[str], Path]]:
        """Return commands that evaluate the run on these columns, each with the file that it writes.

        Columns with the same prompt file share a command.
        """
        groups: dict[Path | None, list[Column]] = {}
        for column in columns:
            groups.setdefault(column.prompts, []).append(self.located(column))
        commands = []
        for prompts, members in groups.items():
            options = [text for column in members for text in (f"--{column.kind}", column.test)]
            options += [PROMPTS_OPTION, str(prompts)] if prompts is not None else []
            if self.settings.device != "auto":
                options += ["--device", self.settings.device]
            path = self.results / f"{_prompt_key(members[0])}-{_digest(' '.join(options).encode())}.json"
            commands.append(([*_program(here), "evaluate", str(self.folder), *options, "--out", str(path)], path))
        return commands

    def shell_line(self, processes: int = 1) -> str:
        """Return one line of shell that trains and evaluates what is missing when it runs."""
        steps = [
            f"{{ test -f {_quote(self.folder / folder.RESULTS)} || {shlex.join(self.train_command(processes))}; }}"
        ]
        steps.append(f"mkdir -p {_quote(self.results)}")
        for command, path in self.evaluate_commands(self.missing_columns()):
            steps.append(f"{{ test -f {_quote(path)} || {shlex.join(command)}; }}")
        return " && ".join(steps)


def plan_runs(table: Table, out: Path, tests: Path, overrides: Sequence[str] = ()) -> list[PlannedRun]:
    """Return the runs of all rows that are trained, in the order of the table.

    Args:
        table: What the table file says.
        out: Folder of the table.
        tests: Folder that test sets are relative to.
        overrides: Texts KEY=VALUE for all runs; they take precedence over those of the file.

    Raises:
        UserError: A config or an override is wrong; the message names the row.

    """
    runs: list[PlannedRun] = []
    for block in table.blocks:
        for row in block.rows:
            if row.config is None:
                continue
            changes = (*row.overrides, *overrides)
            settings = _load(block, row, changes)
            label = row.label or entry(settings.objective.name).label
            if any((run.block, run.label) == (block.title, label) for run in runs):
                raise UserError(f"two rows are called {label}; give {row.config} another label in the table file")
            for seed in table.seeds:
                name = _free_name("-".join(filter(None, (_slug(block.title), _slug(label), f"seed{seed}"))), runs)
                what = (row.config, changes, settings, block.columns)
                hours = None if block.hours is None else (block.hours, table.hours_from)
                runs.append(PlannedRun(block.title, label, seed, name, *what, out, tests, hours))
    return runs


def check_same(runs: Sequence[PlannedRun], stored: dict[str, Any]) -> None:
    """Refuse a row whose settings differ from those that an existing run of it began with.

    Args:
        runs: The planned runs.
        stored: Content of the settings by the name of the run, from the plan of an earlier command.

    """
    for run in runs:
        before = stored.get(run.name)
        if not isinstance(before, dict) or not folder.is_run(run.folder):
            continue
        now = plain_content(run.settings)
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                raise UserError(
                    f"row {run.label}: {key} is {now.get(key, 'the default')}, but {before.get(key, 'the default')} in "
                    f"{run.folder}; use the same settings, remove that folder, or name another one with --out"
                )


def plain_content(settings: Settings) -> dict[str, Any]:
    """Return the settings that determine a run's result as values that JSON can hold."""
    return {key: value if isinstance(value, bool | int) else str(value) for key, value in content_of(settings).items()}


def _load(block: Block, row: Row, overrides: Sequence[str]) -> Settings:
    try:
        return config.load(row.config, overrides)
    except UserError as error:
        name = row.label or str(row.config)
        where = f"{block.title}, {name}" if block.title else name
        raise UserError(f"row {where}: {error}") from None


def _prompt_key(column: Column) -> str:
    """Return a name for the prompts of a column: results with other prompts are results of another test."""
    return _digest(column.prompts.read_bytes()) if column.prompts is not None else "default"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


def _program(here: bool) -> tuple[str, ...]:
    return (sys.executable, "-m", "nuclr") if here else PROGRAM


def _quote(path: Path) -> str:
    return shlex.quote(str(path))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:40]


def _free_name(name: str, taken: Sequence[PlannedRun]) -> str:
    names, number, free = {run.name for run in taken}, 1, name
    while free in names:
        number += 1
        free = f"{name}-{number}"
    return free


def read_plan(path: Path) -> dict[str, Any]:
    """Return the settings by run of an earlier command in the same folder; empty if there was none."""
    try:
        content = files.parse_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); remove it, or name another folder with --out") from None
    runs = content.get("runs") if isinstance(content, dict) else None
    return runs if isinstance(runs, dict) else {}
