"""float32 from tau = 0.001 to 1 on extreme features: finite, and within the promised distance of float64.

The promise for the stateful objectives, with B the batch size and 2^-24 the relative rounding error of float32:

    gradients        1e-4 max(max |gradient|, 1/B)
    log u, zeta/tau  1e-4 + 8 * 2^-24 / tau

float32 cannot represent a score near 1, or a zeta of that size, more closely than 2^-25, and the algorithm
exponentiates such values divided by tau. The second term therefore allows eight such roundings. Before each step the
reference restarts from the objective's own tables and features, converted to float64, so that differences do not
accumulate. Each comparison is of one step from the same start, over steps that revisit samples and take every branch.

A test goes through all combinations of features, temperatures and options, and names those that fail.
"""

import itertools
import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from tests import reference
from tests.objectives.comparison import state_of
from tests.objectives.extensions import cases
from tests.objectives.make import formula, make

pytestmark = pytest.mark.slow
TAUS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
DIM = 16


def random(batch: int, generator: torch.Generator) -> Tensor:
    return normalize(torch.randn(batch, DIM, generator=generator), dim=1)


def near(base: Tensor, distance: float, generator: torch.Generator) -> Tensor:
    return normalize(base + distance * random(len(base), generator), dim=1)


def unequal(x: Tensor, distance: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return near(x, distance, generator), near(x, distance, generator)


# From random features x, the same feature in all rows, and a generator.
KINDS = {
    "random": lambda x, one, generator: (x, random(len(x), generator)),
    "identical": lambda x, one, generator: (one.clone(), one.clone()),
    "identical and opposite": lambda x, one, generator: (one.clone(), -one),
    "opposite": lambda x, one, generator: (x, -x),
    "aligned": lambda x, one, generator: (x, x.clone()),
    "nearly aligned": lambda x, one, generator: (x, near(x, 0.05, generator)),
    "nearly equal": lambda x, one, generator: unequal(one, 1e-4, generator),
    # Score differences of about 1e-3 below a score of 1, which float32 scores resolve worst.
    "close": lambda x, one, generator: unequal(one, 0.05, generator),
    "clustered": lambda x, one, generator: unequal(x[:4][torch.arange(len(x)) % 4], 0.05, generator),
    # Half of the positives have score -1, half +1: sums of very different size in one batch.
    "mixed": lambda x, one, generator: (x, torch.where(torch.arange(len(x))[:, None] % 2 == 0, x, -x)),
}


def feature_pair(kind: str, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = random(batch, generator)
    return KINDS[kind](x, x[:1].expand(batch, -1).contiguous(), generator)


def for_all(check: Callable[..., None], **axes: Iterable) -> None:
    """Call `check` with every combination of values; raise one error that names all combinations that fail."""
    failures, first = [], None
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    for combination in combinations:
        try:
            check(**combination)
        except Exception as error:
            first = first or error
            failures.append(f"{combination}: {error}")
    shown = "\n".join(failures[:20])
    if failures:
        raise AssertionError(f"{len(failures)} of {len(combinations)} combinations fail:\n{shown}") from first


def batches(kind: str, batch: int, steps: int):
    """Yield float32 (x, y, index) of 3 B - 1 pairs; step 1 revisits the samples of step 0, later steps half of them."""
    generator = torch.Generator().manual_seed(batch)
    first = torch.randperm(3 * batch - 1, generator=generator)
    for step in range(steps):
        index = first[:batch] if step < 2 else first[batch // 2 : batch // 2 + batch]
        yield *feature_pair(kind, batch, generator), index


def call(objective, x: Tensor, y: Tensor, index: Tensor, ids: dict[str, Tensor] | None = None):
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    out = objective(x, y, index, **(ids or {}))
    out.loss.backward()
    return out, x.grad, y.grad


# A float64 reference for large batches: the formulas of the loops on blocks of anchors


def kept_rows(ids: list[Tensor], start: int, stop: int) -> Tensor:
    """(stop - start, B): True where j is a negative of anchor i."""
    batch = len(ids[0])
    kept = torch.ones(stop - start, batch, dtype=torch.bool)
    for id_ in ids:
        kept &= id_[start:stop, None] != id_[None]
    return kept


def matrices(name, x, y, index, state, *, temperature, gamma, x_id=None, y_id=None, **options) -> reference.Step:
    """Compute reference.step in training, with default options and other steps of tau."""
    old = {key: torch.from_numpy(table.copy()) for key, table in state.items()}
    n, batch = len(old["log_u_x"]), len(x)
    features = {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}
    grad = {key: torch.zeros_like(feature) for key, feature in features.items()}
    new, value = dict(old), {}
    # The position is a further id: i is not a negative of itself.
    ids = [torch.arange(batch), *(torch.as_tensor(id_) for id_ in (x_id, y_id) if id_ is not None)]

    for a, c in (("x", "y"), ("y", "x")):
        anchors, candidates = features[a], features[c]
        zeta = old[f"zeta_{c}"][index] if name.startswith("nuclr") else torch.zeros(batch, dtype=torch.float64)
        xi = old[f"xi_{c}"].item() if name.startswith("nuclr") else math.inf
        tau = old[f"tau_{a}"][index] if name == "isogclr" else torch.full_like(zeta, temperature)
        positive = (anchors * candidates).sum(1)
        log_u, pull, column = torch.empty_like(zeta), torch.empty_like(zeta), torch.zeros_like(zeta)
        count = torch.empty_like(zeta)

        for start in range(0, batch, 512):
            block = slice(start, min(start + 512, batch))
            kept = kept_rows(ids, block.start, block.stop)
            count[block] = kept.sum(1).double()
            difference = anchors[block] @ candidates.T - positive[block, None]
            exponent = torch.where(kept, (difference - zeta) / tau[block, None], -math.inf)
            log_scale = torch.log((n - 1) / count[block])
            log_phi = log_scale + torch.logsumexp(exponent, 1)
            before = old[f"log_u_{a}"][index[block]]
            rest = math.log(1 - gamma) if gamma < 1 else -math.inf
            averaged = torch.logaddexp(rest + before, math.log(gamma) + log_phi)
            log_u[block] = torch.where(before.isneginf(), log_phi, averaged)

            normalizer = torch.logaddexp(log_u[block], -xi / tau[block])
            w = torch.exp(log_scale[:, None] + exponent - normalizer[:, None])
            grad[a][block] += (w @ candidates - w.sum(1, keepdim=True) * candidates[block]) / batch
            grad[c] += w.T @ anchors[block] / batch
            grad[c][block] -= w.sum(1, keepdim=True) * anchors[block] / batch
            pull[block] = (w * difference).sum(1) / tau[block]
            log_z = torch.logaddexp(log_u[block], -zeta[block] / tau[block])
            column += torch.exp(exponent - log_z[:, None]).sum(0)

        new[f"log_u_{a}"] = old[f"log_u_{a}"].index_copy(0, index, log_u)
        centered = log_u - math.log(n - 1)
        value[a] = (tau * centered).mean().item()
        if name == "isogclr":
            value[a] += (8.0 * tau).mean().item()
            momentum = 0.1 * old[f"tau_momentum_{a}"][index] + 0.9 * (centered + 8.0 - pull).clamp(-5, 5)
            moved = (tau - options["tau_lr"] * momentum).clamp(options["tau_min"], options["tau_max"])
            new[f"tau_momentum_{a}"] = old[f"tau_momentum_{a}"].index_copy(0, index, momentum)
            new[f"tau_{a}"] = old[f"tau_{a}"].index_copy(0, index, moved)
        if name.startswith("nuclr"):
            log_z = torch.logaddexp(log_u, -zeta / tau)
            value[a] = (tau * log_z).mean().item()
            unbiased = name == "nuclr"
            on_positive, on_sum = (1.0, (n - 1) / count) if unbiased else (n / batch, n / batch)
            velocity = 1 - on_positive * torch.exp(-zeta / tau - log_z) - on_sum * column
            moved = zeta - options["zeta_lr"] * velocity
            if unbiased:  # in units of tau, at most 1 per visit, without a common drift
                move = (-options["zeta_lr"] * velocity).clamp(-1, 1)
                moved = zeta + temperature * (move - move.mean())
            new[f"zeta_{c}"] = old[f"zeta_{c}"].index_copy(0, index, moved)
            new[f"xi_{c}"] = torch.tensor(max(xi, moved.abs().max().item()), dtype=torch.float64)
    tables = {key: table.numpy() for key, table in new.items()}
    return reference.Step(value["x"], value["y"], grad["x"].numpy(), grad["y"].numpy(), tables)


def loops(name: str, x: np.ndarray, y: np.ndarray, index: Tensor, state, **options):
    ids = {key: options.pop(key) for key in ("x_id", "y_id") if key in options}
    settings = formula(name, num_samples=len(state["log_u_x"]), **options)
    return reference.step(settings, x, y, index, state, **ids)


# The steps of tau are small, so that an error of its gradient, which grows as 1/tau, does not exceed the promise.
ISOGCLR = {"tau_lr": 1e-5, "tau_min": 0.001, "tau_max": 1.0}
STATEFUL = {
    "sogclr": ("sogclr", {}),
    "isogclr": ("isogclr", ISOGCLR),
    "nuclr": ("nuclr", {"zeta_lr": 1e-3}),
    "nuclr-authors": ("nuclr-authors", {"zeta_lr": 1e-3}),
}
stateful = pytest.mark.parametrize(("name", "options"), STATEFUL.values(), ids=STATEFUL.keys())


@stateful
def test_matrix_reference_equals_the_loops(name, options) -> None:
    def check(kind, ids, tau, gamma) -> None:
        state = reference.initial_state(formula(name, num_samples=23, temperature=tau, **options))
        for x, y, index in batches(kind, 8, steps=3):
            x, y = x.double().numpy(), y.double().numpy()
            slow = loops(name, x, y, index, state, temperature=tau, gamma=gamma, **ids, **options)
            fast = matrices(name, x, y, index, state, temperature=tau, gamma=gamma, **ids, **options)
            assert fast.value == pytest.approx(slow.value, abs=1e-9)
            np.testing.assert_allclose(fast.grad_x, slow.grad_x, rtol=0, atol=1e-9)
            np.testing.assert_allclose(fast.grad_y, slow.grad_y, rtol=0, atol=1e-9)
            for key, table in slow.state.items():
                np.testing.assert_allclose(fast.state[key], table, rtol=1e-9, atol=1e-9, err_msg=key)
            state = slow.state

    ids = [{}, {"x_id": [0, 0, 1, 2, 3, 4, 5, 6], "y_id": [0, 1, 2, 3, 3, 3, 4, 0]}]
    for tau, gamma in ((0.001, 0.8), (0.1, 0.8), (0.1, 1.0)):
        for_all(check, kind=KINDS, ids=ids, tau=[tau], gamma=[gamma])


# The stateful objectives


def assert_within(actual, expected, bound: float, what: str) -> None:
    """Assert that infinite values agree and finite ones differ by at most the bound."""
    actual, expected = np.asarray(actual, dtype=np.float64), np.asarray(expected)
    actual = actual.reshape(expected.shape)
    np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected), err_msg=what)
    finite = np.isfinite(expected)
    worst = np.abs(actual[finite] - expected[finite]).max(initial=0.0)
    assert worst <= bound, f"{what}: off by {worst:.3g}, allowed {bound:.3g}"


def check_step(objective, judge, name, options, x, y, index, tau, gamma, ids=None) -> None:
    exact_x, exact_y, settings = x.double().numpy(), y.double().numpy(), options | (ids or {})
    expected = judge(name, exact_x, exact_y, index, state_of(objective), temperature=tau, gamma=gamma, **settings)
    out, grad_x, grad_y = call(objective, x, y, index, ids)
    assert grad_x.dtype == grad_y.dtype == torch.float32

    logs = 1e-4 + 8 * 2**-24 / tau
    assert_within(out.loss.item(), expected.value, logs * max(tau, 1e-3 * abs(expected.value)), "value")
    for what, actual, exact in (("x", grad_x, expected.grad_x), ("y", grad_y, expected.grad_y)):
        assert_within(actual, exact, 1e-4 * max(np.abs(exact).max(), 1 / len(x)), f"gradient of {what}")
    after = state_of(objective)
    for key, table in expected.state.items():
        if key.startswith("log_u"):
            assert_within(after[key], table, logs, key)
        elif key.startswith(("zeta_x", "zeta_y", "xi_")):
            assert_within(after[key] / tau, table / tau, logs, f"{key} / tau")
        elif key.startswith("tau_momentum"):
            # tau moves by tau_lr times the momentum, which has the errors of log u and of the weighted sum
            assert_within(after[key] * options["tau_lr"] / tau, table * options["tau_lr"] / tau, 2 * logs, key)
        elif key.startswith("tau"):
            assert_within(after[key] / tau, table / tau, logs, f"{key} / tau")


@stateful
def test_larger_batch(name, options) -> None:
    def check(tau, kind) -> None:
        objective = make(name, num_samples=899, temperature=tau, gamma=0.8, **options)
        for x, y, index in batches(kind, 300, steps=3):
            check_step(objective, matrices, name, options, x, y, index, tau, 0.8)

    for_all(check, tau=TAUS, kind=KINDS)


IDS = {
    # The clusters of "clustered": the masked pairs have the largest scores.
    "clusters": {"x_id": torch.arange(8) % 4},
    "a row without negatives": {
        "x_id": torch.tensor([0, 0, 0, 0, 4, 5, 6, 7]),
        "y_id": torch.tensor([0, 1, 2, 3, 0, 0, 0, 0]),
    },
}


@stateful
def test_small_batch(name, options) -> None:
    """Masked scores must not be exponentiated: if they are far above the rest of their row, they overflow."""

    def check(tau, kind, gamma, mask) -> None:
        objective = make(name, num_samples=23, temperature=tau, gamma=gamma, **options)
        for x, y, index in batches(kind, 8, steps=4):
            check_step(objective, loops, name, options, x, y, index, tau, gamma, IDS.get(mask))

    for_all(check, tau=TAUS, kind=KINDS, gamma=[0.8, 1.0], mask=["no ids"])
    for_all(check, tau=TAUS, kind=KINDS, gamma=[0.8], mask=IDS)


def large_ids(batch: int) -> dict[str, Tensor]:
    """Return ids with about five pairs per image, in random order, and a few captions that occur twice."""
    generator = torch.Generator().manual_seed(2)
    return {
        "x_id": torch.randint(batch // 5, (batch,), generator=generator),
        "y_id": torch.randint(2 * batch, (batch,), generator=generator),
    }


@stateful
def test_large_batch_in_float64(name, options) -> None:
    """An odd batch size: however the batch is divided into tiles, the last tile is smaller."""
    batch, tau = 1337, 0.02

    def check(kind, with_ids) -> None:
        objective = make(name, num_samples=3 * batch - 1, temperature=tau, gamma=0.8, **options).double()
        ids = large_ids(batch) if with_ids else {}
        for x, y, index in batches(kind, batch, steps=2):
            x, y = x.double(), y.double()
            state = state_of(objective)
            expected = matrices(name, x.numpy(), y.numpy(), index, state, temperature=tau, gamma=0.8, **ids, **options)
            out, grad_x, grad_y = call(objective, x, y, index, ids)
            assert out.loss.item() == pytest.approx(expected.value, abs=1e-9)
            np.testing.assert_allclose(grad_x, expected.grad_x, rtol=0, atol=1e-9 / batch)
            np.testing.assert_allclose(grad_y, expected.grad_y, rtol=0, atol=1e-9 / batch)
            for key, table in expected.state.items():
                after = state_of(objective)[key].reshape(table.shape)
                np.testing.assert_allclose(after, table, atol=1e-9, err_msg=key)

    for_all(check, kind=["nearly aligned", "clustered"], with_ids=[False, True])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("isogclr", ISOGCLR), ("nuclr", {"zeta_lr": 1e-3})])
