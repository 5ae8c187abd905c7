"""`nuclr train` on any two modalities: wrong data and settings are refused in one or two lines, with status 2."""

import json

import numpy as np
import pytest

from nuclr.data.modalities import base
from tests.data import make
from tests.data.formats.test_beir import write as write_beir
from tests.training import runs

PLUGIN = """
from nuclr.data import Modality, register_modality

class Smell(Modality):
    name = "smell"
    def read(self, cell, folder): return cell
    def collate(self, items, options=None): return list(items)
    def show(self, item): return item

register_modality(Smell())
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with pairs of several kinds, some of them wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))  # forget the modality of the plugin afterwards
    runs.write_texts(tmp_path / "texts.jsonl", 40)
    (tmp_path / "0.jpg").write_bytes(make.picture(0))
    rows = [{"image": "0.jpg", "caption": f"text {n}"} for n in range(40)]
    make.write_lines(tmp_path / "images.jsonl", *rows)
    rows = [{"question": f"{n}.jpg" if n % 2 else f"text {n}", "answer": f"{n}"} for n in range(40)]
    make.write_lines(tmp_path / "mixed.jsonl", *rows)
    rows = [{"question": f"text {n}", "answer": "" if n % 2 else f"{n}"} for n in range(40)]
    make.write_lines(tmp_path / "empty.jsonl", *rows)
    np.savez(tmp_path / "vectors.npz", x=np.ones((40, 3)), y=np.ones((40, 4)))
    write_beir(tmp_path / "beir", train="q1\td1\t0\n")
    (tmp_path / "smell.py").write_text(PLUGIN)
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("mixed.jsonl", ["'question'", '"1.jpg"', '"text 0"']),
        ("empty.jsonl", ["empty.jsonl", "20 of 40", "data.max_bad_share"]),
        ("beir data.split=train", ["train.tsv"]),
        ("texts.jsonl data.contrast=views", ["data.contrast=views", "'question', 'answer'"]),
        ("texts.jsonl data.contrast=views data.x.key=answer", ["data.contrast=views", "texts"]),
        ("vectors.npz data.contrast=views", ["data.contrast=views", "vectors"]),
        ("texts.jsonl data.y.views=2", ["data.y.views=2", "texts.jsonl"]),
        ("texts.jsonl data.x.views=2 data.y.views=2", ["views"]),
        ("texts.jsonl data.y.views=1000", ["data.y.views is 1000", "64"]),
        ("images.jsonl model.shared=true", ["model.shared", "image", "text"]),
        ("vectors.npz model.shared=true", ["model.shared"]),
        ("texts.jsonl model.x.encoder=tiny_resnet", ["model.x.encoder", "'tiny_resnet'"]),
        ("vectors.npz model.y.encoder=tiny_text", ["model.y.encoder", "'tiny_text'"]),
        ("texts.jsonl data.x.modality=banana", ["data.x.modality=banana", "image, text, vector"]),
        ("texts.jsonl data.x.modality=vector", ["question"]),
        ("vectors.npz data.y.modality=text", ["data.y.modality=text", "vectors.npz"]),
        ("texts.jsonl plugins=smell.py data.x.modality=smell", ["model.x.encoder"]),
        ("texts.jsonl plugins=smell.py data.x.modality=smell model.x.encoder=tiny_text", ["smells"]),
        ("texts.jsonl model.x.image_size=32", ["model.x.image_size", "texts"]),
        ("texts.jsonl data.val=images.jsonl", ["data.val", "images", "texts"]),
        ("texts.jsonl data.x.name=a data.y.name=a", ["data.x.name", "data.y.name"]),
    ],
)
def test_wrong_input_is_refused(folder, nuclr, settings, named):
    status, out, err = nuclr("train", *f"data.train={settings} data.batch_size=8 out=run threads=1".split())
    assert (status, out) == (2, "") and len(err.strip().splitlines()) <= 2, err
    assert all(part in err for part in named), err
    assert not (folder / "run" / "checkpoints").exists()


def test_a_few_empty_answers_are_left_out_and_listed(folder, nuclr):
    rows = runs.text_rows(40)
    rows[3]["answer"] = " "
    make.write_lines(folder / "one.jsonl", *rows)
    settings = ["data.batch_size=8", "schedule.epochs=1", "model.x.encoder=bag_of_words", "report=false", "threads=1"]
    status, _, err = nuclr("train", "data.train=one.jsonl", "out=run", *settings)
    assert status == 0, err
    (line,) = (folder / "run" / "bad_samples.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "empty answer"
