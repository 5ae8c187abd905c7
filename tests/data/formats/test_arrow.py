"""Parquet files and Hugging Face datasets on disk: splits, several files, bad rows, and wrong files."""

import os

import pytest

from nuclr.data import check_samples, open_pairs
from nuclr.data.pairs import BadSample
from nuclr.errors import UserError
from tests.data import make

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def write(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_the_copy_of_a_parquet_file_is_cached_until_the_file_changes(tmp_path):
    path = write(tmp_path / "p.parquet", image=[make.picture(1)], caption=["one"])
    assert open_pairs(path).y(0) == open_pairs(path).y(0) == "one"
    copies = list((tmp_path / ".nuclr").glob("*.arrow"))
    assert len(copies) == 1
    write(path, image=[make.picture(1), make.picture(2)], caption=["two", "three"])
    os.utime(path, ns=(5, 5))
    assert [open_pairs(path).y(number) for number in (0, 1)] == ["two", "three"]


def test_a_split_of_a_folder_of_parquet_files_is_read(tmp_path):
    for split in ("train", "val"):
        write(tmp_path / "data" / f"{split}-0.parquet", image=[make.picture(1)], caption=[split])
    assert open_pairs(tmp_path, split="val").y(0) == "val"
    assert len(open_pairs(tmp_path)) == 2
    with pytest.raises(
        UserError, match=r"no \.parquet file of split 'test' \(data\.split\); found: train-0\.parquet, val-0\.parquet"
    ):
        open_pairs(tmp_path, split="test")


def test_a_split_of_a_dataset_dict_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"image": [make.picture(1)], "text": ["one"]}
    sets = {split: datasets.Dataset.from_dict(rows) for split in ("train", "val")}
    datasets.DatasetDict(sets).save_to_disk(tmp_path / "d")
    assert open_pairs(tmp_path / "d", split="val").y(0) == "one"
    for split, message in (
        (None, "name a split with data.split; found: train, val"),
        ("test", r"no split 'test' \(data\.split\); found: train, val"),
    ):
        with pytest.raises(UserError, match=message):
            open_pairs(tmp_path / "d", split=split)


def test_only_the_selected_rows_of_a_dataset_are_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"image": [make.picture(i) for i in range(4)], "text": list("abcd")}
    datasets.Dataset.from_dict(rows).select([2, 0]).save_to_disk(tmp_path / "d")
    pairs = open_pairs(tmp_path / "d")
    assert [pairs.y(number) for number in range(len(pairs))] == ["c", "a"]


def test_rows_without_image_or_caption_are_bad_samples(tmp_path):
    images = [
        {"bytes": make.picture(0), "path": "0.jpg"},
        {"bytes": None, "path": None},
        {"bytes": None, "path": "gone.jpg"},
    ]
    path = write(tmp_path / "p.parquet", image=[*images, images[0]], caption=["a", "b", "c", None])
    pairs = open_pairs(path)
    assert check_samples(pairs, max_bad_share=1) == {1: "no image in the row", 2: "missing file", 3: "empty caption"}
    assert [pairs.name(number) for number in range(3)] == ["0.jpg", "row 1", "gone.jpg"]
    with pytest.raises(BadSample):
        pairs.y(3)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"image": [1, 2], "caption": ["a", "b"]},
            "column 'image' holds int64; needs file names, bytes or {bytes, path}",
        ),
        ({"image": [b"a"], "caption": [1]}, "column 'caption' holds int64; needs text or lists of text"),
        ({"url": ["a"], "caption": ["a"]}, "no column for the image among 'url', 'caption'"),
        (
            {"image": pyarrow.array([], pyarrow.binary()), "caption": pyarrow.array([], pyarrow.string())},
            "holds no pairs",
        ),
    ],
)
def test_wrong_columns_are_refused_with_a_message(tmp_path, columns, message):
    with pytest.raises(UserError, match=message):
        open_pairs(write(tmp_path / "p.parquet", **columns))


def test_broken_files_are_refused(tmp_path):
    (tmp_path / "p.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        open_pairs(tmp_path / "p.parquet")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "state.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read as a dataset on disk"):
        open_pairs(tmp_path / "d")
    write(tmp_path / "f" / "1.parquet", image=["a"], caption=["a"])
    write(tmp_path / "f" / "2.parquet", image=["a"], title=["a"])
    with pytest.raises(UserError, match=r"2\.parquet: columns image, title; 1\.parquet has image, caption"):
        open_pairs(tmp_path / "f")


@pytest.mark.parametrize("as_struct", [False, True])
def test_rows_with_the_same_bytes_are_one_image(tmp_path, as_struct):
    a, b = make.picture(1), make.picture(2)
    other = bytes([a[0] ^ 1]) + a[1:]  # same length and end as a, but a different image
    content = [a, b, a, None, other, b, None, None]
    paths = ["1", "2", "3", "gone.jpg", "5", "6", "gone.jpg", None]
    images = (
        [{"bytes": data, "path": path} for data, path in zip(content, paths, strict=True)] if as_struct else content
    )
    captions = [f"caption {row}" for row in range(len(images))]
    path = write(tmp_path / "p.parquet", image=images, caption=captions)
    assert open_pairs(path).x_id.tolist() == ([0, 1, 0, 2, 3, 1, 2, 4] if as_struct else [0, 1, 0, 2, 3, 1, 4, 5])
