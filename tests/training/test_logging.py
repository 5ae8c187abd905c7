"""metrics.jsonl, TensorBoard and W&B."""

import json
import sys

import pytest

from nuclr.errors import UserError
from nuclr.training.loop import train
from tests.training import runs


def test_metrics_jsonl_has_a_line_per_interval_and_per_evaluation(tmp_path):
    train(runs.load(tmp_path), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(3, 29, 3))
    assert [line["epoch"] for line in lines if "val/mean_R@1" in line] == [1, 2, 3, 4]


def test_tensorboard_shows_the_values_of_metrics_jsonl(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(runs.load(tmp_path, **{"log.tensorboard": True, "schedule.epochs": 2}), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    for name in ("train/loss", "val/mean_R@1"):
        expected = [(line["step"], line[name]) for line in lines if name in line]
        assert [(event.step, pytest.approx(event.value)) for event in events.Scalars(name)] == expected


def test_a_missing_logger_is_reported_before_the_run_begins(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"log\.wandb.*pip install 'nuclr\[logging\]'"):
        train(runs.load(tmp_path, **{"log.wandb": True}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_resumed_run_continues_the_same_wandb_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = runs.load(tmp_path, **{"log.wandb": True, "schedule.epochs": 2})
    runs.train_until(monkeypatch, 8, settings, tmp_path / "run")
    train(settings, tmp_path / "run", resume=True)
    parts = list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(parts) == 2
    assert all((tmp_path / "run" / "wandb_id").read_text() in part.name for part in parts)
