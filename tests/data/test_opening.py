"""`open_pairs`: the format is recognized from the path, and wrong paths are refused."""

from pathlib import Path

import pytest

from nuclr.data import open_pairs
from nuclr.data.opening import locate
from nuclr.errors import UserError
from tests.data import make


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("l.csv", "", "empty file"),
        ("l.jsonl", "", "empty file"),
        ("l.xlsx", "x", r"l\.xlsx.*\.jsonl"),
    ],
)  # fmt: skip
def test_an_empty_or_unknown_file_is_refused(tmp_path, name, text, message):
    with pytest.raises(UserError, match=message) as caught:
        open_pairs(make.write_list(tmp_path, name, text))
    assert str(caught.value).count("\n") == 0


def test_a_missing_path_is_refused(tmp_path):
    make.jsonl(tmp_path)
    with pytest.raises(UserError, match=r"train\.json:"):
        open_pairs(tmp_path / "train.json")
    with pytest.raises(UserError, match=r"data\.root=.*gone"):
        open_pairs("train.jsonl", root=tmp_path / "gone")
    with pytest.raises(UserError, match=tmp_path.name):
        open_pairs(tmp_path)


def test_below_a_root_both_places_are_named(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    make.jsonl(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    for name in ("train.json", "*.tar"):
        with pytest.raises(UserError) as caught:
            open_pairs(name, root="data")
        message = str(caught.value)
        assert message.startswith(f"{name}: ") and "\n" not in message
        assert "data.root=data" in message and "working directory" in message


def test_a_pattern_may_match_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "0.tar").touch()
    assert locate("data", "*.tar") == "*.tar" and locate("data", "{0..1}.tar") == "{0..1}.tar"
    assert locate("data", "x*.tar") == "data/x*.tar"


@pytest.mark.parametrize("name", ["parts/*.csv", "a.csv::b.csv"])
def test_several_lists_are_refused(tmp_path, name):
    (tmp_path / "parts").mkdir()
    for path in ("a.csv", "b.csv", "parts/c.csv"):
        (tmp_path / path).touch()
    with pytest.raises(UserError, match="tars") as caught:
        open_pairs(name, root=tmp_path)
    assert name in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    for path in (make.jsonl(tmp_path), make.table(tmp_path)):
        with monkeypatch.context() as patch, pytest.raises(UserError, match="Permission denied"):
            patch.setattr(Path, "open", refuse)  # chmod has no effect on root
            open_pairs(path)


def test_builtin_pairs_take_options_and_a_split():
    pairs = open_pairs("builtin:n=50,seed=3", split="val")
    assert len(pairs) == 50 and pairs.split == "val" and pairs.seed == 3
    for option in ("size=x", "m=3"):
        with pytest.raises(UserError, match=rf"builtin:{option}.*n=int, seed=int"):
            open_pairs(f"builtin:{option}")
