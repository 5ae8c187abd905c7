"""What the demo prints, for made-up results."""

import copy
from pathlib import Path

from nuclr.runs import config
from nuclr.studies.demo import text

SEARCH = {
    "queries": 2000,
    "recall@1": 0.10,
    "recall@1_corrected": 0.12,
    "never_found": 0.05,
    "never_found_corrected": 0.001,
    "largest": 90,
    "largest_corrected": 31,
    "correlation": 0.7,
    "items": {"most": [["a circle and a shape", 90]], "least": [["a small red arrow", 0]]},
}
RUN = {
    "val": {"image_to_text_chance@1": 0.0005, "text_to_image_chance@1": 0.0005},
    "search": {"image_to_text": SEARCH, "text_to_image": copy.deepcopy(SEARCH)},
}


def results():
    """Three seeds per method; NUCLR is 1, 2 and 3 points above CLIP from picture to caption, and level backwards."""
    made = {method: [copy.deepcopy(RUN) for _ in range(3)] for method in ("clip", "sogclr", "nuclr")}
    for seed, run in enumerate(made["nuclr"]):
        run["search"]["image_to_text"]["recall@1"] = 0.11 + 0.01 * seed
        run["search"]["image_to_text"]["correlation"] = 0.6 + 0.1 * seed
    return made


def row(label, part):
    """Return the row of a table in the first part ("1") or the second one, without its label, one space per gap."""
    first, _, second = text.results_text(results()).partition("2. Search")
    lines = (first if part == "1" else second).splitlines()
    (line,) = [line for line in lines if line.strip().startswith(f"{label}  ")][:1]
    return " ".join(line.split(label, 1)[1].split())


def test_differences_are_taken_seed_by_seed():
    assert row("chance", "1") == "0.05 0.05"
    assert row("CLIP", "1") == "10.0 ± 0.0 10.0 ± 0.0"
    assert row("NUCLR", "1") == "12.0 ± 1.0 10.0 ± 0.0"
    assert row("NUCLR - CLIP", "1") == row("NUCLR - SogCLR", "1") == "+2.0 ± 1.0 +0.0 ± 0.0"


def test_correction_before_and_after():
    assert row("recall@1 in %", "2") == "10.0 -> 12.0 10.0 -> 12.0 12.0 -> 12.0"
    assert row("change", "2") == "+2.0 ± 0.0 +2.0 ± 0.0 +0.0 ± 1.0"
    assert row("never found, in %", "2") == "5.0 -> 0.1 5.0 -> 0.1 5.0 -> 0.1"
    assert row("N_10 of the worst hub", "2") == "90 -> 31 90 -> 31 90 -> 31"


def test_popular_captions_and_correlation():
    printed = text.results_text(results()).partition("3. What is popular")[2]
    assert "0.70 ± 0.10" in printed
    assert "  90   a circle and a shape\n" in printed
    assert printed.endswith("   0   a small red arrow")


def test_lines_fit_on_a_screen():
    settings = config.load()
    parts = [text.opening(settings), text.results_text(results()), text.closing(Path("runs/demo"), True, 100.0)]
    printed = "\n".join(parts)
    assert max(map(len, printed.splitlines())) <= 110
    assert "runs/demo/report.html" in printed
    assert "report.html" not in text.closing(Path("runs/demo"), False, 100.0)
