"""Two-process runs from start to exit: does any process abort, hang or leave a traceback?

    python benchmarks/exits.py [--runs 300] [--lost 20]

Each run trains NUCLR for a few steps on vectors with `torchrun --nproc_per_node 2 -m nuclr train` over gloo, with DDP,
checkpoints and an evaluation, and must end with status 0 and nothing unexpected on stderr. An abort at exit
("terminate called without an active exception") used to happen in about one run of ten if
`torch.distributed.nn.functional` was imported after the process group was created.

Then, `--lost` times, one process of two is killed at a random moment after the first checkpoint, and the time until the
other one has ended is measured; it must end with status 1 and exactly one line. Prints tables and writes JSON.
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

SIGNS = ("terminate called", "Traceback", "Fatal Python error", "Aborted", "core dumped")
TIMEOUT = 300.0


def write_pairs(path: Path) -> None:
    """Write 64 pairs of vectors."""
    rng = np.random.default_rng(0)
    np.savez(path, x=rng.normal(size=(64, 8)).astype("f4"), y=rng.normal(size=(64, 6)).astype("f4"))


def run_once(folder: Path, number: int) -> str:
    """Return "clean", or what went wrong."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "nuclr"]
    settings = ["data.train=pairs.npz", "data.val=pairs.npz", "data.batch_size=16", "model.width=4", "report=false"]
    settings += ["schedule.epochs=1", "threads=1", f"out=run{number}"]
    try:
        done = subprocess.run(
            [*command, "train", *settings],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return "hang"
    for sign in SIGNS:
        if sign in done.stderr:
            return f"stderr: {sign}"
    return "clean" if done.returncode == 0 else f"status {done.returncode}"


def lose_one(folder: Path, number: int, rng: random.Random) -> tuple[str, float]:
    """Kill one process of two; return "clean" or what was wrong with the other one's end, and the seconds it took."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = ["data.train=pairs.npz", "data.val=pairs.npz", "data.batch_size=16", "model.width=4", "report=false"]
    settings += ["schedule.epochs=100000", "threads=1", f"out=lost{number}", "checkpoint_every=5"]
    common = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "nuclr", "train", *settings],
            cwd=folder,
            env=common | {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    while not list((folder / f"lost{number}" / "checkpoints").glob("step_*.pt")):
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.5))
    killed = rng.randrange(2)
    processes[killed].kill()
    begin = time.perf_counter()
    other = processes[1 - killed]
    try:
        _, stderr = other.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        other.kill()
        return "hang", TIMEOUT
    seconds = time.perf_counter() - begin
    processes[killed].communicate()
    reports = [line for line in stderr.splitlines() if line.startswith("nuclr: ")]
    if other.returncode != 1 or len(reports) != 1 or any(sign in stderr for sign in SIGNS):
        return f"status {other.returncode}, {len(reports)} lines", seconds
    return "clean", seconds


def main() -> None:
    """Run, count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--lost", type=int, default=20)
    options = parser.parse_args()
    runs, rng = options.runs, random.Random(0)
    outcomes: Counter[str] = Counter()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        write_pairs(Path(folder) / "pairs.npz")
        for number in range(runs):
            outcomes[run_once(Path(folder), number)] += 1
            print(f"{number + 1}/{runs}: {dict(outcomes)}", flush=True)
        ends = [lose_one(Path(folder), number, rng) for number in range(options.lost)]
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    content = {"runs": runs, "outcomes": dict(outcomes), "seconds": round(time.perf_counter() - begin, 1), "lost": ends}
    (results / "exits.json").write_text(json.dumps(content, indent=1) + "\n")
    for outcome, count in outcomes.most_common():
        print(f"{outcome:40}{count:>6}")
    if ends:
        clean, longest = sum(outcome == "clean" for outcome, _ in ends), max(seconds for _, seconds in ends)
        print(f"one of two killed: {clean} of {len(ends)} others ended with one line, the last after {longest:.1f} s")


if __name__ == "__main__":
    main()
