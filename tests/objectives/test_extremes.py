"""float32 from tau = 0.001 to 1 on awkward features: finite, and within the promised distance of float64.

The promise, for the stateful objectives (B the batch, 2^-24 float32's half unit of rounding at 1):

    gradients        1e-4 max(max |gradient|, 1/B)
    log u, zeta/tau  1e-4 + 8 * 2^-24 / tau

A score near 1 cannot be held in float32 more closely than 2^-25, nor a zeta of that size, and what the algorithm
exponentiates is their quotient by tau: hence the second term, which allows eight such roundings. A difference carried
over from an earlier step would be measured against nothing, so before each step the reference restarts from the
objective's own tables, converted to float64, and sees the very features, converted to float64. What is compared is one
step's arithmetic from the same start, over steps that revisit samples, so that every branch is taken.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from nuclr.objectives import build
from tests import reference

TAUS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
DIM = 16
taus = pytest.mark.parametrize("tau", TAUS)


def random(batch: int, generator: torch.Generator) -> Tensor:
    return normalize(torch.randn(batch, DIM, generator=generator), dim=1)


def near(base: Tensor, distance: float, generator: torch.Generator) -> Tensor:
    return normalize(base + distance * random(len(base), generator), dim=1)


def feature_pair(kind: str, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = random(batch, generator)
    one = x[:1].expand(batch, -1).contiguous()
    centres = x[:4][torch.arange(batch) % 4]
    return {
        "random": lambda: (x, random(batch, generator)),
        "identical": lambda: (one.clone(), one.clone()),
        "identical and opposite": lambda: (one.clone(), -one),
        "opposite": lambda: (x, -x),
        "aligned": lambda: (x, x.clone()),
        "nearly aligned": lambda: (x, near(x, 0.05, generator)),
        "nearly equal": lambda: (near(one, 1e-4, generator), near(one, 1e-4, generator)),
        # Score differences of about 1e-3 below a score of 1: the case that float32 scores resolve worst.
        "close": lambda: (near(one, 0.05, generator), near(one, 0.05, generator)),
        "clustered": lambda: (near(centres, 0.05, generator), near(centres, 0.05, generator)),
        # Half of the rows have their positive at -1, half at +1: rows of very different size in one batch.
        "mixed": lambda: (x, torch.where(torch.arange(batch)[:, None] % 2 == 0, x, -x)),
    }[kind]()


KINDS = [
    "random",
    "identical",
    "identical and opposite",
    "opposite",
    "aligned",
    "nearly aligned",
    "nearly equal",
    "close",
    "clustered",
    "mixed",
]
kinds = pytest.mark.parametrize("kind", KINDS)


def batches(kind: str, batch: int, steps: int):
    """(x, y, index) in float32 from a data set of 3 B - 1 pairs; step 1 revisits step 0's samples, step 2 some."""
    generator = torch.Generator().manual_seed(batch)
    first = torch.randperm(3 * batch - 1, generator=generator)
    for step in range(steps):
        index = first[:batch] if step < 2 else first[batch // 2 : batch // 2 + batch]
        yield *feature_pair(kind, batch, generator), index


def call(objective, x: Tensor, y: Tensor, index: Tensor):
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    out = objective(x, y, index)
    out.loss.backward()
    return out, x.grad, y.grad


def state_of(objective) -> dict[str, np.ndarray]:
    return {name: buffer.detach().double().numpy().copy() for name, buffer in objective.named_buffers()}


# ---------------------------------------------------------------------------------------------------------------------
# A float64 reference for large batches: the loops' formulas on whole matrices, the gradient by autograd
# ---------------------------------------------------------------------------------------------------------------------


def side(
    anchors: Tensor, candidates: Tensor, zeta: Tensor, tau: Tensor, old_log_u: Tensor, xi: float, gamma: float, n: int
):
    """Returns the surrogate, log u, w, and s_ij - s_ii; tau (B,) per anchor, xi = inf for no positive term."""
    batch = len(anchors)
    s = anchors @ candidates.T
    differences = s - s.diagonal()[:, None]
    exponents = math.log((n - 1) / (batch - 1)) + (differences.detach() - zeta) / tau[:, None]
    exponents.fill_diagonal_(-math.inf)
    log_phi = torch.logsumexp(exponents, 1)
    rest = math.log(1 - gamma) if gamma < 1 else -math.inf
    log_u = torch.where(old_log_u.isneginf(), log_phi, torch.logaddexp(rest + old_log_u, math.log(gamma) + log_phi))
    w = torch.exp(exponents - torch.logaddexp(log_u, -xi / tau)[:, None])
    return (w * differences).sum() / batch, log_u, w, differences.detach()


def matrices(name: str, x: np.ndarray, y: np.ndarray, index: Tensor, state, *, temperature, gamma, **options):
    """As reference.sogclr, .isogclr and .nuclr (training, no ids, default rules; reference and unbiased estimators)."""
    state = {key: torch.from_numpy(table.copy()) for key, table in state.items()}
    n, batch = len(state["log_u_x"]), len(x)
    features = {"x": torch.from_numpy(x).requires_grad_(), "y": torch.from_numpy(y).requires_grad_()}
    new = dict(state)
    total, value = 0.0, {}
    for a, c in (("x", "y"), ("y", "x")):
        zeta = state[f"zeta_{c}"][index] if name == "nuclr" else torch.zeros(batch, dtype=torch.float64)
        xi = state[f"xi_{c}"].item() if name == "nuclr" else math.inf
        tau = torch.full((batch,), temperature, dtype=torch.float64)
        if name == "isogclr":
            tau = state[f"tau_{a}"][index]
        surrogate, log_u, w, differences = side(
            features[a], features[c], zeta, tau, state[f"log_u_{a}"][index], xi, gamma, n
        )
        total = total + surrogate
        new[f"log_u_{a}"] = state[f"log_u_{a}"].index_copy(0, index, log_u)
        centred = log_u - math.log(n - 1)
        value[a] = (tau * centred).mean().item()
        if name == "isogclr":
            value[a] += (8.0 * tau).mean().item()
            g = (centred + 8.0 - (w * differences).sum(1) / tau).clamp(-5, 5)
            momentum = 0.5 * state[f"tau_momentum_{a}"][index] + 0.5 * g
            new[f"tau_momentum_{a}"] = state[f"tau_momentum_{a}"].index_copy(0, index, momentum)
            new[f"tau_{a}"] = state[f"tau_{a}"].index_copy(0, index, (tau - 1e-5 * momentum).clamp(0.001, 1.0))
        if name == "nuclr":
            log_z = torch.logaddexp(log_u, -zeta / tau)
            value[a] = (tau * log_z).mean().item()
            p = torch.exp((differences - zeta) / tau[:, None] - log_z[:, None])
            p_jj = p.diagonal().clone()
            sums = p.fill_diagonal_(0).sum(0)
            a_factor, sum_factor = n / batch, n / batch
            if options.get("zeta_estimator") == "unbiased":
                a_factor, sum_factor = 1.0, (n - 1) / (batch - 1)
            velocity = 1 - a_factor * p_jj - sum_factor * sums
            moved = zeta - options["zeta_lr"] * velocity
            new[f"zeta_velocity_{c}"] = state[f"zeta_velocity_{c}"].index_copy(0, index, velocity)
            new[f"zeta_{c}"] = state[f"zeta_{c}"].index_copy(0, index, moved)
            new[f"xi_{c}"] = torch.tensor(max(xi, moved.abs().max().item()), dtype=torch.float64)
    total.backward()
    grad_x, grad_y = features["x"].grad.numpy(), features["y"].grad.numpy()
    return reference.Step(value["x"], value["y"], grad_x, grad_y, {k: t.numpy() for k, t in new.items()})


def loops(name: str, x: np.ndarray, y: np.ndarray, index: Tensor, state, **options):
    return getattr(reference, name)(x, y, index, state, **options)


STATEFUL = {
    "sogclr": ("sogclr", {}),
    "isogclr": ("isogclr", {}),
    "nuclr": ("nuclr", {"zeta_lr": 1e-3}),
    "nuclr unbiased": ("nuclr", {"zeta_lr": 1e-3, "zeta_estimator": "unbiased"}),
}
stateful = pytest.mark.parametrize(("name", "options"), STATEFUL.values(), ids=STATEFUL.keys())


@stateful
@kinds
@pytest.mark.parametrize("gamma", [0.8, 1.0])
def test_matrices_equal_the_loops(name, options, kind, gamma) -> None:
    for tau in (0.001, 0.1):
        start = {
            "sogclr": reference.sogclr_state,
            "isogclr": lambda n, tau=tau: reference.isogclr_state(n, tau),
            "nuclr": reference.nuclr_state,
        }[name]
        state = start(23)
        for x, y, index in batches(kind, 8, steps=3):
            x, y = x.double().numpy(), y.double().numpy()
            slow = loops(name, x, y, index, state, temperature=tau, gamma=gamma, **options)
            fast = matrices(name, x, y, index, state, temperature=tau, gamma=gamma, **options)
            assert fast.value == pytest.approx(slow.value, abs=1e-9)
            np.testing.assert_allclose(fast.grad_x, slow.grad_x, rtol=0, atol=1e-9)
            np.testing.assert_allclose(fast.grad_y, slow.grad_y, rtol=0, atol=1e-9)
            for key, table in slow.state.items():
                np.testing.assert_allclose(fast.state[key], table, rtol=1e-9, atol=1e-9, err_msg=key)
            state = slow.state


# ---------------------------------------------------------------------------------------------------------------------
# The stateful objectives
# ---------------------------------------------------------------------------------------------------------------------


def assert_within(actual, expected, bound: float, what: str) -> None:
    """Equal where infinite, else within the bound."""
    actual, expected = np.asarray(actual, dtype=np.float64), np.asarray(expected)
    actual = actual.reshape(expected.shape)
    np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected), err_msg=what)
    finite = np.isfinite(expected)
    worst = np.abs(actual[finite] - expected[finite]).max(initial=0.0)
    assert worst <= bound, f"{what}: off by {worst:.3g}, allowed {bound:.3g}"


