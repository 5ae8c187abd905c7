"""Count what a newcomer has to read: the functions that one NUCLR step visits, and the modules that a command loads.

Usage: python benchmarks/trace.py [--list]

The step is one forward and backward pass of build("nuclr") in training mode, on one process, after a first step. A
comprehension or a lambda counts as a function of its own. The command is `nuclr hubness` on two small .npy files. With
another version of the package on PYTHONPATH, the script traces that version.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType

import numpy as np
import torch
from torch.nn.functional import normalize

import nuclr
from nuclr.objectives import build

ROOT = Path(nuclr.__file__).parent
ROWS = 64
LOADED = """
import sys
from nuclr.cli.app import main
sys.argv = ["nuclr", "hubness", "q.npy", "g.npy", "--out", "page"]
try:
    main()
except SystemExit:
    pass
for name in sorted(name for name in sys.modules if name.split(".")[0] == "nuclr"):
    print(name, file=sys.__stdout__)
"""


def visited_functions() -> list[str]:
    """Return "module:function" of everything in nuclr that one step calls."""
    torch.manual_seed(0)
    objective = build("nuclr", num_samples=10 * ROWS)
    x, y = (normalize(torch.randn(ROWS, 16), dim=1).requires_grad_() for _ in range(2))
    index = torch.arange(ROWS)
    objective(x, y, index).loss.backward()
    seen: set[CodeType] = set()

    def record(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            seen.add(frame.f_code)

    sys.setprofile(record)
    try:
        objective(x, y, index).loss.backward()
    finally:
        sys.setprofile(None)
    return sorted(f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_qualname}" for code in seen)


def loaded_modules() -> list[str]:
    """Return the modules of nuclr that `nuclr hubness q.npy g.npy` loads."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("q", "g"):
            rows = rng.standard_normal((200, 8)).astype(np.float32)
            np.save(Path(folder) / f"{name}.npy", rows / np.linalg.norm(rows, axis=1, keepdims=True))
        command = [sys.executable, "-c", LOADED]
        finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return [line for line in finished.stdout.splitlines() if line.split(".")[0] == "nuclr" and " " not in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="also print the names")
    listed = parser.parse_args().list
    functions = visited_functions()
    files = sorted({name.partition(":")[0] for name in functions})
    modules = loaded_modules()
    print(f"one NUCLR step: {len(functions)} functions in {len(files)} modules")
    print(f"nuclr hubness q.npy g.npy: {len(modules)} modules")
    if listed:
        print("\n".join([*functions, "", *modules]))


if __name__ == "__main__":
    main()
