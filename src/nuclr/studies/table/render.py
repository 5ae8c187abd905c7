"""The content of table.json as Markdown, LaTeX and CSV."""

import csv
import io
import re
from collections.abc import Sequence
from typing import Any

from nuclr.files import csv_cell
from nuclr.studies.compare.tables import markdown_table

MISSING = "-"
_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "\u2212": "$-$",
    "→": r"$\rightarrow$",
    "τ": r"$\tau$",
    "\u03b3": r"$\gamma$",
    "ζ": r"$\zeta$",
    "ξ": r"$\xi$",
}


def text_of(value: dict[str, Any] | None) -> str:
    """Return the text of a cell or of a published value."""
    return MISSING if value is None else str(value["text"])


def difference_text(value: float | None) -> str:
    """Return ours minus published, with its sign."""
    return MISSING if value is None else f"{value:+.2f}"


def lines_of(block: dict[str, Any], published_in: str | None) -> list[tuple[str, list[str], list[bool], int]]:
    """Return (label, cells, bold, level) of every line of a block.

    A row with published values is followed by two lines of level 1: these values, and ours minus them.
    """
    lines = []
    for row in block["rows"]:
        cells = [text_of(row["cells"][title]) for title in block["columns"]]
        lines.append((row["label"], cells, [title in row["best"] for title in block["columns"]], 0))
        if row["published"]:
            plain = [False] * len(cells)
            published = [text_of(row["published"].get(title)) for title in block["columns"]]
            lines.append((str(published_in), published, plain, 1))
            differences = [difference_text(row["differences"].get(title)) for title in block["columns"]]
            lines.append(("difference", differences, plain, 1))
    return lines


# -- Markdown ----------------------------------------------------------------------------------------------------------


def markdown(content: dict[str, Any]) -> str:
    """Return the tables of all blocks, the protocol and the command."""
    parts = [f"# {_one_line(content['title'])}\n", tables(content)]
    parts.append("\n".join(f"- {line}" for line in content["protocol"]) + "\n")
    tested = dict.fromkeys((t["title"], t["test"], t["metric"]) for block in content["blocks"] for t in block["tests"])
    parts.append("\n".join(f"- {title}: `{test}`, {metric}" for title, test, metric in tested) + "\n")
    if content["published_in"]:
        parts.append(f"Published values: {content['published_in']}. Difference: ours minus published.\n")
    parts.append(f"Command: `{content['command']}`\n")
    return "\n".join(parts)


def tables(content: dict[str, Any]) -> str:
    """Return the tables of all blocks alone, which are also readable on a terminal."""
    parts = []
    for block in content["blocks"]:
        rows = [
            [
                f"{'↳ ' if level else ''}{_one_line(label)}",
                *(f"**{c}**" if b else c for c, b in zip(cells, bold, strict=True)),
            ]
            for label, cells, bold, level in lines_of(block, content["published_in"])
        ]
        title = f"## {_one_line(block['title'])}\n\n" if block["title"] else ""
        parts.append(title + markdown_table(["", *map(_one_line, block["columns"])], rows))
    return "\n".join(parts)


def _one_line(text: str) -> str:
    return text.replace("|", r"\|")


# -- LaTeX -------------------------------------------------------------------------------------------------------------


def latex(content: dict[str, Any]) -> str:
    r"""Return a table environment to \input; it needs the package booktabs.

    Blocks with the same columns are parts of one tabular, separated by rules. Other blocks have a tabular of their own.
    """
    groups: list[list[dict[str, Any]]] = []
    for block in content["blocks"]:
        if groups and groups[-1][0]["columns"] == block["columns"]:
            groups[-1].append(block)
        else:
            groups.append([block])
    lines = ["% Written by nuclr table. In the preamble: \\usepackage{booktabs}", r"\begin{table}[t]", r"  \centering"]
    lines.append(f"  \\caption{{{escape(content['title'])}}}")
    lines.append(f"  \\label{{tab:{re.sub('[^a-z0-9]+', '-', content['title'].lower()).strip('-') or 'table'}}}")
    lines.append(r"  \small")
    for k, group in enumerate(groups):
        lines += [r"  \par\medskip"] if k else []
        lines += _tabular(group, content["published_in"])
    return "\n".join([*lines, r"\end{table}", ""])


def _tabular(blocks: Sequence[dict[str, Any]], published_in: str | None) -> list[str]:
    columns = blocks[0]["columns"]
    lines = [f"  \\begin{{tabular}}{{l{'r' * len(columns)}}}", r"    \toprule"]
    lines.append("    " + " & ".join(["", *map(escape, columns)]).strip() + r" \\")
    for block in blocks:
        lines.append(r"    \midrule")
        if block["title"]:
            lines.append(f"    \\multicolumn{{{len(columns) + 1}}}{{l}}{{\\textit{{{escape(block['title'])}}}}} \\\\")
        for label, cells, bold, level in lines_of(block, published_in):
            name = escape(label) if level == 0 else rf"\quad\footnotesize {escape(label)}"
            texts = [
                rf"\textbf{{{escape(cell)}}}" if best else rf"\footnotesize {_number(cell)}" if level else _number(cell)
                for cell, best in zip(cells, bold, strict=True)
            ]
            lines.append("    " + " & ".join([name, *texts]) + r" \\")
    return [*lines, r"    \bottomrule", r"  \end{tabular}"]


def _number(cell: str) -> str:
    """Return a cell with a minus sign instead of a hyphen in front of a number."""
    return "--" if cell == MISSING else escape(re.sub(r"^-(?=\d)", "\u2212", cell))


def escape(text: str) -> str:
    r"""Return text for LaTeX: special characters are escaped, control characters are left out.

    Example:
        >>> print(escape("zeta_init 5% ± 1"))
        zeta\_init 5\% $\pm$ 1

    """
    return "".join(_LATEX.get(character, character) for character in text if character.isprintable())


# -- CSV ---------------------------------------------------------------------------------------------------------------


def comma_separated(content: dict[str, Any]) -> str:
    """Return one line per block, row and column: ours, the published value, the difference, and every run's value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    most = max((len(cell["per_seed"]) for _, _, _, cell in _cells(content) if cell), default=0)
    values = [f"run_{k}" for k in range(1, most + 1)]
    writer.writerow(
        [
            "block",
            "row",
            "column",
            "runs",
            "mean",
            "std",
            "best",
            "published_mean",
            "published_std",
            "difference",
            *values,
        ]
    )
    for block, row, title, cell in _cells(content):
        published = row["published"].get(title) or {}
        numbers = (published.get("mean"), published.get("std"), row["differences"].get(title))
        mean_and_std = [cell["mean"], cell["std"] if len(cell["per_seed"]) > 1 else None] if cell else [None, None]
        writer.writerow(
            [
                *map(csv_cell, (block["title"], row["label"], title)),
                len(cell["per_seed"]) if cell else 0,
                *map(_decimal, mean_and_std),
                int(title in row["best"]),
                *map(_decimal, numbers),
                *map(_decimal, [*(cell["per_seed"] if cell else []), *[None] * most][:most]),
            ]
        )
    return text.getvalue()


def _cells(content: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any], str, dict[str, Any] | None]]:
    return [
        (block, row, title, row["cells"][title])
        for block in content["blocks"]
        for row in block["rows"]
        for title in block["columns"]
    ]


def _decimal(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
