"""Files are written whole or not at all, read defensively, and never overwrite those of the user."""

import errno
import json
import os
import zipfile
from pathlib import Path

import pytest

from nuclr import files
from nuclr.errors import UserError
from nuclr.files import find_cache_folder, is_temporary, read_lines, read_text, write_atomically, write_json, write_text

NAMES = ("summary.json", "table.csv")


def refuse(*args, **kwargs):
    raise PermissionError(13, "Permission denied")


def test_write_atomically_replaces_the_file(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(b"old")
    with write_atomically(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old", "the target must not change before the block has ended"
        [temporary] = [other for other in tmp_path.iterdir() if other != path]
        assert is_temporary(temporary) and not is_temporary(path)
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left")])
def test_a_failed_write_keeps_the_old_file_and_leaves_no_temporary_file(tmp_path, error):
    path = tmp_path / "data.bin"
    path.write_bytes(b"old")
    with pytest.raises(type(error)), write_atomically(path) as file:
        file.write(b"half")
        raise error
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_target_and_not_the_temporary_file(tmp_path):
    for path in (tmp_path / "missing" / "data.bin", tmp_path):
        with pytest.raises(OSError) as caught, write_atomically(path) as file:
            file.write(b"x")
        assert caught.value.filename == str(path)


def test_write_json_refuses_nan_and_keeps_the_old_file(tmp_path):
    write_json(tmp_path / "a.json", {"name": "ü"})
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"value": float("nan")})
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == '{\n "name": "ü"\n}\n'


def test_the_cache_folder_is_the_first_that_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.delenv("NUCLR_CACHE", raising=False)
    assert find_cache_folder(tmp_path) == tmp_path / ".nuclr"
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, so no folder can be made in it")
    assert find_cache_folder(blocked) == tmp_path / "user" / "nuclr"
    monkeypatch.setenv("NUCLR_CACHE", str(tmp_path / "chosen"))
    assert find_cache_folder(tmp_path) == tmp_path / "chosen"


@pytest.mark.parametrize("folders_can_sync", [True, False])
def test_the_content_is_synced_before_the_rename(tmp_path, monkeypatch, folders_can_sync):
    path = tmp_path / "a.txt"
    synced = []
    fsync = os.fsync

    def record(descriptor):
        synced.append(path.exists())
        if len(synced) == 2 and not folders_can_sync:
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write_text(path, "é\ud800")
    assert synced == [False, True], "first the content, then the folder with the new name"
    assert path.read_bytes() == "é?".encode(), "UTF-8 without lone surrogates"
    with write_atomically(path, sync=False) as file:
        file.write(b"y")
    assert len(synced) == 2 and path.read_bytes() == b"y"


def test_text_is_read_without_its_byte_order_mark(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfabc")
    assert read_text(path) == "abc"
    path.write_bytes("one\u2028more\r\n\ntwo\x0c\n".encode())
    assert read_lines(path) == ["one\u2028more", "", "two\x0c"], "lines end with line feeds only"
    path.write_text("")
    assert read_lines(path) == []
    with pytest.raises(UserError, match=r"missing\.txt"):
        read_text(tmp_path / "missing.txt")


def test_a_file_that_is_not_utf8_is_named_with_a_command_that_converts_it(tmp_path):
    path = tmp_path / "my list.csv"
    path.write_bytes("café\n".encode("latin-1"))
    with pytest.raises(UserError, match=rf"-t UTF-8 '{path}' > '{tmp_path}/my list-utf8\.csv'"):
        read_text(path)


def test_csv_cells_that_a_spreadsheet_would_run_are_escaped():
    for text in ("=1+1", "+cmd", "-cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", "\r=1"):
        assert files.csv_cell(text) == "'" + text
    for text in ("a caption", "", "-0.25", "+1e-3", "-inf", "'quoted", "1=1", "'"):
        assert files.csv_cell(text) == text


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }",  # larger than the file
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 2), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (2,), }",
        "{'descr': '<U9', 'fortran_order': False, 'shape': (2,), }",
        "{'descr': '<f4', 'fortran_order': False, 1: (2,)}",
        "",
    ],
)
def test_damaged_arrays_are_refused_before_memory_is_taken(tmp_path, header):
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(8)
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.npy"):
        files.read_npy(tmp_path / "a.npy")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", content)
    with pytest.raises(UserError, match=r"a\.npz"):
        files.read_npz(tmp_path / "a.npz", ["x"])
    assert files.read_npz(tmp_path / "a.npz", []).keys() == {"x"}


# Output folders


def prepare(folder):
    files.check_folder(folder, "nuclr test", "summary.json", NAMES)


