"""An objective and its float64 loops on the same batches, for tests that compare the two to 1e-9."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from tests import reference
from tests.objectives.make import formula, make

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
FEW_MASKS = ("no ids", "both", "a row without negatives")
masked_in_few_ways = pytest.mark.parametrize("mask", [MASKS[name] for name in FEW_MASKS], ids=FEW_MASKS)

Views = tuple[int | None, int | None]  # of x and of y; None: features are (B, d)


def features(generator: torch.Generator, views: int | None = None) -> Tensor:
    shape = (BATCH, DIM) if views is None else (BATCH, views, DIM)
    return normalize(torch.randn(shape, dtype=torch.float64, generator=generator), dim=-1)


def batches(seed: int = 0, steps: int = STEPS, views: Views = (None, None)):
    """Yield (x, y, index) with new features each time; the second batch revisits the samples of the first."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randperm(SAMPLES, generator=generator)[:BATCH]
    for step in range(steps):
        if step > 1:
            index = torch.randperm(SAMPLES, generator=generator)[:BATCH]
        x = features(generator, views[0])
        center = x if views[0] is None else x.mean(dim=1)
        if views[1] is not None:
            center = center[:, None]
        yield x, normalize(center + 0.7 * features(generator, views[1]), dim=-1), index


def call(objective, x: Tensor, y: Tensor, index: Tensor | None, mask=(None, None), **more):
    """Call the objective as users do; return the output and the gradients with respect to the features."""
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    ids = {name: torch.tensor(id_) for name, id_ in zip(("x_id", "y_id"), mask, strict=True) if id_ is not None}
    objective.zero_grad()
    out = objective(x, y, index, **ids, **more)
    out.loss.backward()
    return out, x.grad, y.grad


def assert_close(actual, expected, what: str) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    # relative for large values: proximal averages let the weights of an anchor grow without a bound
    largest = np.abs(expected[np.isfinite(expected)]).max(initial=1.0)
    np.testing.assert_allclose(actual.reshape(expected.shape), expected, rtol=0, atol=TOLERANCE * largest, err_msg=what)


def state_of(objective) -> dict[str, np.ndarray]:
    return {name: buffer.detach().double().numpy().copy() for name, buffer in objective.named_buffers()}


def assert_same_state(objective, expected: dict[str, np.ndarray], when: str) -> None:
    actual = state_of(objective)
    for name, table in expected.items():
        if name.startswith("offset"):  # of the normalizer network: shows in u
            continue
        assert name in actual, f"{name} is not a buffer {when}"
        assert_close(actual[name], table, f"{name} {when}")


def assert_same_step(out, grad_x: Tensor, grad_y: Tensor, step: reference.Step, sides: str = "both") -> None:
    assert out.loss.dtype == grad_x.dtype == grad_y.dtype == torch.float64
    assert_close(out.loss.item(), step.value, "value")
    for side, value in (("x", step.value_x), ("y", step.value_y)):
        if sides in ("both", side):
            assert_close(float(out.metrics[f"objective_{side}"]), value, f"objective_{side}")
        else:
            assert f"objective_{side}" not in out.metrics
    assert_close(grad_x, step.grad_x, "gradient of x")
    assert_close(grad_y, step.grad_y, "gradient of y")


def materialize(objective, dtype: torch.dtype = torch.float64):
    """Show the objective one batch in eval mode, which fixes the width of its networks; return the objective."""
    x = torch.eye(2, DIM, dtype=dtype)
    objective.eval()(x, x)
    return objective.train()


