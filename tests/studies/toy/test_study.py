"""A small toy study: its values agree with the paper's claims, and its folder is complete."""

import json
from xml.etree import ElementTree

import pytest

from nuclr.popularity import importance_sampling as sampling
from nuclr.studies.toy import constant, spaces, study, weights


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("toy")
    done = []
    with pytest.MonkeyPatch.context() as patch:  # fewer repetitions
        patch.setattr(weights, "REPEATS", 20)
        content = study.write_study(out, seeds=6, sizes=(100, 400), advance=done.append)
    assert sum(done) == study.total_work(6, (100, 400))
    return out, content


def record(content, **setting):
    [match] = [r for r in content["records"] if all(r[key] == value for key, value in setting.items())]
    return match


@pytest.mark.slow
def test_estimated_popularity_reduces_the_error_and_uniform_popularity_does_not(written):
    _, content = written
    gcl, ours, exact = (record(content, tau=0.2, n=400, method=m) for m in ("gcl", "nuclr", "mle"))
    assert gcl["error_mean"] > 0.04
    assert record(content, tau=0.2, n=100, method="gcl")["error_mean"] < 1.5 * gcl["error_mean"]
    assert ours["error_mean"] < 3 * exact["error_mean"]
    for key in ("bound_term_mean", "error_term_mean"):
        assert ours[key] < gcl[key] / 5
    assert record(content, tau=0.2, n=400, method="gcl_constant")["error_mean"] < gcl["error_mean"] / 3
    assert ours["rank_correlation_mean"] > 0.99
    assert record(content, tau=0.2, n=400, method="nuclr_area")["error_mean"] < gcl["error_mean"] / 3


def test_the_folder_is_complete(written):
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
    for text in (
        "GCL: uniform popularity",
        "NUCLR: estimated, scale from the area of Y",
        "τ = 0.2",
        "guide: slope -0.5",
    ):
        assert f"<!-- {text}" in svg


def test_the_same_seed_gives_the_same_values():
    first, second = (study.run_study(2, (100,), base_seed=3) for _ in range(2))
    assert first == second
    assert study.run_study(2, (100,), base_seed=4)["records"] != first["records"]


def test_a_factor_of_the_popularity_shifts_the_risk():
    sample, log_k = spaces.draw(60, 0.2, spaces.generator(6)), constant.gcl_log_constant(0.2)
    values = study.measure(sample, 0.2, log_k)
    for method, log_q in spaces.popularities(sample, log_k).items():
        direct = sampling.empirical_risk_from_popularity(sample.scores, log_q, 0.2).item()
        assert values[method]["risk"] == pytest.approx(direct, abs=1e-12)


def test_all_parts_are_in_the_summary(written):
    _, content = written
    quantities = {fit["quantity"] for fit in content["slopes"]}
    assert quantities == {"error", "bound_term", "error_term", "excess_risk", "zero_one"}
    assert {r["method"] for r in content["learning"]} == {"mle", "gcl", "nuclr"}
    assert all(r["low"] < r["bias"] < r["high"] for r in content["bias"])
    [shown, _] = content["shown"]
    assert shown["n"] == 100 and len(shown["true"]) == 100
    assert len(shown["true_map"]) == len(shown["estimated_map"][0]) == study.MAP_SIDE
