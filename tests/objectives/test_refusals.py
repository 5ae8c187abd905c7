"""Wrong input is refused with a ValueError that names the argument, its value and what is allowed.

Wrong types and norms are in test_inputs.py.
"""

import math

import pytest
import torch
from torch.nn.functional import normalize

from nuclr.objectives import build, entry, names

ALL = names()
STATEFUL = tuple(name for name in ALL if entry(name).needs_num_samples)
N = 10


def features(rows: int = 4, width: int = 3) -> torch.Tensor:
    return normalize(torch.randn(rows, width, generator=torch.Generator().manual_seed(0)), dim=1)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (features(4), features(5), r"x is \(4, 3\) and y is \(5, 3\)"),
        (features(4), features(4, 2), r"x is \(4, 3\) and y is \(4, 2\)"),
        (features(4)[0], features(4)[0], r"x is \(3,\).*a single vector has no negatives"),
        (features(1), features(1), "batch has 1 pair.*at least 2"),
        (features(4).long(), features(4).long(), "floating-point"),
        (features(4), features(4).double(), "one floating-point dtype, but x is torch.float32 and y is torch.float64"),
    ],
)
def test_shapes(name: str, x: torch.Tensor, y: torch.Tensor, message: str) -> None:
    objective = build(name, num_samples=N)
    with pytest.raises(ValueError, match=message):
        objective(x, y, torch.arange(len(x)))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("side", ["x", "y"])
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((4, 2, 2, 3), r"\(4, 2, 2, 3\)"),  # views in two dimensions
        ((4, 0, 3), r"\(4, 0, 3\)"),  # no views
        ((5, 2, 3), r"\(5, 2, 3\)"),  # views of another number of samples
        ((4, 2, 2), r"\(4, 2, 2\)"),  # another width
    ],
)
def test_shapes_of_views(name: str, side: str, shape: tuple[int, ...], message: str) -> None:
    objective = build(name, num_samples=N)
    both = {"x": features(4), "y": features(4)}
    both[side] = normalize(torch.ones(shape), dim=-1)
    with pytest.raises(ValueError, match=rf"{side}.*{message}"):
        objective(both["x"], both["y"], torch.arange(4))
    assert name not in STATEFUL or objective.log_u_x.isneginf().all(), "refused input must not change the state"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("side", ["x", "y"])
def test_values_of_views(name: str, side: str) -> None:
    """One view is nan, or no view has unit norm."""
    views = features(8).reshape(4, 2, 3)
    with_nan = views.clone()
    with_nan[2, 1] = math.nan
    for bad, message in ((with_nan, "must be finite"), (2 * views, "must have unit norm")):
        objective = build(name, num_samples=N)
        both = {"x": views, "y": views} | {side: bad}
        with pytest.raises(ValueError, match=f"{side} {message}"):
            objective(both["x"], both["y"], torch.arange(4))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("side", ["x", "y"])
@pytest.mark.parametrize("rows", [4, 1500])  # one tile, and several
@pytest.mark.parametrize("alone", [False, True])
def test_features_that_are_not_finite(name: str, value: float, side: str, rows: int, alone: bool) -> None:
    objective = build(name, num_samples=rows)
    both = {"x": features(rows), "y": features(rows)}
    both[side][rows - 2, 1] = value
    ids = torch.zeros(rows, dtype=torch.int64) if alone else None
    with pytest.raises(ValueError, match=f"{side} must be finite, but holds nan or inf in rows {rows - 2} of"):
        objective(both["x"], both["y"], torch.arange(rows), x_id=ids)
    assert name not in STATEFUL or objective.log_u_x.isneginf().all(), "refused input must not change the state"


@pytest.mark.parametrize("name", ALL)
def test_features_too_large(name: str) -> None:
    objective = build(name, num_samples=N)
    with pytest.raises(
        ValueError, match=r"x must have unit norm, but row \d of the global batch has norm 1e\+20; pass F.normalize"
    ):
        objective(features() * 1e20, features() * 1e20, torch.arange(4))


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([0, 1, 2, 10], r"index must be in \[0, 10\), but holds 10"),
        ([0, -1, 2, 3], r"index must be in \[0, 10\), but holds -1"),
        ([0, 1, 1, 3], "index must not repeat a pair within the global batch, but holds 1 more than once"),
        ([0, 1, 2], r"index must be \(4,\) integers, one per pair, but is \(3,\)"),
        ([[0], [1], [2], [3]], r"index must be \(4,\) integers, one per pair, but is \(4, 1\)"),
        ([0.0, 1.0, 2.0, 3.0], "index must be .* integers.*torch.float32"),
        (None, r"index is None.*eval\(\)"),
    ],
)
def test_index(name: str, index: list | None, message: str) -> None:
    objective = build(name, num_samples=N)
    with pytest.raises(ValueError, match=message):
        objective(features(), features(), None if index is None else torch.tensor(index))
    assert objective.log_u_x.isneginf().all(), "refused input must not change the state"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(3,), (3, 2), (4, 0), (4, 2, 1), ()])
