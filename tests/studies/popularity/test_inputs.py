"""Captions and image names of the rows of an embedding file."""

import json

import numpy as np
import pytest

from nuclr.errors import UserError
from nuclr.studies.popularity.inputs import input_from_pairs, read_names
from tests.data import make

LINKS = [0, 0, 1]
ENTRIES = [{"image": "a.jpg", "captions": ["a cat", "one cat"]}, {"image": "b.jpg", "captions": ["a dog"]}]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "captions.jsonl"
    path.write_text("\n".join(json.dumps(entry) for entry in ENTRIES) + "\n")
    return path


def test_caption_lists_of_all_formats(tmp_path, jsonl):
    (tmp_path / "captions.json").write_text(
        json.dumps([{"image": i, "caption": c} for i, c in zip("aab", ["a cat", "one cat", "a dog"], strict=True)])
    )
    (tmp_path / "captions.txt").write_text("a cat\none cat\na dog\n")
    (tmp_path / "captions.csv").write_text("IMAGE,CAPTION\na,a cat\na,one cat\nb,a dog\n")
    (tmp_path / "captions.tsv").write_bytes(b"\xef\xbb\xbftitle\r\na cat\r\none cat\r\na dog\r\n")
    for path, images in (
        (jsonl, ["a.jpg", "b.jpg"]),
        (tmp_path / "captions.json", ["a", "b"]),
        (tmp_path / "captions.csv", ["a", "b"]),
        (tmp_path / "captions.tsv", []),
        (tmp_path / "captions.txt", []),
    ):
        names = read_names(path, None, 2, LINKS)
        assert names.labels["y"] == ["a cat", "one cat", "a dog"]
        assert names.labels["x"] == images
    assert names.of_rows("y", [1]) == {"caption": ["one cat"]}
    assert names.of_rows("x", [1]) == {"caption": ["a dog"]}
    assert read_names(jsonl, None, 2, LINKS).of_rows("y", [2]) == {"caption": ["a dog"], "image": ["b.jpg"]}
    assert read_names(None, None, 2, LINKS).of_rows("y", [2]) == {}


def test_image_names_from_a_folder_or_a_list(tmp_path, jsonl):
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).touch()
    assert read_names(jsonl, tmp_path, 2, LINKS).labels["x"] == ["a.jpg", "b.jpg"]
    (tmp_path / "files.txt").write_text("one.png\ntwo.png\n")
    assert read_names(None, tmp_path / "files.txt", 2, LINKS).labels["x"] == ["one.png", "two.png"]


def test_image_names_that_are_too_long_are_only_names(tmp_path):
    (tmp_path / "a.jpg").touch()
    entries = [{"image": name, "captions": ["one", "two"]} for name in ("n" * 300, "a.jpg")]
    (tmp_path / "list.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert read_names(tmp_path / "list.jsonl", tmp_path, 2, [0, 0, 1, 1]).labels["x"][1] == "a.jpg"


def test_lists_that_do_not_match_are_refused(tmp_path, jsonl):
    empty = tmp_path / "empty"
    empty.mkdir()
    text = tmp_path / "captions.txt"
    text.write_text("a cat\none cat\na dog\n")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"image": "a.jpg", "captions": ["a"]}\n{"image": \n')
    bare = tmp_path / "bare.jsonl"
    bare.write_text('{"image": "a.jpg"}\n')
    table = tmp_path / "table.csv"
    table.write_text("id,words\n1,a cat\n")
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    for captions, images, links, message in (
        (jsonl, None, [0, 0, 1, 1], "3 captions, but the embedding file has 4 y"),
        (jsonl, None, [0, 1, 1], "caption 2 belongs to image b.jpg, but y_to_x assigns it to x 1, which is a.jpg"),
        (broken, None, LINKS, "line 2 is not JSON"),
        (bare, None, LINKS, "line 1 has no caption"),
        (binary, None, LINKS, "not UTF-8"),
        (table, None, LINKS, "no column of captions among id, words; rename it to caption"),
        (tmp_path / "none.txt", None, LINKS, "No such file"),
        (tmp_path / "captions.doc", None, LINKS, "allowed: .jsonl, .json, .csv, .tsv, .txt"),
        (jsonl, empty, LINKS, "none of the images in .* is there"),
        (text, empty, LINKS, "a folder needs --captions"),
        (None, text, LINKS, "3 image names, but the embedding file has 2 x"),
    ):
        with pytest.raises(UserError, match=message):
            read_names(captions, images, 2, links)


def test_both_images_of_a_pair_are_named(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.png").write_bytes(make.picture(1))
    (tmp_path / "two.csv").write_text("before,after\na.png,b.png\na.png,c.png\nb.png,c.png\n")
    np.savez(tmp_path / "e.npz", x=np.eye(2), y=np.eye(3), y_to_x=[0, 0, 1])
    names = input_from_pairs(tmp_path / "e.npz", str(tmp_path / "two.csv")).names
    assert names.of_rows("y", [1]) == {"after": ["c.png"], "before": ["a.png"]}
    assert names.of_rows("x", [0]) == {"after": ["b.png"], "before": ["a.png"]}
