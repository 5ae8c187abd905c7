"""`nuclr embed` and `nuclr popularity RUN` on a tiny trained run."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

from nuclr.data import open_pairs
from nuclr.data.formats.embeddings import read_embeddings
from nuclr.models import DualEncoder
from nuclr.runs import config
from nuclr.training.loop import train
from tests.training import runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    settings = runs.picture_settings(folder, **{"schedule.epochs": 1, "data.train": "builtin:n=60"})
    train(config.load(folder / "empty.yaml", settings), folder / "run")
    return folder / "run"


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_pairs(nuclr, trained, tmp_path, suffix):
    out = tmp_path / f"features.{suffix}"
    status, told, err = nuclr("embed", trained, "--out", out, "--batch-size", 7)
    assert status == 0, err
    assert "x (60, 8)" in told
    found = read_embeddings(out)
    pairs, model = open_pairs("builtin:n=60"), DualEncoder.from_pretrained(trained / "model")
    torch.testing.assert_close(found.x, model.encode_images([pairs.x(i) for i in range(60)]), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.y, model.encode_texts([pairs.y(i) for i in range(60)]), atol=1e-5, rtol=0)
    assert found.y_to_x.tolist() == list(range(60))


def test_several_captions_an_image(nuclr, tmp_path):
    settings = runs.vector_settings(tmp_path, **{"schedule.epochs": 1})
    train(config.load(tmp_path / "empty.yaml", settings), tmp_path / "run")
    assert nuclr("embed", tmp_path / "run", "--out", tmp_path / "f.npz", "--best")[0] == 0
    found = np.load(tmp_path / "f.npz")
    assert found["x"].shape == (60, 8) and found["y"].shape == (120, 8)
    assert found["y_to_x"].tolist() == [i // 2 for i in range(120)]
    assert found["number"].tolist() == list(range(120))


def test_images_and_texts_alone(nuclr, trained, tmp_path):
    (tmp_path / "pictures").mkdir()
    for i in range(3):
        Image.new("RGB", (20, 30), (80 * i, 0, 0)).save(tmp_path / "pictures" / f"{i}.png")
    (tmp_path / "texts.txt").write_text("a red circle\ntwo stars\n")
    assert nuclr("embed", trained, "--images", tmp_path / "pictures", "--out", tmp_path / "i.npz")[0] == 0
    assert nuclr("embed", trained / "model", "--texts", tmp_path / "texts.txt", "--out", tmp_path / "t.npz")[0] == 0
    assert np.load(tmp_path / "i.npz")["x"].shape == (3, 8)
    assert (tmp_path / "i.txt").read_text().split() == ["0.png", "1.png", "2.png"]
    assert np.load(tmp_path / "t.npz")["y"].shape == (2, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "a.csv"], "unknown kind of embedding file"),
        (["--out", "no/a.npz"], "does not exist"),
        (["--out", "here.npz"], "here.npz exists"),
        (["--out", "a.npz", "--texts", "gone.txt"], "gone.txt: no such file"),
        (["--out", "a.npz", "--images", "gone"], "gone: no such folder"),
        (["--out", "a.npz", "--texts", "t", "--images", "i"], "exclude one another"),
        (["--out", "a.npz", "--pairs", "vectors.npz"], "holds vectors on side x"),
    ],
)
def test_refusals(nuclr, trained, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.npz").write_text("mine")
    runs.write_vectors(tmp_path / "vectors.npz")
    status, _, err = nuclr("embed", trained, *arguments)
    assert status == 2
    assert message in err and len(err.strip().splitlines()) <= 2
    assert (tmp_path / "here.npz").read_text() == "mine"


@pytest.mark.parametrize(("option", "message"), [("--images", "no pictures"), ("--texts", "no texts")])
def test_a_model_of_vectors(nuclr, tmp_path, option, message):
    train(runs.load(tmp_path, **{"schedule.epochs": 1}), tmp_path / "run")
    status, _, err = nuclr("embed", tmp_path / "run", option, tmp_path, "--out", tmp_path / "a.npz")
    assert status == 2 and message in err and not (tmp_path / "a.npz").exists()


def test_a_list_that_cannot_be_written_is_refused_before_the_work(nuclr, trained, tmp_path):
    keep = ("--keep", tmp_path / "nowhere" / "keep.txt", "--max-quantile", 0.8)
    status, _, err = nuclr("popularity", trained, "--out", tmp_path / "out", *keep)
    assert status == 2 and "its folder does not exist" in err
    assert not (tmp_path / "out").exists()


def test_popularity_of_a_run(nuclr, trained, tmp_path):
    out, keep = tmp_path / "popularity", tmp_path / "popularity" / "keep.txt"  # a folder that the command makes
    status, told, err = nuclr("popularity", trained, "--out", out, "--keep", keep, "--max-quantile", 0.8)
    assert status == 0, err
    content = json.loads((out / "popularity.json").read_text())
    assert content["temperature"] == 0.03, "the run's own"
    rows = [row for row in csv.DictReader((out / "popularity.csv").open()) if row["side"] == "y"]
    pairs = open_pairs("builtin:n=60")
    assert [row["caption"] for row in rows] == [pairs.y(i) for i in range(60)]
    assert "most popular" in told
    again = config.load(trained / "config.yaml", [f"data.keep={keep}"])
    assert 0 < train(again, tmp_path / "again")["samples_per_epoch"] < 60


def test_numbers_of_a_run_on_some_pairs(nuclr, tmp_path):
    kept = list(range(1, 120, 2))
    (tmp_path / "some.txt").write_text("\n".join(map(str, kept)))
    settings = runs.vector_settings(tmp_path, **{"schedule.epochs": 1, "data.keep": "some.txt"})
    train(config.load(tmp_path / "empty.yaml", settings), tmp_path / "run")
    status, told, err = nuclr("popularity", tmp_path / "run", "--keep", tmp_path / "k.txt", "--min-quantile", 0.5)
    assert status == 0, err
    found = np.loadtxt(tmp_path / "k.txt", dtype=int).tolist()
    assert len(found) == 30 and set(found) <= set(kept)
    rows = list(csv.DictReader((tmp_path / "run" / "popularity" / "popularity.csv").open()))
    assert [int(row["number"]) for row in rows if row["side"] == "y"] == kept
    assert [int(row["x"]) for row in rows if row["side"] == "y"] == [number // 2 for number in kept]
    content = json.loads((tmp_path / "run" / "popularity" / "popularity.json").read_text())
    shown = [sample["number"] for sample in content["sides"]["y"]["most_popular"]]
    assert set(shown) <= set(kept) and f"y[{shown[0]}]" in told


def test_an_unfinished_run_is_said(nuclr, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("name: a\n")
    status, _, err = nuclr("popularity", tmp_path / "run")
    assert status == 2 and "not finished" in err
