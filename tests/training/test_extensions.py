"""Training with the objectives' extensions: resume, sharded state on two processes, networks."""

import pytest
import torch

from nuclr.runs import checkpoint
from nuclr.training.loop import train
from tests import forks
from tests.training import runs
from tests.training.test_resume import KilledError, killed_at

EXTENSIONS = {
    "individual temperatures": {"objective.individual_temperature": "true"},
    "learnt temperature": {"objective.learn_temperature": "true", "objective.gamma_rule": "proximal"},
    "adam on one side": {"objective.zeta_optimizer": "adam", "objective.zeta_steps": 2, "objective.sides": "x"},
    "first gradient": {"objective.zeta_velocity_init": "gradient", "objective.zeta_momentum": 0.9},
    "networks": {"objective.popularity": "network", "objective.normalizer": "network"},
    "state on the host": {"objective.state_device": "cpu", "objective.state_sharding": "true"},
}


@pytest.mark.parametrize("changes", EXTENSIONS.values(), ids=EXTENSIONS)
def test_a_run_killed_in_mid_epoch_can_be_resumed(tmp_path, monkeypatch, changes):
    settings = runs.load(tmp_path, **changes, **{"schedule.epochs": 2, "schedule.zeta_frozen_epochs": 0})
    train(settings, tmp_path / "whole")
    for step in (3, 8):
        with monkeypatch.context() as patch:
            killed_at(patch, step)
            with pytest.raises(KilledError):
                train(settings, tmp_path / "killed", resume=True)
    train(settings, tmp_path / "killed", resume=True)
    runs.assert_same_outcome(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
def test_sharded_state_on_two_processes_is_the_replicated_state(tmp_path):
    settings = runs.vector_settings(tmp_path, **{"schedule.epochs": 2})
    for name, sharded in (("replicated", "false"), ("sharded", "true")):
        arguments = [
            tmp_path / "empty.yaml",
            *settings,
            f"objective.state_sharding={sharded}",
            f"out={tmp_path / name}",
        ]
        outcomes = runs.finish(forks.start(arguments, 2))
        assert all(status == 0 for status, _, _ in outcomes), outcomes
    one, two = (checkpoint.load_last(tmp_path / name / "checkpoints", print) for name in ("replicated", "sharded"))
    for part in ("model", "objective"):
        assert one[part].keys() == two[part].keys()
        for key, value in one[part].items():
            assert torch.equal(value, two[part][key]), key
