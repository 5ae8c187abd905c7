"""Tars: patterns of paths, which members are pairs, the cached index, truncated and damaged files."""

import json
import os
import pickle
import tarfile

import numpy as np
import pytest

from nuclr.data import ImageOptions, Loader, SideChoice, check_samples, open_pairs
from nuclr.data.formats import tars as tars_module
from nuclr.data.formats.tars import expand
from nuclr.data.pairs import BadSample
from nuclr.errors import UserError
from tests.data import make


def three_tars(folder):
    """Write tars with keys as in img2dataset and captions that name tar and sample."""
    for tar in range(3):
        members = {}
        for number in range(4):
            members |= make.sample(f"{tar:05d}{number:04d}", 10 * tar + number, f"tar {tar} sample {number}")
        make.write_tar(folder / f"{tar:05d}.tar", members)
    return folder


def captions(pairs):
    def caption(number):
        try:
            return pairs.item("y", number)
        except BadSample as bad:
            return bad.reason

    return [caption(number) for number in range(len(pairs))]


ALL = [f"tar {tar} sample {number}" for tar in range(3) for number in range(4)]


# -- names of tars -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    [
        "{f}",
        "{f}/{{00000..00002}}.tar",
        "{f}/{{00000,00001,00002}}.tar",
        "{f}/00000.tar::{f}/{{00001..00002}}.tar",
        "{f}/*.tar",
        "{f}/0000[0-1].tar::{f}/*2.tar",
    ],
)
def test_tars_can_be_named_by_folder_pattern_and_list(tmp_path, pattern):
    assert captions(open_pairs(pattern.format(f=three_tars(tmp_path / "t")))) == ALL


def test_braces_keep_leading_zeros():
    assert tars_module.expand_braces("a/{08..11}{x,y}.tar")[:3] == ["a/08x.tar", "a/08y.tar", "a/09x.tar"]


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("{f}/*.tgz", "*.tgz"),
        ("{f}/*", "list.csv"),
        ("s3://b/*.tar", "s3://b/*.tar"),
        ("{f}/{{00001..00004}}.tar", "00003.tar"),
    ],
)
def test_missing_tars_are_refused(tmp_path, pattern, named):
    (three_tars(tmp_path / "t") / "list.csv").write_text("image,caption\n")
    with pytest.raises(UserError) as error:
        expand(pattern.format(f=tmp_path / "t"))
    assert named in str(error.value)


# -- the index ---------------------------------------------------------------------------------------------------------


def test_the_index_is_cached_until_a_tar_changes(tmp_path, monkeypatch):
    folder = three_tars(tmp_path / "t")
    first = open_pairs(folder)
    scanned = []
    real = tars_module._scan
    monkeypatch.setattr(tars_module, "_scan", lambda *given: scanned.append(given[1]) or real(*given))
    again = open_pairs(folder)
    assert scanned == [] and again.fingerprint == first.fingerprint
    make.write_tar(folder / "00001.tar", make.sample("x", 1, "new"))
    changed = open_pairs(folder)
    assert len(scanned) == 3 and changed.fingerprint != first.fingerprint
    assert captions(changed) == [*ALL[:4], "new", *ALL[8:]]
    assert captions(open_pairs(folder)) == captions(changed) and len(scanned) == 3


def test_the_index_is_written_to_the_chosen_cache_folder(tmp_path, monkeypatch):
    folder = three_tars(tmp_path / "t")
    monkeypatch.setenv("NUCLR_CACHE", str(tmp_path / "cache"))
    assert captions(open_pairs(folder)) == ALL
    assert list((tmp_path / "cache").glob("*.rows")) and not (folder / ".nuclr").exists()
    monkeypatch.setattr(tars_module, "find_cache_folder", lambda data_folder: None)
    assert captions(open_pairs(folder)) == ALL


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"counts": 3}', '{"counts": [4], "bad": [], "fingerprint": 1}'])
def test_a_damaged_index_in_the_cache_is_made_again(tmp_path, text):
    path = make.write_tar(tmp_path / "t.tar", make.sample("1", 1, "one"))
    open_pairs(path)
    (stored,) = (tmp_path / ".nuclr").glob("tars-*.json")
    stored.write_text(text)
    assert captions(open_pairs(path)) == ["one"]


