"""Local copies of files at URLs: names, versions, retries, several processes, and what cannot be read."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
from types import SimpleNamespace

import fsspec
import pytest

from nuclr import remote
from nuclr.errors import UserError
from nuclr.remote import file_name, is_url, local_copies, local_copy, show_urls
from tests.remote.server import serve


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NUCLR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "WAITS", (0.01,) * 2)
    yield tmp_path / "cache" / "remote"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def web():
    with serve({"/a.bin": b"abc" * 1000, "/b.bin": b"b"}) as server:
        yield server


def test_urls_and_paths():
    assert all(map(is_url, ["s3://b/a.tar", "https://h/a", "hf://datasets/a/b/c.npz", "memory://a"]))
    assert not any(map(is_url, ["a.tar", "/data/a.tar", "builtin:n=100", "c:/a", "a/b://c", "s3:/b/a", "", None]))


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://host/train.npz?download=true", "train.npz"),
        ("https://host/a%2F..%2Fb.npz", "b.npz"),
        ("s3://bucket/..", "file"),
        ("https://host/", "file"),
        ("s3://bucket/a b;c.npz", "a_b_c.npz"),
    ],
)
def test_the_name_of_a_copy_is_a_plain_file_name(url, name):
    assert file_name(url) == name


def test_a_copy_is_downloaded_once_and_again_when_the_file_has_changed(web, cache):
    url = web.url("/a.bin")
    first = local_copy(url)
    assert first.name == "a.bin" and first.is_relative_to(cache) and first.read_bytes() == b"abc" * 1000
    assert local_copy(url) == first and web.gets() == ["/a.bin"]
    web.files["/a.bin"] = b"abd" * 1000
    second = local_copy(url)
    assert second.read_bytes() == b"abd" * 1000
    assert first.read_bytes() == b"abc" * 1000, "a process may still read it"
    second.write_bytes(b"cut")
    assert local_copy(url).read_bytes() == b"abd" * 1000
    web.sizes = False
    assert local_copy(url).read_bytes() == b"abd" * 1000, "a file of unknown size"


def test_copies_have_the_order_of_the_urls(web):
    with fsspec.open("memory://c.bin", "wb") as file:
        file.write(b"")
    urls = [web.url("/b.bin"), web.url("/a.bin"), "memory://c.bin", web.url("/b.bin")]
    assert [copy.name for copy in local_copies(urls)] == ["b.bin", "a.bin", "c.bin", "b.bin"]
    assert len(web.gets()) == 2


def test_a_connection_that_always_breaks_is_named_and_leaves_no_copy(web, cache):
    web.cuts = 100
    with pytest.raises(UserError, match=r"/a\.bin"):
        local_copy(web.url("/a.bin"))
    assert not list(cache.rglob("a.bin")) and web.cuts == 97
    web.cuts = 1
    web.refuse["/a.bin"] = (503, 1)
    assert local_copy(web.url("/a.bin")).read_bytes() == b"abc" * 1000, "tried again"


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_what_another_attempt_cannot_fix_is_reported_at_once(web, status):
    web.refuse["/a.bin"] = (status, 100)
    with pytest.raises(UserError, match=r"/a\.bin: ") as error:
        local_copy(web.url("/a.bin?signature=secret"))
    assert "secret" not in str(error.value)
    assert web.refuse["/a.bin"][1] >= 98  # a HEAD and a GET of one attempt


def test_a_disk_that_is_full_and_a_cache_that_cannot_be_written(web, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
        with pytest.raises(UserError, match="3,000 bytes"):
            local_copy(web.url("/a.bin"))
    assert not web.gets()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUCLR_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="NUCLR_CACHE"):
        local_copy(web.url("/a.bin"))


def test_a_missing_package_and_an_unknown_kind_of_url_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for url, named in (("gs://b/a", "gs://b/a.*gcsfs"), ("nothing://a", "nothing://a")):
        with pytest.raises(UserError, match=named):
            local_copy(url)


def test_messages_name_the_url(web):
    copy = local_copy(web.url("/a.bin"))
    with pytest.raises(UserError) as error, show_urls():
        raise UserError(f"{copy}: not a tar")
    assert str(error.value) == f"{web.url('/a.bin')}: not a tar"


def test_two_processes_that_start_at_once_download_a_file_once(web):
    code = "import sys; from nuclr.remote import local_copies; local_copies(sys.argv[1:])"
    line = [sys.executable, "-c", code, web.url("/a.bin"), web.url("/b.bin")]
    processes = [subprocess.Popen(line) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert sorted(web.gets()) == ["/a.bin", "/b.bin"]


def test_a_file_system_that_cannot_lock_folders(web, monkeypatch):
    """NFS locks only files that are open for writing."""
    flock = fcntl.flock

    def flock_of_nfs(file, operation):
        number = file if isinstance(file, int) else file.fileno()
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock_of_nfs)
    [copy] = set(local_copies([web.url("/a.bin")] * 4))
    assert copy.read_bytes() == b"abc" * 1000 and web.gets() == ["/a.bin"]
