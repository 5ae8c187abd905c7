"""`data.micro_batch`: the same run as with whole batches, resumed exactly, refused where it cannot be exact."""

import json

import pytest
from torch import nn

from nuclr.models import VectorFormat, register_encoder
from nuclr.runs import config
from nuclr.training.loop import train
from tests import forks
from tests.training import runs


def register_dropout_encoder() -> None:
    """Register an encoder of vectors that has dropout."""

    def build(in_width=12):
        tower = nn.Sequential(nn.Linear(in_width, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8))
        tower.width = 8
        return tower, VectorFormat(in_width)

    register_encoder("dropout_test", build, "vector")


def assert_close_losses(a, b, tolerance: float) -> None:
    """Assert that the losses and gradient norms of two runs agree up to rounding errors."""
    one, two = ([json.loads(line) for line in (run / "metrics.jsonl").open()] for run in (a, b))
    steps = [(first, second) for first, second in zip(one, two, strict=True) if "train/loss" in first]
    assert steps
    for first, second in steps:
        for key in ("train/loss", "train/grad_norm"):
            assert second[key] == pytest.approx(first[key], rel=tolerance)


@pytest.mark.parametrize("micro_batch", [5, 8, 16, 100])
def test_the_same_run_as_with_whole_batches(tmp_path, micro_batch):
    for name, size in (("whole", 0), ("micro", micro_batch)):
        train(runs.load(tmp_path, **{"data.micro_batch": size, "schedule.epochs": 2}), tmp_path / name)
    runs.assert_close_outcome(tmp_path / "whole", tmp_path / "micro", queries=20)


@pytest.mark.parametrize("kind", ["text", "view"])
def test_the_same_run_on_tokens_and_on_views(tmp_path, kind):
    """Tokens come as dicts; with views a side has several rows per pair."""
    overrides = {"text": runs.text_settings, "view": runs.view_settings}[kind]
    views = {"data.x.views": 2} if kind == "view" else {}
    for name, size in (("whole", 0), ("micro", 3)):
        changes = {"data.micro_batch": size, "schedule.epochs": 1, **views}
        train(config.load(overrides=overrides(tmp_path, **changes)), tmp_path / name)
    assert_close_losses(tmp_path / "whole", tmp_path / "micro", 1e-3)


def test_bfloat16(tmp_path):
    for name, size in (("whole", 0), ("micro", 5)):
        changes = {"data.micro_batch": size, "precision": "bfloat16", "schedule.epochs": 1, "optimizer.lr": 1e-4}
        train(runs.load(tmp_path, **changes), tmp_path / name)
    assert_close_losses(tmp_path / "whole", tmp_path / "micro", 1e-2)


def test_a_run_with_dropout_killed_in_mid_epoch_can_be_resumed(tmp_path, monkeypatch):
    register_dropout_encoder()
    changes = {"model.x.encoder": "dropout_test", "data.micro_batch": 5, "schedule.epochs": 2}
    runs.assert_resumes(monkeypatch, tmp_path, runs.load(tmp_path, **changes), (1, 5, 8, 11))


@pytest.mark.slow
def test_two_processes_with_dropout_killed_by_sigkill_can_be_resumed(tmp_path):
    (tmp_path / "plugin.py").write_text(
        "from tests.training.test_micro_batches import register_dropout_encoder\nregister_dropout_encoder()\n"
    )
    changes = {"schedule.epochs": 6, "checkpoint_every": 5, "data.micro_batch": 3, "model.x.encoder": "dropout_test"}
    settings = runs.vector_settings(tmp_path, plugins=tmp_path / "plugin.py", **changes)
    arguments = [tmp_path / "empty.yaml", *settings, "--resume"]
    runs.run_in_processes([*arguments, f"out={tmp_path / 'whole'}"], 2)
    processes = forks.start([*arguments, f"out={tmp_path / 'run'}"], 2)
    runs.wait_for(tmp_path / "run" / "timing.jsonl", 4, processes[0])
    for process in processes:
        process.kill()
    runs.finish(processes)
    runs.run_in_processes([*arguments, f"out={tmp_path / 'run'}"], 2)
    runs.assert_same_outcome(tmp_path / "whole", tmp_path / "run")


# The command line


def test_batch_norm_is_refused_unless_frozen(nuclr, tmp_path):
    settings = runs.picture_settings(tmp_path, **{"model.x.encoder": "resnet50", "data.micro_batch": 4, "out": "run"})
    status, _, err = nuclr("train", *settings, "data.val=null", "--dry-run")
    assert status == 2 and "data.micro_batch is 4" in err and "batch norm" in err and "(x." in err
    status, _, err = nuclr("train", *settings, "data.val=null", "model.x.frozen=true", "--dry-run")
    assert status == 0, err
