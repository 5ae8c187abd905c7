"""Tables per item and log_q: against float64 loops, what they reduce to, and what is refused."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from nuclr.integrations import load_state, save_state
from nuclr.objectives import build
from tests import reference
from tests.objectives.comparison import (
    BATCH,
    DIM,
    SAMPLES,
    assert_close,
    assert_same_step,
    batches,
    call,
    state_of,
)
from tests.objectives.extensions import INDIVIDUAL, NUCLR
from tests.objectives.make import formula, make

NUM = {"x": 6, "y": 5}
ITEMS = {"num_x": NUM["x"], "num_y": NUM["y"]}
CASES = [
    ("sogclr", {"temperature": 0.1}, (None, None)),
    ("sogclr", {"temperature": 0.1, "gamma_rule": "proximal"}, (2, 3)),
    ("sogclr", {"temperature": 0.1, "sides": "y"}, (None, None)),
    ("sogclr", {"temperature": 0.1, "false_negative_margin": 0.02}, (None, None)),
    ("isogclr", {"temperature": 0.05, "tau_max": 1.0}, (None, None)),
    ("nuclr", NUCLR | {"zeta_momentum": 0.5}, (None, None)),
    ("nuclr", NUCLR | {"zeta_estimator": "paper", "use_xi": False, "sides": "x"}, (None, None)),
    ("nuclr", NUCLR | {"y_views": 3}, (None, 3)),
    ("nuclr", NUCLR | INDIVIDUAL, (2, None)),
]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def own_rows(options, items: dict, ids: dict, x, y, tau: dict) -> dict:
    """Return state with one row per pair of the batch, which pairs of the same item read from the item's row."""
    positive = reference.positive_scores(reference.scores(reference.with_views(x), reference.with_views(y)))
    state = {}
    for name, table in items.items():
        kind, _, side = name.rpartition("_")
        if kind == "xi":
            state[name] = table
            continue
        state[name] = np.array([table[item] for item in ids[side]])
        if kind == "log_u":
            state[name] = np.array([u - s / t for u, s, t in zip(state[name], positive, tau[side], strict=True)])
    return state


def merge(items: dict, after: dict, ids: dict, positive: list[float], tau: dict) -> dict:
    """Return the tables of the items: each is the mean over the pairs of the batch that have it."""
    merged = {name: table.copy() for name, table in items.items()}
    for name, table in after.items():
        kind, _, side = name.rpartition("_")
        if kind == "xi":
            merged[name] = table
            continue
        for item in set(ids[side]):
            rows = [i for i in range(len(ids[side])) if ids[side][i] == item]
            if kind == "log_u":
                whole = [math.exp(table[i] + positive[i] / tau[side][i]) for i in rows if table[i] > -math.inf]
                merged[name][item] = math.log(mean(whole)) if whole else -math.inf
            else:
                merged[name][item] = np.mean([table[i] for i in rows], axis=0)
    return merged


@pytest.mark.parametrize(("name", "options", "views"), CASES, ids=str)
def test_against_loops(name, options, views) -> None:
    objective = make(name, num_samples=SAMPLES, **options, **ITEMS).double()
    settings = formula(name, num_samples=SAMPLES, **options)
    items = {}
    for table, values in reference.initial_state(settings).items():
        rows = NUM[table[-1]]
        items[table] = values if values.ndim == 0 else values[:rows]
    generator = torch.Generator().manual_seed(5)
    for x, y, _ in batches(views=views):
        ids = {side: torch.randint(count, (BATCH,), generator=generator).tolist() for side, count in NUM.items()}
        tau = {side: np.full(BATCH, settings.temperature) for side in "xy"}
        for side in "xy":
            if settings.individual_temperature:
                tau[side] = np.array([items[f"tau_{side}"][item] for item in ids[side]])
        state = own_rows(settings, items, ids, x.numpy(), y.numpy(), tau)
        step = reference.step(settings, x.numpy(), y.numpy(), range(BATCH), state, x_id=ids["x"], y_id=ids["y"])
        assert_same_step(*call(objective, x, y, None, (ids["x"], ids["y"])), step, settings.sides)
        positive = reference.positive_scores(reference.scores(*map(reference.with_views, (x.numpy(), y.numpy()))))
        items = merge(items, step.state, ids, positive, tau)
        for table, values in state_of(objective).items():
            assert_close(values, items[table], table)
    copy = make(name, num_samples=SAMPLES, **options, **ITEMS)
    copy.load_state_dict(objective.state_dict())
    for table, values in state_of(copy).items():
        np.testing.assert_array_equal(values, state_of(objective)[table], err_msg=table)


