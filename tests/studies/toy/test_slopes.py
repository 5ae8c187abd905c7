"""Fitted slopes and their intervals."""

import numpy as np
import pytest

from nuclr.studies.toy.slopes import fit_slope, slopes


def test_a_power_law_is_recovered():
    fit = fit_slope([100, 200, 400, 800], [3 * n**-0.5 for n in (100, 200, 400, 800)], [0.0] * 4)
    assert fit["slope"] == pytest.approx(-0.5) and fit["low"] == pytest.approx(fit["high"])


def test_the_interval_is_that_of_repeated_fits():
    sizes, errors = [100, 200, 400], [0.02, 0.01, 0.03]
    rng = np.random.default_rng(0)
    fits = [fit_slope(sizes, rng.normal(1.0, errors).tolist(), errors)["slope"] for _ in range(4000)]
    fit = fit_slope(sizes, [1.0] * 3, errors)
    assert (fit["high"] - fit["low"]) / 2 / 1.96 == pytest.approx(np.std(fits), rel=0.05)


def test_slopes_are_per_temperature_and_method():
    records = [
        {"tau": tau, "n": n, "method": method, "seeds": 4, "error_mean": n**power, "error_std": 0.1}
        for tau in (0.2, 1.0)
        for method, power in (("mle", -0.5), ("gcl", 0.0))
        for n in (100, 200)
    ]
    records.append({"tau": 0.2, "n": 100, "method": "alone", "seeds": 2, "error_mean": 1.0})
    fitted = slopes({"records": records}, "records", "error")
    assert {f["part"] for f in fitted} == {"records"}
    assert [(f["tau"], f["method"], round(f["slope"], 6)) for f in fitted] == [
        (0.2, "mle", -0.5), (0.2, "gcl", 0.0), (1.0, "mle", -0.5), (1.0, "gcl", 0.0)
    ]  # fmt: skip
