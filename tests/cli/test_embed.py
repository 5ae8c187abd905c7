"""`nuclr embed` on tiny trained runs."""

import numpy as np
import pytest
import torch
from PIL import Image

from nuclr.data import open_pairs
from nuclr.data.vectors import open_sides, pair_rows
from nuclr.models import DualEncoder
from nuclr.runs import config
from nuclr.training.loop import train
from tests.data import make
from tests.training import runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    settings = runs.picture_settings(folder, **{"schedule.epochs": 1, "data.train": "builtin:n=60"})
    train(config.load(folder / "empty.yaml", settings), folder / "run")
    return folder / "run"


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_features_of_pairs_equal_those_of_the_model(nuclr, trained, tmp_path, suffix):
    out = tmp_path / f"features.{suffix}"
    status, printed, err = nuclr("embed", trained, "--out", out, "--batch-size", 7)
    assert status == 0, err
    assert "x (60, 8)" in printed
    x, y = open_sides(str(out))
    pairs, model = open_pairs("builtin:n=60"), DualEncoder.from_pretrained(trained / "model")
    torch.testing.assert_close(
        torch.from_numpy(x.rows), model.encode_images([pairs.item("x", i) for i in range(60)]), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        torch.from_numpy(y.rows), model.encode_texts([pairs.item("y", i) for i in range(60)]), atol=1e-5, rtol=0
    )
    assert pair_rows(x, y).tolist() == list(range(60))


def test_an_x_with_several_y_is_encoded_once(nuclr, tmp_path):
    settings = runs.vector_settings(tmp_path, **{"schedule.epochs": 1})
    train(config.load(tmp_path / "empty.yaml", settings), tmp_path / "run")
    assert nuclr("embed", tmp_path / "run", "--out", tmp_path / "f.npz", "--best")[0] == 0
    arrays = np.load(tmp_path / "f.npz")
    assert arrays["x"].shape == (60, 8) and arrays["y"].shape == (120, 8)
    assert arrays["y_to_x"].tolist() == [i // 2 for i in range(120)]
    assert arrays["number"].tolist() == list(range(120))


def test_names_and_texts_of_pairs_are_written_next_to_the_embeddings(nuclr, trained, tmp_path):
    images = make.write_images(tmp_path / "images")
    entries = ({"image": name, "captions": texts} for name, texts in make.CAPTIONS.items())
    pairs = make.write_lines(images / "l.jsonl", *entries)
    status, printed, err = nuclr("embed", trained, "--pairs", pairs, "--out", tmp_path / "f.npz")
    assert status == 0, err
    arrays = np.load(tmp_path / "f.npz")
    names, texts = ((tmp_path / f"f.{side}.txt").read_text().splitlines() for side in ("x", "y"))
    assert names == list(make.CAPTIONS) and len(names) == len(arrays["x"])
    assert texts == [text for group in make.CAPTIONS.values() for text in group] and len(texts) == len(arrays["y"])
    assert "f.x.txt" in printed


def test_images_outside_of_the_root_need_an_option(nuclr, trained, tmp_path):
    make.write_images(tmp_path / "elsewhere")
    (tmp_path / "lists").mkdir()
    entries = ({"image": f"../elsewhere/{name}", "captions": texts} for name, texts in make.CAPTIONS.items())
    arguments = ["embed", trained, "--pairs", make.write_lines(tmp_path / "lists" / "l.jsonl", *entries)]
    status, _, err = nuclr(*arguments, "--out", tmp_path / "f.npz")
    assert status == 2 and "--allow-outside allows this" in err
    assert nuclr(*arguments, "--out", tmp_path / "f.npz", "--allow-outside")[0] == 0
    assert np.load(tmp_path / "f.npz")["y"].shape == (8, 8)


def test_images_alone_and_texts_alone(nuclr, trained, tmp_path):
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
        (["--out", "a.csv"], "a.csv"),
        (["--out", "no/a.npz"], "no/a.npz"),
        (["--out", "here.npz"], "here.npz"),
        (["--out", "a.npz", "--texts", "gone.txt"], "gone.txt"),
        (["--out", "a.npz", "--images", "gone"], "gone"),
        (["--out", "a.npz", "--texts", "t", "--images", "i"], "--images"),
        (["--out", "a.npz", "--pairs", "vectors.npz"], "vectors.npz"),
        (["--out", "a.npz", "--pairs", "l.jsonl", "--side", "x"], "--side x"),
        (["--out", "a.npz", "--texts", "here.npz", "--side", "x"], "side x"),
    ],
)
def test_wrong_options_are_refused(nuclr, trained, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.npz").write_text("mine")
    runs.write_vectors(tmp_path / "vectors.npz")
    status, _, err = nuclr("embed", trained, *arguments)
    assert status == 2
    assert message in err and len(err.strip().splitlines()) <= 2
    assert (tmp_path / "here.npz").read_text() == "mine"