def test_a_folder_is_created_and_files_of_an_earlier_run_may_be_replaced(tmp_path):
    folder = tmp_path / "a" / "b"
    prepare(folder)
    assert not list(folder.iterdir())
    (folder / "notes.txt").write_text("mine")
    files.write_json(folder / "summary.json", {"written_by": "nuclr test"})
    files.write_text(folder / "table.csv", "1")
    prepare(folder)
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"table.csv": "mine"}, "table.csv"),
        ({"table.csv": "mine", "summary.json": "not JSON"}, "nuclr test"),
        ({"table.csv": "mine", "summary.json": json.dumps({"written_by": "somebody"})}, "nuclr test"),
        ({"report.html": ""}, "report.html"),  # of another command
        ({"config.yaml": ""}, "out/test"),  # a training run: the error suggests a folder in it
    ],
)
def test_files_of_another_program_are_not_replaced(tmp_path, content, named):
    folder = tmp_path / "out"
    folder.mkdir()
    for name, text in content.items():
        (folder / name).write_text(text)
    with pytest.raises(UserError, match=named):
        prepare(folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == content


def test_a_folder_that_cannot_be_made_or_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(UserError, match=str(tmp_path / "file")):
            prepare(folder)
    monkeypatch.setattr(files.tempfile, "TemporaryFile", refuse)  # chmod has no effect on root
    with pytest.raises(UserError, match=rf"{tmp_path}.*Permission denied"):
        prepare(tmp_path)


def publish(folder, number):
    files.check_folder(folder, "nuclr test", "summary.json", NAMES, create=False)
    with files.publish_folder(folder, "summary.json", "nuclr test") as new:
        (new / "sub").mkdir()
        for name in ("table.csv", "sub/array.npy", "a.bin"):
            (new / name).write_text(str(number))
        files.write_json(new / "summary.json", {"written_by": "nuclr test", "number": number})


def published(folder):
    """Return the number of the result in a folder; None if it is incomplete."""
    number = json.loads((folder / "summary.json").read_text()).get("number")
    contents = {(folder / name).read_text() for name in ("table.csv", "sub/array.npy", "a.bin")}
    assert number is None or contents == {str(number)}, "files of two results"
    return number


def in_a_process(function, *arguments):
    pid = os.fork()
    if pid == 0:
        try:
            function(*arguments)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)


def test_a_result_that_is_killed_while_it_is_published_is_whole_or_none_and_can_be_repeated(tmp_path):
    def killed(number, operation):
        def count(call, *arguments):
            nonlocal operation
            operation -= 1
            return os._exit(9) if operation < 0 else call(*arguments)

        for name in ("replace", "unlink", "mkdir"):
            call = getattr(Path, name)
            setattr(Path, name, lambda *a, call=call, **k: count(lambda *b: call(*b, **k), *a))
        publish(tmp_path, number)

    publish(tmp_path, 0)
    (tmp_path / "notes.txt").write_text("mine")
    seen = set()
    for operation in range(20):
        (tmp_path / "report.html").write_text("of the earlier result")
        before = published(tmp_path)
        in_a_process(killed, operation + 1, operation)
        now = published(tmp_path)
        assert now in (before, None, operation + 1)
        assert now == before or not (tmp_path / "report.html").exists() or now is None
        seen.add("old" if now == before else now and "new")
        publish(tmp_path, 100 + operation)
        assert published(tmp_path) == 100 + operation
        assert {path.name for path in tmp_path.iterdir()} == {*NAMES, "sub", "a.bin", "notes.txt"}
    assert seen == {"old", None, "new"}


def test_a_result_that_cannot_be_written_leaves_the_earlier_one(tmp_path):
    publish(tmp_path, 1)
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    with (
        pytest.raises(UserError, match=rf"{tmp_path}.*No space left"),
        files.publish_folder(tmp_path, "summary.json", "nuclr test") as new,
    ):
        (new / "table.csv").write_text("half")
        raise OSError(28, "No space left on device")
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_several_processes_publish_one_after_the_other(tmp_path):
    publish(tmp_path, 0)
    pids = []
    for number in range(1, 5):
        pid = os.fork()
        if pid == 0:
            try:
                for _ in range(10):
                    publish(tmp_path, number)
                os._exit(0)
            finally:
                os._exit(1)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    assert published(tmp_path) in range(1, 5)


def test_a_full_disk_is_a_user_error_that_names_the_file(tmp_path):
    full = pytest.raises(UserError, match=r"table\.csv.*No space left on device")
    with full, files.user_errors(tmp_path), files.write_atomically(tmp_path / "table.csv"):
        raise OSError(28, "No space left on device")


def test_the_text_of_an_error_names_one_file(tmp_path):
    path = tmp_path / "table.csv"
    with pytest.raises(OSError, match="No space left") as failed, write_atomically(path):
        raise OSError(28, "No space left on device")
    assert str(failed.value).endswith(f"{str(path)!r}")


def test_threads_and_equal_pids_do_not_share_a_temporary_file(tmp_path):
    path = tmp_path / "data.bin"
    with write_atomically(path) as first:
        first.write(b"first")
        with write_atomically(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]


def test_a_link_and_the_permissions_of_a_file_are_kept(tmp_path):
    target = tmp_path / "target.txt"
    target.write_text("old")
    target.chmod(0o600)
    link = tmp_path / "link.txt"
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o600


def test_pipes_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "a.npy")
    with pytest.raises(UserError, match="not a regular file"):
        files.read_npy(tmp_path / "a.npy")
