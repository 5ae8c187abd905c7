"""What the tests of all trainers need: start processes, compare weights and state, read the examples."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
# Of child processes: the source tree that is tested, and nothing is downloaded.
PATHS = [str(ROOT), *(str(Path(path).absolute()) for path in sys.path)]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(PATHS)}


def launch(*arguments: object, processes: int = 1, cwd: Path = ROOT, status: int = 0) -> str:
    """Run Python, or torchrun, with these arguments; check the exit status, and return what it printed."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *(torchrun if processes > 1 else []), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT, timeout=400)
    assert done.returncode == status, done.stderr[-4000:]
    return done.stdout


def result_of(model: torch.nn.Module, objective: torch.nn.Module) -> dict[str, Tensor]:
    """Return copies of the weights, and on process 0 of the whole state."""
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    state = {f"objective.{name}": tensor for name, tensor in objective.gather_state_dict().items()}
    return {name: tensor.detach().clone() for name, tensor in (weights | state).items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 0.0, state: float = 10.0) -> None:
    """Compare weights and state, which is of the size of scores / temperature and may differ `state` times as much."""
    assert one.keys() == other.keys() and one
    for name, value in one.items():
        allowed = tolerance if name.startswith("model.") else state * tolerance
        # Infinite entries of the state are those of pairs that were not visited.
        torch.testing.assert_close(
            other[name], value, rtol=0, atol=allowed, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def marked_lines(example: str, *marks: str) -> int:
    """Return the number of lines of an example that differ from a script without nuclr."""
    return sum(any(mark in line for mark in marks) for line in (EXAMPLES / example).read_text().splitlines())