def test_only_a_limited_number_of_tars_stays_open(tmp_path, monkeypatch):
    monkeypatch.setattr(tars_module, "_OPEN_FILES", 1)
    pairs = open_pairs(three_tars(tmp_path / "t"))
    assert captions(pairs) == ALL
    assert pairs.name(11) == "00002.tar/000020003.jpg" and pairs.item("x", 11).size == (24, 20)
    assert list(pairs._descriptors) == [0]
    assert captions(pickle.loads(pickle.dumps(pairs))) == ALL


# -- truncated tars ----------------------------------------------------------------------------------------------------


def cut(path, size):
    """Truncate a file and change its modification time."""
    os.truncate(path, size)
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("size", [0, 300, 512 * 3, 512 * 8 + 5])
def test_a_truncated_tar_does_not_renumber_later_tars(tmp_path, size):
    folder = three_tars(tmp_path / "t")
    whole = (folder / "00001.tar").read_bytes()
    fingerprint = open_pairs(folder).fingerprint
    cut(folder / "00001.tar", size)
    pairs = open_pairs(folder)
    assert len(pairs) == 12 and pairs.sides["x"].ids.tolist() == list(range(12))
    texts = captions(pairs)
    good = texts.index("truncated tar", 4)
    assert texts == ALL[:good] + ["truncated tar"] * (8 - good) + ALL[8:]
    assert sorted(check_samples(pairs, max_bad_share=0.5)) == list(range(good, 8))
    assert all(pairs.name(number).startswith("00001.tar") for number in range(4, 8))
    (folder / "00001.tar").write_bytes(whole)
    repaired = open_pairs(folder)
    assert captions(repaired) == ALL and repaired.known_bad == {} and repaired.fingerprint == fingerprint


def test_the_length_of_a_truncated_last_tar_comes_from_img2dataset(tmp_path):
    folder = three_tars(tmp_path / "t")
    cut(folder / "00002.tar", 700)
    assert len(open_pairs(folder)) == 9  # no tar follows: only its broken last sample counts
    for successes, pairs in ((1_000_000_000_000, 9), (4, 12)):  # a wrong number takes no memory
        (folder / "00002_stats.json").write_text(json.dumps({"successes": successes}))
        cut(folder / "00002.tar", 600 + pairs)
        assert sorted(open_pairs(folder).known_bad) == list(range(8, pairs))


def test_a_tar_truncated_or_removed_while_open_gives_bad_samples(tmp_path):
    folder = three_tars(tmp_path / "t")
    pairs = open_pairs(folder)
    cut(folder / "00000.tar", 0)
    with pytest.raises(BadSample, match="truncated tar"):
        pairs.item("x", 0)
    (folder / "00001.tar").unlink()
    with pytest.raises(BadSample, match="cannot be read"):
        pairs.item("x", 4)
    assert pairs.name(4) == "00001.tar, row 0" and pairs.item("y", 8) == ALL[8]


# -- which members are pairs -------------------------------------------------------------------------------------------


def write(path, rows):
    members = {f"{number:03d}.{suffix}": data for number, row in enumerate(rows) for suffix, data in row.items()}
    return make.write_tar(path, members)


def test_two_text_members(tmp_path):
    rows = [{"question.txt": f"q {k % 2}".encode(), "answer.txt": f"a {k}".encode()} for k in range(3)]
    rows.append({"question.txt": b"q 3"})
    write(tmp_path / "t" / "0.tar", rows[:2])
    write(tmp_path / "t" / "1.tar", rows[2:])
    pairs = open_pairs(tmp_path / "t", x=SideChoice("question.txt"), y=SideChoice("answer.txt"))
    assert (*pairs.modalities, *pairs.side_names) == ("text", "text", "question", "answer")
    assert pairs[2][:2] == ("q 0", "a 2") and pairs.sides["x"].ids.tolist() == [0, 1, 0, 2]
    assert pairs.known_bad == {3: "no answer"} and pairs.name(3) == "1.tar/001.question.txt"


