import errno
import os
import zipfile

import numpy as np
import pytest

from nuclr import files
from nuclr.errors import UserError
from nuclr.files import (
    find_cache_folder,
    is_temporary,
    not_utf8,
    read_lines,
    read_text,
    write_atomically,
    write_json,
    write_text,
)


def test_write_atomically_replaces_the_file(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(b"old")
    with write_atomically(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old", "the target must not change before the block has ended"
        [temporary] = [other for other in tmp_path.iterdir() if other != path]
        assert temporary.name == f".data.bin.{os.getpid()}.tmp"
        assert is_temporary(temporary)
        assert not is_temporary(path)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left")])
def test_a_failed_write_keeps_the_old_file_and_leaves_no_temporary_file(tmp_path, error):
    path = tmp_path / "data.bin"
    path.write_bytes(b"old")
    with pytest.raises(type(error)), write_atomically(path) as file:
        file.write(b"half")
        raise error
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_target_and_not_the_temporary_file(tmp_path):
    for path in (tmp_path / "missing" / "data.bin", tmp_path):
        with pytest.raises(OSError) as caught, write_atomically(path) as file:
            file.write(b"x")
        assert caught.value.filename == str(path)
    with pytest.raises(OSError, match=r"No space left.*full\.bin"), write_atomically(tmp_path / "full.bin"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_failing_to_remove_the_temporary_file_does_not_hide_the_error(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    with pytest.raises(RuntimeError, match="the real error"), write_atomically(tmp_path / "data.bin"):
        raise RuntimeError("the real error")


def test_the_content_is_synced_before_the_rename(tmp_path, monkeypatch):
    path, synced = tmp_path / "data.bin", []
    fsync = os.fsync

    def record(descriptor):
        synced.append(path.exists())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with write_atomically(path) as file:
        file.write(b"x")
    assert synced == [False, True], "first the content, then the folder with the new name"
    with write_atomically(path, sync=False) as file:
        file.write(b"y")
    assert len(synced) == 2
    assert path.read_bytes() == b"y"


def test_a_file_system_that_cannot_sync_folders_is_accepted(tmp_path, monkeypatch):
    fsync, calls = os.fsync, []

    def only_files(descriptor):
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    write_text(tmp_path / "a.txt", "é")
    assert len(calls) == 2
    assert (tmp_path / "a.txt").read_bytes() == "é".encode()


def test_write_json_refuses_nan_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"name": "ü", "value": 1.5})
    before = path.read_text(encoding="utf-8")
    assert before == '{\n "name": "ü",\n "value": 1.5\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"value": float("nan")})
    assert path.read_text(encoding="utf-8") == before


def test_read_text_drops_the_byte_order_mark_and_refuses_other_encodings(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfabc")
    assert read_text(path) == "abc"
    path.write_bytes(b"ab\xff")
    with pytest.raises(UserError, match=r"a\.txt, line 1: not UTF-8 text \(byte 0xFF\)"):
        read_text(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_text(tmp_path / "missing.txt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("one\ntwo\ncaf\u00e9\n".encode("latin-1"), "line 3: not UTF-8 text (byte 0xE9); if it is Latin-1 or"),
        ("one\n".encode("utf-16"), "line 1: not UTF-8 text (byte 0xFF); it looks like UTF-16, convert"),
        (b"x" * (2**20 - 1) + b"\n\xc3", "line 2: not UTF-8 text (byte 0xC3)"),  # the file ends within a character
        (b"\n" * (2**20 - 1) + b"\xc3\xa9\n\xe9", f"line {2**20 + 1}: "),  # a good character between two blocks
    ],
    ids=["latin-1", "utf-16", "cut", "blocks"],
)  # fmt: skip
def test_the_line_that_is_not_utf8_is_named_with_a_command_that_converts_the_file(tmp_path, content, message):
    path = tmp_path / "my list.csv"
    path.write_bytes(content)
    error = str(not_utf8(path))
    assert message in error
    assert f"-t UTF-8 '{path}' > '{tmp_path}/my list-utf8.csv'" in error


def test_lines_end_with_line_feeds_only(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\u2028more\r\n\ntwo\x0c\n".encode())
    assert read_lines(tmp_path / "a.txt") == ["one\u2028more", "", "two\x0c"]
    (tmp_path / "a.txt").write_text("")
    assert read_lines(tmp_path / "a.txt") == []


def test_the_cache_folder_is_the_first_that_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.delenv("NUCLR_CACHE", raising=False)
    assert find_cache_folder(tmp_path) == tmp_path / ".nuclr"
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, so no folder can be made in it")
    assert find_cache_folder(blocked) == tmp_path / "user" / "nuclr"
    monkeypatch.setenv("NUCLR_CACHE", str(tmp_path / "chosen"))
    assert find_cache_folder(tmp_path) == tmp_path / "chosen"


@pytest.mark.parametrize("text", ["=1+1", "+cmd", "-cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", "\r=1"])
def test_csv_cells_that_a_spreadsheet_would_run_are_escaped(text):
    assert files.csv_cell(text) == "'" + text
    assert files.read_csv_cell(files.csv_cell(text)) == text


@pytest.mark.parametrize("text", ["a caption", "", "-0.25", "+1e-3", "-inf", "'quoted", "1=1", "'"])
def test_other_csv_cells_and_numbers_stay_as_they_are(text):
    assert files.csv_cell(text) == text == files.read_csv_cell(text)


def test_write_text_replaces_lone_surrogates(tmp_path):
    files.write_text(tmp_path / "a.txt", "a\ud800b")
    assert (tmp_path / "a.txt").read_text() == "a?b"


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }",  # larger than the file
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 2), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (2,), }",
        "{'descr': '<U9', 'fortran_order': False, 'shape': (2,), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'x': '''}",
        "{'descr': '<f4', 'fortran_order': False, 1: (2,)}",
        "",
    ],
)
def test_damaged_arrays_are_refused_before_memory_is_taken(tmp_path, header):
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(8)
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.npy: cannot be read as \.npy"):
        files.read_npy(tmp_path / "a.npy")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", content)
    with pytest.raises(UserError, match=r"a\.npz: cannot be read as \.npz"):
        files.read_npz(tmp_path / "a.npz", ["x"])
    assert files.read_npz(tmp_path / "a.npz", []).keys() == {"x"}


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_damaged_compression_is_refused(tmp_path, method):
    np.save(tmp_path / "x.npy", np.arange(1000.0))
    with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
        archive.write(tmp_path / "x.npy", "x.npy")
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[60:200] = bytes(140)
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(UserError, match=r"a\.npz: cannot be read as \.npz"):
        files.read_npz(tmp_path / "a.npz", ["x"])
