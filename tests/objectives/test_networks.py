"""Networks in place of the tables of zeta and u: training without an index, prediction, gradients."""

import copy

import numpy as np
import pytest
import torch

from tests.objectives.comparison import (
    BATCH,
    DIM,
    SAMPLES,
    Stateful,
    assert_close,
    batches,
    call,
    features,
    masked_in_few_ways,
    materialize,
    scatter_networks,
    state_of,
)
from tests.objectives.extensions import INDIVIDUAL, NETWORKS
from tests.objectives.make import make

POPULARITY = {"temperature": 0.5, "popularity": "network"}
NORMALIZER = {"temperature": 0.5, "normalizer": "network"}
BOTH = POPULARITY | NORMALIZER


def test_no_negatives_at_all() -> None:
    """Such a batch changes nothing, and its gradients are 0."""
    pair = Stateful("nuclr", **BOTH)
    *earlier, last = batches(steps=3)
    for batch in earlier:
        pair.check(*batch)
    before = state_of(pair.objective)
    pair.check(*last, ([0] * BATCH, None))
    for key, table in state_of(pair.objective).items():
        np.testing.assert_array_equal(table, before[key], err_msg=key)


@masked_in_few_ways
@pytest.mark.parametrize(
    ("name", "options"),
    [("nuclr", BOTH), ("nuclr", BOTH | {"sides": "x"}), ("sogclr", NORMALIZER)],
    ids=str,
)
def test_without_tables_no_index_is_needed(name, options, mask) -> None:
    pair = Stateful(name, **options)
    for x, y, _ in batches():
        pair.check(x, y, None, mask)


@pytest.mark.parametrize("options", [POPULARITY, NORMALIZER, BOTH | INDIVIDUAL], ids=str)
def test_an_index_is_needed_if_a_table_remains(options) -> None:
    objective = make("nuclr", num_samples=SAMPLES, **options).double()
    x, y, _ = next(batches())
    with pytest.raises(ValueError, match=r"index is None.*eval\(\)"):
        objective(x, y)
    objective.eval()
    assert objective(x, y).loss.isfinite()


@pytest.mark.parametrize("zeta_init", [0.0, -0.1])
def test_predict_popularity(zeta_init) -> None:
    """q = exp(zeta/tau), zeta = zeta_init + tau h(y), for any number of samples."""
    objective = make("nuclr", num_samples=SAMPLES, **POPULARITY, zeta_init=zeta_init).double()
    scatter_networks(objective)
    new = features(torch.Generator().manual_seed(9))[:3]
    for side in "xy":
        popularity = objective.predict_popularity(new, side=side)
        assert popularity.shape == (3,) and not popularity.requires_grad
        with torch.no_grad():
            expected = torch.exp(zeta_init / 0.5 + objective.popularity_networks[side](new))
        assert_close(popularity, expected, side)
        assert expected.std() > 1e-3
    assert torch.equal(objective.predict_popularity(new), objective.predict_popularity(new, side="y"))


@pytest.mark.parametrize(("options", "side", "named"), [({}, "y", "popularity"), (POPULARITY, "z", "side.*'z'")])
def test_predict_popularity_needs_a_network_and_a_side(options, side, named) -> None:
    with pytest.raises(ValueError, match=named):
        make("nuclr", num_samples=SAMPLES, **options).predict_popularity(torch.eye(DIM), side=side)


def test_the_networks_are_parameters_and_see_detached_features() -> None:
    objective = materialize(make("nuclr", num_samples=SAMPLES, temperature=0.5, **NETWORKS).double())
    assert {name.split(".")[0] for name, _ in objective.named_parameters()} == {
        "popularity_networks",
        "normalizer_networks",
    }
    x, y, index = next(batches())
    call(objective, x, y, index)
    frozen = copy.deepcopy(objective).requires_grad_(False)
    _, grad_x, grad_y = call(objective, x, y, index)
    _, frozen_x, frozen_y = call(frozen, x, y, index)
    assert torch.equal(grad_x, frozen_x) and torch.equal(grad_y, frozen_y)


def test_gradients_of_the_networks_scale_with_the_loss_and_need_none_of_the_features() -> None:
    """(c loss).backward() scales all gradients by c, and gradients accumulate; with frozen encoders, networks learn."""
    one = make("nuclr", num_samples=SAMPLES, **BOTH, learn_temperature=True).double()
    scatter_networks(one)
    two = copy.deepcopy(one)
    x, y, index = next(batches())
    call(one, x, y, index)
    loss = two(x, y, index).loss
    (2 * loss).backward(retain_graph=True)
    loss.backward()
    for (name, parameter), other in zip(one.named_parameters(), two.parameters(), strict=True):
        assert_close(other.grad, 3 * parameter.grad, name)