def test_ids(name: str, shape: tuple[int, ...]) -> None:
    objective = build(name, num_samples=N)
    ids = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"y_id must be \(4,\) integers, one per pair, or \(4, k\), but is \("):
        objective(features(), features(), torch.arange(4), y_id=ids)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("temperature", [0.0, -0.1, math.nan, math.inf])
def test_temperature(name: str, temperature: float) -> None:
    objective = build(name, num_samples=N)
    objective.temperature = temperature
    with pytest.raises(ValueError, match=f"temperature must be a positive number, but is {temperature}"):
        objective(features(), features(), torch.arange(4))
    with pytest.raises(ValueError, match="temperature must be a positive number"):
        build(name, num_samples=N, temperature=temperature)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("gamma", [0.0, 1.1, -1.0, math.nan])
def test_gamma(name: str, gamma: float) -> None:
    objective = build(name, num_samples=N)
    objective.gamma = gamma
    with pytest.raises(ValueError, match=rf"gamma must be in \(0, 1\], but is {gamma}"):
        objective(features(), features(), torch.arange(4))
    with pytest.raises(ValueError, match="gamma"):
        build(name, num_samples=N, gamma=gamma)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "nuclr",
            {"zeta_estimator": "exact"},
            "zeta_estimator must be one of reference, unbiased, paper, but is 'exact'",
        ),
        ("nuclr", {"xi_rule": "mean"}, "xi_rule must be one of norm, max, but is 'mean'"),
        ("nuclr", {"xi_update": "never"}, "xi_update must be one of step, epoch, but is 'never'"),
        ("nuclr", {"xi_update": "epoch", "popularity": "network"}, 'xi_update="epoch" needs all zeta in a table'),
        ("nuclr", {"zeta_lr": -1.0}, r"zeta_lr must be in \[0, inf\), but is -1.0"),
        ("nuclr", {"zeta_momentum": 1.0}, r"zeta_momentum must be in \[0, 1\), but is 1.0"),
        ("nuclr", {"zeta_init": math.inf}, "zeta_init must be finite"),
        ("isogclr", {"tau_min": 0.5, "tau_max": 0.1}, "tau_min must be in"),
        ("dcl", {"tau_plus": 1.0}, r"tau_plus must be in \[0, 1\), but is 1.0"),
        ("sogclr", {"gamma_rule": "adaptive"}, r"gamma_rule must be one of .*constant.*proximal.*'adaptive'"),
        ("isogclr", {"gamma_rule": ""}, "gamma_rule must be one of"),
        ("nuclr", {"gamma_rule": "Proximal"}, "gamma_rule must be one of"),
        ("sogclr", {"gamma_rule": "proximal", "alpha": 0.0}, "alpha must be"),
        ("sogclr", {"sides": "xy"}, r"sides must be one of .*both.*'xy'"),
        ("isogclr", {"sides": "z"}, "sides must be one of"),
        ("nuclr", {"sides": "left"}, "sides must be one of"),
        ("nuclr", {"zeta_optimizer": "rmsprop"}, r"zeta_optimizer must be one of .*sgd.*adam.*'rmsprop'"),
        ("nuclr", {"zeta_velocity_init": "random"}, r"zeta_velocity_init must be one of .*zero.*gradient.*'random'"),
        ("nuclr", {"popularity": "mlp"}, r"popularity must be one of .*table.*network.*'mlp'"),
        ("nuclr", {"normalizer": "none"}, r"normalizer must be one of .*table.*network.*'none'"),
        ("sogclr", {"normalizer": "mlp"}, "normalizer must be one of"),
        ("nuclr", {"zeta_steps": 0}, "zeta_steps must be .*but is 0"),
        ("nuclr", {"zeta_steps": -2}, "zeta_steps must be .*but is -2"),
        ("nuclr", {"zeta_beta2": 1.0}, "zeta_beta2 must be in"),
        (
            "nuclr",
            {"individual_temperature": True, "learn_temperature": True},
            r"individual_temperature.*learn_temperature|learn_temperature.*individual_temperature",
        ),
        ("nuclr", {"individual_temperature": True, "tau_min": 0.5, "tau_max": 0.1}, "tau_min must be in"),
        ("nuclr", {"individual_temperature": True, "tau_beta": 1.5}, "tau_beta must be in"),
        ("sogclr", {"num_samples": 1}, "num_samples must be at least 2, but is 1"),
        ("nucler", {}, "name must be one of clip, .*nuclr, but is 'nucler'"),
    ],
)
def test_options(name: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, **({"num_samples": N} | options))


@pytest.mark.parametrize("name", STATEFUL)
def test_num_samples_is_required(name: str) -> None:
    with pytest.raises(ValueError, match="num_samples"):
        build(name)
