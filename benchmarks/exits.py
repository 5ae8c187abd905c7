"""Two-process runs from start to exit: does any process abort, hang or leave a traceback?

    python benchmarks/exits.py [--runs 300]

Each run trains NUCLR for a few steps on vectors with `torchrun --nproc_per_node 2 -m nuclr train` over gloo, with DDP,
checkpoints and an evaluation, and must end with status 0 and nothing unexpected on stderr. An abort at exit
("terminate called without an active exception") used to happen in about one run of ten if
`torch.distributed.nn.functional` was imported after the process group was created. Prints a table and writes JSON.
"""

import argparse
import json
import os
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


def main() -> None:
    """Run, count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    runs = parser.parse_args().runs
    outcomes: Counter[str] = Counter()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        write_pairs(Path(folder) / "pairs.npz")
        for number in range(runs):
            outcomes[run_once(Path(folder), number)] += 1
            print(f"{number + 1}/{runs}: {dict(outcomes)}", flush=True)
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    content = {"runs": runs, "outcomes": dict(outcomes), "seconds": round(time.perf_counter() - begin, 1)}
    (results / "exits.json").write_text(json.dumps(content, indent=1) + "\n")
    for outcome, count in outcomes.most_common():
        print(f"{outcome:40}{count:>6}")


if __name__ == "__main__":
    main()
