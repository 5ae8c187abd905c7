"""Pairs that name image files: in which folder images are searched, and bad rows."""

import pytest

from nuclr.data import check_samples, open_pairs
from nuclr.data.pairs import BadSample
from nuclr.errors import UserError
from tests.data import make


@pytest.mark.parametrize("folder", ["", "train", "images"])
def test_images_are_searched_in_the_root_and_its_usual_folders(tmp_path, folder):
    make.write_images(tmp_path / "photos" / folder)
    (tmp_path / "lists").mkdir()
    make.write_lines(tmp_path / "lists" / "train.jsonl", {"image": "a.jpg", "caption": "one"})
    pairs = open_pairs(tmp_path / "lists" / "train.jsonl", root=tmp_path / "photos")
    assert pairs.x(0).size == (24, 20)


def test_a_list_relative_to_the_root_may_name_absolute_images(tmp_path):
    make.write_images(tmp_path / "elsewhere")
    make.write_lines(tmp_path / "l.jsonl", {"image": str(tmp_path / "elsewhere" / "a.jpg"), "caption": "one"})
    assert open_pairs("l.jsonl", root=tmp_path).x(0).size == (24, 20)


def test_bad_rows_keep_their_numbers(tmp_path):
    make.write_images(tmp_path)
    entries = [
        ("a.jpg", "one"),
        ("a.jpg", " \n"),
        ("gone.jpg", "two"),
        (None, "three"),
        ("b.png", None),
        ("c.jpg", "four"),
    ]
    path = make.write_lines(tmp_path / "l.jsonl", *({"image": i, "caption": c} for i, c in entries))
    pairs = open_pairs(path)
    assert pairs.known_bad == {1: "empty caption", 3: "no image named", 4: "empty caption"}
    assert pairs.y(5) == "four"
    with pytest.raises(BadSample, match="missing file"):
        pairs.x(2)
    with pytest.raises(BadSample, match="empty caption"):
        pairs.y(1)
    assert list(check_samples(pairs, max_bad_share=1)) == [1, 2, 3, 4]


def test_a_list_without_any_existing_image_is_refused(tmp_path):
    path = make.write_lines(tmp_path / "l.jsonl", {"image": "z.jpg", "caption": "x"})
    with pytest.raises(UserError, match=r"none of its first images exists, for example .*z\.jpg; set data\.root"):
        open_pairs(path)
