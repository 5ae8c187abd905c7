"""Parquet files and Hugging Face datasets on disk: splits, several files, bad rows, and wrong files."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from nuclr import data
from nuclr.data import check_samples, open_pairs
from nuclr.data.pairs import BadSample
from nuclr.data.vectors import open_vectors
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
    assert open_pairs(path).item("y", 0) == open_pairs(path).item("y", 0) == "one"
    copies = list((tmp_path / ".nuclr").glob("*.stream"))
    assert len(copies) == 1
    write(path, image=[make.picture(1), make.picture(2)], caption=["two", "three"])
    os.utime(path, ns=(5, 5))
    assert [open_pairs(path).item("y", number) for number in (0, 1)] == ["two", "three"]


def test_vectors_in_parquet_are_copied_once_and_mapped(tmp_path, monkeypatch):
    rows = np.arange(3000, dtype="float32").reshape(1500, 2)
    paths = [write(tmp_path / f"{number}.parquet", v=list(rows[number::2])) for number in (0, 1)]
    opened = open_vectors(tmp_path)
    np.testing.assert_array_equal(np.asarray(opened.rows), np.concatenate([rows[::2], rows[1::2]]))
    stamps = {copy: copy.stat().st_mtime_ns for copy in (tmp_path / ".nuclr").glob("*.npy")}
    assert len(stamps) == 2 and opened.rows.dtype == np.float32
    write(paths[1], v=list(-rows[:3]))
    np.testing.assert_array_equal(np.asarray(open_vectors(tmp_path).rows)[750:], -rows[:3])
    assert {copy: copy.stat().st_mtime_ns for copy in stamps} == stamps, "the copy of the other file is used again"
    monkeypatch.setattr("nuclr.stacked.find_cache_folder", lambda folder: None)
    with pytest.raises(UserError, match=r"0\.parquet.*NUCLR_CACHE"):
        open_vectors(tmp_path)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([[1.0, 2.0]] * 1200 + [[1.0]], r"\[1, 2\] numbers|2 and 1 numbers"),
        ([[1.0, 2.0], None], r"\[0, 2\] numbers"),
    ],
)
def test_vectors_of_several_widths_are_refused(tmp_path, rows, named):
    with pytest.raises(UserError, match=rf"p\.parquet: rows of 'v' have ({named})"):
        open_vectors(write(tmp_path / "p.parquet", v=rows))
    assert not list((tmp_path / ".nuclr").glob("*.npy"))


def test_integers_with_missing_numbers_are_nan(tmp_path):
    rows = [[1, 2]] * 1000 + [[3, None]]
    opened = open_vectors(write(tmp_path / "p.parquet", v=rows))
    assert opened.rows.dtype == np.float32
    np.testing.assert_array_equal(np.asarray(opened.rows)[-2:], [[1, 2], [3, np.nan]])


def test_a_split_of_a_folder_of_parquet_files_is_read(tmp_path):
    for split in ("train", "val"):
        write(tmp_path / "data" / f"{split}-0.parquet", image=[make.picture(1)], caption=[split])
    assert open_pairs(tmp_path, split="val").item("y", 0) == "val"
    assert len(open_pairs(tmp_path)) == 2
    with pytest.raises(UserError, match=r"'test' \(data\.split\).*train-0\.parquet, val-0\.parquet"):
        open_pairs(tmp_path, split="test")


def test_a_split_of_a_dataset_dict_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"image": [make.picture(1)], "text": ["one"]}
    sets = {split: datasets.Dataset.from_dict(rows) for split in ("train", "val")}
    datasets.DatasetDict(sets).save_to_disk(tmp_path / "d")
    assert open_pairs(tmp_path / "d", split="val").item("y", 0) == "one"
    for split, message in (
        (None, "data.split.*train, val"),
        ("test", r"no split 'test' \(data\.split\); found: train, val"),
    ):
        with pytest.raises(UserError, match=message):
            open_pairs(tmp_path / "d", split=split)


def test_only_the_selected_rows_of_a_dataset_are_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"image": [make.picture(i) for i in range(4)], "text": list("abcd")}
    datasets.Dataset.from_dict(rows).select([2, 0]).save_to_disk(tmp_path / "d")
    pairs = open_pairs(tmp_path / "d")
    assert [pairs.item("y", number) for number in range(len(pairs))] == ["c", "a"]


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
        pairs.item("y", 3)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"image": [1, 2], "caption": ["a", "b"]},
            "column 'image' holds int64",
        ),
        ({"image": [b"a"], "caption": [1]}, "column 'caption' holds int64"),
        ({"image": [{"bytes": 3, "path": "a"}], "caption": ["a"]}, "column 'image' holds struct"),
        ({"image": [{"bytes": b"3", "path": 3}], "caption": ["a"]}, "column 'image' holds struct"),
        ({"url": ["a"], "caption": ["a"]}, "'url'"),
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
    with pytest.raises(UserError, match=r"p\.parquet"):
        open_pairs(tmp_path / "p.parquet")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "state.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        open_pairs(tmp_path / "d")
    write(tmp_path / "f" / "1.parquet", image=["a"], caption=["a"])
    write(tmp_path / "f" / "2.parquet", image=["a"], title=["a"])
    with pytest.raises(UserError, match=r"2\.parquet: .*caption"):
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
    assert open_pairs(path).sides["x"].ids.tolist() == (
        [0, 1, 0, 2, 3, 1, 2, 4] if as_struct else [0, 1, 0, 2, 3, 1, 4, 5]
    )


# Damaged files. Reading beyond a mapped file would end the interpreter, so these tests open files in another process.

OPEN = """
import sys
from pathlib import Path
from nuclr.data import open_pairs
from nuclr.data.pairs import BadSample
from nuclr.data.vectors import open_vectors
from nuclr.errors import UserError
try:
    pairs = open_pairs(Path(sys.argv[1]))
    for number in range(len(pairs)):
        try:
            pairs.name(number), pairs.item("x", number), pairs.item("y", number)
        except BadSample:
            pass
    print("opened")
