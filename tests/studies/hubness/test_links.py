"""Right answers in the files that people have: arrays, tables with a header, qrels."""

import numpy as np
import pytest

from nuclr.errors import UserError
from nuclr.studies.hubness.links import read_links

LINKS = [[0, 4], [1, 3], [2, 0]]


@pytest.mark.parametrize(
    "text",
    [
        "0 4\n1 3\n2 0\n",
        "query,item\n0,4\n1,3\n2,0\n",
        "item,query\n4,0\n3,1\n0,2\n",
        '"doc_id"\t"qid"\n4\t0\n3\t1\n0\t2\n',
        "query-id\tcorpus-id\tscore\n0\t4\t1\n1\t3\t2\n1\t4\t0\n2\t0\t1\n",
        "0 0 4 1\n1 0 3 1\n1 0 2 0\n2 0 0 2\n",
        "0.0 4.000000000000000000e+00\n1.0 3.0\n2 0\n",
        "from,to\n0,4\n1,3\n2,0\n",
    ],
    ids=["pairs", "header", "swapped", "names", "beir", "qrels", "floats", "unknown names"],
)
def test_text(tmp_path, text):
    (tmp_path / "links.txt").write_text(text)
    assert read_links(tmp_path / "links.txt", 3, 5).tolist() == LINKS


@pytest.mark.parametrize("dtype", ["int64", "uint8", "float32"])
def test_arrays(tmp_path, dtype):
    np.save(tmp_path / "links.npy", np.array(LINKS, dtype))
    assert read_links(tmp_path / "links.npy", 3, 5).tolist() == LINKS
    np.save(tmp_path / "answers.npy", np.array(LINKS, dtype)[:, 1])
    assert read_links(tmp_path / "answers.npy", 3, 5).tolist() == LINKS


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (
            np.array([4, 3]),
            r"int64 of shape \(2,\); needs whole numbers .* or \(3,\), the item of each query",
        ),
        (np.array([[0, 0.5]]), r"float64 of shape \(1, 2\); needs whole numbers"),
        (np.array([[0, np.nan]]), "needs whole numbers"),
        (np.array([[0, np.inf]]), "row 0 names item"),
        (np.array([[0, -3.0]]), "row 0 names item -1"),
        (np.array([[0, 5]]), "row 0 names item 5; they are numbered from 0 to 4"),
    ],
)
def test_wrong_arrays(tmp_path, array, message):
    np.save(tmp_path / "links.npy", array)
    with pytest.raises(UserError, match=message):
        read_links(tmp_path / "links.npy", 3, 5)


@pytest.mark.parametrize("text", ["0 1 2\n", "query,item\n0\n", "0 1\n0 x\n", "0 0 1 high\n1 0 1 1\n1 0 z 1\n"])
def test_wrong_lines(tmp_path, text):
    (tmp_path / "links.txt").write_text(text)
    with pytest.raises(UserError, match="does not have two whole numbers, query and item, or four as in qrels"):
        read_links(tmp_path / "links.txt", 3, 5)