@pytest.mark.parametrize("with_ids", [False, True])
def test_batch_of_5000(name, options, with_ids) -> None:
    """A batch so large that B x B buffers are not kept."""
    batch, tau = 5000, 0.001
    objective = make(name, num_samples=3 * batch - 1, temperature=tau, gamma=0.8, **options)
    ids = large_ids(batch) if with_ids else {}
    for x, y, index in batches("nearly aligned", batch, steps=1):
        check_step(objective, matrices, name, options, x, y, index, tau, 0.8, ids)


@pytest.mark.parametrize("estimator", ["reference", "paper", "unbiased"])
def test_nuclr_from_a_wide_zeta(estimator) -> None:
    """zeta as in the middle of a run, up to a thousand temperatures wide: exp(-zeta/tau) overflows float32."""

    def check(tau, kind, spread) -> None:
        options = {"zeta_lr": 1e-3 * min(1.0, tau / 0.01), "zeta_estimator": estimator}
        objective = make("nuclr-authors", num_samples=23, temperature=tau, gamma=0.8, **options)
        generator = torch.Generator().manual_seed(1)
        for zeta, xi in ((objective.zeta_x, objective.xi_x), (objective.zeta_y, objective.xi_y)):
            zeta.uniform_(-spread, spread, generator=generator)
            xi.fill_(zeta.abs().max())
        for x, y, index in batches(kind, 8, steps=3):
            check_step(objective, loops, "nuclr-authors", options, x, y, index, tau, 0.8)

    for_all(check, tau=TAUS, kind=KINDS, spread=[0.1, 1.0])


