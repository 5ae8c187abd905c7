"""Tars: patterns of paths, the cached index, and truncated files."""

import os

import pytest

from nuclr.data import check_samples, open_pairs
from nuclr.data.formats import tar_index
from nuclr.data.formats import tars as tars_module
from nuclr.data.formats.tars import expand
from nuclr.data.pairs import BadSample
from nuclr.errors import UserError
from tests.data import make


def three_tars(folder, samples=4):
    """Write tars with keys as in img2dataset and captions that name tar and sample."""
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
        "{f}/*.tar",
        "{f}/0000[0-1].tar::{f}/*2.tar",
    ],
)
def test_tars_can_be_named_by_folder_pattern_and_list(tmp_path, pattern):
    assert captions(open_pairs(pattern.format(f=three_tars(tmp_path / "t")))) == ALL


def test_patterns_are_relative_to_the_root(tmp_path):
    three_tars(tmp_path / "t")
    assert captions(open_pairs("t/{00000..00001}.tar::t/00002.tar", root=tmp_path)) == ALL


def test_braces_keep_leading_zeros():
    assert tars_module.expand_braces("a/{08..11}{x,y}.tar")[:3] == ["a/08x.tar", "a/08y.tar", "a/09x.tar"]


def test_the_index_is_cached_and_only_changed_tars_are_indexed_again(tmp_path, monkeypatch):
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


def test_the_index_is_written_to_the_chosen_cache_folder(tmp_path, monkeypatch):
    folder = three_tars(tmp_path / "t")
    monkeypatch.setenv("NUCLR_CACHE", str(tmp_path / "cache"))
    assert captions(open_pairs(folder)) == ALL
    assert list((tmp_path / "cache").glob("*.rows")) and not (folder / ".nuclr").exists()


def test_tars_can_be_read_without_a_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tars_module, "find_cache_folder", lambda data_folder: None)
    assert captions(open_pairs(three_tars(tmp_path / "t"))) == ALL


def cut(path, size):
    """Truncate a file and change its modification time."""
    os.truncate(path, size)
    os.utime(path, ns=(1, 1))


def test_a_tar_truncated_after_indexing_keeps_all_numbers(tmp_path):
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
def test_a_tar_truncated_before_indexing_does_not_renumber_later_tars(tmp_path, size):
    folder = three_tars(tmp_path / "t")
    cut(folder / "00001.tar", size)
    pairs = open_pairs(folder)
    assert len(pairs) == 12 and pairs.x_id.tolist() == list(range(12))
    texts = captions(pairs)
    good = texts.index("truncated tar", 4)
    assert texts == ALL[:good] + ["truncated tar"] * (8 - good) + ALL[8:]
    assert sorted(check_samples(pairs, max_bad_share=0.5)) == list(range(good, 8))
    assert all(pairs.name(number).startswith("00001.tar") for number in range(4, 8))


def test_the_length_of_a_truncated_last_tar_comes_from_img2dataset(tmp_path):
    folder = three_tars(tmp_path / "t")
    cut(folder / "00002.tar", 700)
    assert len(open_pairs(folder)) == 9  # no tar follows: only its broken last sample counts
    (folder / "00002_stats.json").write_text('{"successes": 4}')
    cut(folder / "00002.tar", 600)
    pairs = open_pairs(folder)
    assert len(pairs) == 12 and sorted(pairs.known_bad) == [8, 9, 10, 11]


def test_a_repaired_tar_is_read_as_before(tmp_path):
    folder = three_tars(tmp_path / "t")
    whole = (folder / "00001.tar").read_bytes()
    fingerprint = open_pairs(folder).fingerprint
    cut(folder / "00001.tar", 700)
    open_pairs(folder)
    (folder / "00001.tar").write_bytes(whole)
    pairs = open_pairs(folder)
    assert captions(pairs) == ALL and pairs.known_bad == {} and pairs.fingerprint == fingerprint


def test_a_tar_truncated_while_open_gives_bad_samples(tmp_path):
    folder = three_tars(tmp_path / "t")
    pairs = open_pairs(folder)
    cut(folder / "00000.tar", 0)
    with pytest.raises(BadSample, match="truncated tar"):
        pairs.x(0)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"1.jpg": make.picture(1), "1.cls": b"3"}, r"no sample with a caption.*found: \.cls, \.jpg"),
        ({"1.txt": b"text"}, r"no sample with an image; .*data\.x\.key.*\(found: \.txt"),
        ({}, "no sample with an image"),
    ],
)
def test_tars_without_images_or_captions_are_refused(tmp_path, members, message):
    with pytest.raises(UserError, match=message):
        open_pairs(make.write_tar(tmp_path / "t.tar", members))


