"""The table file: a short YAML file that names the rows (config and overrides), the columns (test sets) and the seeds.

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
          - {label: elsewhere, results: "cluster/*.json"}

`rows` at the top level makes a single block without a title. A block may have columns of its own. An unknown key is
refused with a suggestion.
"""

import difflib
import glob
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nuclr.errors import UserError
from nuclr.evaluation.test_sets import CLASSIFICATION, RETRIEVAL
from nuclr.runs import config
from nuclr.runs.settings import flatten

KINDS = ("retrieval", "classification")
METRICS = {"retrieval": "mean_R@1", "classification": "zero_shot_acc1"}
CLASS_METRICS = ("zero_shot_acc1", "zero_shot_acc5", "zero_shot_mean_per_class_recall")
MEAN = "Mean"
TABLE_KEYS = ("title", "seeds", "overrides", "columns", "mean", "published_in", "hours_from", "blocks", "rows")
BLOCK_KEYS = ("title", "columns", "overrides", "hours", "rows")
ROW_KEYS = ("label", "config", "overrides", "results", "published")
COLUMN_KEYS = ("title", "test", "kind", "metric", "prompts")
OWNED = {"seed": "list the seeds with the table's key seeds", "out": "name the folder of the table with --out"}
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Column:
    """One test set.

    Attributes:
        title: What the table shows.
        test: Name of a standard test set, NAME:FOLDER, or a path.
        kind: "retrieval" or "classification".
        metric: Key of the metric in the results of `nuclr evaluate`.
        prompts: File with prompts for classification, as `nuclr evaluate` takes it.

    """

    title: str
    test: str
    kind: str
    metric: str
    prompts: Path | None = None


@dataclass(frozen=True)
class Published:
    """A published value in percent; `std` is None if it was published without a standard deviation."""

    mean: float
    std: float | None = None


@dataclass(frozen=True)
class Row:
    """A model that is trained (`config` with `overrides`), or one that was evaluated elsewhere (`results`).

    Attributes:
        label: Name in the table; None: the label of the config's objective.
        config: Settings of the runs.
        overrides: Texts KEY=VALUE, those of the table and of the block first.
        results: Patterns of JSON files that `nuclr evaluate --out` wrote, one or several per run.
        published: Published values by the column's title.

    """

    label: str | None
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    published: Mapping[str, Published] = field(default_factory=dict)


