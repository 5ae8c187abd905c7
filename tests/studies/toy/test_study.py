"""A small toy study: its values agree with the paper's claims, and its folder is complete."""

import json
from xml.etree import ElementTree

import pytest

from nuclr.studies.toy import study


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


@pytest.mark.slow
def test_estimated_popularity_reduces_the_error_and_uniform_popularity_does_not(written):
    _, content = written
    gcl, ours, exact = (record(content, tau=0.2, n=400, method=m) for m in ("gcl", "nuclr", "mle"))
    assert gcl["error_mean"] > 0.04
    assert record(content, tau=0.2, n=100, method="gcl")["error_mean"] < 1.5 * gcl["error_mean"]
    assert ours["error_mean"] < 3 * exact["error_mean"]
    assert ours["bound_term_mean"] < gcl["bound_term_mean"] / 5
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
    for text in ("GCL: uniform popularity", "NUCLR: estimated, scale from the area of Y", "τ = 0.2", "τ = 1.0"):
        assert f"<!-- {text} -->" in svg


def test_the_same_seed_gives_the_same_values():
    first, second = (study.run_study(2, (100,), base_seed=3) for _ in range(2))
    assert first == second
    assert study.run_study(2, (100,), base_seed=4)["records"] != first["records"]
