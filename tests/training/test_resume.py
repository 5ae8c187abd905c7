"""A run that stopped at any step ends as one that never stopped: weights, state, metrics, to the last bit."""

import json
import random
import signal
import time

import pytest

from nuclr.errors import UserError
from nuclr.runs import checkpoint, config
from nuclr.runs.folder import RunFolder
from nuclr.training import logging
from nuclr.training.loop import train
from tests.training import runs


class KilledError(Exception):
    pass


def killed_at(monkeypatch, step: int) -> None:
    """Let the run end abruptly in the middle of this step's bookkeeping."""
    before = logging.Progress.step

    def die(self, done: int) -> None:
        if done == step:
            raise KilledError
        before(self, done)

    monkeypatch.setattr(logging.Progress, "step", die)


@pytest.mark.parametrize("objective", ["nuclr", "isogclr", "siglip"])
def test_killed_at_any_step(tmp_path, monkeypatch, objective):
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
def test_killed_before_the_first_step(tmp_path, monkeypatch, left):
    settings = runs.load(tmp_path, **{"schedule.epochs": 1})
    with monkeypatch.context() as patch:
        name, after = {
            "nothing": ("_take_lock", True),
            "half a config": ("_replace", False),
            "a config": ("_replace", True),
        }[left]
        real = getattr(RunFolder, name)

        def die(self, *arguments):
            if after:
                real(self, *arguments)
            else:
                (self.folder / ".config.yaml.tmp").write_text("name: ti")
            self.close()
            raise KilledError

        patch.setattr(RunFolder, name, die)
        with pytest.raises(KilledError):
            train(settings, tmp_path / "run", resume=True)
    train(settings, tmp_path / "run", resume=True)
    assert len(checkpoint.newest_first(tmp_path / "run" / "checkpoints")) > 0


def test_pictures_with_augmentation(tmp_path, monkeypatch):
    settings = config.load(_empty(tmp_path), runs.picture_settings(tmp_path, **{"schedule.zeta_refresh": 1}))
    train(settings, tmp_path / "whole")
    for step in (3, 7, 12):
        with monkeypatch.context() as patch:
            killed_at(patch, step)
            with pytest.raises(KilledError):
                train(settings, tmp_path / "stopped", resume=True)
    train(settings, tmp_path / "stopped", resume=True)
    runs.assert_same_outcome(tmp_path / "whole", tmp_path / "stopped")


def test_truncated_checkpoint_falls_back_and_says_so(tmp_path, monkeypatch, capsys):
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
    told = capsys.readouterr().err
    assert f"{last}: truncated; going back to the checkpoint before it" in told
    assert f"going on from step {int(before.stem.removeprefix('step_'))} of" in told
    runs.assert_same_outcome(tmp_path / "whole", tmp_path / "run")


def test_a_finished_run_is_not_trained_again(tmp_path):
    settings = runs.load(tmp_path)
    train(settings, tmp_path / "run")
    with pytest.raises(UserError, match="finished run"):
        train(settings, tmp_path / "run")


def test_other_data_is_refused(tmp_path, monkeypatch):
    settings = runs.load(tmp_path)
    killed_at(monkeypatch, 9)
    with pytest.raises(KilledError):
        train(settings, tmp_path / "run")
    runs.write_vectors(tmp_path / "train.npz", seed=5)
    with pytest.raises(UserError, match="the data is not that of the run"):
        train(settings, tmp_path / "run", resume=True)


@pytest.mark.parametrize("mended", [False, True])
def test_a_sample_that_became_bad_or_good_is_refused(tmp_path, monkeypatch, mended):
    settings = config.load(_empty(tmp_path), runs.photograph_settings(tmp_path))
    photograph = tmp_path / "photographs" / "7.jpg"
    whole = photograph.read_bytes()
    first, second = (whole[:200], whole) if mended else (whole, whole[:200])
    photograph.write_bytes(first)
    with monkeypatch.context() as patch:
        killed_at(patch, 3)
        with pytest.raises(KilledError):
            train(settings, tmp_path / "run")
    photograph.write_bytes(second)
    told = (
        r"was bad .* \(.*\), and is good now; restore it" if mended else r"was good .*, and is bad now: .*; restore it"
    )
    with pytest.raises(UserError, match=rf"data.train: sample 7 \(7.jpg\) {told}, or begin another run"):
        train(settings, tmp_path / "run", resume=True)
    photograph.write_bytes(first)
    train(settings, tmp_path / "run", resume=True)


