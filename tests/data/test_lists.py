"""Caption lists and tables: what is read, where images are looked for, and what is refused in words that help."""

import json

import numpy as np
import pytest

from nuclr.data import check_samples, open_pairs
from nuclr.data.pairs import BadSample
from nuclr.errors import UserError
from tests.data import make


def written(tmp_path, name, text):
    make.write_images(tmp_path)
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def captions(pairs):
    return [pairs.y(number) for number in range(len(pairs))]


def test_split_of_karpathy(tmp_path):
    path = make.karpathy(tmp_path)
    content = json.loads(path.read_text())
    for entry, split in zip(content["images"], ["train", "val", "restval", "test", "train"], strict=True):
        entry["split"] = split
    path.write_text(json.dumps(content))
    assert open_pairs(path, split="train").x_id.tolist() == [0, 0, 0, 1]
    assert len(open_pairs(path, split="train+restval")) == 5
    with pytest.raises(UserError, match=r"no entry of split 'dev' \(data\.split\); found: restval, test, train, val"):
        open_pairs(path, split="dev")


@pytest.mark.parametrize("place", ["", "train", "images"])
def test_where_images_are_looked_for(tmp_path, place):
    make.write_images(tmp_path / "photos" / place)
    (tmp_path / "lists").mkdir()
    make.write_lines(tmp_path / "lists" / "train.jsonl", {"image": "a.jpg", "caption": "one"})
    pairs = open_pairs(tmp_path / "lists" / "train.jsonl", root=tmp_path / "photos")
    assert pairs.x(0).size == (24, 20)


def test_list_relative_to_root_and_absolute_images(tmp_path):
    make.write_images(tmp_path / "elsewhere")
    make.write_lines(tmp_path / "l.jsonl", {"image": str(tmp_path / "elsewhere" / "a.jpg"), "caption": "one"})
    assert open_pairs("l.jsonl", root=tmp_path).x(0).size == (24, 20)


def test_named_keys(tmp_path):
    make.write_images(tmp_path)
    path = make.write_lines(
        tmp_path / "l.jsonl", {"image": "b.png", "photo": "a.jpg", "caption": "one", "alt": ["two", "three"]}
    )
    pairs = open_pairs(path, x_key="photo", y_key="alt")
    assert captions(pairs) == ["two", "three"] and pairs.name(0) == "a.jpg"


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


