"""The demo at a tiny scale, and the dry run."""

import json

import pytest

from tests.training import runs

TINY = ["data.train=builtin:n=300", "data.val=builtin:n=50,split=val", "schedule.epochs=1", "data.batch_size=32"]


@pytest.mark.slow
def test_demo(nuclr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, told, err = nuclr("train", *TINY)
    assert status == 0, err
    for row in (
        "recall@1, image to text",
        "recall@10, text to image",
        "zero-shot accuracy",
        "zeta as training left it",
    ):
        assert row in told
    assert "The runs are in runs/demo and runs/demo/sogclr" in told
    found = json.loads((tmp_path / "runs" / "demo" / "demo.json").read_text())
    assert found["nuclr"]["popularity"]["solver_on_true_scores"] > 0.8
    assert "SogCLR" in (tmp_path / "runs" / "demo" / "report.html").read_text()
    assert json.loads((tmp_path / "runs" / "demo" / "sogclr" / "results.json").read_text())["objective"] == "sogclr"
    assert nuclr("train", *TINY, "objective.name=clip")[0] == 0
    assert (tmp_path / "runs" / "demo-2" / "results.json").is_file(), "the first run is not overwritten"


def test_dry_run_writes_nothing(nuclr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = runs.vector_settings(tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    status, told, err = nuclr("train", "empty.yaml", *settings, "--dry-run")
    assert status == 0, err
    assert "120 pairs (0 bad)" in told and "28 steps" in told and "memory: model" in told and "min in all" in told
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
