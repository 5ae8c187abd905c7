"""Tars with other pairs than images and captions."""

import io
import json
import struct

import numpy as np
import pytest

from nuclr.data import ImageOptions, Loader, check_samples, open_pairs
from nuclr.errors import UserError
from tests.data import make


def npy(values):
    file = io.BytesIO()
    np.save(file, np.array(values, "f4"))
    return file.getvalue()


def write(path, rows):
    members = {f"{number:03d}.{suffix}": data for number, row in enumerate(rows) for suffix, data in row.items()}
    return make.write_tar(path, members)


def test_two_text_members(tmp_path):
    rows = [{"question.txt": f"q {k % 2}".encode(), "answer.txt": f"a {k}".encode()} for k in range(3)]
    rows.append({"question.txt": b"q 3"})
    write(tmp_path / "t" / "0.tar", rows[:2])
    write(tmp_path / "t" / "1.tar", rows[2:])
    pairs = open_pairs(tmp_path / "t", x_key="question.txt", y_key="answer.txt")
    assert (pairs.x_kind, pairs.y_kind, pairs.x_name, pairs.y_name) == ("text", "text", "question", "answer")
    assert pairs[2][:2] == ("q 0", "a 2") and pairs.x_id.tolist() == [0, 1, 0, 2]
    assert pairs.known_bad == {3: "empty answer"} and pairs.name(3) == "sample 3"


def test_entries_of_the_json(tmp_path):
    rows = [{"json": json.dumps({"q": ["a", "b"], "vector": [[1, 2], [3, 4]]}).encode()}]
    rows.append({"json": b'{"q": "c", "vector": [5, 6, 7]}'})
    rows += [{"json": b'{"q": 3, "vector": [5, 6]}'}, {"json": b"{"}, {"json": b'{"q": "d", "vector": [7, 8]}'}]
    pairs = open_pairs(write(tmp_path / "t.tar", rows), x_key="q", y_key="json:vector")
    assert (pairs.x_kind, pairs.y_kind) == ("text", "vector") and pairs.group.tolist() == [0, 0, 1, 2, 3, 4]
    np.testing.assert_array_equal(pairs.y(1), [3, 4])
    assert list(pairs.known_bad) == [2, 3, 4]
    assert pairs.known_bad[2] == "vector has 3 numbers; the first rows have 2"
    assert pairs.known_bad[3] == "'q' in its .json is neither a text nor a list"


def test_images_and_vectors(tmp_path):
    rows = [{"jpg": make.picture(k), "clip.npy": npy([k, 1])} for k in range(3)]
    rows += [{"jpg": make.picture(9), "clip.npy": b"damaged"}, {"clip.npy": npy([1, 2])}]
    pairs = open_pairs(write(tmp_path / "t.tar", rows), y_key="clip.npy")
    assert (pairs.x_kind, pairs.y_kind, pairs.y_name) == ("image", "vector", "clip")
    assert pairs.name(1) == "t.tar/001.jpg" and pairs[1].x.size == (24, 20)
    bad = check_samples(pairs, max_bad_share=1)
    assert list(bad) == [3, 4] and bad[3].startswith(".clip.npy cannot be read") and bad[4] == "no image"
    (batch,) = Loader(pairs, x=ImageOptions(8)).load([[2, 0]])
    assert batch.x.shape == (2, 3, 8, 8) and batch.y.tolist() == [[2, 1], [0, 1]]


QUESTION, ANSWER = {"question.txt": b"q"}, {"answer.txt": b"a"}
PNG, TXT, VECTOR = {"png": make.picture(1)}, {"txt": b"t"}, {"v.npy": npy([1, 2])}
BEFORE, AFTER = {"before.png": make.picture(1)}, {"after.png": make.picture(2)}


