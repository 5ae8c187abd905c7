"""Every objective against float64 loops: value, gradients and state over five batches that revisit samples, to 1e-9."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from nuclr.objectives import build
from tests import reference

# float32 cannot represent (n-1)/(B-1), n/B or their logarithms: a constant that was rounded to float32 shows.
SAMPLES, BATCH, DIM, STEPS = 24, 7, 5, 5
TOLERANCE = 1e-9

MASKS = {
    "no ids": (None, None),
    # Pairs 0-2 are captions of one image, 3-4 of another.
    "several captions per image": ([0, 0, 0, 1, 1, 2, 3], None),
    "repeated captions": (None, [0, 1, 2, 2, 3, 4, 0]),
    "both": ([0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 3, 3, 0]),
    # Pair 0 shares its image with pairs 1-3 and its caption with pairs 4-6: it has no negatives, c_0 = 0.
    "a row without negatives": ([0, 0, 0, 0, 4, 5, 6], [0, 1, 2, 3, 0, 0, 0]),
    "no negatives at all": ([0] * BATCH, None),
    # Each x has the id of its image and of a group of images. 5 in one column is not 5 in the other.
    "groups of x": ([[0, 5], [0, 5], [1, 5], [2, 6], [3, 7], [5, 8], [6, 9]], None),
    "groups of both": (
        [[0, 5], [0, 5], [1, 5], [2, 6], [3, 7], [5, 8], [6, 9]],
        [[0, 0], [1, 1], [2, 2], [3, 3], [4, 3], [0, 6], [7, 7]],
    ),
}
masked = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())


def features(generator: torch.Generator) -> Tensor:
    return normalize(torch.randn(BATCH, DIM, dtype=torch.float64, generator=generator), dim=1)


def batches(seed: int = 0, steps: int = STEPS):
    """Yield (x, y, index) with new features each time; the second batch revisits the samples of the first."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randperm(SAMPLES, generator=generator)[:BATCH]
    for step in range(steps):
        if step > 1:
            index = torch.randperm(SAMPLES, generator=generator)[:BATCH]
        x = features(generator)
        yield x, normalize(x + 0.7 * features(generator), dim=1), index


def call(objective, x: Tensor, y: Tensor, index: Tensor | None, mask=(None, None)):
    """Call the objective as users do; return the output and the gradients with respect to the features."""
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    ids = {name: torch.tensor(id_) for name, id_ in zip(("x_id", "y_id"), mask, strict=True) if id_ is not None}
    objective.zero_grad()
    out = objective(x, y, index, **ids)
    out.loss.backward()
    return out, x.grad, y.grad


def assert_close(actual, expected, what: str) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    np.testing.assert_allclose(actual.reshape(expected.shape), expected, rtol=0, atol=TOLERANCE, err_msg=what)


def state_of(objective) -> dict[str, np.ndarray]:
    return {name: buffer.detach().double().numpy().copy() for name, buffer in objective.named_buffers()}


def assert_same_state(objective, expected: dict[str, np.ndarray], when: str) -> None:
    actual = state_of(objective)
    assert set(expected) <= set(actual)
    for name, table in expected.items():
        assert_close(actual[name], table, f"{name} {when}")


def assert_same_step(out, grad_x: Tensor, grad_y: Tensor, step: reference.Step) -> None:
    assert out.loss.dtype == grad_x.dtype == grad_y.dtype == torch.float64
    assert_close(out.loss.item(), step.value, "value")
    assert_close(float(out.metrics["objective_x"]), step.value_x, "objective_x")
    assert_close(float(out.metrics["objective_y"]), step.value_y, "objective_y")
    assert_close(grad_x, step.grad_x, "gradient of x")
    assert_close(grad_y, step.grad_y, "gradient of y")