def test_missing_tars_are_refused(tmp_path):
    three_tars(tmp_path / "t")
    with pytest.raises(UserError, match=r"\*\.tgz: no file matches this pattern"):
        open_pairs(tmp_path / "t" / "*.tgz")
    (tmp_path / "t" / "list.csv").write_text("image,caption\n")
    with pytest.raises(
        UserError, match=r"\*: matches list\.csv, but patterns are for tars only; name a file or a folder"
    ):
        open_pairs(tmp_path / "t" / "*")
    with pytest.raises(UserError, match=r"s3://b/\*\.tar: \* is not possible in a URL; name the folder"):
        expand("s3://b/*.tar")
    with pytest.raises(UserError, match=r"00003\.tar: no such file \(2 of the 4 tars are missing\)"):
        expand(str(tmp_path / "t" / "{00001..00004}.tar"))


def test_only_a_limited_number_of_tars_stays_open(tmp_path, monkeypatch):
    monkeypatch.setattr(tar_index, "_OPEN_FILES", 1)
    pairs = open_pairs(three_tars(tmp_path / "t"))
    assert captions(pairs) == ALL
    assert pairs.name(11) == "00002.tar/000020003.jpg" and pairs.x(11).size == (24, 20)
    assert list(pairs._files._descriptors) == [0]


def test_a_tar_that_was_removed_gives_bad_samples(tmp_path):
    folder = three_tars(tmp_path / "t")
    pairs = open_pairs(folder)
    (folder / "00001.tar").unlink()
    with pytest.raises(BadSample, match=r"cannot be read \(No such file"):
        pairs.x(4)
    assert pairs.name(4) == "00001.tar, row 0" and pairs.y(8) == ALL[8]


def one_tar(path, prefix, samples=4):
    members = {}
    for number in range(samples):
        members |= make.sample(f"{number:04d}", number, f"{prefix} {number}")
    return make.write_tar(path, members)


def test_another_tar_that_is_truncated_does_not_inherit_the_index(tmp_path):
    folder = three_tars(tmp_path / "t")
    before = open_pairs(folder)
    one_tar(folder / "00001.tar", "other")
    cut(folder / "00001.tar", int(before._rows["image"][4]) * 512 + 10)  # no complete caption is left to compare
    pairs = open_pairs(folder)
    assert pairs.fingerprint != before.fingerprint
    assert captions(pairs) == ALL[:4] + ["truncated tar"] * 4 + ALL[8:]


def test_a_tar_with_other_captions_after_the_damage_does_not_serve_them(tmp_path):
    path = one_tar(tmp_path / "t.tar", "first")
    before = open_pairs(path)
    one_tar(path, "other")  # of the same layout
    data = bytearray(path.read_bytes())
    first = one_tar(tmp_path / "first.tar", "first").read_bytes()
    block = int(before._rows["image"][1]) * 512
    data[: block - 512] = first[: block - 512]  # the first sample is the old one
    data[block - 512 : block] = b"damaged " * 64  # the header of the second
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    pairs = open_pairs(path)
    assert captions(pairs) == ["first 0", "damaged tar", "damaged tar", "damaged tar"]
    assert pairs.known_bad == dict.fromkeys((1, 2, 3), "damaged tar")


def test_samples_after_a_damaged_header_are_read_by_the_previous_index(tmp_path):
    path = one_tar(tmp_path / "t.tar", "first")
    before = open_pairs(path)
    with path.open("r+b") as file:
        file.seek(int(before._rows["image"][1]) * 512 - 512)
        file.write(b"damaged " * 64)
    os.utime(path, ns=(1, 1))
    pairs = open_pairs(path)
    assert captions(pairs) == ["first 0", "damaged tar", "first 2", "first 3"]
    assert pairs.fingerprint == before.fingerprint


def test_captions_are_compared_with_the_index_when_they_are_read(tmp_path):
    path = one_tar(tmp_path / "t.tar", "first")
    open_pairs(path)
    stamp = path.stat().st_mtime_ns
    one_tar(path, "other")
    os.utime(path, ns=(stamp, stamp))  # same size and time: the cached index is used
    pairs = open_pairs(path)
    with pytest.raises(BadSample, match="caption differs from the index of the tar"):
        pairs.y(0)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"counts": 3}', '{"counts": [4], "bad": [], "fingerprint": 1}'])
def test_a_damaged_index_in_the_cache_is_made_again(tmp_path, text):
    path = one_tar(tmp_path / "t.tar", "first")
    open_pairs(path)
    (stored,) = (tmp_path / ".nuclr").glob("tars-*.json")
    stored.write_text(text)
    assert captions(open_pairs(path)) == [f"first {number}" for number in range(4)]


def test_a_wrong_number_of_samples_from_img2dataset_takes_no_memory(tmp_path):
    folder = three_tars(tmp_path / "t")
    (folder / "00002_stats.json").write_text('{"successes": 1000000000000}')
    cut(folder / "00002.tar", 700)
    assert len(open_pairs(folder)) == 9
