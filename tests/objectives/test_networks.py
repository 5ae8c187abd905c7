"""Networks in place of the tables of zeta and u: against loops, training without an index, prediction."""

import copy

import numpy as np
import pytest
import torch

from tests.objectives.comparison import (
    BATCH,
    DIM,
    MASKS,
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


def check_batches(name: str, mask, views=(None, None), with_index: bool = True, **options) -> Stateful:
    """Compare five batches with the loops, which limit the gradient of the normalizer network as well."""
    pair = Stateful(name, **options)
    for x, y, index in batches(views=views):
        pair.check(x, y, index if with_index else None, mask)
    return pair


# ---------------------------------------------------------------------------------------------------------------------
# Against loops: gradients of the parameters are autograd's through sum_j (n G_j / B) zeta_j(theta), G from the loops
# ---------------------------------------------------------------------------------------------------------------------


@masked_in_few_ways
@pytest.mark.parametrize("use_xi", [True, False])
def test_popularity_against_loops(use_xi, mask) -> None:
    pair = check_batches("nuclr", mask, **POPULARITY, use_xi=use_xi)
    assert not {"zeta_x", "zeta_y", "zeta_velocity_x", "zeta_velocity_y"} & set(state_of(pair.objective))
    assert pair.state["xi_y"] > 0.01, "this test needs a zeta that is not 0"


@masked_in_few_ways
@pytest.mark.parametrize("name", ["sogclr", "nuclr"])
@pytest.mark.parametrize("gamma", [0.8, 0.0, 1.0])
def test_normalizer_against_loops(name, gamma, mask) -> None:
    """gamma = 0 uses the prediction alone, gamma = 1 the batch alone."""
    pair = check_batches(name, mask, **NORMALIZER, gamma=gamma)
    assert not {"log_u_x", "log_u_y"} & set(state_of(pair.objective))


@pytest.mark.parametrize("mask", [MASKS["no ids"], MASKS["a row without negatives"]], ids=["no ids", "masked"])
@pytest.mark.parametrize(
    ("options", "views"),
    [
        (BOTH, (None, None)),
        (BOTH | {"gamma": 0.0}, (None, None)),
        (BOTH, (2, 3)),
        (POPULARITY, (None, 3)),
        (NORMALIZER | {"zeta_lr": 0.02}, (2, None)),
        (BOTH | {"zeta_init": -0.1}, (None, None)),
        (BOTH | {"zeta_estimator": "paper"}, (None, None)),  # a network's gradient is always the unbiased one
        (BOTH | {"gamma_rule": "proximal"}, (None, None)),
        (BOTH | {"learn_temperature": True}, (None, None)),
        (BOTH | {"sides": "x"}, (None, None)),
        (BOTH | {"sides": "y"}, (2, None)),
        (BOTH | INDIVIDUAL, (None, None)),
        (BOTH | {"zeta_lr": 0.0}, (None, None)),
        (NORMALIZER | {"zeta_lr": 0.02, "zeta_momentum": 0.5}, (None, None)),
    ],
    ids=str,
)
def test_combinations_against_loops(options, views, mask) -> None:
    check_batches("nuclr", mask, views, **options)


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


# ---------------------------------------------------------------------------------------------------------------------
# The index
# ---------------------------------------------------------------------------------------------------------------------


@masked_in_few_ways
@pytest.mark.parametrize(
    ("name", "options"),
    [("nuclr", BOTH), ("nuclr", BOTH | {"sides": "x"}), ("sogclr", NORMALIZER)],
    ids=str,
)
def test_without_tables_no_index_is_needed(name, options, mask) -> None:
    check_batches(name, mask, with_index=False, **options)


@pytest.mark.parametrize("options", [POPULARITY, NORMALIZER, BOTH | INDIVIDUAL], ids=str)
def test_an_index_is_needed_if_a_table_remains(options) -> None:
    objective = make("nuclr", num_samples=SAMPLES, **options).double()
    x, y, _ = next(batches())
    with pytest.raises(ValueError, match=r"index is None.*eval\(\)"):
        objective(x, y)
    objective.eval()
    assert objective(x, y).loss.isfinite()


# ---------------------------------------------------------------------------------------------------------------------
# Prediction, and what the networks are
# ---------------------------------------------------------------------------------------------------------------------


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


def test_predict_popularity_is_what_training_uses() -> None:
    """The value of a side in eval mode, without an index, is that of a table with the predicted zeta."""
    network = make("nuclr", num_samples=BATCH, **POPULARITY).double()
    scatter_networks(network)
    table = make("nuclr", num_samples=BATCH, temperature=0.5).double()
    x, y, _ = next(batches())
    for side, samples in (("x", x), ("y", y)):
        table.get_buffer(f"zeta_{side}").copy_(0.5 * network.predict_popularity(samples, side=side).log())
    index = torch.arange(BATCH)
    one, two = (call(objective.eval(), x, y, index) for objective in (network, table))
    assert_close(one[0].loss.item(), two[0].loss.item(), "value")


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


def test_gradients_of_the_networks_scale_with_the_loss() -> None:
    """(c loss).backward() scales all gradients by c, and gradients accumulate."""
    one = make("nuclr", num_samples=SAMPLES, **BOTH, learn_temperature=True).double()
    scatter_networks(one)
    two = copy.deepcopy(one)
    x, y, index = next(batches())
    one(x.requires_grad_(), y, index).loss.backward()
    loss = two(x, y, index).loss
    (2 * loss).backward(retain_graph=True)
    loss.backward()
    for (name, parameter), other in zip(one.named_parameters(), two.parameters(), strict=True):
        assert_close(other.grad, 3 * parameter.grad, name)


def test_features_without_gradient_still_train_the_networks() -> None:
    """With frozen encoders only the networks learn."""
    one = make("nuclr", num_samples=SAMPLES, **BOTH).double()
    scatter_networks(one)
    two = copy.deepcopy(one)
    x, y, index = next(batches())
    call(one, x, y, index)
    two(x, y, index).loss.backward()
    for (name, parameter), other in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert_close(other[1].grad, parameter.grad, name)
