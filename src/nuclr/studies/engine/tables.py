"""The results of a study as files: tables of texts, Markdown, LaTeX and JSON.

`text_tables` turns a `Comparison` into tables of texts, which Markdown, the terminal and the page have in common.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nuclr import files
from nuclr.evaluation.intervals import Interval
from nuclr.evaluation.metrics import SCORE
from nuclr.studies.engine.results import DIGITS, Block, Comparison, Value

MISSING = "-"
# Where HTML, or the target of a link, would begin. As a number, a character is never markup in Markdown.
_MARKUP = re.compile(r"<(?=[A-Za-z/!?])|\](?=[(:\[])")
NESTED = "↳ "  # begins the label of a line that belongs to the row above
BANK_TITLES = {"train": "training queries", "queries": "own queries (transductive)"}
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
_TABULAR_END = [r"    \bottomrule", r"  \end{tabular}", r"  \par\medskip"]


# -- files -------------------------------------------------------------------------------------------------------------


def write_results(out: Path, comparison: Comparison) -> Comparison:
    """Write the results as KIND.md, KIND.tex and KIND.json, and return them."""
    summary = f"{comparison.kind}.json"
    with files.publish_folder(out, summary, f"nuclr {comparison.kind}") as new:
        files.write_text(new / f"{comparison.kind}.md", markdown(comparison))
        files.write_text(new / f"{comparison.kind}.tex", latex(comparison))
        files.write_json(new / summary, comparison.to_json())
    return comparison


def read_results(path: Path) -> Comparison:
    """Return the results in a JSON file.

    Raises:
        UserError: The file was not written by `nuclr compare` or `nuclr table`, or is damaged.

    """
    return files.read_record(Comparison, path)


# -- tables of texts ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextTable:
    """A table of texts; `bold` holds the cells (row, column) of the best values."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bold: frozenset[tuple[int, int]] = frozenset()

    def markdown(self) -> str:
        """Return the table with aligned columns, which is also readable on a terminal."""
        lines = [list(self.header), *map(list, self.rows)]
        for r, c in self.bold:
            lines[r + 1][c] = f"**{lines[r + 1][c]}**"
        lines = [[_line(cell).replace("|", r"\|") for cell in line] for line in lines]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
        text = ""
        for first, *others in lines:
            cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
            text += f"| {' | '.join([first.ljust(widths[0]), *cells])} |\n"
        return text


def text_tables(comparison: Comparison) -> list[TextTable]:
    """Return the results: one table per block, then differences and corrected retrieval."""
    tables = [block_table(block, comparison) for block in comparison.blocks]
    more = (_difference_table(comparison), _corrected_table(comparison))
    return tables + [table for table in more if table.rows]


def block_table(block: Block, comparison: Comparison) -> TextTable:
    """Return the table of a block. A row with published values is followed by these, and by ours minus them."""
    best = best_values(block, comparison)
    keys = [column.key for column in block.columns]
    rows: list[tuple[str, ...]] = []
    bold = set()
    for row in block.rows:
        bold |= {(len(rows), c) for c, key in enumerate(keys, start=1) if (row.name, key) in best}
        ours = [row.values.get(key) for key in keys]
        rows.append((row.label, *map(_text, ours)))
        if row.published:
            published = [row.published.get(key) for key in keys]
            rows.append((f"{NESTED}{comparison.published_in}", *map(_text, published)))
            gaps = [f"{a.mean - b.mean:+.2f}" if a and b else MISSING for a, b in zip(ours, published, strict=True)]
            rows.append((f"{NESTED}difference", *gaps))
    return TextTable(
        block.title,
        ("", *(column.title for column in block.columns)),
        tuple(rows),
        frozenset(bold),
    )


def best_values(block: Block, comparison: Comparison) -> set[tuple[str, str]]:
    """Return (row, column) of the largest mean of every column, unless all rows are equal.

    In a comparison, the row must also differ significantly from all rows that it is compared with.
    """
    best = set()
    for column in block.columns:
        means = {row.name: round(value.mean, DIGITS) for row in block.rows if (value := row.values.get(column.key))}
        for name, mean in means.items():
            largest = mean == max(means.values()) > min(means.values())
            own = [one for one in comparison.differences if one.set == column.set and name in (one.row, one.to)]
            stands_out = column.compared and own and all(one.points.significant for one in own)
            if largest and (comparison.kind == "table" or stands_out):
                best.add((name, column.key))
    return best


def _text(value: Value | None) -> str:
    return MISSING if value is None else value.text


def _bounds(interval: Interval) -> str:
    return f"[{interval.low:+.2f}, {interval.high:+.2f}]"


def _difference_table(comparison: Comparison) -> TextTable:
    labels = {row.name: row.label for row in comparison.rows}
    rows = []
    for one in comparison.differences:
        names = f"{labels[one.row]} - {labels[one.to]}"
        rows.append((names, one.set, f"{one.points.difference:+.2f}", _bounds(one.points), one.verdict))
    title = "Paired differences of the first metric in points, with 95 % intervals"
    return TextTable(title, ("", "set", "difference", "interval", "verdict"), tuple(rows))


