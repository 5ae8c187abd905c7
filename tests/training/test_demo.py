"""The demo at a tiny scale."""

import json

import pytest

DATA = ["data.train=builtin:n=300", "data.val=builtin:n=50,split=val", "data.classes=builtin"]
TINY = ["name=demo", *DATA, "schedule.epochs=1", "data.batch_size=32"]


@pytest.mark.slow
def test_the_demo_compares_two_objectives_and_keeps_earlier_runs(nuclr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = nuclr("train", *TINY)
    assert status == 0, err
    for row in (
        "recall@1, image to text",
        "recall@10, text to image",
        "zero-shot accuracy",
        "never in the first ten, corrected",
        "popularity's rank correlation, N_10",
    ):
        assert row in out
    assert "The runs are in runs/demo and runs/demo/sogclr" in out
    results = json.loads((tmp_path / "runs" / "demo" / "demo.json").read_text())
    assert 0 <= results["sogclr"]["hubness"]["never_found_corrected"] <= 1
    assert "SogCLR" in (tmp_path / "runs" / "demo" / "report.html").read_text()
    assert json.loads((tmp_path / "runs" / "demo" / "sogclr" / "results.json").read_text())["objective"] == "sogclr"
    assert nuclr("train", *TINY, "objective.name=clip")[0] == 0
    assert (tmp_path / "runs" / "demo-2" / "results.json").is_file(), "the first run is not overwritten"
