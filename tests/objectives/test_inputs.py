"""What users may pass: numpy arrays and lists, features to normalize; and what an objective shows of itself."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from nuclr.objectives import ISogCLR, SigLIP, names, options
from nuclr.objectives.registry import COMMON
from tests.objectives.make import make

N, B, D = 20, 6, 4


def features(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (normalize(torch.randn(B, D, generator=generator, dtype=torch.float64), dim=1).to(dtype) for _ in range(2))
    return x, y


INDEX, X_ID = [3, 0, 19, 7, 8, 2], [0, 0, 1, 2, 3, 4]


# Types


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", names())
def test_numpy_arrays_and_lists_give_the_same_as_tensors(name: str, dtype: torch.dtype) -> None:
    x, y = features(dtype)
    expected = make(name, num_samples=N)
    loss = expected(x, y, torch.tensor(INDEX), x_id=torch.tensor(X_ID)).loss
    for index, x_id in ((INDEX, tuple(X_ID)), (np.array(INDEX), np.array(X_ID, dtype=np.int32))):
        objective = make(name, num_samples=N)
        out = objective(x.numpy(), y.numpy(), index, x_id=x_id)
        assert isinstance(out.loss, Tensor) and torch.equal(out.loss, loss)
        for key, value in objective.state_dict().items():
            assert torch.equal(value, expected.state_dict()[key]), key


def test_a_tensor_keeps_its_gradient_next_to_an_array() -> None:
    x, y = features()
    x.requires_grad_()
    make("nuclr", num_samples=N)(x, y.numpy(), range(B)).loss.backward()
    assert x.grad.abs().sum() > 0


# Unit norm


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("side", ["x", "y"])
def test_features_without_unit_norm_are_refused(name: str, side: str) -> None:
    for training, rows, factor in itertools.product(
        (True, False), (slice(None), 0, B // 2, B - 1), (0.0, 0.98, 1.02, 30.0)
    ):
        objective = make(name, num_samples=N).train(training)
        before = copy.deepcopy(objective.state_dict())
        both = dict(zip("xy", features(), strict=True))
        both[side][rows] *= factor
        row = rows if isinstance(rows, int) else r"\d"
        with pytest.raises(ValueError, match=rf"{side} .*row {row} .*{factor:g}; .*normalize=True"):
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
            make(name, num_samples=64)(rounded, rounded, range(64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", names())
def test_normalize_true_equals_normalized_features_with_gradients(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    raw = [5 * torch.randn(B, D, generator=generator).to(dtype) for _ in range(2)]
    inside, outside = ([t.clone().requires_grad_() for t in raw] for _ in range(2))
    objective, expected = make(name, num_samples=N, normalize=True), make(name, num_samples=N)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for _ in range(2):
        loss = objective(*inside, INDEX).loss
        loss.backward()
        expected_loss = expected(*(normalize(t.to(wide), dim=1) for t in outside), INDEX).loss
        expected_loss.backward()
        assert torch.equal(loss, expected_loss)
    for one, two in zip(inside, outside, strict=True):
        assert one.grad.dtype == dtype and torch.equal(one.grad, two.grad)


# Temperature and repr


@pytest.mark.parametrize("name", names())
def test_current_temperature_starts_at_the_setting_and_follows_schedules_and_scales(name: str) -> None:
    objective = make(name, num_samples=N, temperature=0.07)
    assert objective.current_temperature == pytest.approx(0.07, rel=1e-6)
    if name in ("sogclr", "nuclr", "dcl"):
        objective.temperature = 0.2
        assert objective.current_temperature == 0.2
    if name in ("clip", "cyclip", "siglip"):
        objective = make(name, **({} if name == "siglip" else {"learn_temperature": True}))
        limit = 400 if name == "siglip" else 100
        for scale in (20.0, 400.0):
            objective.log_scale.data.fill_(math.log(scale))
            assert objective.current_temperature == pytest.approx(1 / min(scale, limit), rel=1e-6)


def test_current_temperature_of_isogclr_is_the_mean_over_seen_samples() -> None:
    objective = ISogCLR(num_samples=N, temperature=0.1, temperatures={"tau_lr": 0.01})
    x, y = features()
    objective(x, y, INDEX)
    expected = torch.cat([objective.tau_x[INDEX], objective.tau_y[INDEX]]).double().mean().item()
    assert objective.current_temperature == pytest.approx(expected, abs=1e-9)
    assert objective.current_temperature != pytest.approx(0.1, abs=1e-4)


@pytest.mark.parametrize("name", names())
def test_repr_is_one_line_of_settings(name: str) -> None:
    objective = make(name, num_samples=N, temperature=0.25)
    shown = repr(objective)
    assert "\n" not in shown and shown.startswith(f"{type(objective).__name__}(") and "temperature=0.25" in shown
    for option, default in options(name).items():
        # records and options that are off by default are shown unless they have their default
        assert f"{option}=" in shown or isinstance(default, dict) or option in COMMON, option
    objective.false_negative_margin = 0.1
    assert "false_negative_margin=0.1" in repr(objective)
    objective.temperature = 0.5
    assert name == "siglip" or "temperature=0.5" in repr(objective), "a schedule's value is shown"


def test_repr_of_records_and_of_parameters_without_values() -> None:
    assert "state=StatePlacement(device='cpu'" in repr(make("nuclr", num_samples=N, state_device="cpu"))
    assert "bias=-5" in repr(SigLIP(bias=-5)) and "bias=nan" in repr(SigLIP().to("meta"))
