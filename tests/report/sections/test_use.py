"""The lines that use a model: they run as they stand, and name the run and its sides."""

import dataclasses

import numpy as np
import pytest

from nuclr.report.render import Options
from nuclr.report.sections.use import use_this_model
from nuclr.report.training_run import open_training_run
from nuclr.runs.side_words import name_sides
from tests.report.folders import QUOTED


@pytest.fixture
def context(picture_run):
    return open_training_run(picture_run, Options(model=False))


def test_the_lines_run(context, picture_run, tmp_path, monkeypatch):
    use = use_this_model(context)
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).write_bytes((picture_run.parent / "images" / QUOTED).read_bytes())
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(use.search, names)
    assert names["found"].shape == (2, 2)
    exec(use.corrected, names)
    assert names["found"].shape == (2, 2) and np.isfinite(names["scores"].numpy()).all()


def test_sides_and_commands(context, picture_run):
    use = use_this_model(context)
    assert (use.query.many, use.item.many) == ("captions", "images")
    assert "model.encode_images(images)" in use.search and "model.encode_texts(captions)" in use.search
    assert use.measure == f"nuclr evaluate {picture_run} --correct bank=train"
    assert [line.split()[4] for line in use.exports.splitlines()] == ["sentence-transformers", "onnx"]


@pytest.mark.parametrize(
    ("sides", "lines"),
    [
        (("en", "text", "de", "text"), ["gallery = model.encode_y(de_texts)", "(model.encode_x(en_texts) @"]),
        (("x", "vector", "y", "vector"), ['y_vectors = np.load("y_vectors.npy")', "import numpy as np"]),
        (("sound", "audio", "text", "text"), ["model.encode_texts(texts)", "sound_audios = [...]  # audio inputs"]),
        (("2 big", "text", "class", "text"), ["items_2_big_texts = [", "class_texts = ["]),
    ],
)
def test_other_sides(context, sides, lines):
    context.words = name_sides(*sides)
    search = use_this_model(context).search
    assert all(line in search for line in lines)
    compile(search, "page", "exec")


def test_views_are_searched_with_images(context):
    context.words = name_sides("x", "image", "y", "image", views=True)
    assert "query_images = " in use_this_model(context).search


def test_folders_with_quotes(context, tmp_path):
    odd = tmp_path / 'it\'s "odd"'
    (odd / "model").mkdir(parents=True)
    context.log = dataclasses.replace(context.log, folder=odd)
    use = use_this_model(context)
    compile(use.search, "page", "exec")
    assert use.measure.startswith("nuclr evaluate '/")
