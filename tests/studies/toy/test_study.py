"""A small toy study: its values confirm the paper's claims, and its folder is complete."""

import json
from xml.etree import ElementTree

import pytest
import torch

from nuclr.popularity import importance_sampling as sampling
from nuclr.popularity import solve
from nuclr.studies.toy import figures, spaces, study, variance


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("toy")
    done = []
    content = study.write_study(out, seeds=6, sizes=(100, 400), advance=done.append)
    assert sum(done) == study.total_work(6, (100, 400))
    return out, content


def record(content, **setting):
    [match] = [r for r in content["records"] if all(r[key] == value for key, value in setting.items())]
    return match


def test_the_error_of_a_uniform_popularity_does_not_vanish_and_that_of_the_estimate_does(written):
    _, content = written
    gcl, ours, exact = (record(content, tau=0.2, n=400, method=m) for m in ("gcl", "nuclr", "mle"))
    assert gcl["error_mean"] > 0.04
    assert record(content, tau=0.2, n=100, method="gcl")["error_mean"] < 1.5 * gcl["error_mean"]
    assert ours["error_mean"] < 3 * exact["error_mean"]
    assert ours["bound_term_mean"] < gcl["bound_term_mean"] / 5
    assert ours["rank_correlation_mean"] > 0.99
    assert record(content, tau=0.2, n=400, method="nuclr_area")["error_mean"] < gcl["error_mean"] / 3


def test_folder_is_complete(written):
    out, content = written
    assert json.loads((out / "toy.json").read_text()) == content
    for name in content["figures"]:
        data = (out / name).read_bytes()
        if name.endswith(".png"):
            assert data.startswith(b"\x89PNG") and data.endswith(b"IEND\xaeB`\x82")
        else:
            assert ElementTree.fromstring(data).tag.endswith("svg")
    assert {path.name for path in out.iterdir()} == {"toy.json", *content["figures"]}
    assert len(content["records"]) == 2 * 2 * len(study.METHODS)


def test_figures_show_every_method_at_both_temperatures(written):
    out, _ = written
    svg = (out / "error.svg").read_text()  # matplotlib writes each text as a comment before its outlines
    for text in ("GCL: uniform popularity", "NUCLR: estimated, scale from the area of Y", "τ = 0.2", "τ = 1.0"):
        assert f"<!-- {text} -->" in svg


def test_a_draw_is_solved_with_its_inner_products_as_scores():
    """Neither x nor y has unit norm, so nothing may be normalized."""
    sample = spaces.draw(80, 0.2, spaces.generator(5))
    assert sample.residual <= 1e-6
    zeta = solve(scores=sample.scores, temperature=0.2, tolerance=1e-9).zeta
    torch.testing.assert_close(0.2 * sample.log_q, zeta, atol=1e-6, rtol=0)


def test_the_same_seed_gives_the_same_values():
    first, second = (study.run_study(2, (100,), base_seed=3) for _ in range(2))
    assert first == second
    assert study.run_study(2, (100,), base_seed=4)["records"] != first["records"]


def test_interpolation_returns_the_estimate_at_the_samples():
    sample = spaces.draw(150, 0.2, spaces.generator(0))
    log_q = spaces.popularities(sample)["nuclr"]
    torch.testing.assert_close(figures.interpolate(sample, log_q, sample.y, 0.2), log_q, rtol=0, atol=1e-4)


def test_true_popularity_has_the_area_as_its_scale():
    """The mean of sum_j 1/q(y_j) is one, which scale_to_area relies on."""
    stream = spaces.generator(7)
    sums = []
    for _ in range(200):
        x = spaces.sample_x(50, stream)
        y = spaces.sample_y(x, 0.2, stream).squeeze(1)
        sums.append((-spaces.log_popularity(x, y, 0.2)).exp().sum())
    totals = torch.stack(sums)
    assert abs(totals.mean() - spaces.AREA_OF_Y) < 4 * totals.std() / 200**0.5


def test_measured_variance_agrees_with_the_quadrature():
    stream = spaces.generator(8)
    target, x = spaces.sample_x(4, stream), spaces.sample_x(20, stream)
    exact = variance.by_quadrature(target, x, 0.5, "balance")
    measured = variance.by_repetition(target, x, 0.5, "balance", 4, base_seed=0) * 4
    torch.testing.assert_close(measured, exact, rtol=0.35, atol=0)


def test_single_draws_all_samples_from_one_proposal():
    stream = spaces.generator(9)
    target, x = spaces.sample_x(3, stream), spaces.sample_x(5, stream)
    nodes, measure = spaces.square_nodes(32)
    alone = spaces.log_density(x[:1], nodes, 0.5).T
    log_integrand = spaces.log_density(target, nodes, 0.5)
    expected = sampling.variance(log_integrand, alone, torch.zeros_like(alone), measure) / 5
    torch.testing.assert_close(variance.by_quadrature(target, x, 0.5, "single")[:3], expected)
