"""What a comparison found, as tables: `content` is what its JSON file holds."""

from typing import Any

import numpy as np

from nuclr.report import numbers
from nuclr.report.summary import Table


def tables(content: dict[str, Any]) -> list[tuple[str, Table]]:
    """A title and a table for each set, and one for the averages over sets."""
    directions = (("image_to_text_R@1", "image to text @1"), ("text_to_image_R@1", "text to image @1"))
    means = (("mean_R@1", "mean @1"), ("mean_R@5", "mean @5"), ("mean_R@10", "mean @10"))
    found = []
    for report in content["sets"]:
        columns = (("acc@1", "accuracy"),) if report["kind"] == "classes" else directions + means
        found.append((_title(report), _figures(content, [(report["name"], *column) for column in columns])))
    if content["averages"]:
        averages = [(name, "first", named(name)) for name in content["averages"]]
        found.append(("Averages over sets", _figures(content, averages)))
    return found


def _title(report: dict[str, Any]) -> str:
    return report["name"] if report["label"] == report["name"] else f"{report['name']}: {report['label']}"


def named(average: str) -> str:
    """How people call an average over sets."""
    name = average.removeprefix("average: ")
    return "mean of all sets" if name == "mean" else f"mean of {name} sets"


def _figures(content: dict[str, Any], shown: list[tuple[str, str, str]]) -> Table:
    """(set, metric, title) of the columns -> their table."""
    rows, means = [], []
    for row in content["rows"].values():
        found = [row["metrics"][where][metric] for where, metric, _ in shown]
        rows.append([row["label"], *(_cell(one) for one in found)])
        means.append([one["mean"] for one in found])
    best: set[tuple[int, int]] = set()
    for column, values in enumerate(np.array(means).T.round(2)):
        if len(values) > 1 and values.max() > values.min():
            best |= {(int(r), column + 1) for r in np.flatnonzero(values == values.max())}
    return Table(["", *(title for _, _, title in shown)], rows, best)


def _cell(found: dict[str, Any]) -> str:
    return f"{found['mean']:.2f} ± {found['std']:.2f}"


def corrected(content: dict[str, Any]) -> Table | None:
    """Plain and popularity-corrected ranking, with gains."""
    rows = []
    for row in content["rows"].values():
        for where, banks in row["corrected"].items():
            cells = [_cell(row["metrics"][where]["mean_R@1"])]
            for bank in ("train", "queries"):
                gain = banks[bank]["gain"] if bank in banks else None
                cells.append(_cell(banks[bank]["mean_R@1"]) if gain else numbers.MISSING)
                cells.append(_gain(gain) if gain else numbers.MISSING)
            rows.append([row["label"], where, *cells])
    columns = ["", "set", "plain", "bank: training queries", "gain", "bank: own queries", "gain"]
    return Table(columns, rows, set()) if rows else None


def _gain(gain: dict[str, Any]) -> str:
    value, low, high = (numbers.signed(gain[key]) for key in ("difference", "low", "high"))
    return f"{value} [{low}, {high}]"


def false_negatives(content: dict[str, Any]) -> Table | None:
    """Weight on known false negatives, where the truth is known."""
    rows = [
        [row["label"], _cell(row["false_negatives"]["weighted"]), f"{row['false_negatives']['uniform']:.2f}"]
        for row in content["rows"].values()
        if row.get("false_negatives")
    ]
    return Table(["", "at the trained temperature", "with equal weights"], rows, set()) if rows else None


def chosen(content: dict[str, Any]) -> Table:
    """The settings that tuning chose."""
    rows = []
    for row in content["rows"].values():
        for where, changes in row["tuning"]["chosen"].items():
            told = ", ".join(f"{key.removeprefix('objective.')} {value}" for key, value in changes.items())
            rows.append([row["label"], where, told])
    return Table(["", "tuned on", "setting"], rows, set())
