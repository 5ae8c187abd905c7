"""A small toy study: its values agree with the paper's claims, its slopes are right, and its file holds all of it."""

import itertools

import numpy as np
import pytest

from nuclr import files
from nuclr.studies.toy import study


@pytest.fixture(scope="module")
def result():
    done = []
    result = study.run_study(seeds=6, sizes=(100, 400), advance=done.append)
    assert sum(done) == sum(point.repeats * point.n**2 for point in study.plan(6, (100, 400)))
    return result


@pytest.mark.slow
def test_estimated_popularity_reduces_the_error_and_uniform_popularity_does_not(result):
    few, many = {}, {}
    for method in ("mle", "gcl", "gcl_constant", "nuclr", "nuclr_area"):
        few[method], many[method] = (record.mean for record in result.select("risk", 0.2, method))
    assert few["gcl"]["error"] < 1.5 * many["gcl"]["error"] and many["gcl"]["error"] > 0.04
    assert many["nuclr"]["error"] < 3 * many["mle"]["error"]
    assert many["nuclr"]["error_term"] < many["gcl"]["error_term"] / 5
    for method in ("gcl_constant", "nuclr_area"):
        assert many[method]["error"] < many["gcl"]["error"] / 3
    assert many["nuclr"]["rank_correlation"] > 0.99


def test_several_views_reduce_the_error_of_z_only_with_a_popularity_of_their_own(result):
    for tau in study.TEMPERATURES:
        error = {form: [] for form in ("per_view", "shared")}
        for form, errors in error.items():
            for m in study.VIEWS:
                (record,) = result.select("views", tau, f"{form}_{m}")
                errors.append(record.mean["error"])
        assert error["per_view"][0] == pytest.approx(error["shared"][0], rel=1e-3)
        for few, many in itertools.pairwise(error["per_view"]):
            assert 1.4 < few / many < 2.8, "it falls as 1/sqrt(m)"
        assert error["shared"][2] > 2 * error["per_view"][2]
        if tau == 0.2:
            assert error["shared"][2] > 1.3 * error["shared"][0]


def test_the_file_holds_the_study(result, tmp_path):
    files.write_json(tmp_path / "toy.json", result.to_json())
    assert files.read_record(study.ToyStudy, tmp_path / "toy.json") == result
    counted = {part: sum(record.part == part for record in result.records) for part in study.MEASURES}
    assert counted == {"risk": 2 * 2 * 6, "learning": 2 * 2 * 3, "views": 2 * 6}


def fit(sizes, means, errors):
    """Return the slope of means with these standard errors and half the width of its interval."""
    records = []
    for n, mean, error in zip(sizes, means, errors, strict=True):
        records.append(study.Record("risk", 0.2, n, "mle", 4, {"error": mean}, {"error": 2 * error}))
    other = study.Record("risk", 1.0, 100, "mle", 4, {"error": 9.0}, {"error": 0.1})
    return study.ToyStudy(4, 0, [*records, other]).slope("risk", 0.2, "mle", "error")


def test_a_power_law_is_recovered():
    sizes = [100, 200, 400, 800]
    assert fit(sizes, [3 * n**-0.5 for n in sizes], [0.0] * 4) == pytest.approx((-0.5, 0))
    assert fit([100], [1.0], [0.1]) is None


def test_the_interval_is_that_of_repeated_fits():
    sizes, errors = [100, 200, 400], [0.02, 0.01, 0.03]
    rng = np.random.default_rng(0)
    fits = [fit(sizes, rng.normal(1.0, errors).tolist(), errors)[0] for _ in range(4000)]
    assert fit(sizes, [1.0] * 3, errors)[1] / 1.96 == pytest.approx(np.std(fits), rel=0.05)
