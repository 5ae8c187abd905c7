"""Tars: what a sample is, the index and its cache, truncated files."""

import json
import os
import tarfile

import numpy as np
import pytest

from nuclr.data import check_samples, open_pairs
from nuclr.data.formats import tars as tars_module
from nuclr.data.formats.tars import expand
from nuclr.data.pairs import BadSample
from nuclr.errors import UserError
from tests.data import make


def three_tars(folder, samples=4):
    """Keys as img2dataset counts them; captions name tar and sample."""
    for tar in range(3):
        members = {}
        for number in range(samples):
            members |= make.sample(f"{tar:05d}{number:04d}", 10 * tar + number, f"tar {tar} sample {number}")
        make.write_tar(folder / f"{tar:05d}.tar", members)
    return folder


def captions(pairs):
    def caption(number):
        try:
            return pairs.y(number)
        except BadSample as bad:
            return bad.reason

    return [caption(number) for number in range(len(pairs))]


ALL = [f"tar {tar} sample {number}" for tar in range(3) for number in range(4)]


@pytest.mark.parametrize(
    "pattern",
    [
        "{f}",
        "{f}/{{00000..00002}}.tar",
        "{f}/{{00000,00001,00002}}.tar",
        "{f}/00000.tar::{f}/{{00001..00002}}.tar",
        "{f}/0000{{0..1}}.tar::{f}/00002.tar",
    ],
)
def test_ways_to_name_them(tmp_path, pattern):
    assert captions(open_pairs(pattern.format(f=three_tars(tmp_path / "t")))) == ALL


def test_relative_to_root(tmp_path):
    three_tars(tmp_path / "t")
    assert captions(open_pairs("t/{00000..00001}.tar::t/00002.tar", root=tmp_path)) == ALL


def test_braces_keep_their_zeros():
    assert tars_module._braces("a/{08..11}{x,y}.tar")[:3] == ["a/08x.tar", "a/08y.tar", "a/09x.tar"]


def test_a_sample_that_misses_a_part_is_there_and_bad(tmp_path):
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


def test_members_in_folders_with_long_names_and_others_between(tmp_path):
    folder = "a" * 90 + "/" + "b" * 60
    members = (
        {"README": b"hello", "._x.jpg": b"junk"}
        | make.sample(f"{folder}/1", 1, "one")
        | make.sample("other/1", 2, "two")
    )
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT):
        path = make.write_tar(tmp_path / f"{form}.tar", members, form)
        assert captions(open_pairs(path)) == ["one", "two"]


def test_captions_from_a_key_of_the_json(tmp_path):
    members = make.sample("1", 1) | {"1.json": json.dumps({"alt": "other", "caption": "c"}).encode()}
    path = make.write_tar(tmp_path / "t.tar", members)
    assert captions(open_pairs(path, y_key="alt")) == ["other"]
    assert captions(open_pairs(path)) == ["a caption"]


def test_index_is_kept_and_only_changed_tars_are_read_again(tmp_path, monkeypatch):
    folder = three_tars(tmp_path / "t")
    first = open_pairs(folder)
    scanned = []
    real = tars_module.scan_tar
    monkeypatch.setattr(tars_module, "scan_tar", lambda path, *keys: scanned.append(path.name) or real(path, *keys))
    again = open_pairs(folder)
    assert scanned == [] and again.fingerprint == first.fingerprint
    make.write_tar(folder / "00001.tar", make.sample("x", 1, "new"))
    changed = open_pairs(folder)
    assert scanned == ["00001.tar"] and changed.fingerprint != first.fingerprint
    assert captions(changed) == [*ALL[:4], "new", *ALL[8:]]
    assert captions(open_pairs(folder)) == captions(changed) and scanned == ["00001.tar"]
    assert len(list((folder / ".nuclr").glob("*.rows"))) == 1


def test_index_goes_elsewhere_where_the_folder_is_read_only(tmp_path, monkeypatch):
    folder = three_tars(tmp_path / "t")
    monkeypatch.setenv("NUCLR_CACHE", str(tmp_path / "cache"))
    assert captions(open_pairs(folder)) == ALL
    assert list((tmp_path / "cache").glob("*.rows")) and not (folder / ".nuclr").exists()


def test_without_any_place_for_the_index(tmp_path, monkeypatch):
    monkeypatch.setattr(tars_module, "find_cache_folder", lambda beside: None)
    assert captions(open_pairs(three_tars(tmp_path / "t"))) == ALL


