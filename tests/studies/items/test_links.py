"""Right answers in the files that people have: arrays, tables with a header, qrels; and those of pairs."""

from dataclasses import replace

import numpy as np
import pytest

from nuclr.data.vectors import Vectors
from nuclr.errors import UserError
from nuclr.studies.items.rows import find_links, read_links

LINKS = [[0, 4], [1, 3], [2, 0]]
QUERIES = Vectors(np.ones((3, 2)), "q.npy")
GALLERY = Vectors(np.ones((5, 2)), "g.npy")


@pytest.mark.parametrize(
    "text",
    [
        "0 4\n1 3\n2 0\n",
        "query,item\n0,4\n1,3\n2,0\n",
        '"qid"\t"doc_id"\n0\t4\n1\t3\n2\t0\n',
        "query-id\tcorpus-id\tscore\n0\t4\t1\n1\t3\t2\n1\t4\t0\n2\t0\t1\n",
        "0 0 4 1\n1 0 3 1\n1 0 2 0\n2 0 0 2\n",
        "0.0 4.000000000000000000e+00\n1.0 3.0\n2 0\n",
    ],
    ids=["pairs", "header", "names", "beir", "qrels", "floats"],
)
def test_text(tmp_path, text):
    (tmp_path / "links.txt").write_text(text)
    assert read_links(tmp_path / "links.txt", QUERIES, GALLERY).tolist() == LINKS


@pytest.mark.parametrize("dtype", ["int64", "uint8", "float32"])
def test_arrays(tmp_path, dtype):
    np.save(tmp_path / "links.npy", np.array(LINKS, dtype))
    assert read_links(tmp_path / "links.npy", QUERIES, GALLERY).tolist() == LINKS
    np.save(tmp_path / "answers.npy", np.array(LINKS, dtype)[:, 1])
    assert read_links(tmp_path / "answers.npy", QUERIES, GALLERY).tolist() == LINKS


@pytest.mark.parametrize(
    ("array", "named"),
    [
        (np.array([4, 3]), r"shape \(2,\)"),
        (np.array([[0, 0.5]]), "float64"),
        (np.array([[0, np.nan]]), "float64"),
        (np.array([[0, -3.0]]), "row -3"),
        (np.array([[0, 5]]), "row 5"),
    ],
)
def test_wrong_arrays(tmp_path, array, named):
    np.save(tmp_path / "links.npy", array)
    with pytest.raises(UserError, match=named):
        read_links(tmp_path / "links.npy", QUERIES, GALLERY)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("0\n", 1),
        ("query,item\n0\n", 2),
        ("0 0 1 high\n1 0 1 1\n", 1),
    ],
)
def test_wrong_lines(tmp_path, text, line):
    (tmp_path / "links.txt").write_text(text)
    with pytest.raises(UserError, match=f"links.txt: line {line} "):
        read_links(tmp_path / "links.txt", QUERIES, GALLERY)


def test_ids(tmp_path):
    path = tmp_path / "links.tsv"
    named = replace(GALLERY, ids=["a", "b", "c", "new york", "e"])
    path.write_text("query\titem\n0\te\n1\tnew york\n2\ta\n")
    assert read_links(path, QUERIES, named).tolist() == LINKS
    path.write_text("0 4\n1 3\n2 0\n")
    assert read_links(path, QUERIES, named).tolist() == LINKS, "row numbers still work"
    numerals = replace(GALLERY, ids=["40", "30", "20", "10", "0"])
    path.write_text("0 0\n1 10\n2 40\n")
    assert read_links(path, QUERIES, numerals).tolist() == LINKS, "distinct ids that are numbers are ids"
    for gallery, cell in ((named, "x"), (numerals, "4"), (GALLERY, "x"), (replace(GALLERY, ids=["x"] * 5), "x")):
        path.write_text(f"0 0\n1 {cell}\n" if gallery is not named else f"0 a\n1 {cell}\n")
        with pytest.raises(UserError, match=f"links.tsv: '{cell}' is neither .* g.npy"):
            read_links(path, QUERIES, gallery)
    asked = replace(QUERIES, ids=["q0", "q1", "q2"])
    for header in ("", "qid item\n"):
        path.write_text(f"{header}q0 e\nq1 b\n")
        assert read_links(path, asked, named).tolist() == [[0, 4], [1, 1]], "an id in the first line is no header"
    path.write_text("item,query\n4,0\n")
    with pytest.raises(UserError, match="'item'"):
        read_links(path, QUERIES, GALLERY)  # swapped columns are not misread


def test_swapped_files(tmp_path):
    (tmp_path / "links.txt").write_text("0 4\n1 3\n")
    with pytest.raises(UserError, match=r"they fit if q.npy are the queries .* swapped"):
        read_links(tmp_path / "links.txt", GALLERY, QUERIES)
    (tmp_path / "links.txt").write_text("a x\nb y\n")
    queries, gallery = replace(QUERIES, ids=list("abc")), replace(GALLERY, ids=list("xyzvw"))
    with pytest.raises(UserError, match=r"q.npy has one: are the files swapped"):
        read_links(tmp_path / "links.txt", gallery, queries)


def test_links_of_pairs_are_those_that_share_a_key():
    rng = np.random.default_rng(0)
    keys = {"x": rng.integers(0, 6, 8), "y": rng.integers(0, 6, 11)}
    sides = {}
    for side, key in keys.items():
        links = np.stack([np.arange(len(key)), key], axis=1)
        sides[side] = Vectors(np.ones((len(key), 2)), "pairs.npz", side, links=links)
    for first, second in (("x", "y"), ("y", "x"), ("y", "y")):
        expected = []
        for i, key in enumerate(keys[first]):
            for j, other in enumerate(keys[second]):
                if key == other and (first != second or i != j):
                    expected.append([i, j])
        assert sorted(find_links(sides[first], sides[second]).tolist()) == expected
    other = Vectors(np.ones((8, 2)), "other.npz", "y", links=sides["x"].links)
    assert find_links(sides["x"], other).shape == (0, 2)
