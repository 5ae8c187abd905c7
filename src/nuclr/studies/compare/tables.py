"""compare.json -> tables for people: Markdown, CSV, and the same on a terminal."""

import csv
import io
from typing import Any


def markdown(content: dict[str, Any]) -> str:
    """The whole page: figures, differences, settings chosen, protocol."""
    parts = [f"# {content['title']}\n", _figures(content), _differences(content), _corrected(content)]
    parts += [_false_negatives(content), _chosen(content)]
    parts.append("## Protocol\n\n" + "\n".join(f"- {line}" for line in content["protocol"]) + "\n")
    if content["failed"]:
        parts.append("## Failed runs\n\n" + "\n".join(f"- {k}: {v}" for k, v in content["failed"].items()) + "\n")
    parts.append(f"Command: `{content['command']}`\n")
    return "\n".join(part for part in parts if part)


def columns(content: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(set, metric, title) of the figures that a table shows."""
    found: list[tuple[str, str, str]] = []
    for report in content["sets"]:
        name = report["name"]
        if report["kind"] == "classes":
            found.append((name, "acc@1", f"{name} top-1"))
            continue
        wanted = (("image_to_text_R@1", "i→t @1"), ("text_to_image_R@1", "t→i @1"), ("mean_R@1", "mean @1"))
        extra = (("mean_R@5", "mean @5"), ("mean_R@10", "mean @10"))
        for metric, title in (*wanted, *extra) if report["main"] else wanted[2:]:
            found.append((name, metric, f"{name} {title}"))
    found += [(name, "first", name) for name in content["averages"]]
    return found


def _cell(found: dict[str, Any]) -> str:
    return f"{found['mean']:.2f} ± {found['std']:.2f}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table whose source is aligned too, so that it reads well on a terminal."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        padded = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "| " + " | ".join(("-" * w if i == 0 else "-" * (w - 1) + ":") for i, w in enumerate(widths)) + " |"
    return "\n".join([line(header), rule, *map(line, rows)]) + "\n"


def _figures(content: dict[str, Any]) -> str:
    shown = columns(content)
    rows = [
        [row["label"]] + [_cell(row["figures"][where][metric]) for where, metric, _ in shown]
        for name, row in content["rows"].items()
    ]
    seeds = len(content["seeds"])
    told = f"Recall and accuracy in percent, mean ± standard deviation over {seeds} seed{'s' if seeds > 1 else ''}.\n"
    return told + "\n" + _table(["", *(title for _, _, title in shown)], rows)


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
    title = "## Paired differences in points (recall@1 of both directions, or accuracy), with 95 % intervals\n\n"
    return title + _table(["", "set", "difference", "interval", "verdict"], rows)


def verdict(difference: dict[str, Any]) -> str:
    """In words: whether zero is outside of the interval."""
    if not difference["outside"]:
        return "not told apart"
    return "better" if difference["difference"] > 0 else "worse"


def _corrected(content: dict[str, Any]) -> str:
    rows = []
    main = {found["name"] for found in content["sets"] if found["main"]}
    for row in content["rows"].values():
        for where, banks in ((where, banks) for where, banks in row["corrected"].items() if where in main):
            cells = [_cell(row["figures"][where]["mean_R@1"])]
            for bank in ("train", "queries"):
                gain = banks[bank]["gain"] if bank in banks else None
                told = f"{gain['difference']:+.2f} [{gain['low']:+.2f}, {gain['high']:+.2f}]" if gain else ""
                cells += [_cell(banks[bank]["mean_R@1"]) if gain else "", told]
            rows.append([row["label"], where, *cells])
    if not rows:
        return ""
    title = "## Popularity-corrected retrieval, recall@1 (mean of both directions)\n\n"
    header = ["", "set", "plain", "bank: training queries", "gain", "bank: own queries (transductive)", "gain"]
    return title + _table(header, rows)


def _false_negatives(content: dict[str, Any]) -> str:
    known = {row["label"]: row["false_negatives"] for row in content["rows"].values() if row["false_negatives"]}
    if not known:
        return ""
    title = "## Share of the negatives' weight on known false negatives, percent\n\n"
    rows = [[label, _cell(found["weighted"]), f"{found['uniform']:.2f}"] for label, found in known.items()]
    return title + _table(["", "at the trained temperature", "with equal weights"], rows)


def _chosen(content: dict[str, Any]) -> str:
    rows = []
    for row in content["rows"].values():
        for where, changes in row["tuning"]["chosen"].items():
            told = ", ".join(f"{key.removeprefix('objective.')} {value}" for key, value in changes.items())
            rows.append([row["label"], where, told])
    return "## Settings chosen by tuning\n\n" + _table(["", "tuned on", "setting"], rows) + _at_an_end(content)


def _at_an_end(content: dict[str, Any]) -> str:
    """Who chose the lowest or highest temperature of the grid, and so might gain from a wider one."""
    tried = content["settings"]["temperatures"]
    ends = {min(tried), max(tried)}
    found = [
        row["label"]
        for row in content["rows"].values()
        if row["tuning"]["tried"]
        and any(changes["objective.temperature"] in ends for changes in row["tuning"]["chosen"].values())
    ]
    if not found or len(tried) < 3:
        return ""
    return f"\nChosen at an end of the temperatures, so that a wider grid might do better: {', '.join(found)}.\n"


def comma_separated(content: dict[str, Any]) -> str:
    """One line a row, set, metric and seed: for a reader's own plots."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "set", "metric", "mean", "std", *(f"seed_{seed}" for seed in content["seeds"])])
    for name, row in content["rows"].items():
        for where, metrics in row["figures"].items():
            for metric, found in metrics.items():
                writer.writerow([name, where, metric, *_values(found)])
        for where, banks in row["corrected"].items():
            for bank, metrics in banks.items():
                for metric in (metric for metric in metrics if metric != "gain"):
                    writer.writerow([name, where, f"corrected_{bank}_{metric}", *_values(metrics[metric])])
    return text.getvalue()


def _values(found: dict[str, Any]) -> list[str]:
    return [f"{value:.4f}" for value in (found["mean"], found["std"], *found["per_seed"])]


def terminal(content: dict[str, Any]) -> str:
    """What the command ends with."""
    shown = (_figures(content), _differences(content), _corrected(content), _false_negatives(content))
    return "\n".join(part for part in shown if part)
