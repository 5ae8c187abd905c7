"""Pairs that name image files: in which folder images are searched, and bad rows."""

import os

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
    assert pairs.item("x", 0).size == (24, 20)


def test_a_list_relative_to_the_root_may_name_absolute_images(tmp_path):
    make.write_images(tmp_path / "elsewhere")
    make.write_lines(tmp_path / "l.jsonl", {"image": str(tmp_path / "elsewhere" / "a.jpg"), "caption": "one"})
    assert open_pairs("l.jsonl", root=tmp_path).item("x", 0).size == (24, 20)


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
    assert pairs.known_bad == {1: "empty caption", 3: "no image", 4: "empty caption"}
    assert pairs.item("y", 5) == "four"
    with pytest.raises(BadSample, match="missing file"):
        pairs.item("x", 2)
    with pytest.raises(BadSample, match="empty caption"):
        pairs.item("y", 1)
    assert list(check_samples(pairs, max_bad_share=1)) == [1, 2, 3, 4]


def test_a_list_without_any_existing_image_is_refused(tmp_path):
    path = make.write_lines(tmp_path / "l.jsonl", {"image": "z.jpg", "caption": "x"})
    with pytest.raises(UserError, match=r"none of its first images exists, for example .*z\.jpg; set data\.root"):
        open_pairs(path)


def outside(tmp_path):
    """Write a folder `data` with a good image and three ways out of it, and return the names of the images."""
    make.write_images(tmp_path / "data")
    make.write_images(tmp_path / "secret")
    (tmp_path / "data" / "link.jpg").symlink_to(tmp_path / "secret" / "a.jpg")
    (tmp_path / "data" / "folder").symlink_to(tmp_path / "secret")
    return ["a.jpg", "../secret/a.jpg", str(tmp_path / "secret" / "a.jpg"), "link.jpg", "folder/a.jpg"]


def formats_with_names(folder, names):
    import pyarrow
    import pyarrow.parquet

    yield make.write_lines(folder / "l.jsonl", *({"image": name, "caption": "c"} for name in names))
    (folder / "l.csv").write_text("image,caption\n" + "".join(f"{name},c\n" for name in names))
    yield folder / "l.csv"
    columns = {"image": names, "caption": ["c"] * len(names)}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "names.parquet")
    yield folder / "names.parquet"
    struct = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    columns["image"] = pyarrow.array([{"bytes": None, "path": name} for name in names], struct)
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "paths.parquet")
    yield folder / "paths.parquet"


def test_names_that_leave_the_root_are_bad_samples_unless_allowed(tmp_path):
    names = outside(tmp_path)
    for path in formats_with_names(tmp_path / "data", names):
        for root in (None, tmp_path / "data"):
            pairs = open_pairs(path, root)
            bad = check_samples(pairs, max_bad_share=1)
            assert set(bad) == {1, 2, 3, 4}, path
            assert set(bad.values()) == {"outside data.root; data.allow_outside=true allows this"}
            with pytest.raises(UserError, match=r"4 x outside data\.root; data\.allow_outside=true allows this"):
                check_samples(pairs)
            pairs = open_pairs(path, root, allow_outside=True)
            assert check_samples(pairs) == {}
            assert [pairs.item("x", number).size for number in range(5)] == [(24, 20)] * 5


def test_a_root_that_is_a_symlink_is_followed(tmp_path):
    make.jsonl(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for pairs in (open_pairs(tmp_path / "link" / "train.jsonl"), open_pairs("train.jsonl", tmp_path / "link")):
        assert check_samples(pairs) == {}


def test_images_next_to_the_list_do_not_leave_the_root(tmp_path):
    (tmp_path / "root").mkdir()
    make.jsonl(tmp_path / "lists")
    assert check_samples(open_pairs(tmp_path / "lists" / "train.jsonl", tmp_path / "root")) == {}


def test_files_that_are_not_regular_too_large_or_have_long_names_are_bad_samples(tmp_path):
    make.write_images(tmp_path)
    os.mkfifo(tmp_path / "pipe.jpg")
    with (tmp_path / "large.jpg").open("wb") as file:
        file.truncate(300 * 2**20)
    names = ["a.jpg", "pipe.jpg", "large.jpg", ".", "n" * 300 + ".jpg", "f/" * 3000 + "a.jpg", "/dev/zero", "nul\0.jpg"]
    names.append("loop.jpg")
    (tmp_path / "loop.jpg").symlink_to(tmp_path / "loop.jpg")
    path = make.write_lines(tmp_path / "l.jsonl", *({"image": name, "caption": "c"} for name in names))
    bad = check_samples(open_pairs(path, allow_outside=True), max_bad_share=1)
    assert bad == {
        1: "cannot be read (not a regular file)",
        2: "cannot be read (more than 256 MiB)",
        3: "cannot be read (Is a directory)",
        4: "cannot be read (File name too long)",
        5: "cannot be read (File name too long)",
        6: "cannot be read (not a regular file)",
        7: "cannot be read (embedded null byte)",
        8: "cannot be read (Too many levels of symbolic links)",
    }
    assert set(check_samples(open_pairs(path), max_bad_share=1)) == set(bad)


def test_the_result_of_the_check_depends_on_allow_outside(tmp_path):
    outside(tmp_path)
    path = make.write_lines(tmp_path / "data" / "l.jsonl", {"image": "link.jpg", "caption": "c"})
    assert check_samples(open_pairs(path, allow_outside=True)) == {}
    assert list(check_samples(open_pairs(path), max_bad_share=1)) == [0]
