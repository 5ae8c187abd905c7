"""`data.keep`: numbers of the pairs to train on."""

import numpy as np
import pytest

from nuclr.data import epoch_order, open_pairs, read_keep, usable
from nuclr.errors import UserError
from nuclr.studies.popularity.keep import write_list


def test_what_nuclr_popularity_writes(tmp_path):
    write_list(tmp_path / "keep.txt", np.array([7, 2, 5]), 10)
    kept = read_keep(tmp_path / "keep.txt", 10)
    assert kept.tolist() == [2, 5, 7]
    pairs = open_pairs("builtin:n=10")
    assert usable(pairs, bad=[5, 9], keep=kept).tolist() == [2, 7]
    assert sorted(epoch_order(pairs, 0, 0, numbers=kept)) == [2, 5, 7]


def test_npy_and_repeated_numbers(tmp_path):
    np.save(tmp_path / "keep.npy", np.array([3, 1, 3], np.uint8))
    assert read_keep(tmp_path / "keep.npy", 4).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("k.txt", "1\n10\n11\n", "pair 10, and 1 more does not exist; the data has pairs 0 to 9"),
        ("k.txt", "-1\n", "pair -1 does not exist"),
        ("k.txt", "1\nimage.jpg\n", r"k\.txt, line 2: 'image\.jpg' is not a whole number; write one number per line"),
        ("k.txt", "# nothing\n", "the file has no numbers"),
        ("k.npy", np.array([0.5]), r"holds float64 of shape \(1,\); needs whole numbers of shape \(n,\)"),
        ("k.npy", "text", r"cannot be read as \.npy"),
        ("gone.txt", None, r"data\.keep=.*gone\.txt: no such file"),
    ],
)
def test_mistakes(tmp_path, name, content, message):
    path = tmp_path / name
    if isinstance(content, np.ndarray):
        np.save(path, content)
    elif content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_keep(path, 10)
