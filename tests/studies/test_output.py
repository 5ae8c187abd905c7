"""Folders are checked first; files are whole or absent; nothing of the user's is overwritten."""

import json

import pytest

from nuclr.errors import UserError
from nuclr.studies import output

NAMES = ("summary.json", "table.csv")


def prepare(folder):
    output.prepare_folder(folder, "nuclr test", "summary.json", NAMES)


def test_makes_the_folder(tmp_path):
    prepare(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert not list((tmp_path / "a" / "b").iterdir())


def test_own_files_may_be_replaced_and_others_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    prepare(tmp_path)
    output.write_json(tmp_path / "summary.json", {"written_by": "nuclr test"})
    output.write_text(tmp_path / "table.csv", "1")
    prepare(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("summary", [None, "not JSON", "[]", json.dumps({"written_by": "somebody"})])
def test_foreign_files_are_not_replaced(tmp_path, summary):
    (tmp_path / "table.csv").write_text("mine")
    if summary is not None:
        (tmp_path / "summary.json").write_text(summary)
    with pytest.raises(UserError, match="was not written by `nuclr test`; name another folder"):
        prepare(tmp_path)


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "out").write_text("mine")
    for folder in (tmp_path / "out", tmp_path / "out" / "deeper"):
        with pytest.raises(UserError, match="a file is in the way"):
            prepare(folder)


def test_unwritable_folder(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(output.tempfile, "TemporaryFile", refuse)  # root may write anywhere, so chmod shows nothing
    with pytest.raises(UserError, match=r"cannot be written.*Permission denied"):
        prepare(tmp_path)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("old")
    with pytest.raises(UserError, match="No space left"), output.replacing(path) as temporary:
        temporary.write_text("half")
        raise OSError(28, "No space left on device")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_json_has_no_nan(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        output.write_json(tmp_path / "summary.json", {"value": float("nan")})
