"""Tiny runs for the tests, on vectors (they take a second) or on built-in pictures, in this process or in others."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nuclr.runs import checkpoint, config
from nuclr.training import logging
from nuclr.training.loop import train
from tests import forks


def write_vectors(path: Path, images: int = 60, captions: int = 2, seed: int = 0) -> Path:
    """Write an embedding file whose y are noisy linear functions of their x."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(images, 12)).astype("float32")
    y_to_x = np.repeat(np.arange(images), captions)
    mix = np.random.default_rng(9).normal(size=(12, 8))
    y = (x[y_to_x] @ mix + 0.5 * rng.normal(size=(images * captions, 8))).astype("float32")
    np.savez(path, x=x, y=y, y_to_x=y_to_x)
    return path


COMMON = {"data.batch_size": 16, "model.width": 8, "objective.zeta_lr": 0.3, "report": "false", "threads": 1}
COMMON |= {"schedule.epochs": 2, "log.every": 2, "checkpoint_every": 2}


def overrides(folder: Path, own: dict, changes: dict) -> list[str]:
    """Return the settings of a tiny run as KEY=VALUE, and write a config that only has a name."""
    (folder / "empty.yaml").write_text("name: tiny\n")
    return [f"{key}={value}" for key, value in (COMMON | own | changes).items()]


def vector_settings(folder: Path, **changes):
    """Return overrides for 4 epochs of 7 steps on 120 pairs of vectors, and write the data."""
    write_vectors(folder / "train.npz")
    write_vectors(folder / "val.npz", images=20, seed=1)
    own = {"data.root": folder, "data.train": "train.npz", "data.val": "val.npz", "optimizer.lr": 0.03}
    own |= {"schedule.epochs": 4, "schedule.warmup_steps": 5, "schedule.zeta_frozen_epochs": 1}
    return overrides(folder, own | {"log.every": 3, "checkpoint_every": 4}, changes)


def load(folder: Path, **changes):
    """Return the settings of a tiny run on vectors."""
    return config.load(folder / "empty.yaml", vector_settings(folder, **changes))


def picture_settings(folder: Path, **changes) -> list[str]:
    """Return overrides for two epochs of six steps on 100 built-in pictures, with augmentation."""
    return overrides(folder, {"data.train": "builtin:n=100", "data.val": "builtin:n=30,split=val"}, changes)


WORDS = ["red", "blue", "green", "old", "new", "tall", "small", "fast", "slow", "round", "flat", "warm"]
WORDS += ["cold", "dark", "bright", "loud", "soft", "dry", "wet", "sweet", "light", "heavy", "open", "closed"]


def text_rows(count: int = 60, seed: int = 0, several: int = 0) -> list[dict]:
    """Return rows of questions and answers about two words; with `several`, that number of each per row."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        one, two = rng.choice(WORDS, 2, replace=False)
        questions = [f"{start} {one} or {two}?" for start in ("is it", "would it be", "can it be")]
        answers = [f"{start} {one}, not {two}" for start in ("it is", "maybe", "surely")]
        rows.append({"question": questions[:several] or questions[0], "answer": answers[:several] or answers[0]})
    return rows


def write_texts(path: Path, count: int = 60, seed: int = 0, several: int = 0) -> Path:
    """Write questions and answers as JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in text_rows(count, seed, several)))
    return path


def text_settings(folder: Path, several: int = 2, **changes) -> list[str]:
    """Return overrides for two epochs on questions and answers, several of each per row, and write the data."""
    write_texts(folder / "train.jsonl", 50, several=several)
    write_texts(folder / "val.jsonl", 15, seed=1, several=several)
    own = {"data.root": folder, "data.train": "train.jsonl", "data.val": "val.jsonl"}
    return overrides(folder, own | {"model.x.encoder": "bag_of_words", "optimizer.lr": 0.01}, changes)


