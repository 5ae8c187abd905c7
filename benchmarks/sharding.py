"""Measure the memory per process and the time per step of NUCLR with replicated and with sharded state.

    python benchmarks/sharding.py [--pairs 100000000] [--out benchmarks/results/sharding.json]

Each case starts K processes (gloo, on this machine) that build the objective and take 30 steps with a global batch of
512 pairs of width 256. "state" is the size of the tables of one process, "memory" is the peak of its resident memory
above that of a process with a data set of 1,000 pairs, which has the same libraries and buffers. "best step" is the
shortest time of a step, and "processor" the processor time of a process per step; both are of the slowest process.
"""

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import normalize

from nuclr.objectives import build

BATCH, WIDTH, STEPS = 512, 256, 30
MIB = 2**20


def worker(pairs: int, sharded: bool) -> None:
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    objective = build("nuclr", num_samples=pairs, state={"sharding": sharded})
    x, y = (normalize(torch.randn(BATCH // world, WIDTH), dim=1).requires_grad_() for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    times = []
    cpu = 0.0
    for _ in range(STEPS):
        index = torch.randint(pairs // BATCH, (BATCH,), generator=generator) + torch.arange(BATCH) * (pairs // BATCH)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        objective(x, y, index[rank * len(x) : (rank + 1) * len(x)]).loss.backward()
        times.append(time.perf_counter() - begin)
        cpu += time.process_time() - begin_cpu
    state = sum(table.numel() * table.element_size() for table in objective.buffers())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"rank": rank, "state": state, "peak": peak, "step": min(times), "cpu": cpu / STEPS}), flush=True)
    if world > 1:
        dist.destroy_process_group()


def measure(processes: int, pairs: int, sharded: bool) -> dict[str, float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--worker", "--pairs", str(pairs), *(["--sharded"] if sharded else [])]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    children = [
        subprocess.Popen(command, env=os.environ | address | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(processes)
    ]
    reports = [json.loads(child.communicate()[0].splitlines()[-1]) for child in children]
    return {key: max(report[key] for report in reports) for key in ("state", "peak", "step", "cpu")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100_000_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "sharding.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sharded", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.pairs, options.sharded)
        return
    results = []
    print(f"n = {options.pairs:,}\nprocesses  state        state per process  memory per process  best step  processor")
    for processes, sharded in ((1, False), (2, False), (2, True), (4, False), (4, True)):
        small = measure(processes, 1000, sharded)
        full = measure(processes, options.pairs, sharded)
        memory = full["peak"] - small["peak"]
        kind = "sharded" if sharded else "replicated"
        print(
            f"{processes:9}  {kind:11}  {full['state'] / MIB:13,.0f} MiB  {memory / MIB:14,.0f} MiB  "
            f"{1e3 * full['step']:7.1f} ms {1e3 * full['cpu']:7.1f} ms",
            flush=True,
        )
        results.append({"processes": processes, "sharded": sharded, "memory": memory, **full})
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps({"pairs": options.pairs, "results": results}, indent=1))


if __name__ == "__main__":
    main()
