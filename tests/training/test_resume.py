"""A run that was stopped at any step and resumed equals one that never stopped: weights, state, metrics, bit by bit."""

import random
import signal
import time

import pytest

from nuclr import files
from nuclr.errors import UserError
from nuclr.runs import checkpoint, config
from nuclr.runs.folder import RunFolder
from nuclr.training import logging
from nuclr.training.loop import train
from tests import forks
from tests.training import runs


class KilledError(Exception):
    pass


def killed_at(monkeypatch, step: int) -> None:
    """Let the run end abruptly at this step, after the update and before its values are logged or saved."""
    before = logging.Progress.step

    def die(self, done: int) -> None:
        if done == step:
            raise KilledError
        before(self, done)

    monkeypatch.setattr(logging.Progress, "step", die)


@pytest.mark.parametrize("objective", ["nuclr", "isogclr", "siglip"])
def test_a_run_killed_at_any_step_can_be_resumed(tmp_path, monkeypatch, objective):
    changes = {"objective.name": objective, "schedule.epochs": 3}
    if objective != "nuclr":
        settings = runs.vector_settings(tmp_path, **changes)
        settings = config.load(tmp_path / "empty.yaml", [s for s in settings if "objective.zeta" not in s])
    else:
        settings = runs.load(tmp_path, **changes)
    train(settings, tmp_path / "whole")
    for step in (1, 5, 8, 14, 15, 21):
        with monkeypatch.context() as patch:
            killed_at(patch, step)
            with pytest.raises(KilledError):
                train(settings, tmp_path / "stopped", resume=True)
    train(settings, tmp_path / "stopped", resume=True)
    runs.assert_same_outcome(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.slow
@pytest.mark.parametrize("left", ["nothing", "half a config", "a config"])
def test_a_run_killed_before_the_first_step_can_be_resumed(tmp_path, monkeypatch, left):
    settings = runs.load(tmp_path, **{"schedule.epochs": 1})
    write_text, take_lock = files.write_text, RunFolder._take_lock

    def die_after_locking(folder):
        take_lock(folder)
        raise KilledError

    def die_while_writing(path, text):
        path.with_name(f".{path.name}.12345.tmp").write_text(text[:8])
        raise KilledError

    def die_after_writing(path, text):
        write_text(path, text)
        raise KilledError

    with monkeypatch.context() as patch:
        if left == "nothing":
            patch.setattr(RunFolder, "_take_lock", die_after_locking)
        else:
            patch.setattr(files, "write_text", die_while_writing if left == "half a config" else die_after_writing)
        with pytest.raises(KilledError):
            train(settings, tmp_path / "run", resume=True)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names - {".lock"} == {"half a config": {".config.yaml.12345.tmp"}, "a config": {"config.yaml"}}.get(
        left, set()
    )
    train(settings, tmp_path / "run", resume=True)
    assert len(checkpoint.newest_first(tmp_path / "run" / "checkpoints")) > 0


def test_resuming_with_augmentation_and_zeta_refresh(tmp_path, monkeypatch):
    settings = config.load(_empty(tmp_path), runs.picture_settings(tmp_path, **{"schedule.zeta_refresh": 1}))
    train(settings, tmp_path / "whole")
    for step in (3, 7, 12):
        with monkeypatch.context() as patch:
            killed_at(patch, step)
            with pytest.raises(KilledError):
                train(settings, tmp_path / "stopped", resume=True)
    train(settings, tmp_path / "stopped", resume=True)
    runs.assert_same_outcome(tmp_path / "whole", tmp_path / "stopped")


def test_a_truncated_checkpoint_is_reported_and_the_one_before_it_used(tmp_path, monkeypatch, capsys):
    settings = runs.load(tmp_path)
    train(settings, tmp_path / "whole")
    with monkeypatch.context() as patch:
        killed_at(patch, 18)
        with pytest.raises(KilledError):
            train(settings, tmp_path / "run")
    last, before = checkpoint.newest_first(tmp_path / "run" / "checkpoints")
    last.write_bytes(last.read_bytes()[:-100])
    capsys.readouterr()
    train(settings, tmp_path / "run", resume=True)
    err = capsys.readouterr().err
    assert f"{last}: truncated; using the checkpoint before it" in err
    assert f"resuming from step {int(before.stem.removeprefix('step_'))} of" in err
    runs.assert_same_outcome(tmp_path / "whole", tmp_path / "run")


def test_a_finished_run_is_not_overwritten(tmp_path):
    settings = runs.load(tmp_path)
    train(settings, tmp_path / "run")
    with pytest.raises(UserError, match="finished run"):
        train(settings, tmp_path / "run")


def test_resuming_a_finished_run_changes_nothing(tmp_path, capsys):
    settings = runs.load(tmp_path, **{"schedule.epochs": 1})
    results = train(settings, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.*") if path.name != ".lock"}
    assert results["timing"]["steps"] == 7 and results["timing"]["samples_per_second"] > 0
    assert train(settings, tmp_path / "run", resume=True) == results
    assert "is finished; nothing is left to train" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_changed_data_is_refused(tmp_path, monkeypatch):
    settings = runs.load(tmp_path)
    killed_at(monkeypatch, 9)
    with pytest.raises(KilledError):
        train(settings, tmp_path / "run")
    runs.write_vectors(tmp_path / "train.npz", seed=5)
    with pytest.raises(
        UserError, match=r"data\.train: these are not the pairs that the run in .* began with; restore the data"
    ):
        train(settings, tmp_path / "run", resume=True)


@pytest.mark.parametrize("repaired", [False, True])
def test_a_sample_that_became_bad_or_good_is_refused(tmp_path, monkeypatch, repaired):
    settings = config.load(_empty(tmp_path), runs.photograph_settings(tmp_path))
    photograph = tmp_path / "photographs" / "7.jpg"
    whole = photograph.read_bytes()
    first, second = (whole[:200], whole) if repaired else (whole, whole[:200])
    photograph.write_bytes(first)
    with monkeypatch.context() as patch:
        killed_at(patch, 3)
        with pytest.raises(KilledError):
            train(settings, tmp_path / "run")
    photograph.write_bytes(second)
    change = r"was bad .* \(.*\) and is good now" if repaired else r"was good .* and is bad now: .*"
    with pytest.raises(
        UserError, match=rf"data.train: sample 7 \(7.jpg\) {change}; restore the data, or start another"
    ):
        train(settings, tmp_path / "run", resume=True)
    photograph.write_bytes(first)
    train(settings, tmp_path / "run", resume=True)


def test_a_changed_list_of_pairs_to_keep_is_refused(tmp_path, monkeypatch):
    (tmp_path / "keep.txt").write_text("\n".join(map(str, range(60))))
    settings = runs.load(tmp_path, **{"data.keep": tmp_path / "keep.txt"})
    with monkeypatch.context() as patch:
        killed_at(patch, 5)
        with pytest.raises(KilledError):
            train(settings, tmp_path / "run")
    (tmp_path / "keep.txt").write_text("\n".join(map(str, range(1, 61))))
    with pytest.raises(
        UserError, match=r"^data\.keep does not list the same pairs as when the run in .* began; restore the data"
    ):
        train(settings, tmp_path / "run", resume=True)


def test_changed_settings_are_refused_by_name(tmp_path, monkeypatch):
    killed_at(monkeypatch, 9)
    with pytest.raises(KilledError):
        train(runs.load(tmp_path), tmp_path / "run")
    with pytest.raises(UserError, match=r"optimizer.lr is 0.5, but the run in .* began with 0.03"):
        train(runs.load(tmp_path, **{"optimizer.lr": 0.5}), tmp_path / "run", resume=True)


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
    assert checkpoint.load(checkpoint.newest_first(run / "checkpoints")[0])["position"]["total"] == stopped


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_run_killed_by_sigkill_at_random_moments_can_be_resumed(tmp_path, world):
    settings = runs.vector_settings(tmp_path, **{"schedule.epochs": 40, "checkpoint_every": 5})
    arguments = [tmp_path / "empty.yaml", *settings, "--resume"]
    outcomes = runs.finish(forks.start([*arguments, f"out={tmp_path / 'whole'}"], world))
    assert all(status == 0 for status, _, _ in outcomes), outcomes
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
        outcomes = runs.finish(forks.start([tmp_path / "run", "--resume"], world))  # settings from its own config.yaml
        assert all(status == 0 for status, _, _ in outcomes), outcomes
    assert kills >= 3
    runs.assert_same_outcome(tmp_path / "whole", tmp_path / "run")


def _empty(folder):
    (folder / "empty.yaml").write_text("name: tiny\n")
    return folder / "empty.yaml"
