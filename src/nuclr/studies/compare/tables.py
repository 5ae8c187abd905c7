"""Tables of compare.json: Markdown, CSV, and text for the terminal."""

import csv
import io
from typing import Any

from nuclr.files import csv_cell


def markdown(content: dict[str, Any]) -> str:
    """Return the whole page: metrics, differences, chosen settings, protocol."""
    parts = [f"# {content['title']}\n", _metrics(content), _differences(content), _corrected(content)]
    parts += [_false_negatives(content), _chosen(content)]
    parts.append(_notes(content))
    parts.append("## Protocol\n\n" + "\n".join(f"- {line}" for line in content["protocol"]) + "\n")
    if content["failed"]:
        parts.append("## Failed runs\n\n" + "\n".join(f"- {k}: {v}" for k, v in content["failed"].items()) + "\n")
    parts.append(f"Command: `{content['command']}`\n")
    return "\n".join(part for part in parts if part)


def columns(content: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (set, metric, title) of the columns."""
    shown: list[tuple[str, str, str]] = []
    for reported in content["sets"]:
        name = reported["name"]
        if reported["kind"] == "classes":
            shown.append((name, "acc@1", f"{name} top-1"))
            continue
        x, y = content["sides"]
        recall_at_1 = ((f"{x}_to_{y}_R@1", f"{x}→{y} @1"), (f"{y}_to_{x}_R@1", f"{y}→{x} @1"), ("mean_R@1", "mean @1"))
        others = (("mean_R@5", "mean @5"), ("mean_R@10", "mean @10"))
        for metric, title in (*recall_at_1, *others) if reported["main"] else recall_at_1[2:]:
            shown.append((name, metric, f"{name} {title}"))
    shown += [(name, "first", name) for name in content["averages"]]
    return shown


def _cell(metric: dict[str, Any]) -> str:
    return f"{metric['mean']:.2f} ± {metric['std']:.2f}"


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table with aligned columns, which is also readable on a terminal."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        padded = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "| " + " | ".join(("-" * w if i == 0 else "-" * (w - 1) + ":") for i, w in enumerate(widths)) + " |"
    return "\n".join([line(header), rule, *map(line, rows)]) + "\n"


def _metrics(content: dict[str, Any]) -> str:
    shown = columns(content)
    rows = [
        [row["label"]] + [_cell(row["metrics"][set_name][metric]) for set_name, metric, _ in shown]
        for row in content["rows"].values()
    ]
    seeds = len(content["seeds"])
    kinds = {reported["kind"] for reported in content["sets"]}
    names = [name for kind, name in (("pairs", "recall"), ("classes", "accuracy")) if kind in kinds]
    introduction = (
        f"{' and '.join(names).capitalize()} in percent, mean ± standard deviation over "
        f"{seeds} seed{'s' if seeds > 1 else ''}.\n"
    )
    return introduction + "\n" + markdown_table(["", *(title for _, _, title in shown)], rows)


def _differences(content: dict[str, Any]) -> str:
    if not content["differences"]:
        return ""
    rows = [
        [
            f"{content['rows'][d['row']]['label']} - {content['rows'][d['to']]['label']}",
            d["set"],
            f"{d['difference']:+.2f}",
            f"[{d['low']:+.2f}, {d['high']:+.2f}]",
            verdict(d),
        ]
        for d in content["differences"]
    ]
    kinds = {reported["kind"] for reported in content["sets"]}
    recall = "recall@1 of both directions"
    metric = "accuracy" if kinds == {"classes"} else recall if kinds == {"pairs"} else f"{recall}, or accuracy"
    title = f"## Paired differences in points ({metric}), with 95 % intervals\n\n"
    return title + markdown_table(["", "set", "difference", "interval", "verdict"], rows)


def verdict(difference: dict[str, Any]) -> str:
    """Return the result of a difference in words: better or worse if zero is outside of its interval."""
    if not difference["outside"]:
        return "no significant difference"
    return "better" if difference["difference"] > 0 else "worse"


def _corrected(content: dict[str, Any]) -> str:
    rows = []
    main = {reported["name"] for reported in content["sets"] if reported["main"]}
    for row in content["rows"].values():
        for set_name, banks in ((set_name, banks) for set_name, banks in row["corrected"].items() if set_name in main):
            cells = [_cell(row["metrics"][set_name]["mean_R@1"])]
            for bank in ("train", "queries"):
                gain = banks[bank]["gain"] if bank in banks else None
                difference = f"{gain['difference']:+.2f} [{gain['low']:+.2f}, {gain['high']:+.2f}]" if gain else ""
                cells += [_cell(banks[bank]["mean_R@1"]) if gain else "", difference]
            rows.append([row["label"], set_name, *cells])
    if not rows:
        return ""
    title = "## Popularity-corrected retrieval, recall@1 (mean of both directions)\n\n"
    header = ["", "set", "plain", "bank: training queries", "gain", "bank: own queries (transductive)", "gain"]
    return title + markdown_table(header, rows)


def _false_negatives(content: dict[str, Any]) -> str:
    known = {row["label"]: row["false_negatives"] for row in content["rows"].values() if row["false_negatives"]}
    if not known:
        return ""
    title = "## Share of the negatives' weight on known false negatives, percent\n\n"
    rows = [[label, _cell(one["weighted"]), f"{one['uniform']:.2f}"] for label, one in known.items()]
    return title + markdown_table(["", "at the trained temperature", "with equal weights"], rows)


def _chosen(content: dict[str, Any]) -> str:
    rows = []
    for row in content["rows"].values():
        for set_name, changes in row["tuning"]["chosen"].items():
            setting = ", ".join(f"{key.removeprefix('objective.')} {value}" for key, value in changes.items())
            rows.append([row["label"], set_name, setting])
    return "## Settings chosen by tuning\n\n" + markdown_table(["", "tuned on", "setting"], rows) + _at_an_end(content)


def _at_an_end(content: dict[str, Any]) -> str:
    """Return a note that names the rows whose best temperature is the lowest or highest one of the grid."""
    labels = []
    for row in content["rows"].values():
        tried = {one["changes"]["objective.temperature"] for one in row["tuning"]["tried"]}
        chosen = {changes["objective.temperature"] for changes in row["tuning"]["chosen"].values()} if tried else set()
        if len(tried) >= 3 and chosen & {min(tried), max(tried)}:
            labels.append(row["label"])
    if not labels:
        return ""
    return f"\nThe best temperature is at an end of the grid, so a wider grid might do better: {', '.join(labels)}.\n"


def comma_separated(content: dict[str, Any]) -> str:
    """Return one line per row, set and metric, with the values of all seeds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "set", "metric", "mean", "std", *(f"seed_{seed}" for seed in content["seeds"])])
    for name, row in content["rows"].items():
        for set_name, metrics in row["metrics"].items():
            for metric, value in metrics.items():
                writer.writerow([*map(csv_cell, (name, set_name, metric)), *_values(value)])
        for set_name, banks in row["corrected"].items():
            for bank, metrics in banks.items():
                for metric in (metric for metric in metrics if metric != "gain"):
                    names = (name, set_name, f"corrected_{bank}_{metric}")
                    writer.writerow([*map(csv_cell, names), *_values(metrics[metric])])
    return text.getvalue()


def _values(metric: dict[str, Any]) -> list[str]:
    return [f"{value:.4f}" for value in (metric["mean"], metric["std"], *metric["per_seed"])]


def terminal(content: dict[str, Any]) -> str:
    """Return the tables that the command prints at its end."""
    shown = (_metrics(content), _differences(content), _corrected(content), _false_negatives(content), _notes(content))
    return "\n".join(part for part in shown if part)


def _notes(content: dict[str, Any]) -> str:
    """Return lines about what limits the comparison: pairs that were tuned on, recall near chance."""
    notes = []
    if any(reported["name"] == "val" and reported["main"] for reported in content["sets"]):
        notes.append(
            "Settings were tuned on the same held-out data, so all values are slightly too high; --halves or --test "
            "report on data that tuning has not seen."
        )
    chance = content["chance"]
    best = [row["metrics"]["val"]["mean_R@10"]["mean"] for row in content["rows"].values()] if chance else []
    if best and max(best) < 2 * chance:
        notes.append(
            f"Recall@10 is hardly above chance ({max(best):.1f} %, chance {chance:.1f} %), so differences mean little; "
            "train longer (schedule.epochs), or start from a trained model (model.pretrained)."
        )
    return "".join(f"{note}\n" for note in notes)
