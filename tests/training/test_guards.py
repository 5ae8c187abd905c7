"""Values that are not finite, a full disk and changed data stop a run, and the last good checkpoint is kept."""

import json

import pytest
import torch

from nuclr.runs import checkpoint
from nuclr.training import loop
from nuclr.training.batch_inputs import TrainingInputs
from nuclr.training.guards import TrainingFailed
from nuclr.training.loop import train
from tests.training import runs


@pytest.mark.parametrize("micro_batch", [0, 4])
def test_a_nan_in_the_features_names_the_sample_and_keeps_the_last_good_checkpoint(tmp_path, monkeypatch, micro_batch):
    settings = runs.load(tmp_path, **{"data.micro_batch": micro_batch})
    prepare = TrainingInputs.prepare

    def poisoned(inputs, batch, epoch, step, device):
        x, y = prepare(inputs, batch, epoch, step, device)
        if (epoch, step) == (1, 3):
            x[2] = torch.nan
            poisoned.number = int(batch.numbers[2])
        return x, y

    monkeypatch.setattr(TrainingInputs, "prepare", poisoned)
    with pytest.raises(TrainingFailed) as failed:
        train(settings, tmp_path / "run")
    assert f" {poisoned.number}." in str(failed.value)
    assert len(str(failed.value).splitlines()) == 2
    assert json.loads((tmp_path / "run" / "not_finite.json").read_text())["samples"] == [poisoned.number]
    state = checkpoint.load(checkpoint.newest_first(tmp_path / "run" / "checkpoints")[0])
    assert state.position == {"epoch": 1, "step": 1, "total": 8}
    assert all(tensor.isfinite().all() for tensor in state.model.values())


def test_an_infinite_gradient_stops_the_run(tmp_path, monkeypatch):
    apply_objective = loop.apply_objective

    def exploding(objective, *arguments):
        output = apply_objective(objective, *arguments)
        return output._replace(loss=output.loss * (torch.inf if objective.zeta_lr else 1.0))

    monkeypatch.setattr(loop, "apply_objective", exploding)
    with pytest.raises(TrainingFailed, match="gradient"):
        train(runs.load(tmp_path), tmp_path / "run")
    state = checkpoint.load(checkpoint.newest_first(tmp_path / "run" / "checkpoints")[0])
    assert state.position == {"epoch": 0, "step": 7, "total": 7}


def test_a_full_disk_stops_the_run_with_a_message(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(TrainingFailed, match="No space left on device"):
        train(runs.load(tmp_path), tmp_path / "run")
