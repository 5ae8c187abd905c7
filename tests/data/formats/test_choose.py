"""Which columns are chosen, what they hold, and the names of the sides."""

from pathlib import Path

import pytest

from nuclr.data import open_pairs
from nuclr.data.formats.choose import Choice, SideChoice, choose_columns
from nuclr.errors import UserError
from tests.data import make


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
    assert choose_columns(columns, Choice(), Path("p")) == chosen


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
    assert choose_columns(columns, Choice(SideChoice("x", x_key), SideChoice("y", y_key)), Path("p")) == chosen


@pytest.mark.parametrize(
    ("choice", "columns", "message"),
    [
        (
            Choice(),
            ["a", "b", "c"],
            "no two usual columns among 'a', 'b', 'c'; name them with data.x.key",
        ),
        (Choice(), ["URL", "TEXT"], "column 'URL' holds addresses; download the files first"),
        (Choice(), ["SAMPLE_ID", "URL", "TEXT", "WIDTH"], "column 'URL' holds addresses; download the files first"),
        (
            Choice(SideChoice("x", "a")),
            ["a", "b", "c"],
            "no usual column next to 'a' among 'a', 'b', 'c'",
        ),
        (Choice(y=SideChoice("y", "z")), ["a", "b"], r"no column 'z' \(data\.y\.key\); found: 'a', 'b'"),
        (Choice(views=True), ["a", "b"], "no column of images for data.contrast=views among 'a', 'b'"),
    ],
)
def test_missing_columns_are_refused(choice, columns, message):
    with pytest.raises(UserError, match=message):
        choose_columns(columns, choice, Path("p"))


def test_an_unknown_modality_is_refused(tmp_path):
    path = make.write_lines(tmp_path / "p.jsonl", {"en": "a", "de": "b"})
    with pytest.raises(UserError, match=r"data\.y\.modality=sound: unknown modality; allowed: image, text, vector"):
        open_pairs(path, y_kind="sound")


def test_a_column_that_mixes_names_of_images_and_texts_is_refused(tmp_path):
    make.write_images(tmp_path)
    for key in ("photo", "image"):
        rows = [{key: name, "words": "w"} for name in (*make.CAPTIONS, "a man on a horse", "a dog")]
        path = make.write_lines(tmp_path / "p.jsonl", *rows)
        with pytest.raises(UserError) as caught:
            open_pairs(path)
        message = str(caught.value)
        assert f'column \'{key}\' mixes names of images and texts: line 1 has "a.jpg" and line 6 has "a man' in message
        assert "data.x.modality" in message and message.count("\n") == 0
        assert open_pairs(path, x_kind="text").x(0) == "a.jpg"
        assert open_pairs(path, x_kind="image").x(0).size == (24, 20)


def test_a_few_captions_that_look_like_names_are_texts(tmp_path):
    make.write_images(tmp_path)
    pairs = open_pairs(make.write_lines(tmp_path / "p.jsonl", {"image": "a.jpg", "caption": "IMG_1.JPG"}))
    assert pairs.y(0) == "IMG_1.JPG" and (pairs.x_name, pairs.y_name) == ("image", "text")


def test_images_and_texts_may_be_on_either_side(tmp_path):
    pairs = open_pairs(make.jsonl(tmp_path), x_key="captions", y_key="image")
    assert (pairs.x_kind, pairs.y_kind, pairs.x_name, pairs.y_name) == ("text", "image", "text", "image")
    assert pairs.x(1) == "something red" and pairs.y(1).size == (24, 20) and pairs.name(1) == "a.jpg"
    assert pairs.x_id.tolist() == make.Y_ID and pairs.y_id.tolist() == make.X_ID


def test_two_columns_of_images(tmp_path):
    make.write_images(tmp_path)
    path = make.write_lines(tmp_path / "p.jsonl", {"sketch": "a.jpg", "photo": "b.png"})
    pairs = open_pairs(path)
    assert (pairs.x_kind, pairs.y_kind, pairs.x_name, pairs.y_name) == ("image", "image", "sketch", "photo")
    assert pairs.group is None and pairs.y(0).format == "PNG"


def test_names_of_sides_can_be_set_and_differ(tmp_path):
    path = make.write_lines(tmp_path / "p.jsonl", {"text": "a"}, {"text": "b"})
    pairs = open_pairs(path, x_key="text", y_key="text")
    assert (pairs.x_name, pairs.y_name) == ("text x", "text y")
    assert open_pairs(path, x_key="text", y_key="text", x_name="en").x_name == "en"
    with pytest.raises(UserError, match=r"both sides are called 'en'; name them with data\.x\.name and data\.y\.name"):
        open_pairs(path, x_key="text", y_key="text", x_name="en", y_name="en")
    pairs = open_pairs("builtin:n=4", x_name="picture")
    assert (pairs.x_name, pairs.y_name) == ("picture", "text")
    with pytest.raises(UserError, match=r"data\.x\.modality=text: builtin:n=4 holds images on side x"):
        open_pairs("builtin:n=4", x_kind="text")


def test_names_of_columns_are_safe_to_print(tmp_path):
    hostile, long = "\x1b]0;owned\x07 a\n b", "long " * 1000
    for x, y, names in (
        (hostile, long, ("\\x1b]0;owned\\x07 a b", long[:60])),
        (" ", "\u202etxt", ("x", "\\u202etxt")),
    ):
        path = make.write_lines(tmp_path / "p.jsonl", {x: "a", y: "b"}, {x: "c", y: "d"})
        pairs = open_pairs(path)
        assert (pairs.x_name, pairs.y_name) == names and (pairs.x_key, pairs.y_key) == (x, y)