def test_entries_of_the_json(tmp_path):
    rows = [{"json": json.dumps({"q": ["a", "b"], "vector": [[1, 2], [3, 4]]}).encode()}]
    rows.append({"json": b'{"q": "c", "vector": [5, 6, 7]}'})
    rows += [{"json": b'{"q": 3, "vector": [5, 6]}'}, {"json": b"{"}, {"json": b'{"q": "d", "vector": [7, 8]}'}]
    rows.append({"json": json.dumps({"q": "a", "vector": [[1, 2]] * 32_768}).encode()})
    path = write(tmp_path / "t.tar", rows)
    for pairs in [open_pairs(path, x=SideChoice("q"), y=SideChoice("json:vector")) for _ in range(2)]:
        assert pairs.modalities == ("text", "vector") and pairs.group.tolist() == [0, 0, 1, 2, 3, 4, 5]
        np.testing.assert_array_equal(pairs.item("y", 1), [3, 4])
        assert pairs.item("x", 5) == "d" and list(pairs.known_bad) == [2, 3, 4, 6]
        for number, reason in ((2, "vector has 3 numbers"), (3, "q is 3"), (6, "32,767")):
            assert reason in pairs.known_bad[number]


def test_images_and_vectors(tmp_path):
    rows = [{"jpg": make.picture(k), "json": json.dumps({"clip": [k, 1]}).encode()} for k in range(3)]
    rows += [{"jpg": make.picture(9), "json": b"damaged"}, {"json": b'{"clip": [1, 2]}'}]
    pairs = open_pairs(write(tmp_path / "t.tar", rows), y=SideChoice("clip"))
    assert (*pairs.modalities, pairs.sides["y"].name) == ("image", "vector", "clip")
    assert pairs.name(1) == "t.tar/001.jpg" and pairs[1].x.size == (24, 20)
    bad = check_samples(pairs, max_bad_share=1)
    assert list(bad) == [3, 4] and bad[3].startswith("its .json cannot be read") and bad[4] == "no image"
    (batch,) = Loader(pairs, x=ImageOptions(8)).load([[2, 0]])
    assert batch.x.shape == (2, 3, 8, 8) and batch.y.tolist() == [[2, 1], [0, 1]]


QUESTION, ANSWER = {"question.txt": b"q"}, {"answer.txt": b"a"}
PNG, TXT = {"png": make.picture(1)}, {"txt": b"t"}
BEFORE, AFTER = {"before.png": make.picture(1)}, {"after.png": make.picture(2)}


@pytest.mark.parametrize(
    ("members", "keys", "kinds", "names"),
    [
        (ANSWER | QUESTION, {}, ("text", "text"), ("question", "answer")),
        (ANSWER | QUESTION, {"x": SideChoice("answer.txt")}, ("text", "text"), ("answer", "question")),
        (ANSWER | QUESTION, {"y": SideChoice("question.txt")}, ("text", "text"), ("answer", "question")),
        (BEFORE | AFTER, {}, ("image", "image"), ("before", "after")),
        (PNG | TXT, {}, ("image", "text"), ("image", "text")),
        (PNG | TXT, {"x": SideChoice("txt")}, ("text", "image"), ("text", "image")),
        (PNG | TXT, {"y": SideChoice("png")}, ("text", "image"), ("text", "image")),
        (BEFORE | AFTER | TXT, {}, ("image", "text"), ("image", "text")),
        (BEFORE | AFTER | {"json": b'{"caption": "t"}'}, {}, ("image", "text"), ("image", "text")),
    ],
)
def test_keys_of_two_members_may_be_left_out(tmp_path, members, keys, kinds, names):
    pairs = open_pairs(write(tmp_path / "t.tar", [members] * 2), **keys)
    assert pairs.modalities == kinds and pairs.side_names == names
    assert check_samples(pairs) == {}
    again = open_pairs(tmp_path / "t.tar", x=SideChoice(pairs.sides["x"].key), y=SideChoice(pairs.sides["y"].key))
    assert again.fingerprint == pairs.fingerprint and again.sides["x"].name == pairs.sides["x"].name


