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
    ("settings", "message"),
    [
        ("mixed.jsonl", "column 'question' mixes names of images and texts: line 2 has \"1.jpg\" and line 1 has"),
        ("empty.jsonl", "20 of 40 samples are bad, 50.0%, more than the 5.0% allowed (data.max_bad_share): 20 x empty"),
        ("beir data.split=train", "train.tsv: holds no pairs; a relevant document has relevance 1 or more"),
        ("texts.jsonl data.contrast=views", "no column of images for data.contrast=views among 'question', 'answer'"),
        (
            "texts.jsonl data.contrast=views data.x.key=answer",
            "data.contrast=views needs images, and this source holds texts",
        ),
        ("vectors.npz data.contrast=views", "data.contrast=views needs images, and this source holds vectors"),
        (
            "texts.jsonl data.y.views=2",
            "data.y.views=2: nothing in texts.jsonl has several distinct y that belong to it",
        ),
        ("texts.jsonl data.x.views=2 data.y.views=2", "views on both sides need rows with several x and several y"),
        ("images.jsonl data.x.views=2 augment.enabled=false", "data.x.views=2 needs augmentation, or all views of an"),
        (
            "texts.jsonl data.views=2",
            "unknown key 'data.views'; data.x.views and data.y.views are the numbers of views",
        ),
        ("texts.jsonl data.y.views=0", "data.y.views is 0; it needs a whole number at least 1 and at most 64"),
        ("texts.jsonl data.y.views=1000", "data.y.views is 1000; it needs a whole number at least 1 and at most 64"),
        ("images.jsonl model.shared=true", "model.shared=true: one encoder cannot take both images (side x) and texts"),
        ("vectors.npz model.shared=true", "model.shared=true: vectors of 3 and 4 coordinates need two encoders"),
        ("texts.jsonl model.x.encoder=tiny_resnet", "model.x.encoder is 'tiny_resnet', but the data holds texts there"),
        ("images.jsonl model.x.encoder=tiny_text", "model.x.encoder is 'tiny_text', but the data holds images there"),
        ("vectors.npz model.y.encoder=tiny_text", "the data holds vectors there; leave it out"),
        (
            "texts.jsonl data.x.modality=banana",
            "data.x.modality=banana: unknown modality; allowed: image, text, vector",
        ),
        ("texts.jsonl data.x.modality=vector", "question is not a list of numbers"),
        ("vectors.npz data.y.modality=text", "data.y.modality=text: vectors.npz holds vectors on side y"),
        ("texts.jsonl plugins=smell.py data.x.modality=smell", "model.x.encoder is missing, and the data holds smells"),
        ("texts.jsonl plugins=smell.py data.x.modality=smell model.x.encoder=tiny_text", "register one in a plugin"),
        ("texts.jsonl model.x.image_size=32", "model.x.image_size: is for images, but side x takes texts"),
        ("texts.jsonl data.val=images.jsonl", "data.val holds images on side x, but data.train holds texts"),
        ("texts.jsonl data.x.name=a data.y.name=a", "both sides are called 'a'"),
    ],
)
def test_wrong_input_is_refused(folder, nuclr, settings, message):
    status, out, err = nuclr("train", *f"data.train={settings} data.batch_size=8 out=run threads=1".split())
    lines = err.strip().splitlines()
    assert (status, out) == (2, "") and len(lines) <= 2 and message in err, err
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
