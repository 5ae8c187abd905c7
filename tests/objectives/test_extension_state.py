"""State of the extended objectives: round trips, eval(), exact float64 starts, sharding on one process."""

import copy
import math

import numpy as np
import pytest
import torch

from tests.objectives.comparison import (
    BATCH,
    MASKS,
    SAMPLES,
    Stateful,
    assert_same_step,
    batches,
    call,
    materialize,
    state_of,
)
from tests.objectives.extensions import INDIVIDUAL, NUCLR, cases
from tests.objectives.make import make


def train(objective, data) -> list:
    """Take a step of SGD per batch; return values and gradients."""
    results = []
    for batch in data:
        out, *gradients = call(objective, *batch)
        results.append((out.loss.detach(), *gradients))
        with torch.no_grad():
            for parameter in objective.parameters():
                parameter -= 0.1 * parameter.grad
    return results


def build_seeded(name: str, **options):
    """Build a float32 objective whose networks start the same each time."""
    torch.manual_seed(0)
    return materialize(make(name, num_samples=SAMPLES, **options), torch.float32)


def assert_bitwise_equal(one, two) -> None:
    """Compare parameters and buffers; nan, which a velocity may start from, equals nan."""
    assert one.state_dict().keys() == two.state_dict().keys()
    for key, value in one.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), two.state_dict()[key].numpy(), err_msg=key)


def data_of(views, dtype: torch.dtype, steps: int = 6) -> list:
    return [(x.to(dtype), y.to(dtype), index) for x, y, index in batches(steps=steps, views=views)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@cases()
def test_round_trip_continues_bit_for_bit(name, options, views, dtype, tmp_path) -> None:
    data = data_of(views, dtype)
    straight = make(name, num_samples=SAMPLES, **options).to(dtype)
    train(straight, data[:3])
    torch.save(straight.state_dict(), tmp_path / "state.pt")
    torch.manual_seed(1)  # other initial networks
    resumed = make(name, num_samples=SAMPLES, **options).to(dtype)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for expected, actual in zip(train(straight, data[3:]), train(resumed, data[3:]), strict=True):
        for one, two in zip(expected, actual, strict=True):
            assert torch.equal(one, two)
    assert_bitwise_equal(straight, resumed)


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("mask", [MASKS["no ids"], MASKS["a row without negatives"]], ids=["no ids", "masked"])
@cases()
def test_eval_leaves_state_untouched(name, options, views, with_index, mask) -> None:
    """Seen rows use the stored u or its prediction, unseen rows the batch's phi; without an index, all are unseen."""
    pair = Stateful(name, **options)
    for batch in batches(steps=2, views=views):
        pair.check(*batch)
    visited = {int(k) for _, _, index in batches(steps=2) for k in index}
    *_, (x, y, _) = batches(seed=1, views=views)
    others = [k for k in range(SAMPLES) if k not in visited]
    index = torch.tensor([*sorted(visited)[:4], *others[: BATCH - 4]])

    pair.objective.eval()
    before = copy.deepcopy(pair.objective.state_dict())
    step = pair.expected(x, y, index if with_index else None, mask, training=False)
    results = call(pair.objective, x, y, index if with_index else None, mask)
    assert_same_step(*results, step, pair.settings.sides)
    for key, table in pair.objective.state_dict().items():
        np.testing.assert_array_equal(table.numpy(), before[key].numpy(), err_msg=key)

    pair.objective.train()
    pair.check(x, y, index, mask)


# float64

STARTS = [
    ("isogclr", {"temperature": 0.03}, {"tau": 0.03, "tau_momentum": 0.0, "log_u": -math.inf}),
    ("nuclr", {"zeta_init": -0.05}, {"zeta": -0.05, "xi": 0.05, "log_u": -math.inf}),
    ("nuclr", {"xi_init": 0.1}, {"zeta": 0.0, "xi": 0.1}),
    ("nuclr", {"temperature": 0.07, **INDIVIDUAL}, {"tau": 0.07}),
]


@pytest.mark.parametrize(("name", "options", "starts"), STARTS, ids=str)
def test_float64_starts_with_exact_values(name, options, starts) -> None:
    """After .double(), and without it if the features are float64; rows that are not visited stay exact."""
    implicit, explicit = make(name, num_samples=SAMPLES, **options), make(name, num_samples=SAMPLES, **options)
    explicit.double()
    for key, start in starts.items():
        for side in "xy":
            table = explicit.get_buffer(f"{key}_{side}")
            assert table.dtype == torch.float64 and (table == start).all(), f"{key}_{side} was rounded to float32"
    x, y, index = next(batches())
    assert call(implicit, x, y, index)[0].loss.item() == call(explicit, x, y, index)[0].loss.item()
    assert_bitwise_equal(implicit, explicit)


def test_visited_rows_keep_their_values_if_the_dtype_changes() -> None:
    objective = make("nuclr", num_samples=SAMPLES, **NUCLR, **INDIVIDUAL)
    x, y, index = next(batches())
    objective(x.float(), y.float(), index)
    before = state_of(objective)
    objective.double()
    for key, table in state_of(objective).items():
        rows = index.numpy() if table.shape else ()
        np.testing.assert_array_equal(table[rows], before[key][rows], err_msg=key)


# Sharding on one process: nothing changes

TABLES = [
    "nuclr, stored views",
    "sogclr, views",
    "isogclr, views, proximal, side x",
    "nuclr-authors",
    "nuclr, popularity network",
]


@cases(TABLES)
def test_sharded_state_of_one_process_is_the_replicated_state(name, options, views) -> None:
    data = data_of(views, torch.float32)
    replicated, sharded = build_seeded(name, **options), build_seeded(name, **options, state_sharding=True)
    for expected, actual in zip(train(replicated, data), train(sharded, data), strict=True):
        for one, two in zip(expected, actual, strict=True):
            assert torch.equal(one, two)
    gathered = sharded.gather_state_dict()
    assert gathered.keys() == replicated.state_dict().keys()
    for key, value in replicated.state_dict().items():
        np.testing.assert_array_equal(gathered[key].numpy(), value.numpy(), err_msg=key)

    loaded = make(name, num_samples=SAMPLES, **options)
    loaded.load_state_dict(gathered)
    assert_bitwise_equal(loaded, replicated)
