"""Objectives and their formulas from flat options, as `tests.reference` names them."""

from nuclr.objectives import Objective, build
from tests import reference

RECORDS = {
    "individual_temperature": ("temperatures", "individual"),
    "learn_temperature": ("temperatures", "learnt"),
    "rho": ("temperatures", "rho"),
    "tau_lr": ("temperatures", "tau_lr"),
    "tau_beta": ("temperatures", "tau_beta"),
    "tau_min": ("temperatures", "tau_min"),
    "tau_max": ("temperatures", "tau_max"),
    "gamma_rule": ("average", "gamma_rule"),
    "alpha": ("average", "alpha"),
    "state_device": ("state", "device"),
    "state_sharding": ("state", "sharding"),
    "x_views": ("state", "x_views"),
    "y_views": ("state", "y_views"),
    "num_x": ("state", "num_x"),
    "num_y": ("state", "num_y"),
}
# The options with which nuclr-authors differs from nuclr in the estimator only.
PLAIN = {
    "temperature": 0.03,
    "zeta_init": 0.0,
    "zeta_lr": 1e-3,
    "zeta_lr_ratio_x": 1.0,
    "zeta_momentum": 0.0,
    "zeta_velocity_init": "zero",
    "xi_rule": "norm",
    "xi_update": "step",
}


def make(name: str, **options) -> Objective:
    """Build an objective; nuclr-authors starts from `PLAIN` instead of the published values."""
    if name == "nuclr-authors":
        options = PLAIN | options
    arguments: dict = {}
    for key, value in options.items():
        if key in RECORDS and name not in ("clip", "cyclip", "siglip"):
            record, field = RECORDS[key]
            arguments.setdefault(record, {})[field] = value
        else:
            arguments[key] = value
    return build(name, **arguments)


def formula(name: str, **options) -> reference.Settings:
    """Return the settings of the loops for the same options."""
    if name == "nuclr":
        options = {"zeta_estimator": "unbiased", "zeta_step": "in tau", "zeta_lr": 0.3} | options
    return reference.settings("nuclr" if name == "nuclr-authors" else name, **options)