@pytest.mark.parametrize("name", ["sogclr", "isogclr", "nuclr"])
def test_many_steps_stay_finite(name) -> None:
    """Two hundred steps at the smallest temperature, with the state carried along as in training."""

    def check(kind) -> None:
        objective = make(name, num_samples=23, temperature=0.001, gamma=0.8)
        for x, y, index in batches(kind, 8, steps=200):
            out, grad_x, grad_y = call(objective, x, y, index)
            assert out.loss.isfinite() and grad_x.isfinite().all() and grad_y.isfinite().all()
        for key, table in state_of(objective).items():
            assert not np.isnan(table).any() and not np.isposinf(table).any(), key

    for_all(check, kind=KINDS)


# The extensions


def batches_of_views(kind: str, batch: int, steps: int, views: tuple[int | None, int | None]):
    """Yield (x, y, index) with this number of views on either side; views of a sample are drawn independently."""
    generator = torch.Generator().manual_seed(batch)
    for _, _, index in batches(kind, batch, steps):
        several = [feature_pair(kind, batch, generator) for _ in range(3)]
        x, y = (
            several[0][side] if count is None else torch.stack([one[side] for one in several[:count]], dim=1)
            for side, count in enumerate(views)
        )
        yield x, y, index


@cases()
def test_extensions_are_finite(name, options, views) -> None:
    """Value, gradients, visited rows and gradients of parameters, with the parameters trained along."""

    def check(tau, kind) -> None:
        torch.manual_seed(0)
        objective = make(name, num_samples=23, **(options | {"temperature": tau}))
        objective.eval()(*next(batches_of_views(kind, 8, 1, views))[:2])  # fixes the width of networks
        objective.train()
        parameters = list(objective.parameters())
        optimizer = torch.optim.Adam(parameters, lr=1e-2) if parameters else None
        for x, y, index in batches_of_views(kind, 8, 4, views):
            objective.zero_grad()
            out, grad_x, grad_y = call(objective, x, y, index)
            assert out.loss.isfinite() and grad_x.isfinite().all() and grad_y.isfinite().all()
            for key, parameter in objective.named_parameters():
                assert parameter.grad.isfinite().all(), key
            for key, table in state_of(objective).items():
                values = table[index.numpy() if table.shape == (23,) else ()]
                if key.startswith("log_u") and "false_negative_margin" in options:
                    values = values[~np.isneginf(values)]  # an anchor whose negatives are all dropped stays unseen
                assert np.isfinite(values).all(), key
            if optimizer is not None:
                optimizer.step()

    for_all(check, tau=TAUS, kind=KINDS)