def scatter_networks(objective, seed: int = 0) -> None:
    """Replace the parameters of the networks by random ones, so that their outputs are not constant."""
    generator = torch.Generator().manual_seed(seed)
    materialize(objective)
    with torch.no_grad():
        for name, parameter in objective.named_parameters():
            if "network" in name:
                size = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.1  # outputs of about 1 at any width
                parameter.copy_(size * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    objective.load_state_dict(objective.state_dict())  # so that the networks notice that all prototypes are set


def network_outputs(network: nn.Module, features: Tensor) -> Tensor:
    """Return the outputs of a network on (B, d) or (B, m, d) features, (B, m), with the graph of its parameters."""
    flat = features.reshape(-1, features.shape[-1])
    return network(flat).reshape(len(features), -1)


class Stateful:
    """An objective and its reference, which get the same batches."""

    def __init__(self, name: str, **options) -> None:
        self.settings = formula(name, num_samples=SAMPLES, **options)
        self.objective = make(name, num_samples=SAMPLES, **options).double()
        scatter_networks(self.objective)
        self.state = reference.initial_state(self.settings)
        assert_same_state(self.objective, self.state, "at the start")

    def set(self, **options) -> None:
        """Change attributes between steps, as a schedule does."""
        self.settings = self.settings.replace(**options)
        for key, value in options.items():
            setattr(self.objective, key, value)

    def networks(self) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
        """Return copies of the popularity and normalizer networks that this objective has, by side."""
        popularity, normalizer = {}, {}
        for a, c in self.settings.both_sides:
            if self.settings.popularity == "network":
                popularity[c] = copy.deepcopy(self.objective.popularity_networks[c])
            if self.settings.normalizer == "network":
                normalizer[a] = copy.deepcopy(self.objective.normalizer_networks[a])
        return popularity, normalizer

    def expected(
        self,
        x: Tensor,
        y: Tensor,
        index: Tensor | None,
        mask,
        training: bool = True,
        hard: Tensor | None = None,
        hard_id: list[list[int]] | None = None,
    ) -> reference.Step:
        by_side = {"x": x, "y": y}
        popularity, normalizer = self.networks()
        with torch.no_grad():
            h = {side: network_outputs(network, by_side[side]).numpy() for side, network in popularity.items()}
            if hard is not None and "y" in popularity:
                h["hard"] = network_outputs(popularity["y"], hard).numpy()
            k = {side: network_outputs(network, by_side[side]).numpy() for side, network in normalizer.items()}
        settings = self.settings
        if settings.learn_temperature:
            tau = math.exp(-self.objective.log_scale.item())
            settings = settings.replace(temperature=min(max(tau, 0.001), 1.0))
        x_id, y_id = mask
        ids = {"x_id": x_id, "y_id": y_id, "hard": None if hard is None else hard.numpy(), "hard_id": hard_id}
        return reference.step(settings, x.numpy(), y.numpy(), index, self.state, **ids, training=training, h=h, k=k)

    def expected_parameter_gradients(self, step: reference.Step, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Return the gradients of the objective's parameters, by name; call it before the objective's own step."""
        by_side, gradients = {"x": x, "y": y}, {}
        popularity, normalizer = self.networks()
        for kind, networks, arriving in (
            ("popularity", popularity, step.grad_h),
            ("normalizer", normalizer, step.grad_k),
        ):
            for side, network in networks.items():
                for name, parameter in network.named_parameters():
                    gradients[f"{kind}_networks.{side}.{name}"] = torch.zeros_like(parameter)
                if side in arriving:
                    outputs = network_outputs(network, by_side[side])
                    (outputs * torch.from_numpy(arriving[side])).sum().backward()
                    for name, parameter in network.named_parameters():
                        gradients[f"{kind}_networks.{side}.{name}"] = parameter.grad
        if self.settings.learn_temperature:
            tau = min(max(math.exp(-self.objective.log_scale.item()), 0.001), 1.0)
            gradients["log_scale"] = torch.tensor(-tau * step.grad_tau, dtype=torch.float64)
        return gradients

    def check(
        self,
        x: Tensor,
        y: Tensor,
        index: Tensor | None,
        mask=(None, None),
        hard: Tensor | None = None,
        hard_id: list[list[int]] | None = None,
    ) -> reference.Step:
        """Take one step with both, compare them, and move the parameters; return the step of the reference."""
        step = self.expected(x, y, index, mask, hard=hard, hard_id=hard_id)
        for gradient in step.grad_k.values():  # as a network sees it, it is clipped below; compare only above that
            assert gradient.min() * BATCH * gradient.shape[1] > -0.9 * math.exp(4.0), "choose a larger temperature"
        parameter_gradients = self.expected_parameter_gradients(step, x, y)
        negatives = None if hard is None else hard.clone().requires_grad_()
        more = {} if hard_id is None else {"negative_id": hard_id}
        outcome = call(self.objective, x, y, index, mask, negatives=negatives, **more)
        assert_same_step(*outcome, step, self.settings.sides)
        if negatives is not None:
            assert_close(negatives.grad, step.grad_hard, "gradient of the hard negatives")
        assert_same_state(self.objective, step.state, "after the step")
        parameters = dict(self.objective.named_parameters())
        assert set(parameters) == set(parameter_gradients)
        with torch.no_grad():
            for name, parameter in parameters.items():
                actual = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                assert_close(actual, parameter_gradients[name], f"gradient of {name}")
                parameter -= (0.01 if name == "log_scale" else 1e-3) * actual  # the networks are wide
        self.state = step.state
        return step


def run(name: str, mask=(None, None), views: Views = (None, None), **options) -> Stateful:
    """Compare five batches; return the pair of objective and reference afterwards."""
    pair = Stateful(name, **options)
    for batch in batches(views=views):
        pair.check(*batch, mask)
    return pair


def assert_same_training(
    special: nn.Module,
    general: nn.Module,
    *,
    value: bool = True,
    atol: float = 1e-9,
    mask: tuple = (None, None),
) -> None:
    """Train both on the same batches: values (if asked for), gradients and the tables of `general` must be equal."""
    for batch in batches():
        out, *gradients = call(special, *batch, mask)
        expected, *expected_gradients = call(general, *batch, mask)
        if value:
            torch.testing.assert_close(out.loss, expected.loss, rtol=0, atol=atol)
        for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=atol)
    for key, table in state_of(general).items():
        np.testing.assert_allclose(state_of(special)[key], table, rtol=0, atol=atol, err_msg=key)