@pytest.mark.parametrize(
    ("settings", "members"),
    [
        ({}, {"q.txt": b"q", "a.txt": b"a", "b.txt": b"b"}),
        ({"x": SideChoice("q.txt")}, {"q.txt": b"q", "a.txt": b"a", "b.txt": b"b"}),
        ({"y": SideChoice("a.txt")}, {"q.txt": b"q", "a.txt": b"a", "b.txt": b"b"}),
        ({"x": SideChoice("q.txt"), "y": SideChoice("z")}, {"q.txt": b"q", "a.txt": b"a"}),
        ({"views": True}, {"q.txt": b"q", "a.txt": b"a"}),
        ({"y": SideChoice(modality="vector")}, {"q.txt": b"q", "a.txt": b"a", "b.txt": b"b"}),
        ({}, {"jpg": make.picture(1), "cls": b"3"}),
        ({}, {"txt": b"text"}),
        ({}, {}),
    ],
)
def test_tars_without_a_usable_sample_are_refused(tmp_path, settings, members):
    path = write(tmp_path / "t.tar", [members])
    with pytest.raises(UserError, match=r"t\.tar.*data\.x\.key") as error:
        open_pairs(path, **settings)
    assert all(f".{suffix}" in str(error.value) for suffix in members)


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
    assert pairs.item("y", 0) == "a caption" and pairs.name(3) == "t.tar/3.txt"


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


def test_a_file_that_is_not_a_tar_is_refused(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"\x1f\x8b" + bytes(1000))
    with pytest.raises(UserError, match="compressed; unpack it first"):
        open_pairs(tmp_path / "a.tar")
    (tmp_path / "b.tar").write_bytes(b"text" * 1000)
    with pytest.raises(UserError, match="not a tar file"):
        open_pairs(tmp_path / "b.tar")


def header(name: str, size: int | bytes, kind: bytes = b"0") -> bytes:
    """Return a tar header with a valid checksum; `size` may be the bytes of its field."""
    info = tarfile.TarInfo(name)
    info.size = size if isinstance(size, int) else 0
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    if isinstance(size, bytes):
        block[124:136] = size.ljust(12, b"\0")
    block[156:157] = kind
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member(name: str, data: bytes, kind: bytes = b"0") -> bytes:
    return header(name, len(data), kind) + data + bytes(-len(data) % 512)


def write_between(path, *parts: bytes):
    """Write a good sample, the parts, and another good sample."""
    good = [b"".join(member(name, data) for name, data in make.sample(key, 1, key).items()) for key in ("a", "z")]
    path.write_bytes(good[0] + b"".join(parts) + good[1] + bytes(1024))
    return path


@pytest.mark.parametrize("size", [b"-0000001000", b"-1", b"0o17", b"1_000", b"9", b"\xff" * 12, b"\x80" + b"\xff" * 11])
def test_a_member_with_an_invalid_size_ends_the_tar(tmp_path, size):
    pairs = open_pairs(write_between(tmp_path / "t.tar", header("b.jpg", size)))
    assert pairs.item("y", 0) == "a" and pairs.known_bad == {1: "truncated tar"} and len(pairs) == 2


