"""Test sets of `nuclr evaluate`: columns of a run, pairs without an answer, labeled vectors and images."""

import json

import numpy as np
import pytest

from nuclr.errors import UserError
from nuclr.runs.settings import Data, DataSide
from nuclr.studies.evaluate.tasks import open_probe, open_retrieval, read_classes, read_labeled_vectors
from tests.data import make

ROWS = [{"id": n, "en": f"number {n}", "de": f"Zahl {n}", "fr": f"nombre {n}"} for n in range(4)]


def run_data(x, y, **changes):
    return Data(x=DataSide(x, "text", "source"), y=DataSide(y, "text", "target"), **changes)


def test_the_columns_of_the_run_are_used_if_they_exist(tmp_path):
    path = make.write_lines(tmp_path / "rows.jsonl", *ROWS)
    task = open_retrieval(str(path), None, None, 0.0, columns=run_data("de", "fr"))
    assert (task.pairs.x(1), task.pairs.y(1)) == ("Zahl 1", "nombre 1")
    assert (task.pairs.x_name, task.pairs.y_name, task.duplicates) == ("source", "target", "merge")
    other = make.write_lines(
        tmp_path / "other.jsonl", {"question": "a?", "answer": "b"}, {"question": "c?", "answer": "d"}
    )
    task = open_retrieval(str(other), None, None, 0.0, columns=run_data("de", "fr"))
    assert (task.pairs.x(0), task.pairs.y(0), task.pairs.x_name) == ("a?", "b", "source")
    with pytest.raises(UserError, match=r"no column 'it' \(data\.x\.key\)"):
        open_retrieval(str(path), None, None, 0.0, columns=run_data("it", "fr"))


def test_a_query_without_an_answer_is_refused(tmp_path):
    rows = [ROWS[0], {**ROWS[1], "de": ""}, {**ROWS[2], "de": None}]
    path = make.write_lines(tmp_path / "rows.jsonl", *rows)
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2: en has no de text; add one .*\(2 such en texts\)"):
        open_retrieval(str(path), None, None, 0.5, columns=Data(x=DataSide("en"), y=DataSide("de")))


def test_vectors_of_a_views_run_keep_their_own_sides(tmp_path):
    path = make.write_lines(
        tmp_path / "rows.jsonl", {"question": "a?", "answer": "b"}, {"question": "c?", "answer": "d"}
    )
    data = Data(contrast="views", x=DataSide("image", "image", "view 1"))
    assert open_retrieval(str(path), None, None, 0.0, columns=data).pairs.x_kind == "text"


def test_labeled_vectors(tmp_path):
    path, x = tmp_path / "classes.npz", np.random.default_rng(0).normal(size=(6, 3))
    np.savez(path, x=x, labels=[0, 1, 5, 0, 1, 5])
    loaded = read_labeled_vectors(path)
    assert loaded.x.shape == (6, 3) and loaded.labels.tolist() == [0, 1, 5, 0, 1, 5]
    task = open_probe(str(path), 0.0)
    assert task.numbers.tolist() == list(range(6)) and task.bad == {}
    for arrays, message in (
        ({"labels": [0, 1]}, "labels has shape"),
        ({"labels": [-1, 1, 1, 0, 0, 0]}, "label -1; allowed: whole numbers from 0"),
        ({"labels": [1] * 6}, "labels needs at least two classes"),
        ({"x": x * np.nan}, "x holds a NaN"),
        ({"x": x.astype(int)}, "x has shape"),
    ):
        np.savez(path, **({"x": x, "labels": [0, 1, 5, 0, 1, 5]} | arrays))
        with pytest.raises(UserError, match=message):
            read_labeled_vectors(path)
    np.savez(path, x=x, labels=[0, 1, 2, 0, 1, 2], prompts=x[:2])
    with pytest.raises(UserError, match="label 2; allowed: 0 to 1, the rows of prompts"):
        read_classes(path)


def test_labeled_images(tmp_path):
    for name, files in {"cat": ("a.jpg", "b.png"), "dog": ("c.jpg", "d.jpg", "e.jpg")}.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_bytes(make.IMAGES[file])
    (tmp_path / "dog" / "broken.jpg").write_bytes(b"no image")
    task = open_probe(str(tmp_path), 0.5)
    assert task.numbers.tolist() == [0, 1, 3, 4, 5] and list(task.bad) == [2]
    with pytest.raises(UserError, match=r"data\.max_bad_share"):
        open_probe(str(tmp_path), 0.0)
    assert json.dumps(task.path) == json.dumps(str(tmp_path))
    assert len(open_probe("builtin", 0.0).numbers) > 2
