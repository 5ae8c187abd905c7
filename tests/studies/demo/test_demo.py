"""The demo at a tiny scale, as a user meets it."""

import json

import pytest

TINY = [
    "name=demo",
    "data.train=builtin:n=96,shapes=2",
    "data.val=builtin:n=40,shapes=2,split=val",
    "data.batch_size=32",
    "augment.enabled=false",
    "model.x.encoder=tiny_edges",
    "model.x.frozen=true",
    "model.y.encoder=bag_of_words",
    "model.width=16",
    "schedule.epochs=1",
]


@pytest.mark.slow
def test_the_demo_trains_resumes_and_keeps_earlier_runs(nuclr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = nuclr("train", *TINY)
    assert status == 0, err
    for words in (
        "NUCLR - CLIP",
        "picture to caption",
        "never found",
        "most popular captions",
        "runs/demo/report.html",
    ):
        assert words in out
    demo = tmp_path / "runs" / "demo"
    results = json.loads((demo / "demo.json").read_text())
    assert [len(results[method]) for method in ("clip", "sogclr", "nuclr")] == [3, 3, 3]
    search = results["clip"][1]["search"]["text_to_image"]
    assert 0 <= search["never_found_corrected"] <= 1
    assert search["recall@1"] == pytest.approx(results["clip"][1]["val"]["text_to_image_R@1"], abs=0.03)  # ties
    assert json.loads((demo / "seeds" / "sogclr-2" / "results.json").read_text())["objective"] == "sogclr"
    assert "CLIP" in (demo / "report.html").read_text(), "the page compares with the baseline"

    # A run that is missing is trained again, the others are kept.
    (demo / "seeds" / "clip-1" / "results.json").unlink()
    (demo / "seeds" / "clip-1" / "search.json").unlink()
    status, again, err = nuclr("train", *TINY, "out=runs/demo", "--resume", "report=false")
    assert status == 0, err
    assert again.partition("1. Tr")[2].partition("Done in")[0] == out.partition("1. Tr")[2].partition("Done in")[0]

    status, _, err = nuclr("train", *TINY, "out=runs/demo")
    assert status == 2 and "runs/demo already holds a run" in err
    assert nuclr("train", *TINY, "objective.name=clip", "report=false")[0] == 0
    assert (tmp_path / "runs" / "demo-2" / "results.json").is_file(), "the first run is not overwritten"