@pytest.mark.parametrize("form", ["GNU", "PAX"])
def test_a_member_over_4_gib_is_a_bad_sample_and_the_next_one_is_good(tmp_path, form):
    size = 2**32 + 512 + 9
    first, last = (b"".join(member(n, d) for n, d in make.sample(key, 1, key).items()) for key in ("a", "z"))
    record = b"size=%d\n" % size
    record = b"%d " % (len(record) + 3) + record
    big = header("b.jpg", size) if form == "GNU" else member("p", record, b"x") + header("b.jpg", 0)
    with (tmp_path / "t.tar").open("wb") as file:  # a sparse file
        file.write(first + big)
        file.seek(-(-size // 512) * 512, 1)
        file.write(member("b.txt", b"big") + last + bytes(1024))
    pairs = open_pairs(tmp_path / "t.tar")
    assert pairs.known_bad == {1: "image file too large; at most 256 MiB are allowed"}
    assert [pairs.item("y", number) for number in (0, 2)] == ["a", "z"] and pairs.item("x", 2).size == (24, 20)


@pytest.mark.parametrize(
    "records", [b"-5 path=c.jpg\n", b"x path=c.jpg\n", b"0 path=c.jpg\n", b"99 path=c.jpg\n", b"5"]
)
def test_a_damaged_pax_header_ends_the_tar(tmp_path, records):
    sample = b"".join(member(name, data) for name, data in make.sample("b", 1, "b").items())
    pairs = open_pairs(write_between(tmp_path / "t.tar", sample, member("p", records, b"x")))
    assert pairs.item("y", 0) == "a" and pairs.known_bad == {1: "truncated tar"}  # it may have had more members


@pytest.mark.parametrize("kind", [b"L", b"x"])
def test_a_name_of_gigabytes_is_not_read(tmp_path, kind):
    with (tmp_path / "t.tar").open("wb") as file:  # a sparse file
        for name, data in (make.sample("a", 1, "a") | make.sample("b", 1, "b")).items():
            file.write(member(name, data))
        file.write(header("long", 2**33, kind))
        file.seek(2**33, 1)
        file.write(member("c.jpg", make.picture(1)) + member("c.txt", b"text") + bytes(1024))
    pairs = open_pairs(tmp_path / "t.tar")
    assert pairs.item("y", 0) == "a" and pairs.known_bad == {1: "truncated tar"}  # it may have had more members


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"other": 1}, "empty caption"),
        ({"caption": 5}, "caption is 5; needs a text"),
        ({"caption": {"a": 1}}, 'caption is {"a": 1}; needs a text'),
        ({"captions": []}, "empty caption"),
        ({"caption": None}, "empty caption"),
        ({"captions": ["  "]}, "empty caption"),
        ({"caption": "a" * 200_000}, "caption of 200,000 characters; at most 100,000 are allowed"),
        (["caption"], "empty caption"),
        ("caption", "empty caption"),
        (None, "empty caption"),
        ({"captions": ["a"] * 40_000}, ".json holds more than 32,767 items"),
        (b"[" * 200_000, "its .json cannot be read"),
        (b'{"caption": ' + b"1" * 5000 + b"}", "its .json cannot be read"),
        (b"{", "its .json cannot be read"),
        (b"\xff\xfe\xfd", "its .json cannot be read"),
    ],
)
def test_json_without_a_usable_caption_is_a_bad_sample_with_its_reason(tmp_path, content, reason):
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    pairs = open_pairs(write_between(tmp_path / "t.tar", member("b.jpg", make.picture(1)) + member("b.json", data)))
    assert list(pairs.known_bad) == [1] and pairs.known_bad[1].startswith(reason) and len(pairs) == 3
    assert [pairs.item("y", number) for number in (0, 2)] == ["a", "z"]
    with pytest.raises(BadSample):
        pairs.item("y", 1)
    assert check_samples(pairs, max_bad_share=1) == pairs.known_bad


def test_one_wrong_caption_of_several_is_one_bad_sample(tmp_path):
    data = json.dumps({"captions": ["one", 2, None, "four"]}).encode()
    pairs = open_pairs(write_between(tmp_path / "t.tar", member("b.jpg", make.picture(1)) + member("b.json", data)))
    assert pairs.known_bad == {2: "caption is 2; needs a text", 3: "empty caption"}
    assert [pairs.item("y", number) for number in (1, 4)] == ["one", "four"]
    assert pairs.sides["x"].ids.tolist() == [0, 1, 1, 1, 1, 2]


def test_a_caption_file_that_is_too_large_is_not_read(tmp_path):
    for suffix in ("txt", "json"):
        data = b" " * (17 * 2**20)
        path = write_between(tmp_path / f"{suffix}.tar", member("b.jpg", make.picture(1)) + member(f"b.{suffix}", data))
        assert open_pairs(path).known_bad == {1: "caption file too large; at most 16 MiB are allowed"}


def test_a_damaged_header_is_recognized_by_its_checksum(tmp_path):
    damaged = bytearray(header("c.jpg", 512))
    damaged[130] ^= 1
    sample = b"".join(member(name, data) for name, data in make.sample("b", 1, "b").items())
    pairs = open_pairs(write_between(tmp_path / "t.tar", sample, bytes(damaged)))
    assert pairs.item("y", 0) == "a" and pairs.known_bad == {1: "truncated tar"}  # it may have had more members
