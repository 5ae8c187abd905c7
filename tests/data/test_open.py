"""`open_pairs`: the format is recognized from the path, and wrong paths are refused."""

from pathlib import Path

import pytest

from nuclr.data import open_pairs
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
    with pytest.raises(UserError, match=r"no such file or folder; did you mean train\.jsonl\?"):
        open_pairs(tmp_path / "train.json")
    with pytest.raises(UserError, match=r"data\.root=.*gone: no such folder"):
        open_pairs("train.jsonl", root=tmp_path / "gone")
    with pytest.raises(UserError, match=r"a folder without tars, Parquet files or a saved dataset"):
        open_pairs(tmp_path)


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