@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sogclr", {"temperature": 0.1}),
        ("sogclr", {"temperature": 0.1, "sides": "y", "false_negative_margin": 0.02}),
        ("isogclr", {"temperature": 0.05, "tau_lr": 0.0}),
        ("nuclr", NUCLR | {"zeta_momentum": 0.5}),
        ("nuclr", NUCLR | {"zeta_estimator": "paper", "use_xi": False, "sides": "x"}),
    ],
    ids=str,
)
def test_items_that_occur_once_are_pairs(name, options, moving) -> None:
    """If the scores of positives change between visits, then with gamma = 1."""
    if moving:
        options = options | {"gamma": 1.0}
    every = {"num_x": SAMPLES, "num_y": SAMPLES}
    by_pair, by_item = (make(name, num_samples=SAMPLES, **options, **more).double() for more in ({}, every))
    generator = torch.Generator().manual_seed(1)
    fixed = normalize(torch.randn(2, SAMPLES, DIM, dtype=torch.float64, generator=generator), dim=-1)
    number = torch.randperm(SAMPLES, generator=generator)  # of the item x of each pair; y has the number of the pair
    for x, y, index in batches():
        if not moving:
            x, y = fixed[0, index], fixed[1, index]
        out, *gradients = call(by_pair, x, y, index)
        ids = (number[index].tolist(), index.tolist())
        other, *other_gradients = call(by_item, x, y, None, ids)
        assert_close(other.loss.item(), out.loss.item(), "value")
        for one, two in zip(gradients, other_gradients, strict=True):
            assert_close(two, one, "gradient")
        for table, values in state_of(by_pair).items():
            if table.startswith(("zeta", "xi", "tau")):
                same = state_of(by_item)[table]
                assert_close(same[number] if table.endswith("_x") and same.ndim else same, values, table)


def test_only_one_side_may_have_items() -> None:
    objective = make("nuclr", num_samples=SAMPLES, num_y=5).double()
    assert objective.needs_index and len(objective.log_u_x) == SAMPLES and len(objective.zeta_y) == 5
    x, y, index = next(batches())
    y_id = [0, 0, 1, 2, 3, 4, 4]
    objective(x, y, index, y_id=y_id)
    assert objective.log_u_y.isfinite().all() and objective.log_u_x.isfinite().sum() == BATCH
    with pytest.raises(ValueError, match=r"y_id.*num_y"):
        objective(x, y, index)
    objective.eval()
    objective(x, y, y_id=[9] * BATCH)  # ids of other data, with no row here


@pytest.mark.parametrize("temperature", [0.001, 1.0])
def test_finite_in_float32(temperature) -> None:
    objective = make("nuclr", num_samples=SAMPLES, temperature=temperature, **ITEMS)
    for x, y, index in batches():
        log_q = torch.linspace(-9, -1, BATCH)
        ids = (index % NUM["x"]).tolist(), (index % NUM["y"]).tolist()
        out, *gradients = call(objective, x.float(), y.float(), None, ids, log_q=log_q)
        assert all(values.isfinite().all() for values in (out.loss, *gradients))
    assert not any(np.isnan(table).any() for table in state_of(objective).values())


# log_q


