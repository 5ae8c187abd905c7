"""Slopes of log-log plots: the exponent with which an error falls as n grows."""

import math
from typing import Any

import numpy as np

NORMAL_95 = 1.96


def fit_slope(sizes: list[float], means: list[float], errors: list[float]) -> dict[str, float]:
    """Fit log mean = constant + slope log n by least squares.

    Args:
        sizes: Values of n, at least two different ones.
        means: Mean at each n, positive.
        errors: Standard error of each mean.

    Returns:
        `slope`, and its 95 % interval `low` to `high`, to first order in the standard errors.

    Example:
        >>> fit_slope([100, 400], [0.2, 0.1], [0.0, 0.0])["slope"]
        -0.5

    """
    logs = np.log(np.asarray(sizes, dtype=np.float64))
    centered = logs - logs.mean()
    weight = centered / (centered @ centered)
    slope = float(weight @ np.log(means))
    deviation = math.sqrt(float(np.square(weight * np.asarray(errors) / np.asarray(means)).sum()))
    return {"slope": round(slope, 12), "low": slope - NORMAL_95 * deviation, "high": slope + NORMAL_95 * deviation}


def slopes(study: dict[str, list[dict[str, Any]]], part: str, quantity: str) -> list[dict[str, Any]]:
    """Fit the slope of a quantity for each temperature and method of a part of the study.

    Args:
        study: Lists of records by part.
        part: The list to read. Its records have tau, n, method, seeds, and mean and standard deviation of the quantity.
        quantity: "error" reads error_mean and error_std.

    Returns:
        One entry per temperature and method; those with fewer than two sizes or with a mean of 0 have no slope and are
        left out.

    """
    fitted, records = [], study[part]
    for tau, method in dict.fromkeys((r["tau"], r["method"]) for r in records):
        rows = [r for r in records if (r["tau"], r["method"]) == (tau, method) and r.get(f"{quantity}_mean")]
        if len(rows) > 1:
            means = [r[f"{quantity}_mean"] for r in rows]
            errors = [r[f"{quantity}_std"] / math.sqrt(r["seeds"]) for r in rows]
            fit = fit_slope([r["n"] for r in rows], means, errors)
            fitted.append({"part": part, "tau": tau, "method": method, "quantity": quantity, **fit})
    return fitted


def mean_std(name: str, values: np.ndarray) -> dict[str, float]:
    """Return the mean and the standard deviation of some values as `name`_mean and `name`_std."""
    return {f"{name}_mean": float(values.mean()), f"{name}_std": float(values.std(ddof=1)) if len(values) > 1 else 0.0}
