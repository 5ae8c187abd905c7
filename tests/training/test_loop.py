"""A whole run: the files it writes, its settings, every objective, and two processes that equal one."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import nuclr
from nuclr import objectives
from nuclr.errors import UserError
from nuclr.files import to_record
from nuclr.models import DualEncoder
from nuclr.runs import checkpoint, config
from nuclr.runs.folder import read_results
from nuclr.runs.settings import to_dict
from nuclr.training.loop import train
from tests.training import runs


def test_files_of_a_run(tmp_path):
    results = train(runs.load(tmp_path), tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    expected = {"config.yaml", "metrics.jsonl", "timing.jsonl", "results.json", "checkpoints", "model"}
    assert expected <= names
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == to_record(results)
    assert results.steps == 28 and results.left_over_per_epoch == 120 - 7 * 16
    assert results.val["mean_R@1"] > 3 * results.val["mean_chance@1"]
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["best.pt", "step_000000024.pt", "step_000000028.pt"]

    model = DualEncoder.from_pretrained(tmp_path / "run" / "model")
    state = checkpoint.load(tmp_path / "run" / "checkpoints" / "step_000000028.pt").model
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_equal_seeds_give_equal_metrics(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(runs.load(tmp_path, seed=seed), tmp_path / name)
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in "abc"]
    assert metrics[0] == metrics[1] != metrics[2]


def test_one_pair_per_x(tmp_path):
    results = train(runs.load(tmp_path, **{"data.one_pair_per_x": "true"}), tmp_path / "run")
    assert results.samples_per_epoch == 60


def test_keep_does_not_renumber_the_pairs(tmp_path):
    kept = np.arange(0, 120, 3)
    (tmp_path / "keep.txt").write_text("# kept\n" + "\n".join(map(str, kept)))
    train(runs.load(tmp_path, **{"data.keep": "keep.txt", "data.batch_size": 10}), tmp_path / "run")
    state = checkpoint.load(checkpoint.newest_first(tmp_path / "run" / "checkpoints")[0]).objective
    seen = (~state["log_u_x"].isneginf()).nonzero().flatten()
    assert set(seen.tolist()) <= set(kept.tolist())
    assert len(seen) == len(kept)


@pytest.mark.parametrize("name", objectives.names())
def test_every_objective_trains(tmp_path, name):
    changes = [s for s in runs.vector_settings(tmp_path, **{"schedule.epochs": 2}) if "objective." not in s]
    settings = config.load(tmp_path / "empty.yaml", [*changes, f"objective.name={name}", "schedule.gamma=cosine"])
    results = train(settings, tmp_path / "run")
    assert results.val["mean_R@1"] > results.val["mean_chance@1"]


def test_zeta_is_refreshed_by_the_exact_solver(tmp_path):
    settings = runs.load(tmp_path, **{"schedule.zeta_refresh": 2, "objective.zeta_lr": 0, "schedule.epochs": 2})
    train(settings, tmp_path / "run")
    state = checkpoint.load(checkpoint.newest_first(tmp_path / "run" / "checkpoints")[0]).objective
    assert state["zeta_y"].std() > 0 and state["zeta_x"].std() > 0
    assert state["zeta_y"].mean().abs() < 1e-6
    assert state["xi_y"] == state["zeta_y"].abs().max()


def test_bfloat16_and_clipping(tmp_path):
    results = train(runs.load(tmp_path, precision="bfloat16", **{"optimizer.clip": 0.5}), tmp_path / "run")
    assert results.val["mean_R@1"] > results.val["mean_chance@1"]


def test_a_model_without_trained_parameters_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "same.npz", **{side: rng.normal(size=(40, 8)).astype("float32") for side in ("x", "y")})
    changes = {"data.train": "same.npz", "data.val": "", "model.width": 8}
    for side in ("x", "y"):
        changes |= {f"model.{side}.frozen": "true", f"model.{side}.head": "none"}
    with pytest.raises(UserError, match=r"model\.x\.frozen.*model\.y\.frozen"):
        train(runs.load(tmp_path, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Settings, the learning rate and the number of queries of a run in one and in two processes. With its default eps,
# Adam's first steps turn rounding errors of tiny gradients into full steps. With a small learning rate, rounding errors
# of the two runs stay far below the tolerance.
IN_PROCESSES = {
    "vectors": (runs.vector_settings, {"schedule.epochs": 2}, 1e-4, 20),
    "pictures": (runs.picture_settings, {"schedule.epochs": 2}, 1e-4, 20),
    "texts, one encoder": (runs.text_settings, {}, None, 30),
    "texts, two encoders": (runs.text_settings, {"model.shared": "false"}, None, 30),
    "views of images": (runs.view_settings, {}, 1e-4, 30),
    "four views of images": (runs.view_settings, {"data.x.views": 2, "data.y.views": 2}, 1e-4, 30),
    "views of vectors": (runs.grouped_vector_settings, {}, 1e-3, 15),
    "views of texts": (runs.grouped_text_settings, {}, 1e-3, 15),
    "crops and captions": (runs.captioned_settings, {}, 1e-4, 15),
    "micro-batches": (runs.vector_settings, {"schedule.epochs": 2, "data.micro_batch": 3}, 1e-4, 20),
    "widths": (runs.vector_settings, {"schedule.epochs": 2, "model.matryoshka": "[4,2]"}, 1e-4, 20),
}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "changes", "lr", "queries"), IN_PROCESSES.values(), ids=IN_PROCESSES)
def test_two_processes_give_the_results_of_one(tmp_path, make, changes, lr, queries):
    rate = {} if lr is None else {"optimizer.lr": lr}
    settings = make(tmp_path, **changes, **rate, **{"optimizer.eps": 1e-3})
    for name, world in (("one", 1), ("two", 2)):
        runs.run_in_processes([tmp_path / "empty.yaml", *settings, f"out={tmp_path / name}"], world)
    runs.assert_close_outcome(tmp_path / "one", tmp_path / "two", queries=queries)


@pytest.mark.slow
@pytest.mark.parametrize("widths", ["[]", "[4]"])
def test_sharded_state_on_two_processes_is_the_replicated_state(tmp_path, widths):
    settings = runs.vector_settings(tmp_path, **{"schedule.epochs": 2, "model.matryoshka": widths})
    for sharded in ("false", "true"):
        changes = [f"objective.state.sharding={sharded}", f"out={tmp_path / sharded}"]
        runs.run_in_processes([tmp_path / "empty.yaml", *settings, *changes], 2)
    one, two = (checkpoint.load_last(tmp_path / name / "checkpoints", print) for name in ("false", "true"))
    for part in ("model", "objective"):
        runs.assert_identical(getattr(one, part), getattr(two, part))


@pytest.mark.slow
def test_torchrun(tmp_path):
    settings = runs.vector_settings(tmp_path, **{"schedule.epochs": 1})
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "nuclr"]
    command += ["train", str(tmp_path / "empty.yaml"), *settings]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "runs" / "tiny-2" / "results.json").read_text())["processes"] == 2
    assert ended.stdout.count("The run is in") == 1


def test_nuclr_train_takes_settings_and_returns_what_results_json_holds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {**to_dict(runs.load(tmp_path, **{"schedule.epochs": 1})), "name": "mine"}
    settings.pop("out", None)
    trained = nuclr.train(settings)
    assert trained.folder == Path("runs/mine") and nuclr.train(settings).folder == Path("runs/mine-2")
    assert to_record(trained) == json.loads((tmp_path / "runs/mine/results.json").read_text())
    assert read_results(trained.folder) == trained