@dataclass(frozen=True)
class Block:
    """Rows that are compared with one another, such as all methods trained on one data set.

    Attributes:
        title: Name of the block.
        columns: Its test sets.
        rows: Its models.
        hours: Time of one training elsewhere, for plans made where the data cannot be read; None if unknown.

    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    hours: float | None = None


@dataclass(frozen=True)
class Table:
    """What a table file says. `published_in` and `hours_from` name the source of the published values and times."""

    title: str
    blocks: tuple[Block, ...]
    seeds: tuple[int, ...]
    mean: bool = True
    published_in: str = "paper"
    hours_from: str = "the table file"


def read_table(path: Path) -> Table:
    """Read a table file.

    Args:
        path: The YAML file. Configs, results and prompt files are relative to its folder, or to the working directory.

    Returns:
        The table.

    Raises:
        UserError: An unknown key, a value of the wrong type, a missing config; the message names the place.

    Example:
        >>> file = Path("small.yaml")
        >>> _ = file.write_text('''
        ... columns: [{title: COCO, test: mscoco}]
        ... rows: [{label: ours, results: "*.json"}]
        ... ''')
        >>> read_table(file).blocks[0].columns[0].metric
        'mean_R@1'

    """
    values = config.read(path)
    where = f"{path}: "
    _refuse_unknown(values, TABLE_KEYS, where)
    if ("rows" in values) == ("blocks" in values):
        both = "rows" in values
        raise UserError(f"{where}{'has both rows and blocks; keep one' if both else 'rows (or blocks) are missing'}")
    reader = _Reader(path.parent, where)
    columns = reader.columns(values["columns"], "columns") if "columns" in values else None
    common = overrides_of(values.get("overrides"), f"{where}overrides")
    blocks = _list(values["blocks"], f"{where}blocks") if "blocks" in values else [{"rows": values["rows"]}]
    mean = values.get("mean", True)
    if not isinstance(mean, bool):
        raise UserError(f"{where}mean is {mean!r}; it needs true or false")
    table = Table(
        title=_text(values.get("title", path.stem), f"{where}title"),
        blocks=tuple(
            reader.block(block, f"blocks[{k}]" if "blocks" in values else "", columns, common)
            for k, block in enumerate(blocks)
        ),
        seeds=_seeds(values.get("seeds", 1), where),
        mean=mean,
        published_in=_text(values.get("published_in", "paper"), f"{where}published_in"),
        hours_from=_text(values.get("hours_from", "the table file"), f"{where}hours_from"),
    )
    _refuse_repeated([block.title for block in table.blocks], f"{where}blocks", "title")
    return table


@dataclass(frozen=True)
class _Reader:
    """Reads the parts of a table file; `where` begins every message."""

    folder: Path
    where: str

    def block(self, values: Any, key: str, columns: tuple[Column, ...] | None, common: tuple[str, ...]) -> Block:
        values = _mapping(values, f"{self.where}{key or 'rows'}")
        _refuse_unknown(values, BLOCK_KEYS, self.where, f"{key}." if key else "")
        prefix = f"{key}." if key else ""
        if "columns" in values:
            columns = self.columns(values["columns"], f"{prefix}columns")
        if columns is None:
            raise UserError(f"{self.where}{prefix}columns are missing; list the test sets")
        overrides = common + overrides_of(values.get("overrides"), f"{self.where}{prefix}overrides")
        rows = tuple(
            self.row(row, f"{prefix}rows[{k}]", columns, overrides)
            for k, row in enumerate(_list(values.get("rows"), f"{self.where}{prefix}rows"))
        )
        _refuse_repeated([row.label for row in rows if row.label], f"{self.where}{prefix}rows", "label")
        title = _text(values.get("title", ""), f"{self.where}{prefix}title")
        if key and not title:
            raise UserError(f"{self.where}{prefix}title is missing; name the block, such as CC3M")
        hours = values.get("hours")
        if hours is not None and (type(hours) not in (int, float) or not 0 < hours < math.inf):
            raise UserError(f"{self.where}{prefix}hours is {hours!r}; it needs a number of hours above 0, such as 26")
        return Block(title, columns, rows, hours)

    def columns(self, values: Any, key: str) -> tuple[Column, ...]:
        columns = tuple(
            self.column(column, f"{key}[{k}]") for k, column in enumerate(_list(values, f"{self.where}{key}"))
        )
        _refuse_repeated([column.title for column in columns], f"{self.where}{key}", "title")
        if any(column.title == MEAN for column in columns):
            raise UserError(f"{self.where}{key}: the title {MEAN!r} is the mean of all columns; name another title")
        return columns

    def column(self, values: Any, key: str) -> Column:
        values = _mapping(values, f"{self.where}{key}")
        _refuse_unknown(values, COLUMN_KEYS, self.where, f"{key}.")
        if "test" not in values:
            raise UserError(f"{self.where}{key}.test is missing; name a test set, such as mscoco, or a path")
        test = _text(values["test"], f"{self.where}{key}.test")
        kind = values.get("kind") or self.kind_of(test, f"{key}.test")
        if kind not in KINDS:
            raise UserError(f"{self.where}{key}.kind is {kind!r}; allowed: {', '.join(KINDS)}")
        other = list(CLASSIFICATION) if kind == "retrieval" else list(RETRIEVAL)
        if test.partition(":")[0] in other:
            raise UserError(f"{self.where}{key}.kind is {kind!r}, but {test} is for the other kind; leave kind out")
        metric = _text(values.get("metric", METRICS[kind]), f"{self.where}{key}.metric")
        if kind == "classification" and metric not in CLASS_METRICS:
            raise UserError(f"{self.where}{key}.metric is {metric!r}; allowed: {', '.join(CLASS_METRICS)}")
        if kind == "retrieval" and not re.fullmatch(r".+_R@(1|5|10)", metric):
            raise UserError(
                f"{self.where}{key}.metric is {metric!r}; it needs a recall, such as mean_R@1 or image_to_text_R@5"
            )
        if "prompts" in values and kind != "classification":
            raise UserError(f"{self.where}{key}.prompts: only for classification; leave it out")
        prompts = self.file(values["prompts"], f"{key}.prompts") if "prompts" in values else None
        return Column(_text(values.get("title", test), f"{self.where}{key}.title"), test, kind, metric, prompts)

    def kind_of(self, test: str, key: str) -> str:
        name = test.partition(":")[0]
        for kind, known in zip(KINDS, (list(RETRIEVAL), list(CLASSIFICATION)), strict=True):
            if name in known:
                return kind
        near = difflib.get_close_matches(name, [*RETRIEVAL, *CLASSIFICATION], n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        names = ", ".join([*RETRIEVAL, *CLASSIFICATION])
        raise UserError(
            f"{self.where}{key} is {test!r}, which is not a standard test set ({names}); "
            f"{hint}For a path, add kind: retrieval or kind: classification"
        )

    def row(self, values: Any, key: str, columns: tuple[Column, ...], common: tuple[str, ...]) -> Row:
        values = _mapping(values, f"{self.where}{key}")
        _refuse_unknown(values, ROW_KEYS, self.where, f"{key}.")
        if ("config" in values) == ("results" in values):
            problem = "has both config and results" if "config" in values else "has neither config nor results"
            raise UserError(f"{self.where}{key} {problem}; name a config to train, or results of nuclr evaluate")
        label = _text(values["label"], f"{self.where}{key}.label") if "label" in values else None
        published = self.published(values.get("published", {}), f"{key}.published", columns)
        if "results" in values:
            if "overrides" in values:
                raise UserError(f"{self.where}{key}.overrides: results are not trained; leave it out")
            if label is None:
                raise UserError(f"{self.where}{key}.label is missing; name the row")
            patterns = values["results"] if isinstance(values["results"], list) else [values["results"]]
            texts = tuple(self.pattern(_text(one, f"{self.where}{key}.results")) for one in patterns)
            return Row(label, results=texts, published=published)
        overrides = common + overrides_of(values.get("overrides"), f"{self.where}{key}.overrides")
        return Row(label, self.file(values["config"], f"{key}.config"), overrides, published=published)

    def pattern(self, text: str) -> str:
        """Return the pattern relative to the table file's folder if it matches something there, else as it is."""
        inside = str(self.folder / text)
        return inside if matching_files(inside) else text

    def file(self, value: Any, key: str) -> Path:
        """Return the file, looked for in the table file's folder and in the working directory."""
        text = _text(value, f"{self.where}{key}")
        places = list(dict.fromkeys(Path(os.path.normpath(place)) for place in (self.folder / text, Path(text))))
        for place in places:
            if place.is_file():
                return place
        around = {path.name: path for place in places for path in place.parent.glob(f"*{place.suffix}")}
        near = difflib.get_close_matches(Path(text).name, around, n=1)
        hint = f"; did you mean {around[near[0]]}?" if near else ""
        raise UserError(f"{self.where}{key}: there is no file {text} (looked at {', '.join(map(str, places))}){hint}")

    def published(self, values: Any, key: str, columns: tuple[Column, ...]) -> dict[str, Published]:
        titles = [*(column.title for column in columns), MEAN]
        values = _mapping(values, f"{self.where}{key}")
        _refuse_unknown(values, titles, self.where, f"{key}.", "column")
        return {title: _published(value, f"{self.where}{key}.{title}") for title, value in values.items()}


