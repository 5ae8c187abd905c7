"""Pickles that hold plain data are read; everything else is refused and nothing of it is executed."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from nuclr.data.formats import plain_pickle
from nuclr.data.formats.plain_pickle import read_plain_pickle
from nuclr.errors import UserError
from tests.data import layouts

PATH = Path("test_batch")


class Hostile:
    """Unpickling it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_python_2_pickles_are_read():
    data = layouts.cifar_pixels()
    content = read_plain_pickle(layouts.python2_pickle({"labels": [3, 300], "data": data, "names": ["a"]}), PATH)
    assert content.keys() == {b"labels", b"data", b"names"}
    assert content[b"labels"] == [3, 300] and content[b"names"] == [b"a"]
    np.testing.assert_array_equal(content[b"data"], data)


@pytest.mark.parametrize("protocol", [3, 4])
def test_python_3_pickles_are_read(protocol):
    value = {b"data": np.arange(6, dtype=np.uint8).reshape(2, 3), "labels": [1, -70000], "other": ("a", None, True)}
    content = read_plain_pickle(pickle.dumps(value, protocol), PATH)
    np.testing.assert_array_equal(content.pop(b"data"), value.pop(b"data"))
    assert content == value


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_code_is_not_executed(tmp_path, protocol):
    for value in (Hostile(tmp_path / "touched"), {"data": [Hostile(tmp_path / "touched")]}):
        with pytest.raises(UserError, match="more than plain data"):
            read_plain_pickle(pickle.dumps(value, protocol), PATH)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    "value", [1.5, {1.5: 2}, {(1,): 2}, {1}, print, np.zeros(3), np.zeros((2, 2), np.uint8, order="F"), 2**80]
)
def test_other_values_are_refused(value):
    with pytest.raises(UserError, match="test_batch: not read"):
        read_plain_pickle(pickle.dumps(value, 4), PATH)


def test_damaged_files_are_one_clear_error():
    data = layouts.python2_pickle({"labels": [1, 2], "data": layouts.cifar_pixels()[:1]})
    for end in (0, 1, 5, 40, len(data) // 2, len(data) - 1):
        with pytest.raises(UserError, match="test_batch: not"):
            read_plain_pickle(data[:end], PATH)
    rng = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(data[:150])
        damaged[rng.integers(150)] = rng.integers(256)
        with pytest.raises(UserError, match="test_batch: not"):
            read_plain_pickle(bytes(damaged), PATH)


def test_sizes_are_bounded(monkeypatch):
    """Tuples of references to each other would be exponentially large if they were copied."""
    monkeypatch.setattr(plain_pickle, "MOST_OPERATIONS", 1000)
    with pytest.raises(UserError, match="more than 1,000 operations"):
        read_plain_pickle(b"\x80\x02](" + b"K\x01" * 2000 + b"e.", PATH)
    doubled = b"\x80\x02)" + b"q\x00h\x00\x86" * 200 + b"."
    assert isinstance(read_plain_pickle(doubled, PATH), tuple)