def check_step(objective, judge, name, options, x, y, index, tau, gamma) -> None:
    state = state_of(objective)
    expected = judge(
        name, x.double().numpy(), y.double().numpy(), index, state, temperature=tau, gamma=gamma, **options
    )
    out, grad_x, grad_y = call(objective, x, y, index)
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
        elif key.startswith("zeta_velocity"):
            # zeta moves by zeta_lr times it.
            assert_within(after[key] * options["zeta_lr"] / tau, table * options["zeta_lr"] / tau, logs, key)
        elif key.startswith("tau_momentum"):
            assert_within(after[key], table, logs * (1 + np.abs(table).max()), key)
        elif key.startswith("tau"):
            assert_within(after[key] / tau, table / tau, logs, f"{key} / tau")


@taus
@kinds
@stateful
@pytest.mark.parametrize("gamma", [0.8, 1.0])
def test_small_batch(name, options, kind, tau, gamma) -> None:
    objective = build(name, num_samples=23, temperature=tau, gamma=gamma, **options)
    for x, y, index in batches(kind, 8, steps=4):
        check_step(objective, loops, name, options, x, y, index, tau, gamma)


@taus
@kinds
@stateful
def test_larger_batch(name, options, kind, tau) -> None:
    objective = build(name, num_samples=899, temperature=tau, gamma=0.8, **options)
    for x, y, index in batches(kind, 300, steps=3):
        check_step(objective, matrices, name, options, x, y, index, tau, 0.8)


