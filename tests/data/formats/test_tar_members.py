"""The members of one tar: what a sample is, where its caption is, and files that are not tars."""

import json
import tarfile

import pytest

from nuclr.data import SideChoice, check_samples, open_pairs
from nuclr.data.pairs import BadSample
from nuclr.errors import UserError
from tests.data import make


def captions(pairs):
    return [pairs.item("y", number) for number in range(len(pairs))]


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


def test_y_key_chooses_an_entry_of_the_json(tmp_path):
    members = make.sample("1", 1) | {"1.json": json.dumps({"alt": "other", "caption": "c"}).encode()}
    path = make.write_tar(tmp_path / "t.tar", members)
    assert captions(open_pairs(path, y=SideChoice("alt"))) == ["other"]
    assert captions(open_pairs(path)) == ["a caption"]


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


def write(path, *parts: bytes):
    """Write a good sample, the parts, and another good sample."""
    good = [b"".join(member(name, data) for name, data in make.sample(key, 1, key).items()) for key in ("a", "z")]
    path.write_bytes(good[0] + b"".join(parts) + good[1] + bytes(1024))
    return path


@pytest.mark.parametrize("size", [b"-0000001000", b"-1", b"0o17", b"1_000", b"9", b"\xff" * 12, b"\x80" + b"\xff" * 11])
def test_a_member_with_an_invalid_size_ends_the_tar(tmp_path, size):
    pairs = open_pairs(write(tmp_path / "t.tar", header("b.jpg", size)))
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
    sample = member("p", records, b"x") + member("b.jpg", make.picture(1)) + member("b.txt", b"text")
    pairs = open_pairs(write(tmp_path / "t.tar", sample))
    assert pairs.known_bad == {0: "truncated tar"}  # it may have had more members


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
        (b"[" * 200_000, "its .json cannot be read (brackets nested too deep)"),
        (b'{"caption": ' + b"1" * 5000 + b"}", "its .json cannot be read (a number with thousands of digits)"),
        (b"{", "its .json cannot be read (Expecting property name enclosed in double quotes)"),
        (b"\xff\xfe\xfd", "its .json cannot be read (not UTF-8 text)"),
    ],
)
def test_json_without_a_usable_caption_is_a_bad_sample_with_its_reason(tmp_path, content, reason):
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    pairs = open_pairs(write(tmp_path / "t.tar", member("b.jpg", make.picture(1)) + member("b.json", data)))
    assert pairs.known_bad == {1: reason} and len(pairs) == 3
    assert [pairs.item("y", number) for number in (0, 2)] == ["a", "z"]
    with pytest.raises(BadSample):
        pairs.item("y", 1)
    assert check_samples(pairs, max_bad_share=1) == {1: reason}


def test_one_wrong_caption_of_several_is_one_bad_sample(tmp_path):
    data = json.dumps({"captions": ["one", 2, None, "four"]}).encode()
    pairs = open_pairs(write(tmp_path / "t.tar", member("b.jpg", make.picture(1)) + member("b.json", data)))
    assert pairs.known_bad == {2: "caption is 2; needs a text", 3: "empty caption"}
    assert [pairs.item("y", number) for number in (1, 4)] == ["one", "four"]
    assert pairs.sides["x"].ids.tolist() == [0, 1, 1, 1, 1, 2]


def test_a_caption_file_that_is_too_large_is_not_read(tmp_path):
    for suffix in ("txt", "json"):
        data = b" " * (17 * 2**20)
        path = write(tmp_path / f"{suffix}.tar", member("b.jpg", make.picture(1)) + member(f"b.{suffix}", data))
        assert open_pairs(path).known_bad == {1: "caption file too large; at most 16 MiB are allowed"}


def test_a_damaged_header_is_recognized_by_its_checksum(tmp_path):
    damaged = bytearray(header("c.jpg", 512))
    damaged[130] ^= 1
    sample = b"".join(member(name, data) for name, data in make.sample("b", 1, "b").items())
    pairs = open_pairs(write(tmp_path / "t.tar", sample, bytes(damaged)))
    assert pairs.item("y", 0) == "a" and pairs.known_bad == {1: "truncated tar"}  # it may have had more members
