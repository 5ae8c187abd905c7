"""The examples run as their first lines say, from another folder."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nuclr.runs.folder import read_results

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_own_loop() -> None:
    done = subprocess.run([sys.executable, EXAMPLES / "own_loop.py"], capture_output=True, text=True, check=True)
    assert float(done.stdout.split("recall@1 ")[1].split("%")[0]) > 50


def test_two_towers(tmp_path) -> None:
    command = [sys.executable, EXAMPLES / "two_towers.py", "--epochs", "4", "--loss", "softmax", "sogclr+logq", "nuclr"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    recall = {
        line.split(" recall@20 ")[0].strip(): float(line.split("recall@20 ")[1].split()[0])
        for line in done.stdout.splitlines()[1:]
    }
    assert recall["softmax, put back"] > recall["softmax"] + 20
    assert recall["nuclr, put back"] > recall["nuclr"] + 20
    assert recall["sogclr+logq"] > recall["softmax"] + 20
    done = subprocess.run([*command, "--data", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and str(tmp_path) in done.stderr and "train.txt" in done.stderr


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A folder to work in, with the command `nuclr` on the search path."""
    command = tmp_path / "bin" / "nuclr"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nuclr "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_text_pairs(path) -> None:
    lines = (EXAMPLES / "text_pairs.sh").read_text().splitlines()
    assert len(lines) <= 10
    done = subprocess.run(["sh", EXAMPLES / "text_pairs.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    trained, held_out = ({*(path / name).read_text().splitlines()[1:]} for name in ("pairs.csv", "held_out.csv"))
    assert (len(trained), len(held_out)) == (138, 22) and not trained & held_out
    results = read_results(path / "run")
    assert results.sides == ("question", "answer") and results.val["mean_R@1"] > 0.5
    with np.load("held_out.npz") as features:
        assert features["x"].shape == features["y"].shape == (22, 256)
    assert "recall@1, question to answer" in done.stdout and "most popular" in done.stdout
    assert (path / "run" / "report.html").is_file() and (path / "run" / "popularity" / "report.html").is_file()


@pytest.mark.slow
def test_own_modality(path) -> None:
    """Train, resume, evaluate, embed and show a modality that is not part of the package."""

    def run(*command) -> subprocess.CompletedProcess:
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)

    example = EXAMPLES / "own_modality.py"
    assert run(sys.executable, example, "waves").returncode == 0
    settings = [f"plugins={example}", "data.train=waves/train.jsonl", "data.val=waves/val.jsonl", "out=run"]
    settings += ["data.x.modality=waveform", "data.x.name=recording", "schedule.epochs=2", "optimizer.lr=0.003"]
    done = run("nuclr", "train", *settings)
    assert done.returncode == 0, done.stderr
    results = read_results(path / "run")
    assert results.sides == ("recording", "text")
    assert results.val["mean_R@1"] > 2 * results.val["mean_chance@1"]
    done = run("nuclr", "embed", "run", "--pairs", "waves/val.jsonl", "--out", "val.npz")
    assert done.returncode == 0, done.stderr
    done = run("nuclr", "evaluate", "run", "--retrieval", "waves/val.jsonl")
    assert done.returncode == 0 and "recall@1, recording to text" in done.stdout, done.stderr
    done = run("nuclr", "report", "run")
    assert done.returncode == 0 and 'class="numbers"' in (path / "run" / "report.html").read_text(), done.stderr
    (path / "texts.csv").write_text("question,answer\n" + "".join(f"question {n},answer {n}\n" for n in range(9)))
    done = run("nuclr", "evaluate", "run", "--retrieval", "texts.csv")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "texts.csv" in done.stderr and "waveform" in done.stderr
