"""Test sets of `nuclr evaluate`: columns of a run, labeled vectors and images."""

import numpy as np
import pytest

from nuclr.errors import UserError
from nuclr.runs.settings import Data, DataSide
from nuclr.studies.tasks import open_labels, open_retrieval
from tests.data import make

ROWS = [{"id": n, "en": f"number {n}", "de": f"Zahl {n}", "fr": f"nombre {n}"} for n in range(4)]


def run_data(x, y, **changes):
    return Data(x=DataSide(x, "text", "source"), y=DataSide(y, "text", "target"), **changes)


def test_the_columns_of_the_run_are_used_if_they_exist(tmp_path):
    path = make.write_lines(tmp_path / "rows.jsonl", *ROWS)
    task = open_retrieval(str(path), run_data("de", "fr"))
    pairs = task.source.pairs
    assert (pairs.item("x", 1), pairs.item("y", 1)) == ("Zahl 1", "nombre 1")
    assert (pairs.side_names, task.duplicates) == (("source", "target"), "merge")
    other = make.write_lines(
        tmp_path / "other.jsonl", {"question": "a?", "answer": "b"}, {"question": "c?", "answer": "d"}
    )
    pairs = open_retrieval(str(other), run_data("de", "fr")).source.pairs
    assert (pairs.item("x", 0), pairs.item("y", 0), pairs.sides["x"].name) == ("a?", "b", "source")
    views = Data(contrast="views", x=DataSide("image", "image", "view 1"))
    assert open_retrieval(str(other), views).source.pairs.sides["x"].modality.name == "text", "not those of the views"
    with pytest.raises(UserError, match="'it'"):
        open_retrieval(str(path), run_data("it", "fr"))


def test_labeled_vectors(tmp_path):
    path = tmp_path / "classes.npz"
    np.savez(path, x=np.random.default_rng(0).normal(size=(6, 3)), labels=[0, 1, 5, 0, 1, 5])
    task = open_labels(str(path), Data(), kind="labels")
    assert task.source.numbers.tolist() == list(range(6)) and task.source.bad == {}
    assert task.classes.labels.tolist() == [0, 1, 2, 0, 1, 2] and task.classes.classes == ["0", "1", "5"]


def test_labeled_images(tmp_path):
    for name, files in {"cat": ("a.jpg", "b.png"), "dog": ("c.jpg", "d.jpg", "e.jpg")}.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_bytes(make.IMAGES[file])
    (tmp_path / "dog" / "broken.jpg").write_bytes(b"no image")
    task = open_labels(str(tmp_path), Data(max_bad_share=0.5), kind="labels")
    assert task.source.numbers.tolist() == [0, 1, 3, 4, 5] and list(task.source.bad) == [2]
    with pytest.raises(UserError, match=r"data\.max_bad_share"):
        open_labels(str(tmp_path), Data(max_bad_share=0.0), kind="labels")
    assert len(open_labels("builtin", Data(), kind="labels").source.numbers) > 2
