"""Results that `nuclr evaluate --out` wrote, here or elsewhere: reading them, and finding those of a column."""

import glob
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nuclr import files
from nuclr.errors import UserError
from nuclr.evaluation.test_sets import CLASSIFICATION, RETRIEVAL
from nuclr.objectives import entry, names
from nuclr.studies.table.table_file import METRICS, Block, Column, Row, Table, matching_files

COMMAND = "nuclr evaluate"
LARGEST = 64 * 2**20  # bytes of a results file; ImageNet's, with all class names and prompts, has less than one MB
# What must be equal for two results to be about the same test set measured in the same way, with its name in messages.
IDENTITY = {
    "retrieval": {"fingerprint": "the pairs", "sizes": "the numbers of items", "duplicates": "the treatment of copies"},
    "classification": {"images": "the number of images", "class_names": "the class names", "templates": "the prompts"},
}


@dataclass(frozen=True)
class Evaluation:
    """One file of results."""

    path: Path
    content: dict[str, Any]

    @property
    def subject(self) -> str:
        """The run or model that was evaluated, as its path when it was evaluated."""
        return str(self.content["subject"]["path"])

    def entries(self, kind: str) -> dict[str, dict[str, Any]]:
        """Return the results of one kind by the name of the test set."""
        return self.content[kind]


def read(path: Path) -> Evaluation:
    """Read one file of results.

    Args:
        path: A file that `nuclr evaluate --out` wrote.

    Raises:
        UserError: It does not exist or is something else.

    """
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(f"{path}: too large for results of `{COMMAND}`")
        content = files.parse_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; name a file that `{COMMAND} --out` wrote") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not JSON ({error}); remove it, and evaluate again") from None
    sections = [content.get(key) for key in ("subject", *METRICS)] if isinstance(content, dict) else [None]
    if not all(isinstance(section, dict) for section in sections) or content.get("written_by") != COMMAND:
        raise UserError(f"{path}: was not written by `{COMMAND} --out`")
    entries = [one for kind in METRICS for one in content[kind].values()]
    if "path" not in content["subject"] or not all(isinstance(one, dict) and "plain" in one for one in entries):
        raise UserError(f"{path}: is damaged; evaluate again with another --out")
    return Evaluation(path, content)


def find(
    evaluations: Sequence[Evaluation], column: Column, elsewhere: bool = False
) -> tuple[Evaluation, dict[str, Any]] | None:
    """Return the result on a column's test set, with its file; None if there is none.

    Args:
        evaluations: Results of one run.
        column: The column; a standard set is recognized by its name, another one by its path.
        elsewhere: The file of the test set may have been in another folder: its name is enough.

    Raises:
        UserError: Two files have different results on the set.

    """
    matches = _matching(evaluations, column, _is_set)
    if elsewhere and not matches:
        matches = _matching(evaluations, column, _has_name)
    if not matches:
        return None
    first = matches[0]
    for other in matches[1:]:
        if other[1]["plain"] != first[1]["plain"]:
            raise UserError(
                f"{first[0].path} and {other[0].path}: different results of {first[0].subject} on {column.test}; "
                "keep one of the files"
            )
    return first


def _matching(
    evaluations: Sequence[Evaluation], column: Column, matches: Callable[[str, str, dict[str, Any]], bool]
) -> list[tuple[Evaluation, dict[str, Any]]]:
    return [
        (evaluation, result)
        for evaluation in evaluations
        for name, result in evaluation.entries(column.kind).items()
        if matches(column.test, name, result)
    ]


def _is_set(test: str, name: str, result: dict[str, Any]) -> bool:
    standard = test.partition(":")[0]
    if standard in RETRIEVAL or standard in CLASSIFICATION:
        return name == standard
    return name == test or result.get("path") == test


def _has_name(test: str, name: str, _: dict[str, Any]) -> bool:
    return Path(test).name == Path(name).name