def _corrected_table(comparison: Comparison) -> TextTable:
    rows = []
    for row in comparison.rows:
        for one in row.corrected:
            plain = _text(row.values.get(f"{one.set}/{SCORE}"))
            gain = f"{one.gain.difference:+.2f} {_bounds(one.gain)}"
            rows.append((row.label, one.set, BANK_TITLES[one.bank], plain, _text(one.value), gain))
    title = "Popularity-corrected retrieval, recall@1 (mean of both directions)"
    return TextTable(title, ("", "set", "bank", "plain", "corrected", "gain"), tuple(rows))


def chosen_table(comparison: Comparison) -> TextTable:
    """Return the settings that tuning chose."""
    rows = []
    for row in comparison.rows:
        for name, changes in row.chosen.items():
            rows.append((row.label, name, settings_text(changes)))
    return TextTable("Settings chosen by tuning", ("", "tuned on", "setting"), tuple(rows))


def settings_text(changes: Mapping[str, Any]) -> str:
    """Return changed settings in one line.

    Example:
        >>> settings_text({"objective.temperature": 0.03, "lr_factor": 2})
        'temperature 0.03, lr_factor 2'

    """
    return ", ".join(f"{key.removeprefix('objective.')} {value}" for key, value in changes.items())


# -- Markdown and LaTeX ------------------------------------------------------------------------------------------------


def markdown(comparison: Comparison) -> str:
    """Return the whole document: tables, notes, protocol, command."""
    parts = [f"# {_line(comparison.title)}\n", terminal(comparison)]
    chosen = chosen_table(comparison)
    if chosen.rows:
        parts.append(f"## {_line(chosen.title)}\n\n{chosen.markdown()}")
    parts.append("## Protocol\n\n" + _list(comparison.protocol))
    if comparison.published_in:
        parts.append(f"Published values: {_line(comparison.published_in)}. Difference: ours minus published.\n")
    if comparison.failed:
        parts.append("## Failed runs\n\n" + _list(f"{name}: {why}" for name, why in comparison.failed.items()))
    parts.append(f"Command: `{_line(comparison.command)}`\n")
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", "\n".join(parts))


def terminal(comparison: Comparison) -> str:
    """Return the tables and notes that the command prints at its end."""
    parts = []
    for table in text_tables(comparison):
        title = _line(table.title).replace("|", r"\|")
        parts.append((f"## {title}\n\n" if title else "") + table.markdown())
    return "\n".join([*parts, *(f"{_line(note)}\n" for note in comparison.notes)])


def _line(text: str) -> str:
    """Return a text of a user as one line, so that it cannot begin a heading."""
    return " ".join(text.split())


def _list(lines: Iterable[str]) -> str:
    return "".join(f"- {_line(line)}\n" for line in lines)


def latex(comparison: Comparison) -> str:
    r"""Return a table environment to \input; it needs the package booktabs.

    Blocks with the same columns are parts of one tabular, separated by rules. Other blocks have a tabular of their own.
    """
    label = re.sub("[^a-z0-9]+", "-", comparison.title.lower()).strip("-") or "table"
    lines = [
        "% Written by nuclr. In the preamble: \\usepackage{booktabs}",
        r"\begin{table}[t]",
        r"  \centering",
        f"  \\caption{{{escape(comparison.title)}}}",
        f"  \\label{{tab:{label}}}",
        r"  \small",
    ]
    before: tuple[str, ...] | None = None
    for block in comparison.blocks:
        table = block_table(block, comparison)
        if table.header != before:
            lines += _TABULAR_END if before is not None else []
            lines += [f"  \\begin{{tabular}}{{l{'r' * len(block.columns)}}}", r"    \toprule"]
            lines.append("    " + " & ".join(map(escape, table.header)).strip() + r" \\")
        before = table.header
        lines += _latex_rows(table)
    return "\n".join([*lines, *_TABULAR_END[:2], r"\end{table}", ""])


def _latex_rows(table: TextTable) -> list[str]:
    lines = [r"    \midrule"]
    if table.title:
        lines.append(f"    \\multicolumn{{{len(table.header)}}}{{l}}{{\\textit{{{escape(table.title)}}}}} \\\\")
    for r, (label, *cells) in enumerate(table.rows):
        small = r"\footnotesize " if label.startswith(NESTED) else ""
        texts = [f"\\quad{small}{escape(label.removeprefix(NESTED))}" if small else escape(label)]
        for c, cell in enumerate(cells, start=1):
            # A minus sign instead of a hyphen in front of a number.
            number = "--" if cell == MISSING else escape(re.sub(r"^-(?=\d)", "\u2212", cell))
            texts.append(rf"\textbf{{{number}}}" if (r, c) in table.bold else f"{small}{number}")
        lines.append("    " + " & ".join(texts) + r" \\")
    return lines


def escape(text: str) -> str:
    r"""Return text for LaTeX: special characters are escaped, control characters are left out.

    Example:
        >>> print(escape("zeta_init 5% ± 1"))
        zeta\_init 5\% $\pm$ 1

    """
    return "".join(_LATEX.get(character, character) for character in text if character.isprintable())
