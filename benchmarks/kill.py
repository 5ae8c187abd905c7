"""SIGKILL at random moments, on one process and on two: is the resumed run identical to one that was never stopped?

    python benchmarks/kill.py [--kills 10] [--seed 0] [--data vectors|texts] [--processes 1,2]

A small run of 280 steps (NUCLR, 40 epochs on vectors or on pairs of texts, one evaluation per epoch, a checkpoint
every five steps and after every epoch) is first trained without interruption, by the command that a user would type:
`nuclr train`, or `torchrun --nproc_per_node 2 -m nuclr train` over gloo. Then it is trained again: at each of `--kills`
random moments all its processes get SIGKILL, and `--resume` continues. A moment is a random step plus up to 30 ms, so
kills hit steps, log lines, evaluations and checkpoints that are being written. In the end weights, optimizer, objective
state, metrics.jsonl, results.json (except for timings) and the saved model must be bit-identical. Needs Linux (/proc).
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nuclr.runs import checkpoint

EPOCHS, STEPS = 40, 7
SETTINGS = {
    "name": "kill",
    "report": False,
    "threads": 1,
    "checkpoint_every": 5,
    "data": {"batch_size": 16},
    "model": {"width": 8},
    "objective": {"name": "nuclr", "zeta_lr": 0.01, "zeta_momentum": 0.1},
    "optimizer": {"lr": 0.03, "clip": 1.0},
    "schedule": {"epochs": EPOCHS, "warmup_steps": 5, "zeta_frozen_epochs": 1, "zeta_refresh": 9, "gamma": "cosine"},
    "log": {"every": 1},
}
LAUNCH = {1: [], 2: ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]}


def write_pairs(path: Path, images: int, seed: int) -> None:
    """Write vectors of width 12 and, per vector, two of width 8 that are a linear function of it plus noise."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(images, 12)).astype("float32")
    y_to_x = np.repeat(np.arange(images), 2)
    y = x[y_to_x] @ np.random.default_rng(9).normal(size=(12, 8)) + 0.5 * rng.normal(size=(2 * images, 8))
    np.savez(path, x=x, y=y.astype("float32"), y_to_x=y_to_x)


def write_texts(path: Path, questions: int, seed: int) -> None:
    """Write questions of four words with two answers each, which repeat two of the words."""
    chance = random.Random(seed)
    with path.open("w") as file:
        for _ in range(questions):
            words = [f"word{chance.randrange(50)}" for _ in range(4)]
            answers = [" ".join([*chance.sample(words, 2), f"other{chance.randrange(50)}"]) for _ in range(2)]
            file.write(json.dumps({"question": " ".join(words), "answer": answers}) + "\n")


# Per kind of data: the suffix of its files, how they are written, and settings of the run.
DATA: dict[str, tuple[str, Callable[[Path, int, int], None], list[str]]] = {
    "vectors": (".npz", write_pairs, []),
    "texts": (".jsonl", write_texts, ["model.x.encoder=bag_of_words", "model.shared=true"]),
}


def start(folder: Path, data: str, name: str, world: int) -> subprocess.Popen[str]:
    """Start the run, or resume it."""
    suffix, _, settings = DATA[data]
    settings = [*settings, f"data.train=train{suffix}", f"data.val=val{suffix}"]
    train = ["-m", "nuclr", "train", "kill.yaml", f"out={name}", *settings, "--resume"]
    return subprocess.Popen(
        [sys.executable, *LAUNCH[world], *train],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for the run to end without an error, and return its stderr."""
    _, stderr = process.communicate()
    if process.returncode != 0:
        sys.exit(f"the run ended with status {process.returncode}:\n{stderr}")
    return stderr


def last_step(run: Path) -> int:
    """Return the step of the last complete line of timing.jsonl, which is never truncated."""
    try:
        lines = (run / "timing.jsonl").read_bytes().split(b"\n")[:-1]
    except OSError:
        return 0
    return int(json.loads(lines[-1])["step"]) if lines else 0


def children(pid: int) -> list[int]:
    """Return the ids of the processes that this one has started."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def kill_at(process: subprocess.Popen[str], run: Path, step: int, pause: float, before: int) -> tuple[int, str]:
    """Send SIGKILL to all processes once this step is reached; return the step that was hit, and stderr."""
    lines = before
    while process.poll() is None:
        lines = _lines(run)
        if lines > before and last_step(run) >= step:
            break
        time.sleep(0.002)
    time.sleep(pause)
    for pid in [*children(process.pid), process.pid]:  # torchrun's workers have sessions of their own
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _, stderr = process.communicate()
    return last_step(run), stderr


def _lines(run: Path) -> int:
    path = run / "timing.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def differences(a: Any, b: Any, where: str) -> list[str]:
    """Return the names of the values that are not bit-identical, through nested dicts and lists."""
    if type(a) is not type(b):
        return [where]
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [where]
        return [name for key in a for name in differences(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [where]
        return [name for i, pair in enumerate(zip(a, b, strict=True)) for name in differences(*pair, f"{where}[{i}]")]
    same = a.dtype == b.dtype and torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    return [] if same else [where]


def compare(a: Path, b: Path) -> list[str]:
    """Return what differs between two finished runs."""
    states = [vars(checkpoint.load(checkpoint.newest_first(run / "checkpoints")[0])) for run in (a, b)]
    results = [json.loads((run / "results.json").read_text()) for run in (a, b)]
    for content in results:
        content.pop("timing")
    different = differences(*states, "checkpoint") + differences(*results, "results.json")
    files = ["metrics.jsonl", *sorted(str(path.relative_to(a)) for path in (a / "model").rglob("*") if path.is_file())]
    return different + [name for name in files if (a / name).read_bytes() != (b / name).read_bytes()]


def main() -> None:
    """Print one line per kill and the outcome; write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", choices=list(DATA), default="vectors")
    parser.add_argument("--processes", default="1,2", help="numbers of processes, each tested with so many kills")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kill.json")
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "kills": arguments.kills,
        "seed": arguments.seed,
        "data": arguments.data,
        "steps": EPOCHS * STEPS,
    }
    chance = random.Random(arguments.seed)
    worlds = [int(world) for world in arguments.processes.split(",")]
    suffix, write, _ = DATA[arguments.data]
    for world in worlds:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write(folder / f"train{suffix}", 60, 0)
            write(folder / f"val{suffix}", 20, 1)
            (folder / "kill.yaml").write_text(json.dumps(SETTINGS))  # JSON is YAML
            finish(start(folder, arguments.data, "whole", world))
            run, kills = folder / "run", []
            for step in sorted(chance.sample(range(1, EPOCHS * STEPS), arguments.kills)):
                process = start(folder, arguments.data, "run", world)
                killed, stderr = kill_at(process, run, step, pause := chance.random() * 0.03, _lines(run))
                resumed_at = stderr.partition("resuming from step ")[2].split(" ")[0]
                kills.append({"target": step, "pause": pause, "killed_in": killed, "resumed_at": int(resumed_at or 0)})
                print(
                    f"{world} process{'es' * (world > 1)}: from step {resumed_at or 0}, killed in {killed}", flush=True
                )
            finish(start(folder, arguments.data, "run", world))
            different = compare(folder / "whole", run)
        print(f"{world} process{'es' * (world > 1)}: {', '.join(different) or 'bit-identical'}", flush=True)
        report[f"{world} process"] = {"kills": kills, "differs": different}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(int(any(report[f"{world} process"]["differs"] for world in worlds)))


if __name__ == "__main__":
    main()
