"""Hard negatives against float64 loops, what they reduce to, and what is refused."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import normalize

from tests import reference
from tests.objectives.comparison import (
    BATCH,
    DIM,
    SAMPLES,
    Stateful,
    assert_close,
    batches,
    call,
    masked_in_few_ways,
    materialize,
    state_of,
)
from tests.objectives.extensions import INDIVIDUAL, NUCLR
from tests.objectives.make import make

MARGIN = {"false_negative_margin": 0.02}
NETWORKS = {"temperature": 0.5, "popularity": "network", "normalizer": "network"}
STATEFUL = [
    ("sogclr", {"temperature": 0.1}, (None, None)),
    ("sogclr", {"temperature": 0.001}, (None, None)),
    ("sogclr", {"temperature": 1.0, "gamma": 1.0}, (2, 3)),
    ("sogclr", {"temperature": 0.1, "gamma_rule": "proximal", "sides": "x"}, (None, None)),
    ("sogclr", {"temperature": 0.1} | MARGIN, (None, None)),
    ("sogclr", {"temperature": 0.1, "learn_temperature": True}, (2, None)),
    ("isogclr", {"temperature": 0.05, "tau_max": 1.0}, (2, None)),
    ("nuclr", NUCLR | {"zeta_init": -0.05}, (None, None)),
    ("nuclr", NUCLR | {"zeta_momentum": 0.5, "zeta_estimator": "paper", "use_xi": False}, (None, 2)),
    ("nuclr", NUCLR | {"learn_temperature": True, "zeta_init": 0.1}, (None, None)),
    ("nuclr", NUCLR | INDIVIDUAL | MARGIN, (None, None)),
    ("nuclr", NUCLR | {"y_views": 3}, (2, 3)),
    ("nuclr", NETWORKS, (None, None)),
    ("nuclr", NETWORKS | {"learn_temperature": True, "zeta_init": 0.1}, (2, None)),
    ("nuclr-authors", NUCLR, (None, None)),
]
STATELESS = [
    ("clip", {"temperature": 0.1}),
    ("clip", {"temperature": 0.1, "learn_temperature": True}),
    ("clip", {"temperature": 0.1} | MARGIN),
    ("siglip", {}),
    ("siglip", MARGIN),
    ("dcl", {"temperature": 0.5}),
    ("dcl", {"temperature": 0.1} | MARGIN),
    ("cyclip", {"temperature": 0.1}),
]


def with_hard(k: int, views=(None, None)):
    """Yield the batches of `comparison.batches` with k hard negatives per pair, which are near to y."""
    generator = torch.Generator().manual_seed(3)
    for x, y, index in batches(views=views):
        near = y if y.ndim == 2 else y.mean(dim=1)
        noise = torch.randn(BATCH, k, DIM, dtype=torch.float64, generator=generator)
        yield x, y, index, normalize(near[:, None] + 0.5 * noise, dim=-1)


@masked_in_few_ways
@pytest.mark.parametrize(("name", "options", "views"), STATEFUL, ids=str)
def test_stateful_against_loops(name, options, views, mask) -> None:
    pair = Stateful(name, **options)
    for x, y, index, hard in with_hard(2, views):
        pair.check(x, y, index, mask, hard)
    copy = make(name, num_samples=SAMPLES, **options).double()
    materialize(copy)
    copy.load_state_dict(pair.objective.state_dict())
    x, y, index, hard = next(with_hard(2, views))
    for objective in (pair.objective, copy):
        objective.eval()
    assert_close(
        copy(x, y, index, negatives=hard).loss.item(), pair.objective(x, y, index, negatives=hard).loss.item(), ""
    )
    step = pair.expected(x, y, index, mask, training=False, hard=hard)
    assert_close(
        call(pair.objective, x, y, index, mask, negatives=hard)[0].loss.item(), step.value, "value in eval mode"
    )


# Pairs 3 and 4 have the same y. Hard negatives are the y of another pair, of their own, of two pairs, or of none.
Y_ID = [0, 1, 2, 3, 3, 5, 6]
NEGATIVE_ID = [[1, 9], [8, 0], [2, 7], [9, 9], [6, 5], [3, 8], [6, 6]]


@pytest.mark.parametrize("x_id", [None, [0, 0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize(("name", "options", "views"), STATEFUL, ids=str)
def test_a_hard_negative_with_the_id_of_the_positive_is_no_negative_of_this_anchor(name, options, views, x_id) -> None:
    pair = Stateful(name, **options)
    for x, y, index, hard in with_hard(2, views):
        pair.check(x, y, index, (x_id, Y_ID), hard, NEGATIVE_ID)


@pytest.mark.parametrize("hard_id", [None, NEGATIVE_ID], ids=["no ids of negatives", "ids of negatives"])
@masked_in_few_ways
@pytest.mark.parametrize(("name", "options"), STATELESS, ids=str)
def test_stateless_against_loops(name, options, mask, hard_id) -> None:
    more = {}
    if hard_id is not None:
        mask = (mask[0], Y_ID)
        more = {"negative_id": hard_id}
    objective = make(name, num_samples=SAMPLES, **options).double()
    counts = (1, 3) if hard_id is None else (2, 2)
    for (k, views), _ in itertools.product(zip(counts, ((None, None), (2, None)), strict=True), range(2)):
        x, y, index, hard = next(with_hard(k, views))
        leaves = [side.clone().requires_grad_() for side in (x, y, hard)]
        parameters = {key: p.detach().clone().requires_grad_() for key, p in objective.named_parameters()}
        arguments = {"x_id": mask[0], "y_id": mask[1], "hard": leaves[2]}
        if hard_id is not None:
            arguments["hard"] = leaves[2], Y_ID, hard_id
        arguments |= {key: value for key, value in options.items() if key not in ("learn_temperature", *parameters)}
        form = name
        if "log_scale" in parameters:
            form = {"clip": "clip_learnable"}.get(name, name)
            arguments = {key: value for key, value in arguments.items() if key != "temperature"} | parameters
        views_of_x = leaves[0].unbind(1) if views[0] else [leaves[0]]
        value = torch.stack([getattr(reference, form)(one, leaves[1], **arguments) for one in views_of_x]).mean()
        value.backward()
        negatives = hard.clone().requires_grad_()
        out, grad_x, grad_y = call(objective, x, y, index, mask, negatives=negatives, **more)
        assert_close(out.loss.item(), value.item(), "value")
        gradients = (grad_x, grad_y, negatives.grad, *(p.grad for p in objective.parameters()))
        for actual, leaf in zip(gradients, [*leaves, *parameters.values()], strict=True):
            assert_close(actual, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, "gradient")
        for parameter in objective.parameters():
            parameter.data -= 0.05 * parameter.grad


def test_clip_is_the_cross_entropy_over_positives_and_all_hard_negatives() -> None:
    x, y, index, hard = next(with_hard(2))
    out = make("clip", temperature=0.05)(x, y, index, negatives=hard)
    logits = x @ torch.cat([y, hard.flatten(0, 1)]).T / 0.05
    expected = torch.nn.functional.cross_entropy(logits, torch.arange(BATCH))
    assert_close(2 * float(out.metrics["objective_x"]), expected.item(), "MultipleNegativesRankingLoss")


@pytest.mark.parametrize("negative_id", [None, [[3, 0], [1, 2], [0, 0], [9, 0], [2, 9], [0, 1], [5, 6]]])
def test_the_normalizer_is_unbiased_for_all_hard_negatives_of_the_data_set(negative_id) -> None:
    """The mean of phi_i over all batches of three that contain pair i is the sum over n - 1 pairs and n k negatives.

    With ids, those that are y_i, here number 0, are not in the sum.
    """
    n, k, tau = 7, 2, 0.5
    generator = torch.Generator().manual_seed(0)
    x, y = (normalize(torch.randn(n, DIM, dtype=torch.float64, generator=generator), dim=1) for _ in range(2))
    hard = normalize(torch.randn(n, k, DIM, dtype=torch.float64, generator=generator), dim=2)
    estimates = []
    for others in itertools.combinations(range(1, n), 2):
        index = torch.tensor([0, *others])
        objective = make("sogclr", num_samples=n, temperature=tau, gamma=1.0).double()
        ids = {}
        if negative_id is not None:
            ids = {"y_id": index, "negative_id": torch.tensor(negative_id)[index]}
        objective(x[index], y[index], index, negatives=hard[index], **ids)
        estimates.append(objective.log_u_x[0].exp())
    counted = torch.tensor([[True] * k] * n if negative_id is None else negative_id).flatten() != 0
    candidates = torch.cat([y[1:], hard.flatten(0, 1)[counted]])
    expected = torch.exp((candidates @ x[0] - x[0] @ y[0]) / tau).sum()
    assert_close(torch.stack(estimates).mean(), expected, "phi")


@pytest.mark.parametrize("name", ["sogclr", "nuclr"])
def test_the_positive_as_hard_negative_doubles_phi_and_adds_one(name) -> None:
    one, two = (make(name, num_samples=SAMPLES, temperature=0.1, gamma=1.0).double() for _ in range(2))
    x, y, index = next(batches())
    one(x, y, index)
    two(x, y, index, negatives=y[:, None])
    assert_close(two.log_u_x[index].exp(), 2 * one.log_u_x[index].exp() + 1, "u of x")
    assert_close(two.log_u_y[index], one.log_u_y[index], "u of y, whose candidates are x")


@pytest.mark.parametrize("name", ["clip", "siglip", "dcl", "cyclip", "sogclr", "isogclr", "nuclr", "nuclr-authors"])
@pytest.mark.parametrize("temperature", [0.001, 0.01, 1.0])
def test_finite_in_float32(name, temperature) -> None:
    objective = make(name, num_samples=SAMPLES, temperature=temperature)
    for x, y, index, hard in with_hard(3):
        negatives = hard.float().requires_grad_()
        out, *gradients = call(objective, x.float(), y.float(), index, negatives=negatives)
        assert all(values.isfinite().all() for values in (out.loss, *gradients, negatives.grad))
    assert not any(math.isnan(table.sum()) for table in state_of(objective).values())


@pytest.mark.parametrize("name", ["clip", "nuclr"])
def test_normalize_applies_to_hard_negatives(name) -> None:
    x, y, index, hard = next(with_hard(2))
    raw, unit = make(name, num_samples=SAMPLES, normalize=True), make(name, num_samples=SAMPLES)
    one = raw(x, 2 * y, index, negatives=3 * hard).loss
    assert_close(one.item(), unit(x, y, index, negatives=hard).loss.item(), "value")


@pytest.mark.parametrize("name", ["clip", "nuclr"])
def test_refusals(name) -> None:
    objective = make(name, num_samples=SAMPLES)
    x, y, index, hard = next(with_hard(2))
    nan = hard.clone()
    nan[1, 1, 0] = math.nan
    for negatives, word in (
        (hard[:, :, 1:], "negatives.*5.*4"),
        (hard[1:], "negatives.*7.*6"),
        (hard[:, 0], r"negatives.*\(b, k, d\)"),
        (hard[:, :0], "negatives"),
        (hard.float(), "negatives.*float64.*float32"),
        (2 * hard, "negatives.*norm 2.*F.normalize"),
        (nan, "negatives.*row 1"),
    ):
        with pytest.raises(ValueError, match=word):
            objective(x, y, index, negatives=negatives)


@pytest.mark.parametrize(
    ("hard_id", "y_id", "word"),
    [
        (NEGATIVE_ID, None, "y_id"),
        ([own[:1] for own in NEGATIVE_ID], Y_ID, "negative_id.*7, 1"),
        (NEGATIVE_ID[1:], Y_ID, "negative_id.*6"),
        ([[0.5, 1.0]] * BATCH, Y_ID, "negative_id"),
    ],
)
def test_ids_of_negatives_that_do_not_fit_are_refused(hard_id, y_id, word) -> None:
    x, y, index, hard = next(with_hard(2))
    objective = make("nuclr", num_samples=SAMPLES)
    with pytest.raises((ValueError, TypeError), match=word):
        objective(x, y, index, y_id=y_id, negatives=hard, negative_id=hard_id)
    with pytest.raises(ValueError, match=r"negative_id.*negatives"):
        objective(x, y, index, y_id=Y_ID, negative_id=NEGATIVE_ID)


def test_a_side_without_x_as_anchors_has_no_use_for_them() -> None:
    x, y, index, hard = next(with_hard(2))
    with pytest.raises(ValueError, match=r"negatives.*sides"):
        make("nuclr", num_samples=SAMPLES, sides="y").double()(x, y, index, negatives=hard)
