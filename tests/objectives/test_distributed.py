"""K real processes of b pairs each give the weights, state, losses and refusals of one process of K b pairs."""

import functools
from collections.abc import Callable

import pytest
import torch

from tests import forks
from tests.objectives.worker import ALL_CASES, PAIRS, RUNS, RUNS_ON_FOUR, SHARDED, main

pytestmark = pytest.mark.xdist_group("objectives on several processes")


@pytest.fixture(scope="module")
def run_on(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict]]:
    """A function that runs the cases on this number of processes, once, and returns what each process wrote."""

    @functools.cache
    def run(processes: int) -> list[dict]:
        folder = tmp_path_factory.mktemp("processes")
        forks.call(main, [folder], processes)
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(processes)]

    return run


@pytest.fixture
def one(run_on: Callable[[int], list[dict]]) -> dict:
    return run_on(1)[0]


@pytest.fixture(params=[2, 4])
def several(request: pytest.FixtureRequest, run_on: Callable[[int], list[dict]]) -> list[dict]:
    return run_on(request.param)


def assert_bitwise_equal(one: torch.Tensor, two: torch.Tensor, what: str) -> None:
    assert one.dtype == two.dtype and one.shape == two.shape, what
    assert torch.equal(one.isnan(), two.isnan()) and torch.equal(one.nan_to_num(), two.nan_to_num()), what


RUNS_BY_PROCESSES = [(2, *run) for run in RUNS] + [(4, *run) for run in RUNS_ON_FOUR]


@pytest.mark.slow
@pytest.mark.parametrize(("several", "case", "variant"), RUNS_BY_PROCESSES, indirect=["several"])
def test_same_as_one_process(case: str, variant: str, one: dict, several: list[dict]) -> None:
    for rank, result in enumerate(several):
        for name, value in result["trained"][case, variant].items():
            expected = one["trained"][case, variant][name]
            # float64 shows that they are equal; float32 rounds, and the velocity of zeta and the momentum of tau are
            # differences of numbers as large as their largest entries
            size = max(1.0, float(expected.double().nan_to_num(neginf=0.0).abs().max()))
            torch.testing.assert_close(
                value,
                expected,
                rtol=0,
                equal_nan=True,  # a velocity that starts with the first gradient is nan before
                atol=2e-5 * size if variant == "float32" else 1e-9,
                msg=lambda m, r=rank, n=name: f"process {r}, {n}: {m}",
            )


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL_CASES)
def test_state_is_identical_on_all_processes(case: str, several: list[dict]) -> None:
    first = several[0]["trained"][case, "float32"]
    for result in several[1:]:
        for name, value in result["trained"][case, "float32"].items():
            assert_bitwise_equal(value, first[name], name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("several", "case", "variant"), [run for run in RUNS_BY_PROCESSES if run[1] in SHARDED], indirect=["several"]
)
def test_sharded_state_is_the_replicated_state_bit_for_bit(case: str, variant: str, several: list[dict]) -> None:
    for rank, result in enumerate(several):
        sharded = result["trained"][case, variant]
        replicated = result["trained"][SHARDED[case], variant]
        if rank == 0:
            assert sharded.keys() == replicated.keys()
        for name, value in sharded.items():
            assert_bitwise_equal(value, replicated[name], f"process {rank}, {name}")


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [PAIRS, 5])
def test_a_process_holds_its_share_of_the_rows(pairs: int, several: list[dict]) -> None:
    share = -(-pairs // len(several))
    for rank, result in enumerate(several):
        assert all(rows <= share for rows in result["rows"][pairs]["local"])
        assert result["rows"][pairs]["gathered"] == ([pairs, pairs] if rank == 0 else [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "everyone", "the_last"),
    [
        ("unequal batches", "number of pairs", "number of pairs"),
        ("unequal widths", "width", "width"),
        ("not finite", "nan or inf", "nan or inf"),
        ("not unit norm", "unit norm", "unit norm"),
        ("wrong type", "refused its input", "WrongTypeError: y "),
        ("repeated", "index", "index"),
        ("out of range", "holds 41", "holds 41"),
        ("bad gamma", "refused its input", "gamma"),
        ("gradient on one", "requires_grad", "requires_grad"),
        ("other temperature", "0.05", "0.07"),
        ("other number", "41", "42"),
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
