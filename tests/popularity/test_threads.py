"""Parts of a computation in threads: the same numbers whatever the number of threads, which a program gets back."""

import threading
from collections.abc import Iterator

import pytest
import torch

from nuclr.popularity import kernel as kernel_module
from nuclr.popularity import solve, threads
from nuclr.popularity.kernel import Kernel
from nuclr.popularity.problem import Problem, make_problem
from tests.popularity.reference import paired

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("memory", [0, 2**29])
def test_a_solution_does_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    monkeypatch.setattr(threads, "PART", 1000)
    monkeypatch.setattr(kernel_module, "CPU_BLOCK", (16, 64))
    monkeypatch.setattr(kernel_module, "LEAST_HEIGHT", 16)
    x, y = paired(150, 210)
    two = solve(x, y, temperature=0.05, tolerance=1e-3, memory=memory)
    torch.set_num_threads(1)
    one = solve(x, y, temperature=0.05, tolerance=1e-3, memory=memory)
    assert one.history == two.history
    assert torch.equal(one.zeta, two.zeta)
    assert torch.equal(one.extend(y[:64]), two.extend(y[:64]))


@pytest.mark.usefixtures("two_threads")
def test_parts_run_in_threads_of_their_own_and_are_used_in_order() -> None:
    seen = []
    used: list[int] = []

    def square(number: int) -> int:
        seen.append(torch.get_num_threads())
        return number**2

    threads.in_order(square, range(20), CPU, used.append)
    assert used == [number**2 for number in range(20)]
    assert seen == [1] * 20
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_after_an_error_torch_has_its_threads_again(error: type[BaseException]) -> None:
    def fail(number: int) -> int:
        if number == 3:
            raise error
        return number

    with threads.one_per_operation(), pytest.raises(error):
        threads.in_order(fail, range(10), CPU, id)
    assert torch.get_num_threads() == 2
    assert threads.count(CPU) == 2
    torch.set_num_threads(1)
    assert threads.count(CPU) == 1


@pytest.mark.usefixtures("two_threads")
def test_after_calls_from_two_threads_torch_has_its_threads_again() -> None:
    entered = threading.Event()
    left = threading.Event()
    seen = []

    def enter() -> None:
        with threads.one_per_operation():
            entered.set()
            left.wait(60)

    with threads.one_per_operation():
        other = threading.Thread(target=enter)
        other.start()
        entered.wait(60)
    left.set()
    other.join()
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert seen == [torch.get_num_threads()] == [2]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PART", 1000)
    monkeypatch.setattr(kernel_module, "CPU_BLOCK", (16, 64))


@pytest.mark.usefixtures("two_threads", "small_tiles")
def test_threads_compute_in_the_inference_mode_of_their_caller() -> None:
    x, y = paired(150, 210)
    expected = solve(x, y, temperature=0.05, tolerance=1e-3)
    with torch.inference_mode():
        result = solve(x, y, temperature=0.05, tolerance=1e-3)
    assert torch.equal(result.zeta, expected.zeta)


@pytest.mark.usefixtures("two_threads", "small_tiles")
def test_an_error_in_each_tile_ends_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Problem, "logits", fail)
    with pytest.raises(MemoryError):
        solve(*paired(150, 210), temperature=0.05)


def test_few_rows_with_many_columns_are_shared_by_the_threads() -> None:
    parts, _ = kernel_module.tiling(make_problem(*paired(100, 2**17), temperature=0.05))
    assert len(parts) > 4
    one, _ = kernel_module.tiling(make_problem(*paired(100, 500), temperature=0.05))
    assert len(one) == 1


def test_the_tiles_of_all_threads_fit_into_the_memory() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(16)
    memory = 2**17
    kernel = Kernel(make_problem(*paired(300, 500), temperature=0.05), memory)
    torch.set_num_threads(before)
    tiles = [kernel.spaces.get()[1] for _ in range(kernel.spaces.qsize())]
    assert len(tiles) > 1
    assert sum(tile.nbytes for tile in tiles) <= memory
