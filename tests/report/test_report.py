"""Folders of every kind to pages; what is missing is said."""

import json
import shutil

import numpy as np
import pytest

from nuclr.report.training import Options, training_page
from nuclr.report.write import make_page, write_report
from nuclr.runs import config
from nuclr.training.loop import train
from tests.report import pages
from tests.training import runs


@pytest.fixture(scope="module")
def vector_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    train(runs.load(folder), folder / "run")
    return folder / "run"


def test_pictures_and_hostile_text(picture_run):
    page = make_page(picture_run, Options())
    assert pages.HOSTILE not in page, "data is never markup"
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "\\u003cscript\\u003e" in page
    assert 'src="http' not in page and "url(" not in page
    assert page.count("data:image/jpeg") > 40
    for told in (
        "Zeta of the captions",
        "Image to text",
        "Likely false negatives",
        "Near-duplicate",
        "The worst mistakes",
    ):
        assert told in page


def test_vectors_have_no_pictures(vector_run):
    page = training_page(vector_run, Options())
    assert "The data holds vectors, not images, so there are no pictures." in page.notes
    assert page.popularity["cards"][0]["caption"] is None
    assert page.retrieval and page.versions["python"] and "-again" in page.again
    assert [chart.title for chart in page.curves if chart.title.startswith("Zeta")]
    assert '<p class="caption">caption ' in make_page(vector_run, Options())


def test_without_held_out_pairs(tmp_path):
    settings = [s for s in runs.vector_settings(tmp_path) if not s.startswith("data.val")]
    train(config.load(tmp_path / "empty.yaml", settings), tmp_path / "run")
    page = training_page(tmp_path / "run", Options())
    assert any("no held-out pairs" in note for note in page.notes)
    assert page.tiles[-1].label == "Training time" and page.table is None
    assert "trained on" in page.retrieval_of


def test_stopped_in_the_middle(vector_run, tmp_path):
    run = shutil.copytree(vector_run, tmp_path / "run")
    (run / "results.json").unlink()
    shutil.rmtree(run / "model")
    page = training_page(run, Options())
    assert page.notes[0].startswith("This run is not finished: 28 steps")
    assert any("the model after step 28" in note for note in page.notes)
    assert page.retrieval and page.time
    shutil.rmtree(run / "checkpoints")
    for name in ("metrics.jsonl", "timing.jsonl"):
        (run / name).unlink()
    page = training_page(run, Options())
    assert any("no checkpoint" in note for note in page.notes) and not page.curves
    assert "Nothing was logged" in make_page(run, Options())


def test_data_that_is_gone(vector_run, tmp_path):
    run = shutil.copytree(vector_run, tmp_path / "run")
    text = (run / "config.yaml").read_text().replace(str(vector_run.parent), str(tmp_path / "gone"))
    (run / "config.yaml").write_text(text)
    page = training_page(run, Options())
    assert any("The training data is missing" in note and "gone" in note for note in page.notes)
    assert page.table is not None and page.curves


def test_a_hundred_thousand_samples(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100_000, 4)).astype("float32")
    np.savez(tmp_path / "train.npz", x=x, y=x + 0.1)
    (tmp_path / "run.yaml").write_text("name: large\n")
    settings = {"data.root": tmp_path, "data.train": "train.npz", "data.batch_size": 1000, "model.width": 4}
    settings |= {"schedule.epochs": 1, "threads": 1, "log.every": 100}
    train(config.load(tmp_path / "run.yaml", [f"{k}={v}" for k, v in settings.items()]), tmp_path / "run")
    page = make_page(tmp_path / "run", Options(samples=500))
    assert "500 of the 100,000 training pairs, drawn at random" in page
    assert len(page) < 1_000_000


def test_popularity_folder_with_many_pictures(nuclr, tmp_path):
    names = pages.write_pictures(tmp_path / "images", 70, 160, noise=True)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(70, 6)).astype("float32")
    np.savez(tmp_path / "e.npz", x=x, y=(x + 0.5 * rng.normal(size=x.shape)).astype("float32"))
    lines = [{"image": name, "caption": pages.HOSTILE if k == 0 else f"thing {k}"} for k, name in enumerate(names)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("popularity", tmp_path / "e.npz", "--temperature", 0.3, "--captions", tmp_path / "c.jsonl")
    status, told, err = nuclr(*arguments, "--images", tmp_path / "images", "--out", tmp_path / "out")
    assert status == 0 and "report.html" in told, err
    assert nuclr("report", tmp_path / "out", "--gallery", 60)[0] == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count('class="card ') == 120 and page.count("data:image/jpeg") >= 120
    assert len(page) < 2 * 3_000_000, "120 pictures of noise, twice those of a gallery of 60"
    assert pages.HOSTILE not in page and "false negatives" in page


def test_popularity_of_a_run(nuclr, picture_run, tmp_path):
    status, _, err = nuclr("popularity", picture_run, "--temperature", 0.3, "--out", tmp_path / "out")
    assert status == 0, err
    page = (tmp_path / "out" / "report.html").read_text()
    assert "data:image/jpeg" in page and "zeta as training left it" in page


def test_comparison_and_toy(tmp_path):
    pages.write_json(tmp_path / "c" / "compare.json", pages.comparison(label=pages.HOSTILE))
    page = write_report(tmp_path / "c").read_text()
    assert "A run failed: clip 1: killed" in page and "+1.25" in page and pages.HOSTILE not in page
    assert page.count('class="key s') == 2
    pages.write_json(tmp_path / "t" / "toy.json", pages.toy())
    page = write_report(tmp_path / "t").read_text()
    assert "The figure spaces.png is missing." in page and "GCL: uniform popularity" in page


def test_refusals(nuclr, vector_run, tmp_path):
    for arguments, message in (
        ([tmp_path / "nowhere"], "no such folder"),
        ([tmp_path], "no run there"),
        ([vector_run, "--out", tmp_path], "is a folder"),
        ([vector_run, "--no-model", "--out", tmp_path / "no" / "page.html"], "cannot be written"),
    ):
        status, _, err = nuclr("report", *arguments)
        assert status == 2 and message in err and "Traceback" not in err
    (tmp_path / "config.yaml").write_text("[]")
    assert "cannot be read as the settings" in nuclr("report", tmp_path)[2]


def test_at_the_end_of_training(nuclr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = [s for s in runs.vector_settings(tmp_path) if not s.startswith("report")]
    status, told, err = nuclr("train", "empty.yaml", *settings, "out=run")
    assert status == 0 and "The page: run/report.html" in told, err
    assert "nuclr train empty.yaml" in (tmp_path / "run" / "report.html").read_text()
    monkeypatch.setattr("nuclr.report.write.make_page", lambda *_: 1 / 0)
    status, _, err = nuclr("train", "empty.yaml", *settings, "out=other")
    assert status == 0 and "no report page (division by zero)" in err
