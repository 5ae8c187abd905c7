"""A run that was stopped at any step and resumed equals one that never stopped: weights, state, metrics, bit by bit."""

import contextlib
import copy
import math
import random
import shutil
import signal
import time

import pytest
import torch

from nuclr import files
from nuclr.errors import UserError
from nuclr.runs import checkpoint, config
from nuclr.training.loop import train
from tests import forks
from tests.training import runs


@pytest.mark.parametrize("objective", ["nuclr", "isogclr", "siglip"])
def test_a_run_killed_at_any_step_can_be_resumed(tmp_path, monkeypatch, objective):
    settings = runs.load(tmp_path, **{"objective.name": objective, "objective.zeta_lr": "", "schedule.epochs": 3})
    runs.assert_resumes(monkeypatch, tmp_path, settings, (1, 5, 8, 14, 15, 21))


REFRESH = {"schedule.zeta_refresh": 1}
NETWORKS = {"objective.popularity": "network", "objective.normalizer": "network"}
HOST = {"objective.state.device": "cpu", "objective.state.sharding": "true"}
INDIVIDUAL = {"objective.temperatures.individual": "true", "objective.sides": "x"}
LEARNT = {"objective.temperatures.learnt": "true", "objective.average.gamma_rule": "proximal"}
KINDS = {
    "individual temperatures": (runs.vector_settings, INDIVIDUAL),
    "learnt temperature": (runs.vector_settings, LEARNT),
    "the published code": (runs.vector_settings, {"objective.name": "nuclr-authors"}),
    "networks": (runs.vector_settings, NETWORKS),
    "state on the host": (runs.vector_settings, HOST),
    "widths": (runs.vector_settings, REFRESH | {"model.matryoshka": "[2,4]"}),
    "widths, networks": (runs.vector_settings, NETWORKS | {"model.matryoshka": "[4]"}),
    "widths, learnt temperature": (runs.grouped_vector_settings, LEARNT | {"model.matryoshka": "[4]"}),
    "augmentation": (runs.picture_settings, REFRESH),
    "texts": (runs.text_settings, REFRESH | {"model.x.encoder": "tiny_text"}),
    "views of vectors": (runs.grouped_vector_settings, {}),
    "views of texts": (runs.grouped_text_settings, {}),
}


@pytest.mark.parametrize(("make", "changes"), KINDS.values(), ids=KINDS)
def test_a_run_of_any_kind_can_be_resumed(tmp_path, monkeypatch, make, changes):
    overrides = make(tmp_path, **changes, **{"schedule.epochs": 2, "schedule.zeta_frozen_epochs": 0})
    settings = config.load(tmp_path / "empty.yaml", overrides)
    runs.assert_resumes(monkeypatch, tmp_path, settings, (1, 3, 5))


@pytest.mark.slow
@pytest.mark.parametrize("left", ["nothing", "half a config", "a config"])
def test_a_run_killed_before_the_first_step_can_be_resumed(tmp_path, monkeypatch, left):
    settings = runs.load(tmp_path, **{"schedule.epochs": 1})
    write_text, take_lock = files.write_text, files.take_lock

    def die_after_locking(*arguments):
        take_lock(*arguments)
        raise runs.KilledError

    def die_while_writing(path, text):
        path.with_name(f".{path.name}.0123abcd.tmp").write_text(text[:8])
        raise runs.KilledError

    def die_after_writing(path, text):
        write_text(path, text)
        raise runs.KilledError

    with monkeypatch.context() as patch:
        if left == "nothing":
            patch.setattr(files, "take_lock", die_after_locking)
        else:
            patch.setattr(files, "write_text", die_while_writing if left == "half a config" else die_after_writing)
        with pytest.raises(runs.KilledError):
            train(settings, tmp_path / "run", resume=True)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names - {".lock"} == {"half a config": {".config.yaml.0123abcd.tmp"}, "a config": {"config.yaml"}}.get(
        left, set()
    )
    train(settings, tmp_path / "run", resume=True)
    assert len(checkpoint.newest_first(tmp_path / "run" / "checkpoints")) > 0