def view_settings(folder: Path, count: int = 40, **changes) -> list[str]:
    """Return overrides for two epochs on two views of every image in a folder, and write the images."""
    if not (folder / "photographs").exists():
        write_photographs(folder / "photographs", count)
    own = {"data.train": folder / "photographs", "model.x.image_size": 16, "data.batch_size": 8}
    settings = picture_settings(folder, **(own | changes))
    return [setting for setting in settings if not setting.startswith("data.val=")]


def write_photographs(folder: Path, count: int) -> list[bytes]:
    """Write different JPEGs `0.jpg`, `1.jpg`, ... and return their contents."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    contents = []
    for number in range(count):
        Image.fromarray(rng.integers(256, size=(3, 3, 3), dtype=np.uint8)).resize((24, 24)).save(
            folder / f"{number}.jpg"
        )
        contents.append((folder / f"{number}.jpg").read_bytes())
    return contents


def photograph_settings(folder: Path, count: int = 60, **changes) -> list[str]:
    """Return overrides for two epochs on JPEGs with one caption each, and write the data."""
    write_photographs(folder / "photographs", count)
    entries = [{"image": f"{number}.jpg", "caption": f"photograph {number}"} for number in range(count)]
    (folder / "photographs" / "train.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    own = {"data.train": "train.jsonl", "data.root": folder / "photographs"}
    own |= {"model.x.image_size": 16, "checkpoint_every": 1}
    settings = picture_settings(folder, **(own | changes))
    return [setting for setting in settings if not setting.startswith("data.val=")]


def captioned_settings(folder: Path, **changes) -> list[str]:
    """Return overrides for JPEGs with three captions each; a visit takes two crops and two captions."""
    settings = photograph_settings(folder, **({"data.x.views": 2, "data.y.views": 2} | changes))
    entries = [{"image": f"{n}.jpg", "caption": [f"{word} {n}" for word in ("one", "two", "three")]} for n in range(60)]
    (folder / "photographs" / "train.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return settings


def grouped_vector_settings(folder: Path, **changes) -> list[str]:
    """Return overrides for 60 x with five y each, of which a visit takes two."""
    settings = vector_settings(folder, **({"data.y.views": 2} | changes))
    write_vectors(folder / "train.npz", captions=5)
    return settings


def grouped_text_settings(folder: Path, **changes) -> list[str]:
    """Return overrides for texts of which a visit takes two questions and three answers."""
    return text_settings(folder, several=3, **({"data.x.views": 2, "data.y.views": 3} | changes))


class KilledError(Exception):
    """A run that ended abruptly."""


def train_until(monkeypatch, step: int, settings, out: Path) -> None:
    """Start or resume a run that ends abruptly at this step, after the update and before it is logged or saved."""
    before = logging.Progress.step

    def die(self, done: int) -> None:
        if done == step:
            raise KilledError
        before(self, done)

    with monkeypatch.context() as patch:
        patch.setattr(logging.Progress, "step", die)
        with pytest.raises(KilledError):
            train(settings, out, resume=True)


def assert_resumes(monkeypatch, folder: Path, settings, steps: Sequence[int]) -> None:
    """Assert that a run that is killed at these steps and resumed equals one that never stopped, bit by bit."""
    train(settings, folder / "whole")
    for step in steps:
        train_until(monkeypatch, step, settings, folder / "stopped")
    train(settings, folder / "stopped", resume=True)
    assert_same_outcome(folder / "whole", folder / "stopped")


def run_in_processes(arguments: list, world: int = 1) -> None:
    """Train in real processes, and assert that all of them succeed."""
    outcomes = finish(forks.start(arguments, world))
    assert all(status == 0 for status, _, _ in outcomes), outcomes


def outcome(run: Path) -> tuple[dict, bytes, dict]:
    """Return the state in the last checkpoint, metrics.jsonl, and results.json without the timing."""
    state = checkpoint.load(checkpoint.newest_first(run / "checkpoints")[0])
    results = json.loads((run / "results.json").read_text())
    results.pop("timing")
    return vars(state), (run / "metrics.jsonl").read_bytes(), results


def assert_identical(a, b, where: str = "") -> None:
    """Assert that nested dicts and lists are equal to the last bit."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_identical(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_identical(one, other, f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where


