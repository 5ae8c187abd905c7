"""Output folders are checked before the work, and files of the user are never overwritten."""

import json

import pytest

from nuclr import files
from nuclr.errors import UserError

NAMES = ("summary.json", "table.csv")


def prepare(folder):
    files.prepare_folder(folder, "nuclr test", "summary.json", NAMES)


def test_the_folder_is_created(tmp_path):
    prepare(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert not list((tmp_path / "a" / "b").iterdir())


def test_files_of_an_earlier_run_may_be_replaced_and_others_are_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    prepare(tmp_path)
    files.write_json(tmp_path / "summary.json", {"written_by": "nuclr test"})
    files.write_text(tmp_path / "table.csv", "1")
    prepare(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("summary", [None, "not JSON", "[]", json.dumps({"written_by": "somebody"})])
def test_files_of_another_program_are_not_replaced(tmp_path, summary):
    (tmp_path / "table.csv").write_text("mine")
    if summary is not None:
        (tmp_path / "summary.json").write_text(summary)
    with pytest.raises(UserError, match="was not written by `nuclr test`; name another folder"):
        prepare(tmp_path)


def test_the_folder_of_a_training_run_or_of_another_command_is_refused(tmp_path):
    (tmp_path / "report.html").touch()
    with pytest.raises(
        UserError, match=r"report\.html exists and was not written by `nuclr test`; name another folder"
    ):
        prepare(tmp_path)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match=rf"the folder of a training run; name another folder, such as {tmp_path}/test"):
        prepare(tmp_path)


def test_a_file_instead_of_a_folder_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    for folder in (tmp_path / "out", tmp_path / "out" / "deeper"):
        with pytest.raises(UserError, match="there is a file with this name; name a folder"):
            prepare(folder)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", refuse)  # chmod has no effect on root
    with pytest.raises(UserError, match=r"cannot be written.*Permission denied"):
        prepare(tmp_path)


def test_a_full_disk_is_a_user_error_that_names_the_file(tmp_path):
    full = pytest.raises(UserError, match=r"table\.csv: cannot be written \(No space left on device\)")
    with full, files.user_errors(tmp_path), files.write_atomically(tmp_path / "table.csv"):
        raise OSError(28, "No space left on device")
    failed = pytest.raises(UserError, match=rf"^{tmp_path}: cannot be written \(Input/output error\)")
    with failed, files.user_errors(tmp_path):
        raise OSError(5, "Input/output error")