def matching_files(pattern: str) -> list[Path]:
    """Return the files that a pattern matches, in order; the pattern may be an absolute path."""
    return [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]  # noqa: PTH207 (Path.glob is relative)


def overrides_of(values: Any, where: str) -> tuple[str, ...]:
    """Return overrides as texts KEY=VALUE, from a list of such texts or from keys and values.

    Args:
        values: A list of texts, or a dict whose keys are full ("objective.gamma") or nested; None for no overrides.
        where: Begins error messages.

    Returns:
        The texts.

    Raises:
        UserError: Another type, a text without "=", or a key that the table itself sets (seed, out).

    Example:
        >>> overrides_of({"objective": {"gamma": 0.8}, "data.mask": False}, "")
        ('objective.gamma=0.8', 'data.mask=false')

    """
    if values is None:
        return ()
    if isinstance(values, Mapping):
        texts = [f"{key}={_value_text(value)}" for key, value in flatten(values)]
    elif isinstance(values, list) and all(isinstance(text, str) and "=" in text for text in values):
        texts = list(values)
    else:
        raise UserError(f"{where}: needs keys and values, or a list of KEY=VALUE")
    for text in texts:
        key = text.partition("=")[0]
        if key in OWNED:
            raise UserError(f"{where}: {key} cannot be an override; {OWNED[key]}")
    return tuple(texts)


