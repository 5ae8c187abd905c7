"""Stacked: the rows of several files behave like those of one array in memory."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nuclr.errors import UserError
from nuclr.stacked import Stacked, stored_npy

SIZES = (5, 0, 7, 1)


@pytest.fixture
def parts(tmp_path):
    """Write matrices of float16 and one of float32, and return them with their concatenation."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(rows, 3)).astype("f4" if rows == 7 else "f2") for rows in SIZES]
    stored = []
    for number, array in enumerate(arrays):
        path = tmp_path / f"{number}.npy"
        np.save(path, array)
        stored.append(stored_npy(path))
    return stored, np.concatenate(arrays)


def test_slices_are_those_of_an_array(parts):
    stored, array = parts
    for limits in ((None,), (2, 9), (1, None, 3), (4, 4), (-3, None), (None, None, -1)):
        rows = slice(*limits)
        part = Stacked(stored)[rows]
        assert isinstance(part, Stacked) and len(part) == len(array[rows]) and part.shape == array[rows].shape
        np.testing.assert_array_equal(np.asarray(part), array[rows])
        np.testing.assert_array_equal(np.asarray(part[1:5:2]), array[rows][1:5:2])


def test_rows_of_an_array(parts):
    stored, array = parts
    matrix = Stacked(stored)
    assert matrix.dtype == array.dtype and matrix.ndim == 2
    index = np.array([12, 0, 5, 5, 11])
    np.testing.assert_array_equal(matrix[index], array[index])
    np.testing.assert_array_equal(matrix[::2][[3, 1]], array[::2][[3, 1]])
    assert matrix[np.array([], np.int64)].shape == (0, 3)
    for wrong in ([13], [-1], np.ones(13, bool)):
        with pytest.raises(IndexError, match="13"):
            matrix[wrong]


def test_no_file_stays_open(parts):
    stored, array = parts
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir())) if descriptors.is_dir() else 0
    matrix = Stacked(stored * 20)
    np.testing.assert_array_equal(np.asarray(matrix), np.concatenate([array] * 20))
    np.testing.assert_array_equal(matrix[[250, 3, 100]], np.concatenate([array] * 20)[[250, 3, 100]])
    if before:
        assert len(list(descriptors.iterdir())) <= before


@pytest.mark.parametrize("shape", [(2, 3), (6,), (2, 0)])
@pytest.mark.parametrize("dtype", ["int64", "complex64", ">f4", "f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_only_rows_of_numbers_that_can_be_mapped_are_accepted(tmp_path, shape, dtype, order):
    matrix = np.arange(6 if 0 not in shape else 0).astype(dtype).reshape(shape)
    np.save(tmp_path / "a.npy", np.asarray(matrix, order=order))
    if (shape, dtype) == ((2, 3), "f4"):
        stacked = Stacked([stored_npy(tmp_path / "a.npy")])
        assert np.array_equal(stacked, matrix) and np.array_equal(stacked[[1, 0]], matrix[[1, 0]])
    else:
        with pytest.raises(UserError, match=r"a\.npy"):
            stored_npy(tmp_path / "a.npy")


def test_a_header_that_promises_more_than_the_file_has_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((100, 8)))
    content = (tmp_path / "a.npy").read_bytes()[:-1]
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.npy"):
        stored_npy(tmp_path / "a.npy")


def test_parts_of_other_widths_and_a_file_that_disappears_are_refused(tmp_path):
    for width in (2, 3):
        np.save(tmp_path / f"{width}.npy", np.ones((4, width)))
    two, three = (stored_npy(tmp_path / f"{width}.npy") for width in (2, 3))
    with pytest.raises(ValueError, match="2, 3"):
        Stacked([two, three])
    (tmp_path / "2.npy").unlink()
    with pytest.raises(UserError, match=r"2\.npy"):
        Stacked([two])[[0]]


def test_a_file_that_is_truncated_while_it_is_in_use_is_an_error(tmp_path):
    path = tmp_path / "big.npy"
    np.save(path, np.ones((20_000, 4), "float32"))
    script = (
        "import os, sys; from nuclr.data.vectors import open_vectors; rows = open_vectors(sys.argv[1]).rows; "
        "os.truncate(sys.argv[1], 200); rows[19_999:].__array__().sum()"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1  # numpy.memmap alone would be killed by SIGBUS
    assert f"UserError: {path}: cannot be read any more" in done.stderr