# The stateless objectives


def stateless_reference(name: str, x: Tensor, y: Tensor, tau: float) -> Tensor:
    if name == "siglip":
        log_scale, bias = torch.tensor([-math.log(tau), -10.0], dtype=torch.float64)
        return reference.siglip(x, y, log_scale, bias)
    return getattr(reference, name)(x, y, temperature=tau)


@pytest.mark.parametrize("name", ["clip", "siglip", "dcl", "cyclip"])
def test_stateless(name) -> None:
    """Gradients have a factor 1/tau, and probabilities an error of a rounded score divided by tau.

    If every score is -1, DCL's two estimates of Ng are equal and the gradient of either is right.
    """

    def check(tau, kind) -> None:
        objective = make(name, num_samples=23, temperature=tau)
        for x, y, index in batches(kind, 8, steps=2):
            out, grad_x, grad_y = call(objective, x, y, index)
            x, y = x.double().requires_grad_(), y.double().requires_grad_()
            value = stateless_reference(name, x, y, tau)
            value.backward()
            relative = 1e-4 + 8 * 2**-24 / tau
            assert_within(out.loss.item(), value.item(), relative * max(1.0, abs(value.item())), "value")
            tie = name == "dcl" and kind == "identical and opposite"
            for what, actual, exact in (("x", grad_x, x.grad), ("y", grad_y, y.grad)):
                if tie:
                    assert actual.isfinite().all()
                    continue
                bound = relative * max(exact.abs().max().item(), 1 / (tau * len(x)))
                assert_within(actual, exact, bound, f"gradient of {what}")
            for key, parameter in objective.named_parameters():
                assert parameter.grad.isfinite().all(), key

    for_all(check, tau=TAUS, kind=KINDS)