def test_a_truncated_checkpoint_is_reported_and_the_one_before_it_used(tmp_path, monkeypatch, capsys):
    settings = runs.load(tmp_path)
    train(settings, tmp_path / "whole")
    runs.train_until(monkeypatch, 18, settings, tmp_path / "run")
    last, before = checkpoint.newest_first(tmp_path / "run" / "checkpoints")
    last.write_bytes(last.read_bytes()[:-100])
    capsys.readouterr()
    train(settings, tmp_path / "run", resume=True)
    err = capsys.readouterr().err
    assert f"{last}: " in err
    assert f"step {int(before.stem.removeprefix('step_'))} of" in err
    runs.assert_same_outcome(tmp_path / "whole", tmp_path / "run")


def leaves(content, path=()):
    """Yield the path of every entry of nested dicts and lists."""
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in entries:
        yield (*path, key)
        yield from leaves(value, (*path, key))


def forge(content: dict, path: tuple, value: object) -> dict:
    """Replace or (with `...`) remove an entry."""
    forged = copy.deepcopy(content)
    parent = forged
    for key in path[:-1]:
        parent = parent[key]
    if value is ...:
        del parent[path[-1]]
    elif isinstance(value, str) and isinstance(parent[path[-1]], torch.Tensor):
        tensor = parent[path[-1]]
        parent[path[-1]] = torch.full_like(tensor, math.nan) if value == "nan" else tensor[None].to(torch.complex64)
    else:
        parent[path[-1]] = value
    return forged


@pytest.mark.parametrize("seed", range(3))
def test_forged_checkpoints_give_a_message_and_the_one_before_is_used(tmp_path, monkeypatch, capsys, seed):
    """The checksum is right, the content is not."""
    settings = runs.load(tmp_path, **{"schedule.epochs": 2})
    train(settings, tmp_path / "whole")
    runs.train_until(monkeypatch, 9, settings, tmp_path / "stopped")
    last, _ = checkpoint.newest_first(tmp_path / "stopped" / "checkpoints")
    content = torch.load(last, weights_only=True)
    choose = random.Random(seed)
    paths = [path for path in leaves(content) if path[:2] != ("optimizer", "param_groups")]
    refused = 0
    for number in range(12):
        path = choose.choice(paths)
        value = choose.choice([..., None, "nan", "text", -1, 10**400, math.nan, [], {"": None}, torch.zeros(0, 3)])
        run = tmp_path / f"run{number}"
        shutil.copytree(tmp_path / "stopped", run)
        torch.save(forge(content, path, value), run / "checkpoints" / last.name)
        capsys.readouterr()
        with contextlib.suppress(UserError):  # other data is refused
            train(settings, run, resume=True)
        if "using the checkpoint before it" in capsys.readouterr().err:
            refused += 1
            runs.assert_same_outcome(tmp_path / "whole", run)
    assert refused > 6