class Stateful:
    """An objective and its reference, which get the same batches."""

    def __init__(self, name: str, **options) -> None:
        self.name, self.options = name, options
        self.objective = build(name, num_samples=SAMPLES, **options).double()
        starting = {"sogclr": (), "isogclr": ("temperature",), "nuclr": ("zeta_init", "xi_init", "xi_rule")}[name]
        starting_options = {key: options[key] for key in starting if key in options}
        start = getattr(reference, f"{name}_state")(SAMPLES, **starting_options)
        # Tables start in float32, which rounds 0.1; after that both compute in float64.
        self.state = {key: np.float64(np.float32(table)) for key, table in start.items()}
        assert_same_state(self.objective, self.state, "at the start")

    def expected(self, x: Tensor, y: Tensor, index: Tensor | None, mask, training: bool = True) -> reference.Step:
        options = {key: value for key, value in self.options.items() if key != "xi_init"}
        x_id, y_id = mask
        step = getattr(reference, self.name)
        return step(x.numpy(), y.numpy(), index, self.state, x_id=x_id, y_id=y_id, training=training, **options)

    def set(self, **options) -> None:
        """Change attributes between steps, as a schedule does."""
        self.options |= options
        for key, value in options.items():
            setattr(self.objective, key, value)

    def check(self, x: Tensor, y: Tensor, index: Tensor, mask=(None, None)) -> None:
        step = self.expected(x, y, index, mask)
        assert_same_step(*call(self.objective, x, y, index, mask), step)
        assert_same_state(self.objective, step.state, "after the step")
        self.state = step.state


def run(name: str, mask=(None, None), **options) -> Stateful:
    pair = Stateful(name, **options)
    for batch in batches():
        pair.check(*batch, mask)
    return pair


# ---------------------------------------------------------------------------------------------------------------------
# SogCLR, iSogCLR
# ---------------------------------------------------------------------------------------------------------------------


@masked
@pytest.mark.parametrize("gamma", [0.8, 1.0])
def test_sogclr(gamma, mask) -> None:
    run("sogclr", mask, temperature=0.1, gamma=gamma)


@masked
@pytest.mark.parametrize("gamma", [0.8, 1.0])
def test_isogclr(gamma, mask) -> None:
    pair = run("isogclr", mask, temperature=0.1, gamma=gamma, tau_lr=2e-3)
    if mask[0] != [0] * BATCH:
        assert pair.state["tau_x"].std() > 1e-3, "this test needs temperatures that have moved"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rho": 0.3, "tau_lr": 0.01},  # m_i of both signs
        {"tau_lr": 0.05, "tau_min": 0.02, "tau_max": 0.12},  # tau reaches its bounds
        {"tau_lr": 1e-3, "tau_beta": 0.9},
    ],
    ids=str,
)
def test_isogclr_options(options) -> None:
    run("isogclr", temperature=0.1, gamma=0.8, **options)


# ---------------------------------------------------------------------------------------------------------------------
# NUCLR
# ---------------------------------------------------------------------------------------------------------------------

NUCLR = {"temperature": 0.1, "gamma": 0.8, "zeta_lr": 0.02}
estimators = pytest.mark.parametrize("estimator", ["reference", "paper", "unbiased"])
xi_rules = pytest.mark.parametrize("xi_rule", ["norm", "max"])


@masked
@estimators
@xi_rules
@pytest.mark.parametrize("use_xi", [True, False])
def test_nuclr(estimator, xi_rule, use_xi, mask) -> None:
    pair = run("nuclr", mask, **NUCLR, zeta_estimator=estimator, xi_rule=xi_rule, use_xi=use_xi)
    if mask[0] != [0] * BATCH:
        assert np.abs(pair.state["zeta_y"]).max() > 1e-3, "this test needs a zeta that has moved"
        assert pair.state["xi_y"] > 0 or xi_rule == "max"