@pytest.mark.parametrize("name", ["clip", "cyclip", "sogclr", "isogclr", "nuclr", "nuclr-authors"])
def test_log_q_of_items_that_occur_once_changes_nothing(name) -> None:
    one, two = (make(name, num_samples=SAMPLES).double() for _ in range(2))
    for x, y, index in batches():
        expected, *expected_gradients = call(one, x, y, index)
        out, *gradients = call(two, x, y, index, log_q=torch.full((BATCH,), -math.log(SAMPLES), dtype=torch.float64))
        assert_close(out.loss.item(), expected.loss.item(), "value")
        assert_close(gradients[0], expected_gradients[0], "gradient of x")
    for table, values in state_of(one).items():
        assert_close(state_of(two)[table], values, table)


def test_log_q_of_clip_is_the_corrected_softmax() -> None:
    x, y, index = next(batches())
    log_q = torch.linspace(-4, -1, BATCH, dtype=torch.float64)
    out = make("clip", temperature=0.1).double()(x, y, index, log_q=log_q)
    expected = cross_entropy(x @ y.T / 0.1 - log_q, torch.arange(BATCH))
    assert_close(2 * float(out.metrics["objective_x"]), expected.item(), "side x")
    plain = make("clip", temperature=0.1).double()(x, y, index)
    assert_close(float(out.metrics["objective_y"]), float(plain.metrics["objective_y"]), "side y")


@pytest.mark.parametrize("name", ["clip", "cyclip"])
@pytest.mark.parametrize("shift", [0.0, -9.0])
def test_hard_negatives_count_as_candidates_of_the_mean_log_q(name, shift) -> None:
    x, y, index = next(batches())
    hard = normalize(y[:, None] + 0.3 * x[:, None].flip(0), dim=-1)
    q = torch.arange(1, BATCH + 1, dtype=torch.float64)
    out = make(name, temperature=0.1).double()(x, y, index, negatives=hard, log_q=q.log() + shift)
    plain = make(name, temperature=0.1).double()(x, y, index, negatives=hard)
    uniform = make(name, temperature=0.1).double()(x, y, index, negatives=hard, log_q=torch.zeros_like(q) + shift)
    assert_close(float(uniform.loss), float(plain.loss), "uniform")
    if name == "clip":
        logits = torch.cat([x @ y.T / 0.1 - (q / q.mean()).log(), x @ hard[:, 0].T / 0.1], dim=1)
        expected = cross_entropy(logits, torch.arange(BATCH))
        assert_close(2 * float(out.metrics["objective_x"]), expected.item(), "side x")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nuclr", NUCLR),
        ("nuclr", NUCLR | {"use_xi": False, "zeta_momentum": 0.5}),
        ("nuclr", NUCLR | INDIVIDUAL | {"sides": "x"}),
        ("nuclr-authors", NUCLR),
    ],
    ids=str,
)
def test_log_q_adds_to_the_zeta_of_y(name, options) -> None:
    """The loops take zeta_y + tau log(n q); xi bounds zeta alone."""
    objective = make(name, num_samples=SAMPLES, **options).double()
    settings = formula(name, num_samples=SAMPLES, **options)
    state = reference.initial_state(settings)
    counts = torch.arange(1, SAMPLES + 1, dtype=torch.float64)
    for x, y, index in batches():
        given = settings.temperature * counts[index].log().numpy()
        shifted = state | {"zeta_y": state["zeta_y"].copy()}
        shifted["zeta_y"][index] += given
        step = reference.step(settings, x.numpy(), y.numpy(), index, shifted)
        log_q = (counts[index] / SAMPLES).log()
        assert_same_step(*call(objective, x, y, index, log_q=log_q), step, settings.sides)
        xi = state["xi_y"]
        state = step.state
        state["zeta_y"][index] -= given
        state["xi_y"] = np.maximum(xi, np.abs(state["zeta_y"][index]).max())
        for table, values in state_of(objective).items():
            assert_close(values, state[table], table)


