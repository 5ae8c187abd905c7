"""`nuclr train --dry-run`."""

import pytest
import torch

from nuclr.runs import launch
from nuclr.training import dry_run
from tests.training import runs
from tests.training.test_micro_batches import register_dropout_encoder


def test_dry_run_writes_nothing(nuclr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = runs.vector_settings(tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    status, out, err = nuclr("train", "empty.yaml", *settings, "--dry-run")
    assert status == 0, err
    assert "120 pairs" in out and "28 steps" in out and "main thread" in out and err == ""
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_dry_run_measures_training_mode(tmp_path, monkeypatch):
    """Dropout takes memory and time; with it off, the estimate would be that of an evaluation."""
    register_dropout_encoder()
    modes = []
    forward = torch.nn.Dropout.forward
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, x: modes.append(self.training) or forward(self, x))
    dry_run.dry_run(runs.load(tmp_path, **{"model.x.encoder": "dropout_test"}))
    assert modes and all(modes)


def test_dry_run_reports_the_rates_of_the_data_path_and_of_the_step(nuclr, tmp_path):
    settings = runs.photograph_settings(tmp_path, **{"data.workers": 3})
    status, out, err = nuclr("train", tmp_path / "empty.yaml", *settings, "--dry-run")
    assert status == 0, err
    assert "cpu" in out and "data.workers=3" in out


def test_dry_run_warns_of_held_out_pairs_that_are_training_pairs(nuclr, tmp_path):
    settings = runs.text_settings(tmp_path)
    path = next(text.partition("=")[2] for text in settings if text.startswith("data.train="))
    status, _, err = nuclr("train", tmp_path / "empty.yaml", *settings, f"data.val={path}", "--dry-run")
    assert status == 0 and "data.val" in err and "data.train" in err, err


def test_dry_run_warns_of_a_data_path_that_is_slower_than_the_step(tmp_path, monkeypatch):
    for rate, warned in ((1e-9, True), (1e9, False)):
        monkeypatch.setattr(dry_run, "_measure_data", lambda *_, rate=rate: rate)
        [warning] = dry_run.dry_run(runs.load(tmp_path)).warnings or [""]
        assert ("bottleneck" in warning) == warned


@pytest.mark.parametrize(
    ("content", "expected"),
    [("150000 100000", 2), ("max 100000", 8), ("", 8), ("10000 100000", 1), ("1600000 100000", 8)],
)
def test_cores_respect_the_quota_of_a_container(tmp_path, monkeypatch, content, expected):
    (tmp_path / "cpu.max").write_text(content)
    monkeypatch.setattr(launch, "CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert launch.cpu_cores() == expected