@estimators
@xi_rules
@pytest.mark.parametrize("gamma", [0.8, 1.0])
@pytest.mark.parametrize("mask", [MASKS["no ids"], MASKS["both"]], ids=["no ids", "both"])
@pytest.mark.parametrize(
    "options",
    [
        {"zeta_momentum": 0.9, "zeta_lr_ratio_x": 3.0},
        {"zeta_init": -0.2},
        {"zeta_init": 0.1, "xi_init": 0.15},
        {"xi_init": math.inf, "zeta_init": -0.1},
        {"xi_init": -0.5, "zeta_init": -0.2},
        {"temperature": 0.01, "zeta_lr": 1e-3},
    ],
    ids=str,
)
def test_nuclr_options(estimator, xi_rule, gamma, mask, options) -> None:
    run("nuclr", mask, **(NUCLR | options | {"gamma": gamma}), zeta_estimator=estimator, xi_rule=xi_rule)


def test_defaults_are_the_documented_ones() -> None:
    defaults = {
        "temperature": 0.03,
        "gamma": 0.8,
        "zeta_init": 0.0,
        "xi_init": 0.0,
        "xi_rule": "norm",
        "use_xi": True,
        "zeta_lr": 1e-3,
        "zeta_lr_ratio_x": 1.0,
        "zeta_momentum": 0.0,
        "zeta_estimator": "reference",
    }
    pair = Stateful("nuclr", **defaults)
    pair.objective = build("nuclr", num_samples=SAMPLES).double()
    for batch in batches():
        pair.check(*batch)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@estimators
def test_zeta_lr_set_between_steps(momentum, estimator) -> None:
    """While zeta_lr is 0, zeta, its velocity and xi are frozen, but u is updated; gamma and temperature change too."""
    pair = Stateful("nuclr", temperature=0.1, gamma=0.8, zeta_lr=0.0, zeta_momentum=momentum, zeta_estimator=estimator)
    schedule = [
        {"zeta_lr": 0.0},
        {"zeta_lr": 0.0, "gamma": 0.5},
        {"zeta_lr": 0.05},
        {"zeta_lr": 0.02, "temperature": 0.07},
        {"zeta_lr": 0.0, "gamma": 1.0},
        {"zeta_lr": 0.01, "gamma": 0.3},
    ]
    for settings, batch in zip(schedule, batches(steps=len(schedule)), strict=True):
        pair.set(**settings)
        before = state_of(pair.objective)
        pair.check(*batch)
        if settings["zeta_lr"] == 0:
            for name in ("zeta_x", "zeta_y", "zeta_velocity_x", "zeta_velocity_y", "xi_x", "xi_y"):
                np.testing.assert_array_equal(state_of(pair.objective)[name], before[name])


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------------------------------

STATEFUL = [
    ("sogclr", {"temperature": 0.1, "gamma": 0.8}),
    ("isogclr", {"temperature": 0.1, "gamma": 0.8, "tau_lr": 2e-3}),
    ("nuclr", NUCLR),
    ("nuclr", NUCLR | {"use_xi": False, "zeta_estimator": "unbiased"}),
]


@masked
@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize(("name", "options"), STATEFUL, ids=lambda value: str(value))
def test_eval_leaves_state_untouched(name, options, with_index, mask) -> None:
    """With an index, seen rows use the stored u and unseen rows the batch's phi; without one, all use phi."""
    pair = Stateful(name, **options)
    for batch in batches(steps=2):
        pair.check(*batch)
    seen = np.isfinite(pair.state["log_u_x"])
    *_, (x, y, _) = batches(seed=1)
    index = torch.from_numpy(np.concatenate([np.flatnonzero(seen)[:4], np.flatnonzero(~seen)[: BATCH - 4]]))

    pair.objective.eval()
    before = state_of(pair.objective)
    step = pair.expected(x, y, index if with_index else None, mask, training=False)
    assert_same_step(*call(pair.objective, x, y, index if with_index else None, mask), step)
    for key, table in state_of(pair.objective).items():
        np.testing.assert_array_equal(table, before[key])

    pair.objective.train()
    pair.check(x, y, index, mask)