# Half precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["clip", "siglip", "dcl", "cyclip", "sogclr", "isogclr", "nuclr"])
def test_half_precision_features_are_computed_in_float32(name, dtype) -> None:
    """bf16 and fp16 features give the same as their float32 conversions; only the final gradient is rounded."""
    half, full = (make(name, num_samples=23, temperature=0.01) for _ in range(2))
    for x, y, index in batches("nearly aligned", 8, steps=3):
        x, y = x.to(dtype), y.to(dtype)
        out, grad_x, grad_y = call(half, x, y, index)
        exact, exact_x, exact_y = call(full, x.float(), y.float(), index)
        assert grad_x.dtype == grad_y.dtype == dtype
        assert out.loss.dtype == torch.float32
        torch.testing.assert_close(out.loss, exact.loss, rtol=0, atol=0)
        torch.testing.assert_close(grad_x, exact_x.to(dtype), rtol=0, atol=0)
        torch.testing.assert_close(grad_y, exact_y.to(dtype), rtol=0, atol=0)
        for key, table in state_of(half).items():
            np.testing.assert_array_equal(table, state_of(full)[key], err_msg=key)


def test_normalize_accepts_features_that_overflow_when_squared():
    x, y = torch.randn(2, 8, 5)
    expected = make("clip", num_samples=8, normalize=True)(x, y, torch.arange(8)).loss
    loss = make("clip", num_samples=8, normalize=True)(x * 1e25, y * 1e25, torch.arange(8)).loss
    torch.testing.assert_close(loss, expected)
