"""A run: what it writes, what stops it, and that two processes do what one does."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from nuclr.errors import UserError
from nuclr.models import DualEncoder
from nuclr.runs import checkpoint, config
from nuclr.runs import components as parts
from nuclr.training import loop
from nuclr.training.loop import TrainingFailed, train
from tests.training import runs


def test_what_a_run_leaves(tmp_path):
    results = train(runs.load(tmp_path), tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    expected = {"config.yaml", "metrics.jsonl", "timing.jsonl", "results.json", "checkpoints", "model"}
    assert expected <= names
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == results
    assert results["steps"] == 28 and results["left_over_per_epoch"] == 120 - 7 * 16
    assert config.load(tmp_path / "run" / "config.yaml") == runs.load(tmp_path)
    assert results["val"]["mean_R@1"] > 3 * results["val"]["mean_chance@1"]
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["best.pt", "step_000000024.pt", "step_000000028.pt"]

    model = DualEncoder.from_pretrained(tmp_path / "run" / "model")
    state = checkpoint.load(tmp_path / "run" / "checkpoints" / "step_000000028.pt")["model"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_the_seed_decides(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(runs.load(tmp_path, seed=seed), tmp_path / name)
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in "abc"]
    assert metrics[0] == metrics[1] != metrics[2]


def test_one_caption_an_image(tmp_path):
    results = train(runs.load(tmp_path, **{"data.one_pair_per_x": "true"}), tmp_path / "run")
    assert results["samples_per_epoch"] == 60


def test_keep_leaves_the_numbers(tmp_path):
    kept = np.arange(0, 120, 3)
    (tmp_path / "keep.txt").write_text("# kept\n" + "\n".join(map(str, kept)))
    train(runs.load(tmp_path, **{"data.keep": "keep.txt", "data.batch_size": 10}), tmp_path / "run")
    state = checkpoint.load(checkpoint.newest_first(tmp_path / "run" / "checkpoints")[0])["objective"]
    seen = (~state["log_u_x"].isneginf()).nonzero().flatten()
    assert set(seen.tolist()) <= set(kept.tolist())
    assert len(seen) == len(kept)


@pytest.mark.parametrize("name", ["clip", "siglip", "dcl", "cyclip", "sogclr", "isogclr", "nuclr"])
def test_every_objective_trains(tmp_path, name):
    changes = [s for s in runs.vector_settings(tmp_path, **{"schedule.epochs": 2}) if "objective." not in s]
    settings = config.load(tmp_path / "empty.yaml", [*changes, f"objective.name={name}", "schedule.gamma=cosine"])
    results = train(settings, tmp_path / "run")
    assert results["val"]["mean_R@1"] > results["val"]["mean_chance@1"]


def test_refresh_from_the_exact_solver(tmp_path):
    settings = runs.load(tmp_path, **{"schedule.zeta_refresh": 2, "objective.zeta_lr": 0, "schedule.epochs": 2})
    train(settings, tmp_path / "run")
    state = checkpoint.load(checkpoint.newest_first(tmp_path / "run" / "checkpoints")[0])["objective"]
    assert state["zeta_y"].std() > 0 and state["zeta_x"].std() > 0
    assert state["zeta_y"].mean().abs() < 1e-6
    assert state["xi_y"] == state["zeta_y"].abs().max()


def test_nan_stops_and_leaves_the_last_good_checkpoint(tmp_path, monkeypatch):
    settings = runs.load(tmp_path)
    before = loop.inputs

    def poisoned(model, augment, batch, epoch, step, device):
        x, y = before(model, augment, batch, epoch, step, device)
        if (epoch, step) == (1, 3):
            x[2] = torch.nan
            poisoned.number = int(batch.numbers[2])
        return x, y

    monkeypatch.setattr(loop, "inputs", poisoned)
    with pytest.raises(TrainingFailed) as failed:
        train(settings, tmp_path / "run")
    assert f"features are not finite in the batch with the samples {poisoned.number}." in str(failed.value)
    assert len(str(failed.value).splitlines()) == 2
    assert json.loads((tmp_path / "run" / "not_finite.json").read_text())["samples"] == [poisoned.number]
    state = checkpoint.load(checkpoint.newest_first(tmp_path / "run" / "checkpoints")[0])
    assert state["position"] == {"epoch": 1, "step": 1, "total": 8}
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


def test_a_gradient_that_is_not_finite(tmp_path, monkeypatch):
    before = loop.contrast

    def exploding(objective, fx, fy, batch, *rest):
        out = before(objective, fx, fy, batch, *rest)
        return out._replace(loss=out.loss * (torch.inf if objective.zeta_lr else 1.0))

    monkeypatch.setattr(loop, "contrast", exploding)
    with pytest.raises(TrainingFailed, match="the gradient is not finite in the batch with the samples"):
        train(runs.load(tmp_path), tmp_path / "run")
    state = checkpoint.load(checkpoint.newest_first(tmp_path / "run" / "checkpoints")[0])
    assert state["position"] == {"epoch": 0, "step": 7, "total": 7}


def test_bfloat16_and_clipping(tmp_path):
    results = train(runs.load(tmp_path, precision="bfloat16", **{"optimizer.clip": 0.5}), tmp_path / "run")
    assert results["val"]["mean_R@1"] > results["val"]["mean_chance@1"]


def test_nothing_to_train(tmp_path):
    changes = {"model.x.frozen": "true", "model.y.frozen": "true", "model.width": ""}
    settings = runs.load(tmp_path, **changes, **{"model.x.head": "none", "model.y.head": "none"})
    with pytest.raises(UserError):
        train(settings, tmp_path / "run")


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(TrainingFailed, match="No space left on device"):
        train(runs.load(tmp_path), tmp_path / "run")


def test_two_runs_in_one_folder(tmp_path, monkeypatch):
    settings = runs.load(tmp_path)
    refused = []
    before = loop.set_schedules

    def second(*arguments):
        if not refused:
            with pytest.raises(UserError, match="another run is using it") as found:
                loop.folder.RunFolder(tmp_path / "run").open({}, True)
            refused.append(found)
        before(*arguments)

    monkeypatch.setattr(loop, "set_schedules", second)
    train(settings, tmp_path / "run")
    assert refused


def test_somebody_elses_folder_stays(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    with pytest.raises(UserError, match=r"not empty \(thesis.txt\)"):
        train(runs.load(tmp_path), tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "all of it"


def test_vectors_are_standardized(tmp_path):
    settings = runs.load(tmp_path)
    source = parts.open_source(settings.data, "train.npz", None)
    model = parts.make_model(settings.model, source, 0)
    x = torch.from_numpy(np.stack([source.pairs.x(i) for i in range(120)]))
    standard = model.x.tower(x)
    assert standard.mean(0).abs().max() < 1e-5
    assert float(standard.square().mean()) == pytest.approx(1, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("make", [runs.vector_settings, runs.picture_settings])
def test_two_processes_do_what_one_does(tmp_path, make):
    settings = make(tmp_path, **{"schedule.epochs": 2})
    for name, world in (("one", 1), ("two", 2)):
        ended = runs.finish(runs.start([tmp_path / "empty.yaml", *settings, f"out={tmp_path / name}"], world))
        assert all(status == 0 for status, _, _ in ended), ended
    one, two = ([json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()] for name in ("one", "two"))
    assert len(one) == len(two) > 0
    for a, b in zip(one, two, strict=True):
        norms = [line.pop("train/grad_norm", 1.0) for line in (a, b)]  # Adam's first steps amplify roundings of it
        assert norms[1] == pytest.approx(norms[0], rel=1e-2)
        # the two last-bit different models may rank one of 20 (30) queries by one place differently
        ranks = [{key: line.pop(key) for key in list(line) if key.startswith("val/")} for line in (a, b)]
        assert ranks[1] == pytest.approx(ranks[0], abs=0.051)
        assert b == pytest.approx(a, abs=1e-4)
    states = [checkpoint.load(checkpoint.newest_first(tmp_path / name / "checkpoints")[0]) for name in ("one", "two")]
    for name, tensor in states[0]["objective"].items():
        torch.testing.assert_close(states[1]["objective"][name], tensor, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    settings = runs.vector_settings(tmp_path, **{"schedule.epochs": 1})
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "nuclr"]
    command += ["train", str(tmp_path / "empty.yaml"), *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "runs" / "tiny-2" / "results.json").read_text())["processes"] == 2
    assert done.stdout.count("The run is in") == 1


def test_tensorboard_has_what_metrics_jsonl_has(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(runs.load(tmp_path, **{"log.tensorboard": True, "schedule.epochs": 2}), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    for name in ("train/loss", "val/mean_R@1"):
        wanted = [(line["step"], line[name]) for line in lines if name in line]
        assert [(event.step, pytest.approx(event.value)) for event in events.Scalars(name)] == wanted


def test_a_logger_that_is_missing_is_said_before_the_run_begins(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"log\.wandb: wandb is not installed; pip install 'nuclr\[logging\]'"):
        train(runs.load(tmp_path, **{"log.wandb": True}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
