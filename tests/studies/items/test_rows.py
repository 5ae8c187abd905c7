"""Names of rows, the table, and how often rows are checked."""

import csv
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import nuclr
from nuclr import arrays
from nuclr.data.vectors import Vectors
from nuclr.errors import UserError
from nuclr.studies.items.hubness_report import hubness_report
from nuclr.studies.items.rows import name_rows, write_table

Y = Vectors(np.ones((3, 2)), "pairs.npz", "y")
X = Vectors(np.ones((2, 2)), "pairs.npz", "x")


def unit(rng, rows):
    x = rng.normal(size=(rows, 6))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype("float32")


@pytest.fixture
def lists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entries = [{"image": "a.jpg", "captions": ["a cat", "one cat"]}, {"image": "b.jpg", "captions": ["a dog"]}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (tmp_path / "names.txt").write_text("a cat\none cat\na dog\n")
    (tmp_path / "names.csv").write_text("id,title\n1,a cat\n2,one cat\n3,a dog\n")


@pytest.mark.parametrize("argument", ["pairs.jsonl", "names.txt", "names.csv:title"])
def test_names_in_files_of_all_kinds(lists, argument):
    assert name_rows(Y, argument).ids == ["a cat", "one cat", "a dog"]
    for wrong in (argument, "names.csv:word", "none.txt"):  # for 5 rows
        with pytest.raises(UserError, match=wrong.partition(":")[0]):
            name_rows(Vectors(np.ones((5, 2)), "g.npy"), wrong)


def test_a_list_of_pairs_names_both_sides(lists):
    assert name_rows(X, "pairs.jsonl").ids == ["a.jpg", "b.jpg"]
    assert name_rows(X, "pairs.jsonl", np.array([2, 0])).ids == ["b.jpg", "a.jpg"]
    one_array = Vectors(np.ones((2, 2)), "images.npy")
    assert name_rows(one_array, "pairs.jsonl").ids == ["a.jpg", "b.jpg"], "one row per distinct x"


def test_a_table_has_cells_that_no_spreadsheet_runs(tmp_path):
    part = {"number": np.arange(2), "zeta": np.array([0.5, -1 / 3]), "name": ["=1+1", "a, b\nc"]}
    write_table(tmp_path / "t.csv", [part, part])
    rows = list(csv.DictReader((tmp_path / "t.csv").open(newline="")))
    assert [row["zeta"] for row in rows] == ["0.5", "-0.33333333"] * 2
    assert rows[2]["name"] == "'=1+1" and rows[3]["name"] == "a, b\nc"


def test_arrays_give_what_files_give(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    queries, gallery, bank = (unit(rng, rows) for rows in (40, 50, 30))
    links = np.stack([np.arange(40), np.arange(40)], axis=1)
    for name, array in (("q", queries), ("g", gallery), ("b", bank), ("l", links)):
        np.save(f"{name}.npy", array)
    of_files = nuclr.hubness_report("q.npy", "g.npy", bank="b.npy", links="l.npy", k=5)
    of_arrays = nuclr.hubness_report(torch.from_numpy(queries), gallery, bank=bank, links=links, k=5)
    hubs = [[replace(hub, bias=round(hub.bias, 5)) for hub in report.hubs] for report in (of_arrays, of_files)]
    assert hubs[0] == hubs[1] and of_arrays.recall_change == of_files.recall_change
    np.testing.assert_allclose(of_files.bias, of_arrays.bias, atol=1e-6)  # centered after rounding, see `_map_bias`
    np.testing.assert_array_equal(of_arrays.bias, of_arrays.correction.bias(gallery))
    assert of_arrays.counts.sum(dim=1).tolist() == [200, 200] and not of_arrays.same
    assert nuclr.hubness_report(gallery, k=5).same
    with pytest.raises(UserError, match="queries"):
        nuclr.hubness_report(2 * queries, gallery)


@pytest.mark.parametrize("bank", [None, "b.npy"])
def test_each_row_is_checked_once(tmp_path, monkeypatch, bank):
    """Rows are counted by the only function that looks for NaN."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    sizes = {"q.npy": 41, "g.npy": 53, "b.npy": 37}
    for name, rows in sizes.items():
        np.save(name, unit(rng, rows))
    checked: list[int] = []
    original = arrays.check_finite

    def count(name, matrix, first=0):
        checked.append(len(matrix))
        original(name, matrix, first)

    monkeypatch.setattr(arrays, "check_finite", count)
    hubness_report("q.npy", "g.npy", bank=bank, out=tmp_path / "out")
    used = ("q.npy", "g.npy") if bank is None else sizes
    assert sorted(checked) == sorted(sizes[name] for name in used)
    checked.clear()
    hubness_report("g.npy", "g.npy")
    assert checked == [53]


def test_two_arrays_load_few_modules(tmp_path):
    """`nuclr hubness q.npy g.npy` needs neither formats of pairs nor models, training or figures."""
    np.save(tmp_path / "q.npy", unit(np.random.default_rng(0), 30))
    np.save(tmp_path / "g.npy", unit(np.random.default_rng(1), 40))
    code = (
        "import sys; from nuclr.cli.app import main; sys.argv = ['nuclr', 'hubness', 'q.npy', 'g.npy']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print('modules', *[m for m in sys.modules if m.split('.')[0] in ('nuclr', 'matplotlib', 'transformers')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    modules = done.stdout.splitlines()[-1].split()[1:]
    assert len(modules) <= 80
    unwanted = ("nuclr.models", "nuclr.training", "nuclr.runs", "nuclr.objectives", "nuclr.data.formats", "matplotlib")
    assert not [module for module in modules if module.startswith(unwanted)]
    assert (tmp_path / "hubness" / "report.html").is_file()