def test_rows_of_a_table_with_other_numbers_of_cells_are_bad(tmp_path):
    pairs = open_pairs(
        written(tmp_path, "l.csv", 'filepath,title\na.jpg,one\nb.png\nc.jpg,two,three\n\nd.jpg,"four,\nfive"\n')
    )
    assert pairs.known_bad == {1: "line 3 has 1 cells, the header has 2", 2: "line 4 has 3 cells, the header has 2"}
    assert pairs.y(3) == "four, five"


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    pairs = open_pairs(written(tmp_path, "l.csv", b"\xef\xbb\xbfimage;caption\r\na.jpg;one\r\nb.png;two\r\n"))
    assert captions(pairs) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("l.csv", "a.jpg,one\nb.png,two\n", r"line 1 names an image \(a\.jpg\); put a header such as filepath,title"),
        ("l.csv", "file,words\na.jpg,one\n", r"no column for the image among 'file', 'words'; name it with data.x.key"),
        ("l.csv", "image,words\na.jpg,one\n", r"no column for the caption among 'image', 'words'; name it with data.y"),
        ("l.csv", "image caption\na.jpg one\n", r"no column for the image among 'image caption'"),
        ("l.csv", "image,caption\n", "holds no pairs"),
        ("l.csv", "\n\n", "empty; needs a header"),
        ("l.csv", b"image,caption\na.jpg,caf\xe9\n", "not UTF-8 text"),
        ("l.csv", "", "empty file"),
        ("l.jsonl", "", "empty file"),
        ("l.jsonl", '{"image": "a.jpg", "caption": "x"}\n{"image": \n', r"l\.jsonl, line 2: not JSON"),
        ("l.jsonl", '["a.jpg", "x"]\n', r"line 1: \[\"a\.jpg\", \"x\"\] is not an entry \{\"image\""),
        ("l.jsonl", '{"image": 3, "caption": "x"}\n', r"line 1: 'image' is 3; needs a text"),
        ("l.jsonl", '{"image": "a.jpg", "caption": {"en": "x"}}\n', r"line 1: 'caption' is \{.*needs a text"),
        ("l.jsonl", '{"image": "a.jpg", "label": "x"}\n', r"line 1: no column for the caption among 'image', 'label'"),
        ("l.jsonl", b'{"image": "a.jpg", "caption": "caf\xe9"}\n', "not UTF-8 text"),
        ("l.json", '[{"image": "a.jpg",\n "caption": "x"},\n {"image" "b.png"}]', r"l\.json, line 3: not JSON"),
        ("l.json", '[{"image": "a.jpg", "caption": "x"}\n {}]', r"line 2: not JSON \(',' or '\]' expected"),
        ("l.json", '[{"image": "a.jpg", "caption": "x"},\n', r"line 2: not JSON"),
        ("l.json", '{"a.jpg": "x"}', r"is neither a list of .* nor a Karpathy split"),
        ("l.json", '{"images": [{"id": 3}]}', r"images\[0\]: has no \"sentences\"; is this a Karpathy split"),
        ("l.json", '{"images": [{"sentences": [{"tokens": []}]}]}', r"images\[0\]: needs \"filename\" and"),
        ("l.json", "[]", "holds no pairs"),
        ("l.json", '"text"', "is neither a list"),
        ("l.jsonl", '{"image": "z.jpg", "caption": "x"}\n', r"none of its first images exists, for example .*z\.jpg"),
        ("l.xlsx", "x", r"unknown format; known formats: \.jsonl"),
    ],
)  # fmt: skip
def test_mistakes(tmp_path, name, text, message):
    with pytest.raises(UserError, match=message) as caught:
        open_pairs(written(tmp_path, name, text))
    assert str(caught.value).count("\n") == 0


def test_wrong_column_names_the_nearest(tmp_path):
    path = make.table(tmp_path)
    with pytest.raises(
        UserError, match=r"no column 'tittle' \(data.y.key\); found: 'filepath', 'title'; nearest: 'title'"
    ):
        open_pairs(path, y_key="tittle")


def test_missing_path_names_the_nearest(tmp_path):
    make.jsonl(tmp_path)
    with pytest.raises(UserError, match=r"no such file or folder; did you mean train\.jsonl\?"):
        open_pairs(tmp_path / "train.json")
    with pytest.raises(UserError, match=r"data\.root=.*gone: no such folder"):
        open_pairs("train.jsonl", root=tmp_path / "gone")
    with pytest.raises(UserError, match=r"a folder without tars, Parquet files or a saved dataset"):
        open_pairs(tmp_path)


def test_embedding_files(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3, 4)).astype("f4"), rng.normal(size=(5, 2)).astype("f4")
    np.savez(tmp_path / "e.npz", x=x, y=y, y_to_x=[0, 0, 2, 1, 1])
    pairs = open_pairs("e.npz", root=tmp_path)
    assert (pairs.x_kind, pairs.y_kind, len(pairs)) == ("vector", "vector", 5)
    assert pairs.x_id.tolist() == [0, 0, 2, 1, 1] and pairs.y_id.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(pairs.x(2), x[2])
    np.testing.assert_array_equal(pairs.y(4), y[4])
    assert check_samples(pairs) == {} and pairs.name(3) == "e.npz, x row 1"
    np.savez(tmp_path / "e.npz", x=x, y=y)
    with pytest.raises(UserError, match="x has 3 rows and y 5; add y_to_x"):
        open_pairs(tmp_path / "e.npz")


def test_builtin():
    pairs = open_pairs("builtin:n=50,seed=3", split="val")
    assert len(pairs) == 50 and pairs.split == "val" and pairs.seed == 3
    for options, message in (
        ("size=x", "size='x' is not a whole number"),
        ("m=3", "unknown option 'm'; allowed: n, seed"),
    ):
        with pytest.raises(UserError, match=message):
            open_pairs(f"builtin:{options}")