@pytest.mark.parametrize(
    ("members", "keys", "kinds", "names"),
    [
        (ANSWER | QUESTION, {}, ("text", "text"), ("question", "answer")),
        (ANSWER | QUESTION, {"x_key": "answer.txt"}, ("text", "text"), ("answer", "question")),
        (ANSWER | QUESTION, {"y_key": "question.txt"}, ("text", "text"), ("answer", "question")),
        (VECTOR | PNG, {}, ("image", "vector"), ("image", "v")),
        (VECTOR | TXT, {}, ("vector", "text"), ("v", "text")),
        (BEFORE | AFTER, {}, ("image", "image"), ("before", "after")),
        (PNG | TXT, {}, ("image", "text"), ("image", "text")),
        (PNG | TXT, {"x_key": "txt"}, ("text", "image"), ("text", "image")),
        (PNG | TXT, {"y_key": "png"}, ("text", "image"), ("text", "image")),
        (BEFORE | AFTER | TXT, {}, ("image", "text"), ("image", "text")),
        (BEFORE | AFTER | {"json": b'{"caption": "t"}'}, {}, ("image", "text"), ("image", "text")),
    ],
)
def test_keys_of_two_members_may_be_left_out(tmp_path, members, keys, kinds, names):
    pairs = open_pairs(write(tmp_path / "t.tar", [members] * 2), **keys)
    assert (pairs.x_kind, pairs.y_kind) == kinds and (pairs.x_name, pairs.y_name) == names
    assert check_samples(pairs) == {}
    again = open_pairs(tmp_path / "t.tar", x_key=pairs.x_key, y_key=pairs.y_key)
    assert again.fingerprint == pairs.fingerprint and again.x_name == pairs.x_name


def test_a_truncated_tar_has_a_bad_sample(tmp_path):
    path = write(tmp_path / "t.tar", [{"q.txt": b"q" * 600, "a.txt": b"a"} for _ in range(3)])
    path.write_bytes(path.read_bytes()[:6200])
    pairs = open_pairs(path, x_key="q.txt", y_key="a.txt")
    assert pairs.known_bad[len(pairs) - 1] == "truncated tar" and pairs.y(0) == "a"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"x_key": "q.txt"}, r"entry of side y with data\.y\.key \(found: \.a\.txt, \.b\.txt, \.q\.txt\)"),
        ({"y_key": "a.txt"}, r"member or the entry of side x with data\.x\.key"),
        ({}, r"no sample with an image; for other pairs, name two members with data\.x\.key and data\.y\.key"),
        ({"x_key": "q.txt", "y_key": "z"}, "no sample can be used; the first: empty z"),
        (
            {"views": True},
            r"data\.contrast=views needs images, but found only \.a\.txt, \.b\.txt, \.q\.txt; leave it out",
        ),
        ({"y_kind": "vector"}, r"data\.y\.modality=vector: name its member with data\.y\.key"),
    ],
)
def test_wrong_keys_are_refused(tmp_path, settings, message):
    path = write(tmp_path / "t.tar", [{"q.txt": b"q", "a.txt": b"a", "b.txt": b"b"}])
    with pytest.raises(UserError, match=message):
        open_pairs(path, **settings)


def test_arrays_that_are_not_vectors_are_bad_samples(tmp_path):
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 0), }".ljust(117) + "\n"
    no_width = b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + header.encode()  # 128 bytes, for a billion vectors
    many = npy(np.zeros((32_768, 1), np.int8))
    rows = [{"t.txt": b"a", "v.npy": content} for content in (npy([1, 2]), npy(3), npy([[[1, 2]]]), no_width, many)]
    pairs = open_pairs(write(tmp_path / "t.tar", rows), x_key="t.txt", y_key="v.npy")
    assert len(pairs) == 5 and pairs.y(0).tolist() == [1, 2]
    assert list(pairs.known_bad) == [1, 2, 3, 4]
    assert pairs.known_bad[1] == ".v.npy has shape (); needs a vector, or a matrix of vectors"
    assert pairs.known_bad[2] == ".v.npy has shape (1, 1, 2); needs a vector, or a matrix of vectors"
    assert "shape (1000000000, 0) of float32 does not fit into 128 bytes" in pairs.known_bad[3]
    assert pairs.known_bad[4] == ".v.npy holds 32,768 vectors; at most 32,767 are allowed"


def test_entries_with_too_many_items_are_bad_samples(tmp_path):
    entries = [{"q": "a", "a": ["b"] * 32_768}, {"q": "a", "a": ["b", "c"]}]
    rows = [{"json": json.dumps(entry).encode()} for entry in entries]
    pairs = open_pairs(write(tmp_path / "t.tar", rows), x_key="q", y_key="a")
    assert pairs.known_bad == {0: "'a' in its .json holds 32,768 items; at most 32,767 are allowed"}
    assert len(pairs) == 3