@pytest.mark.parametrize("options", [{}, {"zeta_init": 0.1}, {"zeta_init": 0.1, "use_xi": False}], ids=str)
@pytest.mark.parametrize("hard", [False, True])
def test_the_gradient_of_a_learnt_temperature(options, hard) -> None:
    """With gamma = 1 and a single visit, the gradient is that of the value."""
    x, y, index = next(batches())
    more = {"log_q": torch.linspace(-4, -1, BATCH, dtype=torch.float64)}
    if hard:
        more["negatives"] = normalize(y[:, None] + 0.3 * x[:, None].flip(0), dim=-1)

    def run(log_scale: float):
        objective = make(
            "nuclr", num_samples=SAMPLES, gamma=1.0, temperature=0.1, learn_temperature=True, zeta_lr=0.0, **options
        ).double()
        objective.log_scale.data.fill_(log_scale)
        out = objective(x, y, index, **more)
        out.loss.backward()
        return out.loss.item(), objective.log_scale.grad.item()

    step = 1e-6
    numeric = (run(2.0 + step)[0] - run(2.0 - step)[0]) / (2 * step)
    assert run(2.0)[1] == pytest.approx(numeric, rel=1e-6)


def test_the_corrected_normalizer_estimates_the_sum_over_items() -> None:
    """Pairs are drawn in proportion to the counts of their y: phi estimates the sum over other items, once each."""
    items, counts, tau = 4, [1, 2, 3, 6], 0.5
    of_pair = [item for item, count in enumerate(counts) for _ in range(count)]
    n = len(of_pair)
    generator = torch.Generator().manual_seed(0)
    x = normalize(torch.randn(n, DIM, dtype=torch.float64, generator=generator), dim=1)
    texts = normalize(torch.randn(items, DIM, dtype=torch.float64, generator=generator), dim=1)
    y, log_q = texts[of_pair], torch.tensor([counts[item] / n for item in of_pair], dtype=torch.float64).log()
    objective = make("sogclr", num_samples=n, temperature=tau, gamma=1.0).double()
    objective(x, y, range(n), log_q=log_q)  # the batch is the data set
    # item 0 has one pair; the n - 1 others have all the others, and (n - 1)/c = 1
    scores = torch.exp((texts[1:] @ x[0] - texts[0] @ x[0]) / tau)
    assert_close(objective.log_u_x[0].exp(), scores.sum(), "phi")


# refusals


def test_refusals(tmp_path) -> None:
    x, y, _ = next(batches())
    wrong = [("num_x", 0), ("num_y", -1), ("num_x", 2.5), ("num_x", True), ("num_y", "6")]
    for option, value in [*wrong, ("sharding", 2), ("y_views", 2.5)]:
        with pytest.raises(ValueError, match=rf"state.*{option}.*{value}"):
            build("nuclr", num_samples=SAMPLES, state={option: value})
    objective = make("nuclr", num_samples=SAMPLES, **ITEMS)
    good = [0, 1, 2, 3, 4, 0, 1]
    for x_id, y_id, word in (
        (None, good, "x_id is None.*num_x"),
        (good, [0, 1, 2, 3, 4, 5, 1], r"y_id.*\[0, 5\).*5"),
        ([-1, *good[1:]], good, r"x_id.*\[0, 6\).*-1"),
    ):
        with pytest.raises(ValueError, match=word):
            objective(x, y, x_id=x_id, y_id=y_id)
    assert objective.log_u_x.isneginf().all()
    clip = make("clip", num_samples=SAMPLES)
    for log_q, word in (
        (torch.zeros(3), "log_q.*7.*3"),
        (torch.zeros(BATCH, dtype=torch.long), "log_q.*int64"),
        (torch.full((BATCH,), -math.inf), "log_q.*finite"),
    ):
        with pytest.raises(ValueError, match=word):
            clip(x, y, log_q=log_q)
    for name in ("siglip", "dcl"):
        with pytest.raises(ValueError, match=r"log_q.*normalizer"):
            make(name, num_samples=SAMPLES)(x, y, log_q=torch.zeros(BATCH))
    save_state(objective, tmp_path)
    load_state(make("nuclr", num_samples=SAMPLES, **ITEMS), tmp_path)
    with pytest.raises(ValueError, match=r"_y.* 5 .* 7.*num_y"):
        load_state(make("nuclr", num_samples=SAMPLES, num_x=6, num_y=7), tmp_path)