def _value_text(value: Any) -> str:
    """Return a value so that `config.load` reads the same value from the text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(map(str, value))
    text = str(value)
    if isinstance(value, str) and yaml.safe_load(text) != value:
        return yaml.safe_dump(value, default_style='"').strip()
    return text


def _published(value: Any, where: str) -> Published:
    """Return a published value from a number, "24.2 ± 0.1", "24.2 +- 0.1" or [24.2, 0.1]."""
    if isinstance(value, str):
        parts: list[Any] = re.split(r"\s*(?:±|\+-|\+/-)\s*", value.strip())
    else:
        parts = value if isinstance(value, list) else [value]
    try:
        numbers = [float(part) for part in parts if not isinstance(part, bool)]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) not in (1, 2) or not all(map(math.isfinite, numbers)) or min(numbers) < 0 or max(numbers) > 100:
        raise UserError(f"{where} is {value!r}; it needs a percentage, such as 24.2 or '24.2 ± 0.1'")
    return Published(*numbers)


def _seeds(value: Any, where: str) -> tuple[int, ...]:
    seeds = list(range(min(value, MOST_SEEDS + 1))) if type(value) is int and value > 0 else value
    whole = isinstance(seeds, list) and all(type(seed) is int and 0 <= seed < 2**31 for seed in seeds)
    if not whole or not seeds or len(seeds) > MOST_SEEDS:
        raise UserError(
            f"{where}seeds is {str(value)[:100]!r}; it needs a number of seeds, or a list such as [0, 1, 2]"
        )
    if len(set(seeds)) < len(seeds):
        raise UserError(f"{where}seeds: a seed is listed twice")
    return tuple(seeds)


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: needs keys and values, not {type(value).__name__}")
    return value


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: needs a list with at least one entry")
    return value


def _text(value: Any, where: str) -> str:
    if isinstance(value, dict | list) or value is None or not str(value).isprintable():
        raise UserError(f"{where}: needs a text in one line")
    return str(value)


def _refuse_unknown(
    values: Mapping[str, Any], known: Sequence[str], where: str, prefix: str = "", what: str = "key"
) -> None:
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(known)}"
            raise UserError(f"{where}unknown {what} {prefix}{str(key)[:100]}; {hint}")


def _refuse_repeated(names: Sequence[str], where: str, what: str) -> None:
    repeated = next((name for k, name in enumerate(names) if name in names[:k]), None)
    if repeated is not None:
        raise UserError(f"{where}: the {what} {repeated!r} occurs twice; each needs its own")
