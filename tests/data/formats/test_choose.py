"""Which columns are chosen, what they hold, and the names of the sides."""

from pathlib import Path

import pytest

from nuclr.data import open_pairs
from nuclr.data.formats.choose import Request, SideChoice, choose_columns
from nuclr.errors import UserError
from tests.data import make


def request(x_key=None, y_key=None, views=False):
    return Request(Path("p"), sides={"x": SideChoice(x_key), "y": SideChoice(y_key)}, views=views)


@pytest.mark.parametrize(
    ("columns", "chosen"),
    [
        (["id", "caption", "image"], ("image", "caption")),
        (["question", "answer", "text"], ("question", "answer")),
        (["positive", "query", "negative"], ("query", "positive")),
        (["anchor", "positive", "negative"], ("anchor", "positive")),
        (["premise", "hypothesis", "label"], ("premise", "hypothesis")),
        (["score", "sentence1", "sentence2"], ("sentence1", "sentence2")),
        (["repo", "path", "code", "docstring"], ("code", "docstring")),
        (["IMAGE", "TEXT", "URL"], ("IMAGE", "TEXT")),
        (["de", "en"], ("de", "en")),
        (["de", "en", "__index_level_0__"], ("de", "en")),
    ],
)
def test_usual_columns_are_found(columns, chosen):
    assert tuple(choose_columns(columns, request()).values()) == chosen


@pytest.mark.parametrize(
    ("x_key", "y_key", "columns", "chosen"),
    [
        ("en", "de", ["a", "de", "en"], ("en", "de")),
        ("EN", None, ["de", "en"], ("en", "de")),
        (None, "de", ["de", "en"], ("en", "de")),
        ("question", None, ["a", "answer", "question"], ("question", "answer")),
        (None, "alt", ["alt", "image", "caption"], ("image", "alt")),
        ("photo", None, ["photo", "caption", "n"], ("photo", "caption")),
        ("text", "text", ["text"], ("text", "text")),
    ],
)
def test_named_columns_are_used(x_key, y_key, columns, chosen):
    assert tuple(choose_columns(columns, request(x_key, y_key)).values()) == chosen


@pytest.mark.parametrize(
    ("x_key", "y_key", "views", "columns", "named"),
    [
        (None, None, False, ["a", "b", "c"], ["'a', 'b', 'c'", "data.x.key and data.y.key"]),
        (None, None, False, ["URL", "TEXT"], ["'URL'", "img2dataset"]),
        (None, None, False, ["SAMPLE_ID", "URL", "TEXT", "WIDTH"], ["'URL'", "img2dataset"]),
        ("a", None, False, ["a", "b", "c"], ["'a', 'b', 'c'", "data.y.key"]),
        (None, "z", False, ["a", "b"], ["'z'", "data.y.key", "'a', 'b'"]),
        (None, None, True, ["a", "b"], ["data.contrast=views", "'a', 'b'", "data.x.key"]),
    ],
)
def test_missing_columns_are_refused(x_key, y_key, views, columns, named):
    with pytest.raises(UserError) as error:
        choose_columns(columns, request(x_key, y_key, views))
    assert all(text in str(error.value) for text in named)


def test_an_unknown_modality_is_refused(tmp_path):
    path = make.write_lines(tmp_path / "p.jsonl", {"en": "a", "de": "b"})
    with pytest.raises(UserError, match=r"data\.y\.modality=sound"):
        open_pairs(path, y=SideChoice(modality="sound"))


def test_a_column_that_mixes_names_of_images_and_texts_is_refused(tmp_path):
    make.write_images(tmp_path)
    for key in ("photo", "image"):
        rows = [{key: name, "words": "w"} for name in (*make.CAPTIONS, "a man on a horse", "a dog")]
        path = make.write_lines(tmp_path / "p.jsonl", *rows)
        with pytest.raises(UserError) as caught:
            open_pairs(path)
        message = str(caught.value)
        assert all(text in message for text in (f"'{key}'", '"a.jpg"', '"a man on a horse"', "data.x.modality"))
        assert message.count("\n") == 0
        assert open_pairs(path, x=SideChoice(modality="text")).item("x", 0) == "a.jpg"
        assert open_pairs(path, x=SideChoice(modality="image")).item("x", 0).size == (24, 20)


def test_a_few_captions_that_look_like_names_are_texts(tmp_path):
    make.write_images(tmp_path)
    pairs = open_pairs(make.write_lines(tmp_path / "p.jsonl", {"image": "a.jpg", "caption": "IMG_1.JPG"}))
    assert pairs.item("y", 0) == "IMG_1.JPG" and pairs.side_names == ("image", "text")


def test_images_and_texts_may_be_on_either_side(tmp_path):
    pairs = open_pairs(make.jsonl(tmp_path), x=SideChoice("captions"), y=SideChoice("image"))
    assert (*pairs.modalities, *pairs.side_names) == ("text", "image", "text", "image")
    assert pairs.item("x", 1) == "something red" and pairs.item("y", 1).size == (24, 20) and pairs.name(1) == "a.jpg"
    assert pairs.sides["x"].ids.tolist() == make.Y_ID and pairs.sides["y"].ids.tolist() == make.X_ID


def test_two_columns_of_images(tmp_path):
    make.write_images(tmp_path)
    path = make.write_lines(tmp_path / "p.jsonl", {"sketch": "a.jpg", "photo": "b.png"})
    pairs = open_pairs(path)
    assert (*pairs.modalities, *pairs.side_names) == ("image", "image", "sketch", "photo")
    assert pairs.group is None and pairs.item("y", 0).format == "PNG"


def test_names_of_sides_can_be_set_and_differ(tmp_path):
    path = make.write_lines(tmp_path / "p.jsonl", {"text": "a"}, {"text": "b"})
    pairs = open_pairs(path, x=SideChoice("text"), y=SideChoice("text"))
    assert pairs.side_names == ("text x", "text y")
    assert open_pairs(path, x=SideChoice(key="text", name="en"), y=SideChoice("text")).sides["x"].name == "en"
    with pytest.raises(UserError, match=r"data\.x\.name and data\.y\.name"):
        open_pairs(path, x=SideChoice(key="text", name="en"), y=SideChoice(key="text", name="en"))
    pairs = open_pairs("builtin:n=4", x=SideChoice(name="picture"))
    assert pairs.side_names == ("picture", "text")
    with pytest.raises(UserError, match=r"data\.x\.modality=text: builtin:n=4 holds images on side x"):
        open_pairs("builtin:n=4", x=SideChoice(modality="text"))


def test_names_of_columns_are_safe_to_print(tmp_path):
    hostile, long = "\x1b]0;owned\x07 a\n b", "long " * 1000
    for x, y, names in (
        (hostile, long, ("\\x1b]0;owned\\x07 a b", long[:60])),
        (" ", "\u202etxt", ("x", "\\u202etxt")),
    ):
        path = make.write_lines(tmp_path / "p.jsonl", {x: "a", y: "b"}, {x: "c", y: "d"})
        pairs = open_pairs(path)
        assert pairs.side_names == names and (pairs.sides["x"].key, pairs.sides["y"].key) == (x, y)
