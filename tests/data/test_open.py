"""`open_pairs`: the format is recognized from the path, and wrong paths are refused."""

from pathlib import Path

import pytest

from nuclr.data import open_pairs
from nuclr.data.open import locate
from nuclr.errors import UserError
from tests.data import make


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("l.csv", "", "empty file"),
        ("l.jsonl", "", "empty file"),
        ("l.xlsx", "x", r"unknown format; known formats: \.jsonl"),
    ],
)  # fmt: skip
def test_an_empty_or_unknown_file_is_refused(tmp_path, name, text, message):
    with pytest.raises(UserError, match=message) as caught:
        open_pairs(make.write_list(tmp_path, name, text))
    assert str(caught.value).count("\n") == 0


def test_a_missing_path_is_refused_with_the_nearest_name(tmp_path):
    make.jsonl(tmp_path)
    with pytest.raises(UserError, match=r"no such file or folder; did you mean .*train\.jsonl\?"):
        open_pairs(tmp_path / "train.json")
    with pytest.raises(UserError, match=r"data\.root=.*gone: no such folder"):
        open_pairs("train.jsonl", root=tmp_path / "gone")
    with pytest.raises(UserError, match=r"a folder without tars, Parquet files or a saved dataset"):
        open_pairs(tmp_path)


def test_below_a_root_both_places_are_named(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    make.jsonl(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_held_out.csv").touch()
    tried = "neither in data.root=data nor in the working directory"
    for name, message in (
        ("train.json", f"train.json: no such file or folder, {tried}; did you mean train.jsonl?"),
        ("my_hold_out.csv", f"my_hold_out.csv: no such file or folder, {tried}; did you mean my_held_out.csv?"),
        ("*.tar", f"*.tar: no file matches this pattern, {tried}"),
    ):
        with pytest.raises(UserError) as caught:
            open_pairs(name, root="data")
        assert str(caught.value) == message


def test_a_pattern_may_match_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "0.tar").touch()
    assert locate("data", "*.tar") == "*.tar" and locate("data", "{0..1}.tar") == "{0..1}.tar"
    assert locate("data", "x*.tar") == "data/x*.tar"


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("parts/*.csv", "join the files first: awk 'FNR > 1 || NR == 1' parts/*.csv > parts/all.csv"),
        ("a.jsonl::b.jsonl", "join the files first: cat a.jsonl b.jsonl > all.jsonl"),
        ("parts/*.parquet", "name the folder that holds them, such as parts"),
    ],
)
def test_several_lists_are_refused_with_the_way_to_join_them(name, fix):
    with pytest.raises(UserError) as caught:
        open_pairs(name)
    assert str(caught.value) == f"{name}: several files, and patterns, are for tars only; {fix}"


def test_a_file_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    for path in (make.jsonl(tmp_path), make.table(tmp_path)):
        with monkeypatch.context() as patch, pytest.raises(UserError, match=r"cannot be read \(Permission denied\)"):
            patch.setattr(Path, "open", refuse)  # chmod has no effect on root
            open_pairs(path)


def test_builtin_pairs_take_options_and_a_split():
    pairs = open_pairs("builtin:n=50,seed=3", split="val")
    assert len(pairs) == 50 and pairs.split == "val" and pairs.seed == 3
    for options, message in (
        ("size=x", "size='x' is not a whole number"),
        ("m=3", "unknown option 'm'; allowed: n, seed"),
    ):
        with pytest.raises(UserError, match=message):
            open_pairs(f"builtin:{options}")