def value(evaluation: Evaluation, result: dict[str, Any], column: Column) -> float:
    """Return the column's metric as a fraction.

    Raises:
        UserError: The results do not have the metric.

    """
    metrics = result["plain"]
    number = metrics.get(column.metric) if isinstance(metrics, dict) else None
    if isinstance(number, bool) or not isinstance(number, int | float):
        have = ", ".join(metrics) if isinstance(metrics, dict) else "nothing"
        raise UserError(f"{evaluation.path}: no metric {column.metric!r} on {column.test}; it has {have}")
    return float(number)


def check_same_set(column: Column, results: Sequence[tuple[Evaluation, dict[str, Any]]]) -> None:
    """Refuse results of one column that were measured on different data or in different ways.

    Raises:
        UserError: Names the two files and what differs.

    """
    for evaluation, result in results[1:]:
        for key, what in IDENTITY[column.kind].items():
            if result.get(key) != results[0][1].get(key):
                raise UserError(
                    f"{results[0][0].path} and {evaluation.path}: not the same test set for the column {column.title}; "
                    f"{what} ({key}) differ"
                )


def gather(patterns: Sequence[str], where: str) -> list[list[Evaluation]]:
    """Return the results of all files that the patterns match, grouped by the run that was evaluated.

    Args:
        patterns: Paths or glob patterns.
        where: Begins error messages.

    Raises:
        UserError: A pattern matches no file.

    """
    paths: dict[Path, None] = {}
    for pattern in patterns:
        matches = matching_files(pattern)
        if not matches:
            raise UserError(f"{where}: no file matches {pattern}; name files that `{COMMAND} --out` wrote")
        paths |= dict.fromkeys(matches)
    groups: dict[str, list[Evaluation]] = {}
    for evaluation in map(read, paths):
        groups.setdefault(evaluation.subject, []).append(evaluation)
    return list(groups.values())


# -- a table from results alone ----------------------------------------------------------------------------------------


def table_of_results(arguments: Sequence[str]) -> Table:
    """Return a table whose rows and columns come from files of results.

    Args:
        arguments: Paths or patterns, or LABEL=PATTERN for a row of this label. Without a label, the runs with the same
            settings but for the seed are one row, named by their objective.

    Raises:
        UserError: A file is missing or is something else.

    """
    rows: dict[str, list[str]] = {}
    unlabelled: list[list[Evaluation]] = []
    everything: list[Evaluation] = []
    for text in arguments:
        label, equals, pattern = text.partition("=")
        groups = gather([pattern if equals else text], "--results")
        everything += [one for group in groups for one in group]
        if equals:
            rows.setdefault(label, []).extend(glob.escape(str(one.path)) for group in groups for one in group)
        else:
            unlabelled += groups
    for (_, label), members in _by_settings(unlabelled).items():
        free, number = label, 1
        while free in rows:
            number += 1
            free = f"{label} ({number})"
        rows[free] = [glob.escape(str(one.path)) for one in members]
    columns: dict[tuple[str, str], Column] = {}
    for evaluation in everything:
        for kind, metric in METRICS.items():
            for name in evaluation.entries(kind):
                columns.setdefault((kind, name), Column(name, name, kind, metric))
    if not columns:
        raise UserError("--results: the files have neither retrieval nor classification results")
    block = Block("", tuple(columns.values()), tuple(Row(label, results=tuple(paths)) for label, paths in rows.items()))
    return Table("Results", (block,), seeds=())


def _by_settings(groups: Sequence[list[Evaluation]]) -> dict[tuple[str, str], list[Evaluation]]:
    """Return evaluations by (settings, label)."""
    rows: dict[tuple[str, str], list[Evaluation]] = {}
    for group in groups:
        subject = group[0].content["subject"]
        objective = str(subject.get("objective", ""))
        label = entry(objective).label if objective in names() else objective or Path(group[0].subject).name
        rows.setdefault((str(subject.get("settings", group[0].subject)), label), []).extend(group)
    return rows
