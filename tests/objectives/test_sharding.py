"""A checkpoint of state that was sharded over four processes continues on any number of processes, sharded or not."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import normalize

from tests import forks
from tests.objectives.make import make

PAIRS, BATCH, WIDTH = 41, 12, 6
NUCLR = {"temperature": 0.1, "zeta_lr": 0.02, "zeta_momentum": 0.5}
OPTIONS = NUCLR | {"num_samples": PAIRS, "individual_temperature": True, "tau_max": 0.2}


def batch(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, y and index of one global batch, in float64."""
    generator = torch.Generator().manual_seed(number)
    x, y = (normalize(torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator), dim=1) for _ in range(2))
    return x, y, torch.randperm(PAIRS, generator=generator)[:BATCH]


def train(objective: torch.nn.Module, first: int, last: int, rows: slice) -> Tensor:
    """Train on these rows of the batches first to last - 1; return the losses."""
    losses = [objective(*(part[rows] for part in batch(number))).loss for number in range(first, last)]
    return torch.stack(losses).detach()


def main(checkpoint: str, first: str, last: str, out: str) -> None:
    """Load the checkpoint, unless it is "-", train on batches first to last - 1, and write the whole state to `out`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    objective = make("nuclr", **OPTIONS, state_sharding=True).double()
    if checkpoint != "-":
        objective.load_state_dict(torch.load(checkpoint, weights_only=True))
    share = BATCH // dist.get_world_size()
    losses = train(objective, int(first), int(last), slice(dist.get_rank() * share, (dist.get_rank() + 1) * share))
    state = objective.gather_state_dict()
    if dist.get_rank() == 0:
        torch.save(state | {"losses": losses}, out)
    else:
        assert state == {}
    dist.destroy_process_group()


EVERYTHING = slice(0, BATCH)
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sharded state")]


def run_on(processes: int, checkpoint: Path | str, first: int, last: int, out: Path) -> dict:
    """Train on this number of processes; return the whole state and the losses."""
    forks.call(main, [checkpoint, first, last, out], processes)
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def straight() -> dict:
    """The state after six batches on one process without sharding."""
    objective = make("nuclr", **OPTIONS).double()
    losses = train(objective, 0, 6, EVERYTHING)
    return objective.state_dict() | {"losses": losses}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole state after three batches on four processes."""
    folder = tmp_path_factory.mktemp("four")
    state = run_on(4, "-", 0, 3, folder / "all.pt")
    del state["losses"]
    torch.save(state, folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


def assert_same(state: dict, expected: dict) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            state[name], value, rtol=0, atol=1e-9, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("processes", [4, 2, 1])
def test_sharded(processes: int, checkpoint: Path, straight: dict, tmp_path: Path) -> None:
    state = run_on(processes, checkpoint, 3, 6, tmp_path / "resumed.pt")
    assert_same(state, straight | {"losses": straight["losses"][3:]})


@pytest.mark.parametrize("state_sharding", [False, True])
def test_without_torch_distributed(state_sharding: bool, checkpoint: Path, straight: dict) -> None:
    objective = make("nuclr", **OPTIONS, state_sharding=state_sharding).double()
    objective.load_state_dict(torch.load(checkpoint, weights_only=True))
    losses = train(objective, 3, 6, EVERYTHING)
    assert_same(objective.gather_state_dict() | {"losses": losses}, straight | {"losses": straight["losses"][3:]})


def test_a_checkpoint_of_one_process_continues_on_two(straight: dict, tmp_path: Path) -> None:
    objective = make("nuclr", **OPTIONS).double()
    train(objective, 0, 3, EVERYTHING)
    torch.save(objective.state_dict(), tmp_path / "checkpoint.pt")
    state = run_on(2, tmp_path / "checkpoint.pt", 3, 6, tmp_path / "resumed.pt")
    assert_same(state, straight | {"losses": straight["losses"][3:]})
