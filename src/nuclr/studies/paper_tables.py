"""`nuclr table`: the tables of a paper, from a short YAML file with rows, columns (test sets) and seeds.

    title: Table 1
    seeds: 3
    columns:
      - {title: MSCOCO, test: mscoco}
      - {title: CIFAR100, test: cifar100}
    blocks:
      - title: CC3M
        rows:
          - {config: ../cc3m_clip.yaml}
          - {label: NUCLR, config: ../cc3m_nuclr.yaml, overrides: {objective.zeta_init: 0.0}}
          - {label: elsewhere, published: {MSCOCO: 20.5 ± 0.3}}

`rows` at the top level makes a single block without a title. A block may have columns of its own. A row is trained
(`config` with `overrides`), or only shows values that were published.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from nuclr.errors import UserError
from nuclr.evaluation.metrics import Kind, find_metric
from nuclr.evaluation.retrieval import direction_names
from nuclr.evaluation.test_sets import CLASSIFICATION, RETRIEVAL
from nuclr.objectives import entry
from nuclr.remote import is_url
from nuclr.runs import config
from nuclr.runs import folder as run_folder
from nuclr.runs.launch import is_first, pick_device, processes
from nuclr.runs.settings import Settings, content, flatten, put
from nuclr.studies.engine.measure import BUILTIN_CLASSES, VAL, MeasuredSet, open_test, run_job
from nuclr.studies.engine.plan import Plan, Row, Study
from nuclr.studies.engine.results import FIRST, Block, Column, Comparison, ResultRow, Value, make_comparison, result_row
from nuclr.studies.engine.tables import write_results
from nuclr.training import loop

KINDS: dict[str | None, Kind] = {"retrieval": "retrieval", "classification": "zero_shot"}  # in table files
MEAN = "Mean"
OWNED = {"seed": "set the number of seeds with the table's key seeds", "out": "name the folder of the table with --out"}
PROTOCOL = (
    "Percent. Each value is the mean over the seeds, with the sample standard deviation.",
    "Retrieval: recall@1, mean of both directions, unless the column names another metric. Classification: zero-shot "
    "top-1 accuracy.",
    "Mean: the columns are averaged for each seed, then over the seeds.",
    "The best value of each column among the rows of a block is in bold.",
)


# -- the table file ----------------------------------------------------------------------------------------------------


def _read_published(value: Any) -> Value:
    """Return a published value from a number or "24.2 ± 0.1", in percent."""
    mean, *std = (float(text) for text in str(value).split("±"))
    if len(std) > 1 or not all(0 <= number <= 100 for number in (mean, *std)):
        raise ValueError("needs percent, such as 24.2 or 24.2 ± 0.1")
    return Value(mean, std[0] if std else None)


def _read_overrides(value: Any) -> Any:
    """Return overrides by full key."""
    return dict(flatten(value)) if isinstance(value, Mapping) else value


Published = Annotated[Value, pydantic.BeforeValidator(_read_published)]
Overrides = Annotated[dict[str, Any], pydantic.BeforeValidator(_read_overrides)]
Title = Annotated[str, pydantic.Field(pattern=r"^[^\x00-\x1f]*$")]


class _Entry(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        extra="forbid",
        frozen=True,
        coerce_numbers_to_str=True,
    )


class ColumnEntry(_Entry):
    """A test set: its name or path, its `kind` if that is not clear, another `metric`, and a prompt file.

    Or the mean `of` columns before it, in place of a test set.
    """

    test: str = ""
    title: Title = ""
    of: tuple[str, ...] = ()
    kind: Literal["retrieval", "classification"] | None = None
    metric: str = FIRST
    prompts: str | None = None

    @property
    def name(self) -> str:
        """Title of the column."""
        return self.title or self.test


class RowEntry(_Entry):
    """A model: a `config` to train, with the values that were published, or only these."""

    label: Title | None = None
    config: str | None = None
    overrides: Overrides = {}
    published: dict[str, Published] = {}

    @pydantic.model_validator(mode="after")
    def _check(self) -> "RowEntry":
        if self.config is None and not (self.label and self.published):
            raise ValueError("needs a config to train, or a label and published values")
        return self


class BlockEntry(_Entry):
    """Rows that are compared with one another. `hours` is the time of one training, where it cannot be measured."""

    title: Title = ""
    columns: tuple[ColumnEntry, ...] = ()
    overrides: Overrides = {}
    hours: pydantic.PositiveFloat | None = None
    rows: Annotated[tuple[RowEntry, ...], pydantic.Field(min_length=1)]


class TableFile(_Entry):
    """The content of a table file. `seeds` is their number; `published_in` names the source of published values."""

    title: Title = ""
    seeds: Annotated[int, pydantic.Field(ge=1, le=1000)] = 1
    overrides: Overrides = {}
    columns: tuple[ColumnEntry, ...] = ()
    mean: bool = True
    published_in: str = "paper"
    blocks: tuple[BlockEntry, ...] = ()
    rows: tuple[RowEntry, ...] = ()

    @pydantic.model_validator(mode="after")
    def _check(self) -> "TableFile":
        if bool(self.rows) == bool(self.blocks):
            raise ValueError("needs rows, or blocks with rows, and not both")
        blocks = []
        for block in self.blocks or (BlockEntry(rows=self.rows),):
            columns = block.columns or self.columns
            titles = [column.name for column in columns]
            if not titles or len({*titles, MEAN}) <= len(titles):
                raise ValueError(f"columns: {titles} of block {block.title!r}; each needs a title of its own")
            for number, column in enumerate(columns):
                if bool(column.test) == bool(column.of) or not set(column.of) <= set(titles[:number]):
                    raise ValueError(f"column {column.name!r} needs a test, or the titles of columns before it as of")
            for title in (title for row in block.rows for title in row.published):
                if title not in (*titles, MEAN):
                    raise ValueError(f"published {title!r} is not a column")
            blocks.append(block.model_copy(update={"columns": columns}))
        return self.model_copy(update={"blocks": tuple(blocks)})


def read_table(path: Path) -> TableFile:
    """Read a table file.

    Args:
        path: The YAML file.

    Returns:
        Its content: all rows in `blocks`, with the columns of each block.

    Raises:
        UserError: An unknown key or a wrong value; the message names the place.

    Example:
        >>> file = Path("small.yaml")
        >>> _ = file.write_text('''
        ... columns: [{title: COCO, test: mscoco}]
        ... rows: [{label: theirs, published: {COCO: 20.5}}]
        ... ''')
        >>> read_table(file).blocks[0].columns[0].test
        'mscoco'

    """
    values = config.read(path)
    try:
        table = TableFile.model_validate(values)
    except pydantic.ValidationError as error:
        known = {key for kind in (TableFile, BlockEntry, RowEntry, ColumnEntry) for key in kind.model_fields}
        raise config.user_error(error, f"{path}: ", sorted(known)) from None
    return table.model_copy(update={"title": table.title or path.stem})


# -- the plan ----------------------------------------------------------------------------------------------------------


def plan_table(
    path: Path,
    tests: Path,
    out: Path,
    overrides: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> "TableStudy":
    """Read a table file, load the settings of its rows, and open its test sets.

    Args:
        path: The table file.
        tests: Folder that test sets are relative to; a standard set, such as mscoco, is in the folder of its name.
        out: Folder of the table.
        overrides: Texts KEY=VALUE for all runs; they take precedence over those of the file.
        say: Called with lines about the progress.

    Raises:
        UserError: The file, a config or an override is wrong; the message names the row.

    """
    table = read_table(path)
    rows: dict[str, Row] = {}
    blocks = []
    problems: dict[str, None] = {}
    for block in table.blocks:
        labeled = []
        for row in block.rows:
            if row.config is None:
                labeled.append(row)
                continue
            changes = {**table.overrides, **block.overrides, **row.overrides}
            settings = _load(
                path.parent / row.config,
                changes,
                overrides,
                row.label,
            )
            label = row.label or entry(settings.objective.name).label
            name = f"{block.title}/{label}"
            if name in rows:
                raise UserError(f"{path}: two rows are called {label}; give {row.config} another label")
            sets = []
            for column in (column for column in block.columns if column.test):
                try:
                    sets.append(_open_column(column, tests, settings, path.parent))
                except UserError as error:
                    problems[f"column {column.name}: {error}"] = None
            rows[name] = Row(
                name,
                label,
                settings,
                tuple(sets),
                title=_run_title(block.title, settings, row.overrides),
            )
            labeled.append(row.model_copy(update={"label": label}))
        blocks.append(block.model_copy(update={"rows": tuple(labeled)}))
    plan = Plan(
        command="nuclr table",
        name="table",
        rows=tuple(rows.values()),
        seeds=tuple(range(table.seeds)),
        keep_checkpoints=True,
        entries={f"row {row.name.strip('/')}": content(row.base) for row in rows.values()},
    )
    return TableStudy(
        table.model_copy(update={"blocks": tuple(blocks)}),
        plan,
        list(problems),
        out,
        say,
    )


def _run_title(
    block: str,
    settings: Settings,
    overrides: Mapping[str, Any],
) -> str:
    """Return the start of the names of runs. It does not depend on labels, so that tables can share runs."""
    parts = [block, settings.objective.name]
    for key, value in overrides.items():
        if key != "objective.name":
            parts.append(f"{key.rpartition('.')[2]}={value}")
    return re.sub(r"[^a-z0-9.=_]+", "-", "-".join(parts).lower()).strip("-.")[:60]


def _load(
    path: Path,
    changes: Mapping[str, Any],
    overrides: Sequence[str],
    label: str | None,
) -> Settings:
    values = config.read(path)
    for key, value in changes.items():
        values = put(values, key, value)
    for key in {*changes, *(text.partition("=")[0] for text in overrides)} & OWNED.keys():
        raise UserError(f"{key} cannot be an override; {OWNED[key]}")
    try:
        return dataclasses.replace(config.load(values, overrides), report=False)
    except UserError as error:
        raise UserError(f"row {label or path}: {error}") from None


def _open_column(
    column: ColumnEntry,
    tests: Path,
    settings: Settings,
    folder: Path,
) -> MeasuredSet:
    path = column.test
    standard, _, below = path.partition(":")
    if standard in RETRIEVAL or standard in CLASSIFICATION:
        path = f"{standard}:{(tests / (below or standard)).absolute()}"
    elif path == "builtin" and column.kind == "classification":
        path = BUILTIN_CLASSES
    elif standard not in ("builtin", BUILTIN_CLASSES) and not is_url(path):
        path = str((tests / path).absolute())
    prompts = folder / column.prompts if column.prompts is not None else None
    test = open_test(
        column.test,
        path,
        settings.data,
        KINDS.get(column.kind),
        prompts,
    )
    metric, direction = find_metric(column.metric) or (None, "")
    known = metric is not None and metric.kind == test.kind and not metric.median
    if column.metric != FIRST and not (known and direction in ("", "mean", *direction_names(test.sides))):
        raise UserError(f"metric {column.metric}: not one of {test.kind} between {' and '.join(test.sides)}")
    return dataclasses.replace(test, name=column.name)


# -- the study ---------------------------------------------------------------------------------------------------------


class TableStudy(Study):
    """The runs of a table file.

    Args:
        file: The table file, in which every row has a label.
        plan: The runs; the name of a row is "BLOCK/LABEL".
        problems: What is wrong with test sets that cannot be opened.
        out: Folder of the table.
        say: Called with lines about the progress.

    """

    def __init__(
        self,
        file: TableFile,
        plan: Plan,
        problems: Sequence[str],
        out: Path,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(plan, out, say)
        self.file = file
        self.problems = problems

    def runs(self) -> list[tuple[Row, Settings]]:
        """Return all runs, each with its row."""
        return [(row, run) for row in self.plan.rows for run in self.finals(row)[VAL]]

    def check(self) -> None:
        """Raise a UserError if a test set cannot be opened."""
        for problem in self.problems:
            raise UserError(problem)

    def train(self, workers: int | None = None, collect: bool = False) -> Comparison:
        """Train and measure what is missing, and write the table after every run.

        Args:
            workers: Number of runs at the same time. None: one per CPU core, or one on a GPU.
            collect: Only write the table from the results that exist.

        Raises:
            UserError: A test set cannot be read, or a row has other settings than before.
            nuclr.runs.jobs.Stop: On SIGINT or SIGTERM, after all workers have written checkpoints.

        """
        with self.locked():
            if self.plan.rows and not collect:
                self.check()
                self.run(workers, lambda: write_results(self.out, self.summarize()))
            return write_results(self.out, self.summarize())

    def train_one(self, name: str) -> None:
        """Train and measure one run, as a job of a cluster does: in this process, or in all that torchrun started.

        The folder of the table is not locked, so that many jobs can work at the same time.

        Raises:
            UserError: The table has no such run, or a test set cannot be read.

        """
        self.check()
        runs = {run.name: (row, run) for row, run in self.runs()}
        if name not in runs:
            raise UserError(f"--job {name}: the table has no such run; --dry-run lists them")
        row, run = runs[name]
        with processes(pick_device(run.device)):
            if not run_folder.is_finished(self.path(run)):
                # It has the machine for itself, and need not stay on one core.
                settings = dataclasses.replace(run, threads=row.base.threads)
                loop.train(settings, self.path(run), resume=True)
        if is_first():
            run_job(self.job(run, self.needed(row)), {})

    def missing(self) -> list[str]:
        """Return the names of the runs that are not done, after the settings are stored in the folder."""
        self.check()
        with self.locked():
            return [run.name for row, run in self.runs() if self.state(row, run) != "done"]

    def describe(self) -> list[str]:
        """Return the state of every run, the time that its training takes, and what is wrong with test sets."""
        hours = {block.title: block.hours for block in self.file.blocks}
        lines = []
        total = 0.0
        roots = set()
        for row, run in self.runs():
            roots.add(run.data.root)
            known = hours[row.name.rpartition("/")[0]]
            time = f"about {known:g} h (the table file)" if known else "nuclr train CONFIG --dry-run: how long"
            state = self.state(row, run)
            lines.append(f"{run.name}: {state}{'' if state == 'done' else f'; {time}'}")
            total += 0 if state == "done" else known or 0
        if total:
            lines.append(f"all that are not done: about {total:g} h")
        folders = [f"data.root={root}: no such folder" for root in roots if root and not Path(root).is_dir()]
        return [*lines, *(f"before training: {problem}" for problem in [*folders, *self.problems])]

    def summarize(self) -> Comparison:
        """Return the results that exist."""
        blocks = []
        published = False
        for block in self.file.blocks:
            columns = []
            for shown in block.columns:
                columns.append(Column(shown.name, shown.name, shown.name, shown.metric, of=shown.of))
            if self.file.mean and len(columns) > 1:
                columns.append(Column(MEAN, MEAN, MEAN, FIRST, of=tuple(column.key for column in columns)))
            rows = []
            for one in block.rows:
                label = str(one.label)
                published = published or bool(one.published)
                if one.config is None:
                    rows.append(ResultRow(label, label, "", dict(one.published)))
                else:
                    result = result_row(
                        self,
                        self.rows[f"{block.title}/{label}"],
                        columns,
                        one.published,
                    )
                    rows.append(dataclasses.replace(result, name=label))
            blocks.append(Block(block.title, tuple(columns), tuple(rows)))
        return make_comparison(
            self,
            self.file.title,
            blocks,
            protocol=PROTOCOL,
            published_in=self.file.published_in if published else "",
        )