# ---------------------------------------------------------------------------------------------------------------------
# Stateless objectives
# ---------------------------------------------------------------------------------------------------------------------


def check_stateless(objective, loops, mask) -> None:
    """Compare with loops(x, y, parameters, x_id, y_id), where parameters maps names to the objective's parameters."""
    objective = objective.double()
    for x, y, index in batches():
        out, grad_x, grad_y = call(objective, x, y, index, mask)
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
        parameters = {name: p.detach().clone().requires_grad_() for name, p in objective.named_parameters()}
        value = loops(x, y, parameters, *mask)
        value.backward()
        assert out.loss.dtype == torch.float64
        assert_close(out.loss.item(), value.item(), "value")
        assert_close(grad_x, x.grad, "gradient of x")
        assert_close(grad_y, y.grad, "gradient of y")
        for name, parameter in objective.named_parameters():
            assert_close(parameter.grad, parameters[name].grad, f"gradient of {name}")
        with torch.no_grad():
            for parameter in objective.parameters():
                parameter -= 0.05 * parameter.grad


@masked
@pytest.mark.parametrize("tau", [0.01, 0.1, 1.0])
def test_clip(tau, mask) -> None:
    objective = build("clip", num_samples=SAMPLES, temperature=tau)
    assert not list(objective.parameters())
    check_stateless(objective, lambda x, y, p, i, j: reference.clip(x, y, temperature=tau, x_id=i, y_id=j), mask)


@masked
@pytest.mark.parametrize("tau", [0.03, 0.1])
def test_clip_learns_its_temperature(tau, mask) -> None:
    objective = build("clip", num_samples=SAMPLES, temperature=tau, learn_temperature=True)
    ((name, log_scale),) = objective.named_parameters()
    assert log_scale.item() == pytest.approx(math.log(1 / tau))
    check_stateless(objective, lambda x, y, p, i, j: reference.clip_learnable(x, y, p[name], i, j), mask)


def test_clip_scale_stops_at_100() -> None:
    learnable = build("clip", num_samples=SAMPLES, temperature=0.05, learn_temperature=True).double()
    log_scale = torch.tensor(math.log(400.0), dtype=torch.float64)
    with torch.no_grad():
        next(learnable.parameters()).copy_(log_scale)
    for x, y, index in batches():
        out, grad_x, grad_y = call(learnable, x, y, index)
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
        value = reference.clip_learnable(x, y, log_scale)
        value.backward()
        assert_close(out.loss.item(), value.item(), "value")
        assert_close(grad_x, x.grad, "gradient of x")
        assert_close(grad_y, y.grad, "gradient of y")


@masked
@pytest.mark.parametrize("options", [{}, {"temperature": 0.3, "bias": -1.0}], ids=str)
def test_siglip(options, mask) -> None:
    objective = build("siglip", num_samples=SAMPLES, **options)
    named = dict(objective.named_parameters())
    (bias,) = [name for name in named if "bias" in name]
    (log_scale,) = [name for name in named if "bias" not in name]
    assert named[bias].item() == pytest.approx(options.get("bias", -10.0))
    assert named[log_scale].item() == pytest.approx(-math.log(options.get("temperature", 0.1)))
    check_stateless(objective, lambda x, y, p, i, j: reference.siglip(x, y, p[log_scale], p[bias], i, j), mask)


@masked
@pytest.mark.parametrize(
    "options",
    # With the last options, debiased sums are negative, below the lower bound, and above it.
    [{"temperature": 0.1}, {"temperature": 1.0, "tau_plus": 0.01}, {"temperature": 1.0, "tau_plus": 0.5}],
    ids=str,
)
def test_dcl(options, mask) -> None:
    objective = build("dcl", num_samples=SAMPLES, **options)
    check_stateless(objective, lambda x, y, p, i, j: reference.dcl(x, y, x_id=i, y_id=j, **options), mask)


