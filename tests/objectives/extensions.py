"""The stateful objectives and their extensions, alone and combined, for tests that hold for each of them."""

from collections.abc import Iterable

import pytest

Case = tuple[str, dict, tuple[int | None, int | None]]  # objective, options, views of x and of y

NUCLR = {"temperature": 0.1, "zeta_lr": 0.02}
# The bounds admit every temperature that the tests use.
INDIVIDUAL = {"individual_temperature": True, "tau_lr": 2e-3, "tau_min": 0.001, "tau_max": 1.0}
NETWORKS = {"popularity": "network", "normalizer": "network"}

CASES: dict[str, Case] = {
    "sogclr": ("sogclr", {"temperature": 0.1}, (None, None)),
    "isogclr": ("isogclr", {"temperature": 0.1, "tau_max": 1.0}, (None, None)),
    "nuclr": ("nuclr", NUCLR | {"zeta_momentum": 0.1}, (None, None)),
    "nuclr, no xi": ("nuclr", NUCLR | {"use_xi": False}, (None, None)),
    "sogclr, views": ("sogclr", {"temperature": 0.1}, (2, 3)),
    "sogclr, proximal": ("sogclr", {"temperature": 0.1, "gamma_rule": "proximal"}, (None, None)),
    "sogclr, learnt temperature": ("sogclr", {"temperature": 0.1, "learn_temperature": True}, (None, None)),
    "sogclr, side y": ("sogclr", {"temperature": 0.1, "sides": "y"}, (None, None)),
    "sogclr, normalizer network": ("sogclr", {"temperature": 0.5, "normalizer": "network"}, (None, None)),
    "isogclr, views, proximal, side x": (
        "isogclr",
        {"temperature": 0.03, "gamma_rule": "proximal", "sides": "x", "tau_min": 0.001, "tau_max": 1.0},
        (3, None),
    ),
    "nuclr, views": ("nuclr", NUCLR, (2, 3)),
    "nuclr, stored views": ("nuclr", NUCLR | {"zeta_momentum": 0.1, "x_views": 2, "y_views": 3}, (2, 3)),
    "nuclr, stored views of y": ("nuclr", NUCLR | {"y_views": 3, "sides": "x"}, (None, 3)),
    "nuclr, individual temperatures": ("nuclr", NUCLR | INDIVIDUAL, (None, None)),
    "nuclr, individual temperatures, views": ("nuclr", NUCLR | INDIVIDUAL, (3, 2)),
    "nuclr, learnt temperature, views": ("nuclr", NUCLR | {"learn_temperature": True}, (None, 2)),
    "nuclr, individual temperatures, momentum, side y": (
        "nuclr",
        NUCLR | INDIVIDUAL | {"zeta_momentum": 0.5, "sides": "y"},
        (None, None),
    ),
    "sogclr, false negatives": ("sogclr", {"temperature": 0.1, "false_negative_margin": 0.02}, (None, None)),
    "nuclr, false negatives, views": ("nuclr", NUCLR | {"false_negative_margin": 0.02}, (2, 3)),
    "nuclr-authors": ("nuclr-authors", NUCLR | {"zeta_momentum": 0.9}, (None, None)),
    "nuclr-authors, first gradient as velocity": (
        "nuclr-authors",
        NUCLR | {"zeta_velocity_init": "gradient", "zeta_momentum": 0.9},
        (None, None),
    ),
    "nuclr, popularity network": ("nuclr", NUCLR | {"popularity": "network", "temperature": 0.5}, (None, None)),
    "nuclr, normalizer network": ("nuclr", NUCLR | {"normalizer": "network", "temperature": 0.5}, (None, None)),
    "nuclr, both networks, views": ("nuclr", NUCLR | NETWORKS | {"temperature": 0.5}, (2, 2)),
    "nuclr, both networks, learnt temperature": (
        "nuclr",
        NUCLR | NETWORKS | {"temperature": 0.5, "learn_temperature": True},
        (None, None),
    ),
}


def cases(names: Iterable[str] = CASES):
    """Parametrize a test with name, options and views of these cases."""
    names = list(names)
    return pytest.mark.parametrize(("name", "options", "views"), [CASES[name] for name in names], ids=names)
