"""The demo: which runs it plans, what it prints for made-up results, and the whole at a tiny scale."""

import dataclasses
import json
from pathlib import Path

import pytest

from nuclr.runs import config
from nuclr.studies import demo
from nuclr.studies.demo import MAIN, Demo, Search

TINY = [
    "data.train=builtin:n=96,shapes=2",
    "data.val=builtin:n=40,shapes=2,split=val",
    "data.batch_size=32",
    "model.width=16",
    "schedule.epochs=1",
    "schedule.zeta_frozen_epochs=0",
]


def test_methods_share_everything_but_their_objective():
    settings = config.load(demo.SETTINGS, ["seed=5"])
    study = Demo(settings, Path("demo"))
    cells = [cell for row in study.plan.rows for cell in study.finals(row)["val"]]
    assert {cell.objective.name for cell in cells} == set(demo.METHODS)
    assert {cell.seed for cell in cells} == {5, 6, 7}
    for cell in cells:
        for section in ("data", "model", "optimizer", "schedule"):
            assert getattr(cell, section) == getattr(settings, section)
    paths = [study.path(cell) for cell in cells]
    assert len(set(paths)) == 9 and [path.parent for path in paths].count(Path("demo/seeds")) == 8


def results():
    """Three seeds per method; NUCLR is 1, 2 and 3 points above CLIP from picture to caption, and level backwards."""
    search = Search(
        queries=2000,
        chance=0.0005,
        recall=(0.10, 0.12),
        never_found=(0.05, 0.001),
        largest=(90, 31),
        correlation=0.7,
        captions=(("a circle and a shape", 90), ("a small red arrow", 0)),
    )
    made = {method: [dict.fromkeys(demo.DIRECTIONS, search) for _ in range(3)] for method in demo.METHODS}
    for seed in range(3):
        better = dataclasses.replace(search, recall=(0.11 + 0.01 * seed, 0.12), correlation=0.6 + 0.1 * seed)
        made[MAIN][seed]["image_to_text"] = better
    return made


def row(label, part):
    """Return the row of a table in the first part ("1") or the second one, without its label, one space per gap."""
    first, _, second = demo.results_text(results()).partition("2. Search")
    lines = (first if part == "1" else second).splitlines()
    (line,) = [line for line in lines if line.strip().startswith(f"{label}  ")][:1]
    return " ".join(line.split(label, 1)[1].split())


def test_the_tables_of_made_up_results():
    assert row("chance", "1") == "0.05 0.05"
    assert row("CLIP", "1") == "10.0 ± 0.0 10.0 ± 0.0"
    assert row("NUCLR", "1") == "12.0 ± 1.0 10.0 ± 0.0"
    assert row("NUCLR - CLIP", "1") == row("NUCLR - SogCLR", "1") == "+2.0 ± 1.0 +0.0 ± 0.0"
    assert row("recall@1 in %", "2") == "10.0 -> 12.0 10.0 -> 12.0 12.0 -> 12.0"
    assert row("change", "2") == "+2.0 ± 0.0 +2.0 ± 0.0 +0.0 ± 1.0"
    assert row("never found, in %", "2") == "5.0 -> 0.1 5.0 -> 0.1 5.0 -> 0.1"
    assert row("N_10 of the worst hub", "2") == "90 -> 31 90 -> 31 90 -> 31"
    printed = demo.results_text(results()).partition("3. What is popular")[2]
    assert "0.70 ± 0.10" in printed and "  90   a circle and a shape\n" in printed
    assert printed.endswith("   0   a small red arrow")


@pytest.mark.slow
def test_the_demo_trains_resumes_and_keeps_earlier_runs(nuclr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = nuclr("demo", *TINY)
    assert status == 0, err
    assert "NUCLR - CLIP" in out and "runs/demo/report.html" in out
    folder = tmp_path / "runs" / "demo"
    stored = json.loads((folder / "demo.json").read_text())
    assert [len(stored[method]) for method in demo.METHODS] == [3, 3, 3]
    run = folder / "seeds" / "clip-1"
    trained = json.loads((run / "results.json").read_text())
    assert trained["objective"] == "clip"
    recall = stored["clip"][1]["text_to_image"]["recall"][0]
    assert recall == pytest.approx(trained["val"]["text_to_image_R@1"], abs=0.03)  # ties
    assert "NUCLR" in (folder / "report.html").read_text()

    # A run that is missing is trained again, the others are kept.
    (run / "results.json").unlink()
    (run / "search.json").unlink()
    status, again, err = nuclr("demo", *TINY, "out=runs/demo", "--resume", "report=false")
    assert status == 0, err
    assert again.partition("1. Tr")[2].partition("Done in")[0] == out.partition("1. Tr")[2].partition("Done in")[0]
    status, _, err = nuclr("demo", *TINY, "out=runs/demo")
    assert status == 2 and "runs/demo" in err and "--resume" in err
