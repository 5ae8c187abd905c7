"""An objective with special options is another one: the same values, gradients and state over the same batches."""

import math

import pytest
import torch

from nuclr.objectives import build
from tests.objectives.comparison import BATCH, MASKS, SAMPLES, assert_same_training, batches
from tests.objectives.extensions import INDIVIDUAL, NUCLR
from tests.objectives.make import PLAIN, make

FROZEN = {"zeta_lr": 0.0, "zeta_init": 0.0, "xi_init": math.inf}
STATEFUL = ("sogclr", "isogclr", "nuclr")


@pytest.mark.parametrize("mask", [MASKS["no ids"], MASKS["both"]], ids=["no ids", "both"])
@pytest.mark.parametrize(
    ("special", "options", "general", "other_options", "value", "atol"),
    [
        # without popularity and the positive term; the value of nuclr has another constant
        ("nuclr", FROZEN, "sogclr", {}, False, 0),
        ("nuclr", FROZEN | {"individual_temperature": True}, "isogclr", {}, True, 1e-9),
        (
            "nuclr",
            FROZEN | {"individual_temperature": True, "gamma_rule": "proximal"},
            "isogclr",
            {"gamma_rule": "proximal"},
            True,
            1e-9,
        ),
        # temperatures that do not move; the value has the term of rho
        ("nuclr", NUCLR | INDIVIDUAL | {"tau_lr": 0.0}, "nuclr", NUCLR, False, 1e-9),
        ("isogclr", {"tau_lr": 0.0, "tau_max": 1.0}, "sogclr", {}, False, 1e-9),
        # averages
        *((name, {"gamma_rule": "proximal", "alpha": 1e60}, name, {"gamma": 1.0}, True, 1e-9) for name in STATEFUL),
        *((name, {"gamma_rule": "constant", "alpha": 9.0}, name, {"alpha": 1.0}, True, 0) for name in STATEFUL),
        # without state
        ("dcl", {"tau_plus": 0.0, "temperature": 0.1}, "clip", {"temperature": 0.1}, True, 1e-12),
        ("cyclip", {"cross": 0.0, "within": 0.0, "temperature": 0.1}, "clip", {"temperature": 0.1}, True, 1e-12),
    ],
)
def test_special_case(special, options, general, other_options, value, atol, mask) -> None:
    one = make(special, num_samples=SAMPLES, **options).double()
    two = make(general, num_samples=SAMPLES, **other_options).double()
    assert_same_training(one, two, value=value, atol=atol, mask=mask)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_nuclr_authors_without_its_peculiarities_is_the_letter_of_nuclr(momentum) -> None:
    options = NUCLR | {"zeta_momentum": momentum, "zeta_estimator": "paper"}
    letter = build("nuclr", num_samples=SAMPLES, **options).double()
    step = options["zeta_lr"] * options["temperature"] * BATCH / SAMPLES
    authors = build("nuclr-authors", num_samples=SAMPLES, **(PLAIN | options | {"zeta_lr": step})).double()
    with torch.no_grad():
        for batch in batches():
            torch.testing.assert_close(authors(*batch).loss, letter(*batch).loss, rtol=0, atol=1e-9)
    assert any("velocity" in name for name, _ in letter.named_buffers()) == (momentum > 0)
    for name, table in letter.named_buffers():
        scale = SAMPLES / BATCH if "velocity" in name else 1.0
        torch.testing.assert_close(authors.get_buffer(name), scale * table, rtol=0, atol=1e-9)
