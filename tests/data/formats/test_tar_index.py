"""The index of one tar: what a sample is, where its caption is, and files that are not tars."""

import json
import tarfile

import numpy as np
import pytest

from nuclr.data import open_pairs
from nuclr.data.formats.tar_index import ROW
from nuclr.errors import UserError
from tests.data import make


def captions(pairs):
    return [pairs.y(number) for number in range(len(pairs))]


def test_a_sample_without_image_or_caption_is_bad_and_keeps_its_number(tmp_path):
    members = (
        make.sample("0", 0)
        | make.sample("1", 1)
        | make.sample("2", 2, "  ")
        | make.sample("3", 3)
        | make.sample("4", 4)
    )
    del members["1.txt"], members["1.json"], members["3.jpg"]
    members["4.txt"] = b"\xff\xfe"
    pairs = open_pairs(make.write_tar(tmp_path / "t.tar", members))
    assert pairs.known_bad == {1: "no caption", 2: "empty caption", 3: "no image", 4: "caption is not UTF-8 text"}
    assert pairs.y(0) == "a caption" and pairs.name(3) == "t.tar/3.txt"


def test_long_names_folders_and_other_members_are_handled(tmp_path):
    folder = "a" * 90 + "/" + "b" * 60
    members = (
        {"README": b"hello", "._x.jpg": b"junk"}
        | make.sample(f"{folder}/1", 1, "one")
        | make.sample("other/1", 2, "two")
    )
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT):
        path = make.write_tar(tmp_path / f"{form}.tar", members, form)
        assert captions(open_pairs(path)) == ["one", "two"]


def test_y_key_chooses_an_entry_of_the_json(tmp_path):
    members = make.sample("1", 1) | {"1.json": json.dumps({"alt": "other", "caption": "c"}).encode()}
    path = make.write_tar(tmp_path / "t.tar", members)
    assert captions(open_pairs(path, y_key="alt")) == ["other"]
    assert captions(open_pairs(path)) == ["a caption"]


def test_a_file_that_is_not_a_tar_is_refused(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"\x1f\x8b" + bytes(1000))
    with pytest.raises(UserError, match="compressed; unpack it first"):
        open_pairs(tmp_path / "a.tar")
    (tmp_path / "b.tar").write_bytes(b"text" * 1000)
    with pytest.raises(UserError, match="not a tar file"):
        open_pairs(tmp_path / "b.tar")


def test_a_row_of_the_index_has_at_most_32_bytes():
    assert ROW.itemsize <= 32
    assert np.dtype(ROW).hasobject is False