def test_another_list_of_pairs_to_keep_is_refused(tmp_path, monkeypatch):
    (tmp_path / "keep.txt").write_text("\n".join(map(str, range(60))))
    settings = runs.load(tmp_path, **{"data.keep": tmp_path / "keep.txt"})
    with monkeypatch.context() as patch:
        killed_at(patch, 5)
        with pytest.raises(KilledError):
            train(settings, tmp_path / "run")
    (tmp_path / "keep.txt").write_text("\n".join(map(str, range(1, 61))))
    with pytest.raises(UserError, match=r"data\.keep names other pairs than when the run in .* was begun"):
        train(settings, tmp_path / "run", resume=True)


def test_other_settings_are_refused_by_name(tmp_path, monkeypatch):
    killed_at(monkeypatch, 9)
    with pytest.raises(KilledError):
        train(runs.load(tmp_path), tmp_path / "run")
    with pytest.raises(UserError, match=r"optimizer.lr is 0.5, but .* begun with 0.03"):
        train(runs.load(tmp_path, **{"optimizer.lr": 0.5}), tmp_path / "run", resume=True)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_write_a_checkpoint(tmp_path, number, status):
    settings = runs.vector_settings(tmp_path, **{"schedule.epochs": 400, "checkpoint_every": 100000})
    run = tmp_path / "run"
    [process] = runs.start([tmp_path / "empty.yaml", *settings, f"out={run}"])
    _wait_for(run / "timing.jsonl", 10)
    process.send_signal(number)
    [(found, _, err)] = runs.finish([process])
    assert found == status
    assert "nuclr: stopped at step" in err and "--resume" in err and "Traceback" not in err
    stopped = int(err.rpartition("stopped at step ")[2].split()[0])
    assert checkpoint.load(checkpoint.newest_first(run / "checkpoints")[0])["position"]["total"] == stopped


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_sigkill_at_random_moments(tmp_path, world):
    settings = runs.vector_settings(tmp_path, **{"schedule.epochs": 40, "checkpoint_every": 5})
    arguments = [tmp_path / "empty.yaml", *settings, "--resume"]
    ended = runs.finish(runs.start([*arguments, f"out={tmp_path / 'whole'}"], world))
    assert all(status == 0 for status, _, _ in ended), ended
    chance = random.Random(world)
    kills = 0
    while kills < 10 // world:
        processes = runs.start([*arguments, f"out={tmp_path / 'run'}"], world)
        lines = _lines(tmp_path / "run" / "timing.jsonl")
        try:
            _wait_for(tmp_path / "run" / "timing.jsonl", lines + chance.randrange(4), processes[0])
            time.sleep(chance.random() / 20)
        finally:
            for process in processes:
                process.kill()
            runs.finish(processes)
        kills += 1
        if (tmp_path / "run" / "results.json").exists():
            break
    if not (tmp_path / "run" / "results.json").exists():
        ended = runs.finish(runs.start([tmp_path / "run", "--resume"], world))  # its own config, by its folder
        assert all(status == 0 for status, _, _ in ended), ended
    assert kills >= 3
    runs.assert_same_outcome(tmp_path / "whole", tmp_path / "run")


def _empty(folder):
    (folder / "empty.yaml").write_text("name: tiny\n")
    return folder / "empty.yaml"


def _lines(path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _wait_for(path, lines: int, process=None) -> None:
    deadline = time.monotonic() + 240
    while _lines(path) < lines and time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            return
        time.sleep(0.005)


def test_metrics_are_lines_of_json(tmp_path):
    train(runs.load(tmp_path), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(3, 29, 3))
    assert [line["epoch"] for line in lines if "val/mean_R@1" in line] == [1, 2, 3, 4]


@pytest.mark.slow
def test_wandb_sees_one_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = runs.load(tmp_path, **{"log.wandb": True, "schedule.epochs": 2})
    with monkeypatch.context() as patch:
        killed_at(patch, 8)
        with pytest.raises(KilledError):
            train(settings, tmp_path / "run")
    train(settings, tmp_path / "run", resume=True)
    parts = list((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(parts) == 2
    assert all((tmp_path / "run" / "wandb_id").read_text() in part.name for part in parts)