def assert_same_outcome(a: Path, b: Path) -> None:
    """Assert that two runs ended with the same state, metrics and results."""
    (state_a, metrics_a, results_a), (state_b, metrics_b, results_b) = outcome(a), outcome(b)
    assert metrics_a == metrics_b
    assert_identical(results_a, results_b)
    assert_identical(state_a, state_b)


def assert_close_outcome(a: Path, b: Path, queries: int) -> None:
    """Assert that two runs, on different numbers of processes, agree up to rounding errors.

    The models differ in the last bits, so one of the held-out queries may get another rank.
    """
    one, two = ([json.loads(line) for line in (run / "metrics.jsonl").open()] for run in (a, b))
    assert len(one) == len(two) > 0
    for first, second in zip(one, two, strict=True):
        ranks = [{key: line.pop(key) for key in list(line) if key.startswith("val/")} for line in (first, second)]
        assert ranks[1] == pytest.approx(ranks[0], abs=1.02 / queries)
        assert second == pytest.approx(first, abs=1e-4)
    states = [checkpoint.load(checkpoint.newest_first(run / "checkpoints")[0]) for run in (a, b)]
    for part in ("model", "objective"):
        for name, tensor in getattr(states[0], part).items():
            torch.testing.assert_close(
                getattr(states[1], part)[name], tensor, atol=1e-4, rtol=1e-4, msg=f"{part}: {name}"
            )


def wait_for(path: Path, lines: int, process: subprocess.Popen | None = None) -> None:
    """Wait until a file has this number of lines, or the process has ended."""
    deadline = time.monotonic() + 240
    while count_lines(path) < lines and time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            return
        time.sleep(0.005)


def count_lines(path: Path) -> int:
    """Return the number of lines of a file; 0 if it does not exist."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def start(arguments: list, world: int = 1, ranks: Sequence[int] | None = None) -> list[subprocess.Popen]:
    """Start `nuclr train` in `world` processes, as torchrun does, or only in those with the given ranks."""
    return start_python(["-m", "nuclr", "train", *map(str, arguments)], world, ranks)


def start_python(arguments: list[str], world: int, ranks: Sequence[int] | None = None) -> list[subprocess.Popen]:
    """Start Python in `world` processes, with the variables that torchrun sets."""
    command = [sys.executable, *arguments]
    return [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for environment in environments(world, ranks)
    ]


def environments(world: int, ranks: Sequence[int] | None = None) -> list[dict[str, str]]:
    """Return the environment of each process, with the variables that torchrun sets unless it is the only one."""
    if world == 1 and ranks is None:
        return [dict(os.environ)]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port()), "WORLD_SIZE": str(world)}
    ranks = range(world) if ranks is None else ranks
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in ranks]


def reserve_port() -> int:
    """Return a port that no other process is given until this one ends.

    The socket stays open without listening. SO_REUSEADDR, set after the port was chosen, lets torch's store listen.
    """
    holder = socket.socket()
    holder.bind(("127.0.0.1", 0))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _reserved_ports.append(holder)
    return holder.getsockname()[1]


_reserved_ports: list[socket.socket] = []


def finish(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """Wait for the processes; return status, stdout and stderr of each. If one hangs, show what all of them did."""
    try:
        texts = [process.communicate(timeout=300) for process in processes]
    except subprocess.TimeoutExpired as error:
        for process in processes:
            if hasattr(process, "dump_stacks"):
                process.dump_stacks()
        time.sleep(2)
        for process in processes:
            process.kill()
        ends = [(process.communicate(timeout=60), process.returncode) for process in processes]
        shown = [f"process {rank}, status {status}:\n{err[-3000:]}" for rank, ((_, err), status) in enumerate(ends)]
        raise AssertionError("\n".join([str(error), *shown])) from None
    return [(process.returncode, *both) for process, both in zip(processes, texts, strict=True)]