def cut(path, size):
    """Truncate, with another time, as a broken copy has."""
    os.truncate(path, size)
    os.utime(path, ns=(1, 1))


def test_truncated_since_it_was_indexed(tmp_path):
    folder = three_tars(tmp_path / "t")
    before = open_pairs(folder)
    cut(folder / "00001.tar", int(before._rows["image"][6]) * 512 + 100)
    pairs = open_pairs(folder)
    assert pairs.fingerprint == before.fingerprint
    assert captions(pairs) == ALL[:6] + ["truncated tar"] * 2 + ALL[8:]
    bad = check_samples(pairs, max_bad_share=0.5)
    assert bad == {6: "truncated tar", 7: "truncated tar"}
    assert [pairs.name(number) for number in (5, 6, 7, 8)] == [
        "00001.tar/000010001.jpg", "00001.tar/000010002.jpg", "00001.tar, row 3", "00002.tar/000020000.jpg",
    ]  # fmt: skip


@pytest.mark.parametrize("size", [0, 300, 512 * 3, 512 * 8 + 5])
def test_truncated_before_it_was_indexed(tmp_path, size):
    """The numbers of the tar after it are as if nothing were lost."""
    folder = three_tars(tmp_path / "t")
    cut(folder / "00001.tar", size)
    pairs = open_pairs(folder)
    assert len(pairs) == 12 and pairs.x_id.tolist() == list(range(12))
    found = captions(pairs)
    good = found.index("truncated tar", 4)
    assert found == ALL[:good] + ["truncated tar"] * (8 - good) + ALL[8:]
    assert sorted(check_samples(pairs, max_bad_share=0.5)) == list(range(good, 8))
    assert all(pairs.name(number).startswith("00001.tar") for number in range(4, 8))


def test_truncated_last_tar_and_what_img2dataset_tells(tmp_path):
    folder = three_tars(tmp_path / "t")
    cut(folder / "00002.tar", 700)
    assert len(open_pairs(folder)) == 9  # nothing comes after it: only its broken end counts
    (folder / "00002_stats.json").write_text('{"successes": 4}')
    cut(folder / "00002.tar", 600)
    pairs = open_pairs(folder)
    assert len(pairs) == 12 and sorted(pairs.known_bad) == [8, 9, 10, 11]


def test_repaired_it_is_as_before(tmp_path):
    folder = three_tars(tmp_path / "t")
    whole = (folder / "00001.tar").read_bytes()
    fingerprint = open_pairs(folder).fingerprint
    cut(folder / "00001.tar", 700)
    open_pairs(folder)
    (folder / "00001.tar").write_bytes(whole)
    pairs = open_pairs(folder)
    assert captions(pairs) == ALL and pairs.known_bad == {} and pairs.fingerprint == fingerprint


def test_shrunk_while_in_use(tmp_path):
    folder = three_tars(tmp_path / "t")
    pairs = open_pairs(folder)
    cut(folder / "00000.tar", 0)
    with pytest.raises(BadSample, match="truncated tar"):
        pairs.x(0)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"1.jpg": make.picture(1), "1.cls": b"3"}, r"no sample with a caption.*found: \.cls, \.jpg"),
        ({"1.txt": b"text"}, r"no sample with an image \(found: \.txt"),
        ({}, "no sample with an image"),
    ],
)
def test_useless_tars(tmp_path, members, message):
    with pytest.raises(UserError, match=message):
        open_pairs(make.write_tar(tmp_path / "t.tar", members))


def test_not_a_tar(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"\x1f\x8b" + bytes(1000))
    with pytest.raises(UserError, match="compressed; unpack it first"):
        open_pairs(tmp_path / "a.tar")
    (tmp_path / "b.tar").write_bytes(b"text" * 1000)
    with pytest.raises(UserError, match="not a tar file"):
        open_pairs(tmp_path / "b.tar")


def test_missing_tars(tmp_path):
    three_tars(tmp_path / "t")
    with pytest.raises(UserError, match=r"00003\.tar: no such file \(2 of the 4 tars are missing\)"):
        expand(str(tmp_path / "t" / "{00001..00004}.tar"))


def test_rows_are_small():
    assert tars_module.ROW.itemsize <= 32
    assert np.dtype(tars_module.ROW).hasobject is False
