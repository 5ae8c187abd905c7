"""What users may pass: numpy arrays and lists, features to normalize; and what an objective shows of itself."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from nuclr.objectives import CLIP, ISogCLR, SigLIP, build, names, options

N, B, D = 20, 6, 4


def features(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (normalize(torch.randn(B, D, generator=generator, dtype=torch.float64), dim=1).to(dtype) for _ in range(2))
    return x, y


INDEX, X_ID = [3, 0, 19, 7, 8, 2], [0, 0, 1, 2, 3, 4]


# ---------------------------------------------------------------------------------------------------------------------
# Types
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", names())
def test_numpy_arrays_and_lists_give_the_same_as_tensors(name: str, dtype: torch.dtype) -> None:
    x, y = features(dtype)
    expected = build(name, num_samples=N)
    loss = expected(x, y, torch.tensor(INDEX), x_id=torch.tensor(X_ID)).loss
    for index, x_id in ((INDEX, tuple(X_ID)), (np.array(INDEX), np.array(X_ID, dtype=np.int32))):
        objective = build(name, num_samples=N)
        out = objective(x.numpy(), y.numpy(), index, x_id=x_id)
        assert isinstance(out.loss, Tensor) and torch.equal(out.loss, loss)
        for key, value in objective.state_dict().items():
            assert torch.equal(value, expected.state_dict()[key]), key


def test_a_tensor_keeps_its_gradient_next_to_an_array() -> None:
    x, y = features()
    x.requires_grad_()
    build("nuclr", num_samples=N)(x, y.numpy(), range(B)).loss.backward()
    assert x.grad.abs().sum() > 0


def test_arrays_that_torch_does_not_take_as_they_are() -> None:
    x, y = (t.numpy() for t in features())
    x.setflags(write=False)
    expected = build("clip")(x[::-1].copy(), y[::-1].copy()).loss
    assert torch.equal(build("clip")(x[::-1], y[::-1]).loss, expected)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": [[1.0, 0.0]]}, TypeError, "x must be a tensor or a numpy array of features, but is of type list"),
        ({"y": None}, TypeError, "y must be a tensor or a numpy array of features, but is of type NoneType"),
        ({"x": np.array([["a"]])}, TypeError, "x cannot be converted to a tensor"),
        ({"index": 3}, TypeError, "index must be a tensor, numpy array or list of integers, but is 3"),
        ({"index": "all"}, TypeError, "index must be a tensor, numpy array or list of integers, but is 'all'"),
        ({"index": ["a"] * B}, TypeError, "index cannot be converted to a tensor"),
        ({"index": [[0], [1, 2]]}, TypeError, "index cannot be converted to a tensor"),
        (
            {"index": [0.5] * B},
            ValueError,
            r"index must be \(6,\) integers, one per pair, but is \(6,\) of torch.float64",
        ),
        (
            {"x_id": [True] * B},
            ValueError,
            r"x_id must be \(6,\) integers, one per pair, or \(6, k\), but is \(6,\) of torch.bool",
        ),
        ({"y_id": {1, 2}}, TypeError, "y_id must be a tensor, numpy array or list of integers, but is of type set"),
        ({"x": np.ones(D), "y": np.ones(D)}, ValueError, r"x is \(4,\).*a single vector has no negatives"),
        ({"x": torch.ones(B, D, device="meta")}, ValueError, "on one device, but x is on meta and y on cpu"),
    ],
)
@pytest.mark.parametrize("name", ["clip", "nuclr"])
def test_wrong_types_are_refused_by_argument(name: str, changes: dict, error: type, message: str) -> None:
    x, y = features()
    with pytest.raises(error, match=message):
        build(name, num_samples=N)(**({"x": x, "y": y, "index": INDEX} | changes))


# ---------------------------------------------------------------------------------------------------------------------
# Unit norm
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("side", ["x", "y"])
def test_features_without_unit_norm_are_refused(name: str, side: str) -> None:
    for training, rows, factor in itertools.product(
        (True, False), (slice(None), 0, B // 2, B - 1), (0.0, 0.98, 1.02, 30.0)
    ):
        objective = build(name, num_samples=N).train(training)
        before = copy.deepcopy(objective.state_dict())
        both = dict(zip("xy", features(), strict=True))
        both[side][rows] *= factor
        row = rows if isinstance(rows, int) else r"\d"
        problem = rf"{side} must have unit norm, but row {row} of the global batch has norm {factor:g}; "
        fix = rf"pass F\.normalize\({side}, dim=-1\), or build the objective with normalize=True"
        with pytest.raises(ValueError, match=problem + fix):
            objective(**both, index=INDEX)
        for key, value in objective.state_dict().items():
            assert torch.equal(value, before[key]), "refused input must not change the state"


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("width", [2, 64, 1024])
def test_rounding_is_accepted(name: str, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(64, width, generator=generator, dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rounded in (normalize(exact, dim=1).to(dtype), normalize(exact.to(dtype), dim=1)):
            build(name, num_samples=64)(rounded, rounded, range(64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", names())
def test_normalize_true_equals_normalized_features_with_gradients(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    raw = [5 * torch.randn(B, D, generator=generator).to(dtype) for _ in range(2)]
    inside, outside = ([t.clone().requires_grad_() for t in raw] for _ in range(2))
    objective, expected = build(name, num_samples=N, normalize=True), build(name, num_samples=N)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for _ in range(2):
        loss = objective(*inside, INDEX).loss
        loss.backward()
        expected_loss = expected(*(normalize(t.to(wide), dim=1) for t in outside), INDEX).loss
        expected_loss.backward()
        assert torch.equal(loss, expected_loss)
    for one, two in zip(inside, outside, strict=True):
        assert one.grad.dtype == dtype and torch.equal(one.grad, two.grad)


# ---------------------------------------------------------------------------------------------------------------------
# Temperature and repr
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_current_temperature_starts_at_the_setting(name: str) -> None:
    assert build(name, num_samples=N, temperature=0.07).current_temperature == pytest.approx(0.07, rel=1e-6)


@pytest.mark.parametrize("name", ["clip", "cyclip"])
def test_current_temperature_follows_the_learnt_scale(name: str) -> None:
    objective = build(name, temperature=0.07, learn_temperature=True)
    for scale, temperature in ((20.0, 0.05), (400.0, 0.01)):  # the scale is limited to 100
        objective.log_scale.data.fill_(math.log(scale))
        assert objective.current_temperature == pytest.approx(temperature, rel=1e-6)
    siglip = SigLIP()
    siglip.log_scale.data.fill_(math.log(400.0))
    assert siglip.current_temperature == pytest.approx(1 / 400, rel=1e-6)


@pytest.mark.parametrize("name", ["sogclr", "nuclr", "dcl"])
def test_current_temperature_follows_a_schedule(name: str) -> None:
    objective = build(name, num_samples=N)
    objective.temperature = 0.2
    assert objective.current_temperature == 0.2


def test_current_temperature_of_isogclr_is_the_mean_over_seen_samples() -> None:
    objective = ISogCLR(num_samples=N, temperature=0.1, tau_lr=0.01)
    x, y = features()
    objective(x, y, INDEX)
    expected = torch.cat([objective.tau_x[INDEX], objective.tau_y[INDEX]]).double().mean().item()
    assert objective.current_temperature == pytest.approx(expected, abs=1e-9)
    assert objective.current_temperature != pytest.approx(0.1, abs=1e-4)


def test_repr_is_one_line_of_settings() -> None:
    objective = build("nuclr", num_samples=N, zeta_lr=0.01, xi_init=math.inf, state_device="cpu")
    shown = repr(objective)
    assert shown.startswith(
        "NUCLR(num_samples=20, temperature=0.03, gamma=0.8, zeta_init=0.0, xi_init=inf, xi_rule='norm', use_xi=True, "
        "zeta_lr=0.01, zeta_lr_ratio_x=1.0, zeta_momentum=0.0, zeta_estimator='reference', zeta_optimizer='sgd', "
    )
    assert shown.endswith("state_device='cpu', state_sharding=False, normalize=False)")
    assert "\n" not in shown
    objective.gamma = 0.5
    assert "gamma=0.5" in repr(objective), "a schedule's value is shown"
    assert repr(CLIP(learn_temperature=True)) == "CLIP(temperature=0.05, learn_temperature=True, normalize=False)"
    assert repr(SigLIP(bias=-5)) == "SigLIP(temperature=0.1, bias=-5, normalize=False)"
    assert "bias=?" in repr(SigLIP().to("meta"))


@pytest.mark.parametrize("name", names())
def test_repr_has_every_option(name: str) -> None:
    shown = repr(build(name, num_samples=N))
    assert "\n" not in shown
    for option in options(name):
        assert f"{option}=" in shown or option == "state_device", option