@pytest.mark.parametrize("left", [None, 20])
def test_metrics_that_are_missing_are_not_padded(tmp_path, monkeypatch, left):
    settings = runs.load(tmp_path, **{"schedule.epochs": 2})
    runs.train_until(monkeypatch, 9, settings, tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    if left is None:
        metrics.unlink()
    else:
        metrics.write_bytes(metrics.read_bytes()[:left])
    train(settings, tmp_path / "run", resume=True)
    assert b"\0" not in metrics.read_bytes()


def test_a_finished_run_is_not_overwritten(tmp_path):
    settings = runs.load(tmp_path)
    train(settings, tmp_path / "run")
    with pytest.raises(UserError, match=str(tmp_path / "run")):
        train(settings, tmp_path / "run")


def test_resuming_a_finished_run_changes_nothing(tmp_path, capsys):
    settings = runs.load(tmp_path, **{"schedule.epochs": 1})
    results = train(settings, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.*") if path.name != ".lock"}
    assert results.timing["steps"] == 7 and results.timing["samples_per_second"] > 0
    assert train(settings, tmp_path / "run", resume=True) == results
    assert "finished" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize("repaired", [False, True])
def test_a_sample_that_became_bad_or_good_is_refused(tmp_path, monkeypatch, repaired):
    settings = config.load(None, runs.photograph_settings(tmp_path))
    photograph = tmp_path / "photographs" / "7.jpg"
    whole = photograph.read_bytes()
    first, second = (whole[:200], whole) if repaired else (whole, whole[:200])
    photograph.write_bytes(first)
    runs.train_until(monkeypatch, 3, settings, tmp_path / "run")
    photograph.write_bytes(second)
    with pytest.raises(UserError, match=r"data\.train.*bad_samples\.jsonl"):
        train(settings, tmp_path / "run", resume=True)
    photograph.write_bytes(first)
    train(settings, tmp_path / "run", resume=True)


def test_other_settings_and_data_are_refused_by_name(tmp_path, monkeypatch):
    keep = tmp_path / "keep.txt"
    keep.write_text("\n".join(map(str, range(60))))
    settings = runs.load(tmp_path, **{"data.keep": keep})
    runs.train_until(monkeypatch, 5, settings, tmp_path / "run")
    with pytest.raises(UserError, match=r"optimizer.lr is 0.5.*0.03"):
        train(runs.load(tmp_path, **{"data.keep": keep, "optimizer.lr": 0.5}), tmp_path / "run", resume=True)
    keep.write_text("\n".join(map(str, range(1, 61))))
    with pytest.raises(UserError, match=r"data\.keep"):
        train(settings, tmp_path / "run", resume=True)
    runs.write_vectors(tmp_path / "train.npz", seed=5)
    with pytest.raises(UserError, match=r"data\.train has other pairs"):
        train(settings, tmp_path / "run", resume=True)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.slow
def test_signals_write_a_checkpoint(tmp_path, number, status):
    settings = runs.vector_settings(tmp_path, **{"schedule.epochs": 400, "checkpoint_every": 100000})
    run = tmp_path / "run"
    [process] = runs.start([tmp_path / "empty.yaml", *settings, f"out={run}"])
    runs.wait_for(run / "timing.jsonl", 10)
    process.send_signal(number)
    [(returned, _, err)] = runs.finish([process])
    assert returned == status
    assert "nuclr: stopped at step" in err and "--resume" in err and "Traceback" not in err
    stopped = int(err.rpartition("stopped at step ")[2].split()[0])
    assert checkpoint.load(checkpoint.newest_first(run / "checkpoints")[0]).position["total"] == stopped


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_killed_by_sigkill_at_random_moments_can_be_resumed(tmp_path, world):
    settings = runs.vector_settings(tmp_path, **{"schedule.epochs": 40, "checkpoint_every": 5})
    arguments = [tmp_path / "empty.yaml", *settings, "--resume"]
    runs.run_in_processes([*arguments, f"out={tmp_path / 'whole'}"], world)
    chance = random.Random(world)
    kills = 0
    while kills < 10 // world:
        processes = forks.start([*arguments, f"out={tmp_path / 'run'}"], world)
        lines = runs.count_lines(tmp_path / "run" / "timing.jsonl")
        try:
            runs.wait_for(tmp_path / "run" / "timing.jsonl", lines + chance.randrange(4), processes[0])
            time.sleep(chance.random() / 20)
        finally:
            for process in processes:
                process.kill()
            runs.finish(processes)
        kills += 1
        if (tmp_path / "run" / "results.json").exists():
            break
    if not (tmp_path / "run" / "results.json").exists():
        runs.run_in_processes([tmp_path / "run", "--resume"], world)
    assert kills >= 3
    runs.assert_same_outcome(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("make", [runs.text_settings, runs.view_settings, runs.captioned_settings])
def test_sigkill_and_resume(tmp_path, make):
    settings = make(tmp_path, **{"schedule.epochs": 6, "checkpoint_every": 2})
    arguments = [tmp_path / "empty.yaml", *settings, "--resume"]
    runs.run_in_processes([*arguments, f"out={tmp_path / 'whole'}"])
    for lines in (2, 4, 6):
        [process] = forks.start([*arguments, f"out={tmp_path / 'run'}"])
        try:
            runs.wait_for(tmp_path / "run" / "timing.jsonl", lines, process)
        finally:
            process.kill()
            runs.finish([process])
    assert not (tmp_path / "run" / "results.json").exists()
    runs.run_in_processes([tmp_path / "run", "--resume"])  # settings from its own config.yaml
    runs.assert_same_outcome(tmp_path / "whole", tmp_path / "run")
