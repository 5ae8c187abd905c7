"""K real processes of b pairs each give the weights, state, losses and refusals of one process of K b pairs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.objectives.worker import CASES, VARIANTS

WORKER = Path(__file__).with_name("worker.py")


def run_on(processes: int, folder: Path) -> list[dict]:
    """Return what each process wrote."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(WORKER), str(folder)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(processes)]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return run_on(1, tmp_path_factory.mktemp("one"))[0]


@pytest.fixture(scope="module", params=[2, 4])
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return run_on(request.param, tmp_path_factory.mktemp("several"))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES)
def test_same_as_one_process(case: str, variant: str, one: dict, several: list[dict]) -> None:
    for rank, result in enumerate(several):
        for name, value in result["trained"][case, variant].items():
            expected = one["trained"][case, variant][name]
            # float64 shows that they are equal; float32 rounds, and the velocity of zeta is a difference of numbers as
            # large as its largest entries
            size = max(1.0, float(expected.nan_to_num(neginf=0.0).abs().max()))
            torch.testing.assert_close(
                value,
                expected,
                rtol=0,
                atol=5e-6 * size if variant == "float32" else 1e-9,
                msg=lambda m, r=rank, n=name: f"process {r}, {n}: {m}",
            )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_state_is_identical_on_all_processes(case: str, several: list[dict]) -> None:
    first = several[0]["trained"][case, "float32"]
    for result in several[1:]:
        for name, value in result["trained"][case, "float32"].items():
            assert torch.equal(value, first[name]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "everyone", "the_last"),
    [
        ("unequal batches", "same number of pairs", "same number of pairs"),
        ("unequal widths", "width", "width"),
        ("not finite", "nan or inf in rows", "nan or inf in rows"),
        ("not unit norm", "x must have unit norm, but row", "x must have unit norm, but row"),
        ("wrong type", "refused its input", "TypeError: y must be a tensor or a numpy array"),
        ("repeated", "more than once", "more than once"),
        ("out of range", r"index must be in [0, 40), but holds 40", r"index must be in [0, 40), but holds 40"),
        ("bad gamma", "refused its input", "gamma must be in (0, 1], but is 2.0"),
    ],
)
def test_all_processes_refuse_together(case: str, everyone: str, the_last: str, several: list[dict]) -> None:
    for result in several[:-1]:
        assert everyone in result["messages"][case]
    assert the_last in several[-1]["messages"][case]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_ddp_does_not_broadcast_the_tables(where: str, several: list[dict]) -> None:
    assert [result["marks"][where] for result in several] == [-1.0] * (len(several) - 1) + [7.0]