@masked
@pytest.mark.parametrize("tau", [0.03, 0.5])
def test_cyclip(tau, mask) -> None:
    objective = build("cyclip", num_samples=SAMPLES, temperature=tau)
    check_stateless(objective, lambda x, y, p, i, j: reference.cyclip(x, y, temperature=tau, x_id=i, y_id=j), mask)


# ---------------------------------------------------------------------------------------------------------------------
# The reference itself
# ---------------------------------------------------------------------------------------------------------------------


def test_reference_gradient_is_that_of_the_surrogate() -> None:
    """Compare with central differences of (1/B) sum w_ij (s_ij - s_ii), at fixed w."""
    generator = torch.Generator().manual_seed(3)
    anchors, candidates = features(generator).numpy(), features(generator).numpy()
    w = torch.rand(BATCH, BATCH, dtype=torch.float64, generator=generator).tolist()

    def surrogate(a: np.ndarray, c: np.ndarray) -> float:
        s = reference.scores(a, c)
        return sum(w[i][j] * (s[i][j] - s[i][i]) for i in range(BATCH) for j in range(BATCH)) / BATCH

    gradients = reference.surrogate_gradient(anchors, candidates, w)
    for which, gradient in enumerate(gradients):
        for position in np.ndindex(gradient.shape):
            shift = np.zeros_like(gradient)
            shift[position] = 1e-4
            up = [f + shift if k == which else f for k, f in enumerate((anchors, candidates))]
            down = [f - shift if k == which else f for k, f in enumerate((anchors, candidates))]
            assert abs((surrogate(*up) - surrogate(*down)) / 2e-4 - gradient[position]) < 1e-9


@pytest.mark.parametrize("tau", [0.03, 0.1, 1.0])
def test_reference_zeta_gradient_is_that_of_the_convex_problem(tau) -> None:
    """If the batch is the whole data set and u is exact, n G_j is n times the derivative of the convex problem."""
    generator = torch.Generator().manual_seed(4)
    x, y = features(generator), features(generator)
    zeta = (0.2 * torch.randn(BATCH, dtype=torch.float64, generator=generator)).requires_grad_()
    problem = (tau * torch.logsumexp((x @ y.T - zeta) / tau, 1)).mean() + zeta.mean()
    problem.backward()

    s, kept, values = reference.scores(x.numpy(), y.numpy()), reference.kept_pairs(BATCH), zeta.tolist()
    log_u = reference.log_phi(s, kept, values, [tau] * BATCH, BATCH)
    for estimator in ("unbiased", "paper", "reference"):  # they agree if B = n
        gradient = reference.zeta_gradient(s, kept, values, tau, log_u, estimator, BATCH)
        assert_close(gradient, BATCH * zeta.grad, estimator)


def test_reference_relations() -> None:
    """NUCLR with frozen zeta = 0 and without the positive term is SogCLR; iSogCLR with tau_lr = 0 adds rho tau."""
    nuclr, isogclr = reference.nuclr_state(SAMPLES, xi_init=math.inf), reference.isogclr_state(SAMPLES, 0.1)
    sogclr = reference.sogclr_state(SAMPLES)
    for x, y, index in batches():
        x, y = x.numpy(), y.numpy()
        one = reference.sogclr(x, y, index, sogclr, temperature=0.1, gamma=0.8)
        two = reference.nuclr(x, y, index, nuclr, temperature=0.1, gamma=0.8, zeta_lr=0.0)
        three = reference.isogclr(x, y, index, isogclr, temperature=0.1, gamma=0.8, tau_lr=0.0)
        sogclr, nuclr, isogclr = one.state, two.state, three.state
        for other in (two, three):
            assert_close(other.grad_x, one.grad_x, "gradient of x")
            assert_close(other.grad_y, one.grad_y, "gradient of y")
        assert three.value == pytest.approx(one.value + 2 * 8.0 * 0.1)