@taus
@kinds
@pytest.mark.parametrize("estimator", ["reference", "paper", "unbiased"])
@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_nuclr_from_a_spread_out_zeta(kind, tau, estimator, spread) -> None:
    """zeta as it is in the middle of a run, up to a thousand temperatures wide: exp(-zeta/tau) overflows float32."""
    options = {"zeta_lr": 1e-3 * min(1.0, tau / 0.01), "zeta_estimator": estimator}
    objective = build("nuclr", num_samples=23, temperature=tau, gamma=0.8, **options)
    generator = torch.Generator().manual_seed(1)
    for zeta, xi in ((objective.zeta_x, objective.xi_x), (objective.zeta_y, objective.xi_y)):
        zeta.uniform_(-spread, spread, generator=generator)
        xi.fill_(zeta.abs().max())
    for x, y, index in batches(kind, 8, steps=3):
        check_step(objective, loops, "nuclr", options, x, y, index, tau, 0.8)


@kinds
@pytest.mark.parametrize("name", ["sogclr", "isogclr", "nuclr"])
def test_many_steps_stay_finite(name, kind) -> None:
    """Two hundred steps at the smallest temperature, state carried along as in training."""
    objective = build(name, num_samples=23, temperature=0.001, gamma=0.8)
    for x, y, index in batches(kind, 8, steps=200):
        out, grad_x, grad_y = call(objective, x, y, index)
        assert out.loss.isfinite() and grad_x.isfinite().all() and grad_y.isfinite().all()
    for key, table in state_of(objective).items():
        assert not np.isnan(table).any() and not np.isposinf(table).any(), key