except UserError as error:
    print("refused:", error)
"""


def open_elsewhere(path):
    return subprocess.run([sys.executable, "-c", OPEN, str(path)], capture_output=True, text=True, check=False)


def write_stream(folder, table):
    """Write a data set on disk as `save_to_disk` does, without the datasets package."""
    folder.mkdir()
    with pyarrow.OSFile(str(folder / "data-0.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    return folder


def damage(path, before, after):
    content = path.read_bytes()
    assert content.count(before) == 1
    path.write_bytes(content.replace(before, after))


def offsets(*values):
    return np.array(values, np.int32).tobytes()


@pytest.mark.parametrize("column", ["caption", "image", "captions"])
def test_offsets_outside_of_a_mapped_file_are_refused_without_a_crash(tmp_path, column):
    captions = {"captions": [["one"], ["three", "four"]]} if column == "captions" else {"caption": ["one", "three"]}
    table = pyarrow.table({"image": [b"12345678901", b"1234567890123"], **captions})
    folder = write_stream(tmp_path / "d", table)
    before = {"caption": (0, 3, 8), "image": (0, 11, 24), "captions": (0, 1, 3)}[column]
    damage(folder / "data-0.arrow", offsets(*before), offsets(0, 2**30, 2**31 - 8))
    process = open_elsewhere(folder)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith(f"refused: {folder}: the file is damaged"), process.stdout


def test_a_damaged_copy_of_a_parquet_file_is_written_again(tmp_path):
    path = write(tmp_path / "p.parquet", image=[b"12345678901", b"1234567890123"], caption=["one", "three"])
    assert len(open_pairs(path)) == 2
    (copy,) = (tmp_path / ".nuclr").glob("*.stream")
    damage(copy, offsets(0, 3, 8), offsets(0, 2**30, 2**31 - 8))
    process = open_elsewhere(path)
    assert (process.returncode, process.stdout) == (0, "opened\n"), process.stdout + process.stderr


@pytest.mark.parametrize("kind", ["bytes", "struct", "names", "lists"])
@pytest.mark.parametrize("mapped", [False, True])
def test_text_that_is_not_utf8_is_a_bad_sample(tmp_path, kind, mapped):
    def texts(*values):
        return pyarrow.array(values, pyarrow.binary()).view(pyarrow.string())

    picture, bad = make.picture(1), b"\xff\xfe"
    (tmp_path / "a.jpg").write_bytes(picture)
    captions = texts(b"one", bad, b"three")
    if kind == "lists":
        captions = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1, 2, 3], pyarrow.int32()), captions)
    images = pyarrow.array([picture] * 3)
    if kind == "names":
        images = texts(b"a.jpg", b"a.jpg", bad)
    elif kind == "struct":
        empty = pyarrow.array([picture, picture, None], pyarrow.binary())
        images = pyarrow.StructArray.from_arrays([empty, texts(b"a.jpg", b"a.jpg", bad)], ["bytes", "path"])
    table = pyarrow.table({"image": images, "caption": captions})
    if mapped:
        path = write_stream(tmp_path / "d", table)
    else:
        path = tmp_path / "p.parquet"
        parquet.write_table(table, path)
    pairs = open_pairs(path, root=tmp_path)
    expected = {1: "caption is not UTF-8 text"}
    if kind in ("names", "struct"):
        expected[2] = "image name is not UTF-8 text"
    assert check_samples(pairs, max_bad_share=1) == expected
    assert pairs.item("y", 0) == "one"
    assert all(pairs.name(number).isprintable() for number in range(3))


def test_a_column_whose_name_is_not_utf8_is_refused(tmp_path):
    folder = write_stream(tmp_path / "d", pyarrow.table({"image": ["a"], "caption": ["b"], "qqqqqqq": ["c"]}))
    content = (folder / "data-0.arrow").read_bytes()
    (folder / "data-0.arrow").write_bytes(content.replace(b"qqqqqqq", b"qqq\xff\xfeqq"))
    with pytest.raises(UserError, match="cannot be read"):
        open_pairs(folder)


@pytest.mark.parametrize("name", ["../outside.arrow", "/etc/passwd", "", ".", "a\0b", 3, None])
def test_data_files_outside_of_the_folder_are_refused(tmp_path, name):
    folder = write_stream(tmp_path / "d", pyarrow.table({"image": ["a"], "caption": ["b"]}))
    (folder / "data-0.arrow").rename(tmp_path / "outside.arrow")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(UserError, match=r"state\.json"):
        open_pairs(folder)


@pytest.mark.parametrize("state", ["[" * 100_000, "[]", '{"_data_files": 1}', "null"])
def test_a_damaged_state_json_is_refused(tmp_path, state):
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(UserError, match="cannot be read"):
        open_pairs(tmp_path)


def test_images_without_bytes_in_any_row_are_read_by_name(tmp_path):
    make.write_images(tmp_path)
    rows = [{"image": {"bytes": None, "path": name}, "caption": texts[0]} for name, texts in make.CAPTIONS.items()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    pairs = open_pairs(tmp_path / "pairs.parquet")
    assert pairs[0].x.size == (24, 20)
    assert len(set(pairs.sides["x"].ids.tolist())) == len(rows)


def test_a_dataset_in_memory_is_read_from_its_table(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"question": ["why?", " who? ", ""], "answer": ["because", "they", "x"]}
    dataset = datasets.Dataset.from_dict(rows)
    pairs = data.open(dataset)
    assert pairs.side_names == ("question", "answer") and pairs[1][:2] == ("who?", "they")
    assert pairs.known_bad == {2: "empty question"}
    dataset.save_to_disk(tmp_path / "saved")
    saved = data.open(tmp_path / "saved")
    assert saved.fingerprint == pairs.fingerprint
    assert data.open(datasets.load_from_disk(tmp_path / "saved")).fingerprint == pairs.fingerprint
    with pytest.raises(UserError, match="flatten_indices"):
        data.open(dataset.select([0, 2]))
