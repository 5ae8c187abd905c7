"""The table as Markdown, LaTeX and CSV."""

import csv
import io
import re
import shutil
import subprocess

import pytest

from nuclr.studies.table import render
from tests.studies.table.tiny import table_content as content

HOSTILE = r"50% of_a & b $x$ {y} \end{table} ~^#<>|"


def test_markdown_has_bold_and_the_published_values_below_ours():
    lines = render.markdown(content()).splitlines()
    at = lines.index("## CC3M")
    assert [" ".join(line.split()) for line in lines[at + 2 : at + 8]] == [
        "| | COCO | Mean |",
        "| ------------ | ---------------: | -------------: |",
        "| NUCLR | **21.00 ± 1.41** | 20.00 (1 of 2) |",
        "| ↳ the paper | 20.50 ± 0.20 | - |",
        "| ↳ difference | +0.50 | - |",
        "| =CLIP | - | - |",
    ]
    assert "Command: `nuclr table t.yaml`" in lines


def test_a_pipe_in_a_label_does_not_end_the_cell():
    assert r"a\|b" in render.markdown(content("a|b"))


def test_latex_has_one_row_per_line_and_as_many_cells_as_columns():
    text = render.latex(content())
    assert text.count(r"\begin{tabular}{lrr}") == 1  # blocks with the same columns share it
    assert text.count(r"\midrule") == 2
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert rows[0].strip() == r"& COCO & Mean \\"
    assert rows[1].strip() == r"\multicolumn{3}{l}{\textit{CC3M}} \\"
    assert rows[2].strip() == r"NUCLR & \textbf{21.00 $\pm$ 1.41} & 20.00 (1 of 2) \\"
    assert rows[4].strip() == r"\quad\footnotesize difference & \footnotesize +0.50 & \footnotesize -- \\"
    assert all(line.count(" & ") == 2 for line in rows[2:-2] if "multicolumn" not in line)
    other = render.latex(content(second=("COCO",)))
    assert other.count(r"\begin{tabular}") == other.count(r"\end{tabular}") == 2


def test_latex_escapes_every_special_character():
    escaped = render.escape(HOSTILE)
    assert escaped == (
        r"50\% of\_a \& b \$x\$ \{y\} \textbackslash{}end\{table\} "
        r"\textasciitilde{}\textasciicircum{}\#\textless{}\textgreater{}\textbar{}"
    )
    assert render.escape("a\nb\x00") == "ab"
    text = render.latex(content(HOSTILE))
    assert text.count(r"\end{table}") == 1
    assert re.search(r"\\label\{tab:[a-z0-9-]+\}", text)


def test_a_negative_difference_has_a_minus_sign():
    assert render._number("-0.50") == "$-$0.50"
    assert render._number("-") == "--"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_compiles(tmp_path):
    (tmp_path / "table.tex").write_text(render.latex(content(HOSTILE, second=("COCO",))), encoding="utf-8")
    main = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\\input{table}\\end{document}"
    (tmp_path / "main.tex").write_text(main)
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "main.tex"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:]


def test_csv_has_every_value_and_no_formulas():
    rows = list(csv.DictReader(io.StringIO(render.comma_separated(content()))))
    assert len(rows) == 6
    assert rows[0] | {"block": "CC3M"} == {
        "block": "CC3M", "row": "NUCLR", "column": "COCO", "runs": "2", "mean": "21.0000", "std": "1.0000",
        "best": "1", "published_mean": "20.5000", "published_std": "0.2000", "difference": "0.5000",
        "run_1": "20.0000", "run_2": "22.0000",
    }  # fmt: skip
    assert (rows[1]["runs"], rows[1]["std"], rows[1]["run_2"]) == ("1", "", "")
    assert not rows[2]["row"].startswith("=")
    assert (rows[2]["runs"], rows[2]["mean"]) == ("0", "")