# ---------------------------------------------------------------------------------------------------------------------
# The stateless objectives
# ---------------------------------------------------------------------------------------------------------------------


def stateless_reference(name: str, x: Tensor, y: Tensor, tau: float) -> Tensor:
    if name == "siglip":
        log_scale, bias = torch.tensor([-math.log(tau), -10.0], dtype=torch.float64)
        return reference.siglip(x, y, log_scale, bias)
    return getattr(reference, name)(x, y, temperature=tau)


@taus
@kinds
@pytest.mark.parametrize("name", ["clip", "siglip", "dcl", "cyclip"])
def test_stateless(name, kind, tau) -> None:
    """These gradients carry a factor 1/tau, and probabilities off by what a rounded score over tau does to them."""
    objective = build(name, num_samples=23, temperature=tau)
    for x, y, index in batches(kind, 8, steps=2):
        out, grad_x, grad_y = call(objective, x, y, index)
        x, y = x.double().requires_grad_(), y.double().requires_grad_()
        value = stateless_reference(name, x, y, tau)
        value.backward()
        relative = 1e-4 + 8 * 2**-24 / tau
        assert_within(out.loss.item(), value.item(), relative * max(1.0, abs(value.item())), "value")
        for what, actual, exact in (("x", grad_x, x.grad), ("y", grad_y, y.grad)):
            bound = relative * max(exact.abs().max().item(), 1 / (tau * len(x)))
            assert_within(actual, exact, bound, f"gradient of {what}")
        for key, parameter in objective.named_parameters():
            assert parameter.grad.isfinite().all(), key


@taus
@kinds
@pytest.mark.parametrize("name", ["clip", "siglip", "dcl", "cyclip", "sogclr", "isogclr", "nuclr"])
def test_finite(name, kind, tau) -> None:
    objective = build(name, num_samples=899, temperature=tau)
    for x, y, index in batches(kind, 300, steps=3):
        out, grad_x, grad_y = call(objective, x, y, index)
        assert out.loss.isfinite() and grad_x.isfinite().all() and grad_y.isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------
# Half precision
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["clip", "siglip", "dcl", "cyclip", "sogclr", "isogclr", "nuclr"])
def test_half_precision_features_are_computed_in_float32(name, dtype) -> None:
    """Features in bf16 or fp16 give what their float32 conversions give; only the gradient is rounded, at the end."""
    half, full = (build(name, num_samples=23, temperature=0.01) for _ in range(2))
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


@pytest.mark.parametrize("convert", ["half", "bfloat16"])
@pytest.mark.parametrize("name", ["sogclr", "isogclr", "nuclr"])
def test_tables_stay_float32(name, convert) -> None:
    objective, untouched = (build(name, num_samples=23, temperature=0.01) for _ in range(2))
    getattr(objective, convert)()
    for x, y, index in batches("nearly aligned", 8, steps=3):
        call(objective, x, y, index)
        call(untouched, x, y, index)
    for key, buffer in objective.named_buffers():
        assert buffer.dtype in (torch.float32, torch.int64, torch.bool), key
        np.testing.assert_array_equal(state_of(objective)[key], state_of(untouched)[key], err_msg=key)
