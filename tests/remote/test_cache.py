"""The cache of local copies: size, versions, several processes, killed processes."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import fsspec
import pytest

from nuclr.errors import UserError
from nuclr.remote import cache as caching
from nuclr.remote import local_copies, local_copy, show_urls

HOLD = "import sys; from nuclr.remote import local_copies; local_copies(sys.argv[1:]); print('ready', flush=True)"
WAIT = HOLD + "; sys.stdin.read()"


def write(url: str, content: bytes) -> str:
    with fsspec.open(url, "wb") as file:
        file.write(content)
    return url


def start(*urls: str, code: str = WAIT) -> subprocess.Popen:
    """Start a process that gets copies and keeps them until its stdin is closed."""
    command = [sys.executable, "-c", code, *urls]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ready(process: subprocess.Popen) -> None:
    assert process.stdout.readline() == "ready\n", process.stderr.read()


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def names(cache: Path) -> set[str]:
    return {path.name for path in cache.glob("*/data/*")}


def free_lease(cache: Path) -> None:
    """Let this process use no files any more."""
    caching._Lease._mine[cache / "leases"].write({})


@pytest.fixture(autouse=True)
def no_files():
    yield
    fsspec.filesystem("memory").store.clear()


def test_a_copy_has_the_content_and_the_name_of_the_file(cache):
    path = local_copy(write("memory://folder/a.bin", b"abc"))
    assert path.read_bytes() == b"abc" and path.name == "a.bin" and path.is_relative_to(cache)
    assert local_copy("memory://folder/a.bin") == path


def test_file_urls_are_copied_as_well(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"abc")
    assert local_copy(f"file://{tmp_path}/a.bin").read_bytes() == b"abc"


def test_an_empty_file(web):
    web.files["/a.bin"] = b""
    assert local_copy(web.url("/a.bin")).read_bytes() == b""


def test_a_copy_is_downloaded_once(web):
    web.files["/a.bin"] = b"abc"
    assert local_copies([web.url("/a.bin")] * 2) == [local_copy(web.url("/a.bin"))] * 2
    assert len(web.gets()) == 1


@pytest.mark.parametrize("url", ["memory://a.bin", None])
def test_a_file_that_changed_is_downloaded_again(web, url):
    for content in (b"abc", b"abd"):
        web.files["/a.bin"] = content
        if url:
            write(url, content)
        assert local_copy(url or web.url("/a.bin")).read_bytes() == content


def test_a_damaged_copy_is_downloaded_again(web):
    web.files["/a.bin"] = b"abc"
    os.truncate(local_copy(web.url("/a.bin")), 1)
    assert local_copy(web.url("/a.bin")).read_bytes() == b"abc"


def test_messages_name_the_url(web):
    web.files["/folder/a.bin"] = b"abc"
    path = local_copy(web.url("/folder/a.bin"))
    with pytest.raises(UserError) as caught, show_urls():
        raise UserError(f"{path}: wrong; {path.parent / 'b.jpg'}: missing")
    assert str(caught.value) == f"{web.url('/folder/a.bin')}: wrong; {web.url('/folder/b.jpg')}: missing"


# Size


def test_the_copies_used_longest_ago_are_removed_first(cache, monkeypatch):
    monkeypatch.setenv("NUCLR_CACHE_SIZE", "250")
    for age, name in ((30, "a"), (10, "b")):
        path = local_copy(write(f"memory://{name}.bin", b"x" * 100))
        os.utime(path.parents[1] / "entry.json", (time.time() - age,) * 2)
    free_lease(cache)
    local_copy("memory://a.bin")  # now b was used longest ago
    local_copy(write("memory://c.bin", b"x" * 100))
    assert names(cache) == {"a.bin", "c.bin"}


def test_files_of_this_process_are_not_removed(cache, monkeypatch):
    monkeypatch.setenv("NUCLR_CACHE_SIZE", "250")
    path = local_copy(write("memory://a.bin", b"x" * 200))
    with pytest.raises(UserError) as caught:
        local_copy(write("memory://b.bin", b"x" * 100))
    assert str(caught.value) == (
        "1 file of 100 bytes in total must fit into the cache, which has 250 bytes, of which 200 bytes are in use; "
        "raise NUCLR_CACHE_SIZE, or copy the data to a local folder"
    )
    assert path.exists()
    local_copy(write("memory://c.bin", b"x" * 50))


def test_data_larger_than_the_cache_is_refused_before_anything_is_downloaded(web, monkeypatch, cache):
    monkeypatch.setenv("NUCLR_CACHE_SIZE", "1kB")
    web.files |= {f"/{n}.bin": b"x" * 400 for n in range(3)}
    with pytest.raises(
        UserError, match=r"^3 files of 1\.2 kB in total must fit into the cache, which has 1\.0 kB; raise"
    ):
        local_copies([web.url(f"/{n}.bin") for n in range(3)])
    assert not web.gets() and not names(cache)


def test_a_failed_download_does_not_keep_its_space(web, monkeypatch):
    monkeypatch.setenv("NUCLR_CACHE_SIZE", "1000")
    web.files["/a.bin"], web.cuts = b"x" * 900, 100
    with pytest.raises(UserError, match="5 attempts"):
        local_copy(web.url("/a.bin"))
    web.cuts = 0
    web.files["/b.bin"] = b"x" * 800
    local_copy(web.url("/b.bin"))


def test_a_disk_without_space_is_named(web, monkeypatch, cache):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 100, 100))
    web.files["/a.bin"] = b"x" * 2000
    with pytest.raises(UserError) as caught:
        local_copy(web.url("/a.bin"))
    assert str(caught.value).startswith(
        f"{cache}: 2.0 kB are to be downloaded, but only 100 bytes are free on the disk"
    )
    assert not web.gets()


def test_a_copy_that_cannot_be_written_is_named(web):
    web.files["/a.bin"] = b"x" * 50_000
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"a\.bin: the copy in .* cannot be written \(File too large\); make room"):
            local_copy(web.url("/a.bin"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(web.gets()) == 1  # another attempt would not help


@pytest.mark.parametrize("size", ["0", "-1", "much", "5XB", "5 iB"])
def test_a_wrong_size_of_the_cache_is_refused(monkeypatch, size):
    monkeypatch.setenv("NUCLR_CACHE_SIZE", size)
    with pytest.raises(UserError, match=r"^NUCLR_CACHE_SIZE is '.*'; it needs a number of bytes, such as 200GB or"):
        local_copy(write("memory://a.bin", b"abc"))


@pytest.mark.parametrize(("text", "size"), [("", 50 * 10**9), ("1000", 1000), ("1.5 GB", 15 * 10**8), ("2GiB", 2**31)])
def test_sizes_of_the_cache(monkeypatch, text, size):
    monkeypatch.setenv("NUCLR_CACHE_SIZE", text)
    assert caching._limit() == size


def test_a_cache_that_cannot_be_created_is_refused(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUCLR_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"file/remote: cannot be written \(Not a directory\); set NUCLR_CACHE"):
        local_copy(write("memory://a.bin", b"abc"))


# Several processes


def test_two_processes_that_start_at_once_download_every_file_once(web):
    web.files |= {f"/{n}.bin": bytes([n]) * 200_000 for n in range(3)}
    urls = [web.url(path) for path in web.files]
    processes = [start(*urls, code=HOLD) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sorted(path for _, path, _ in web.gets()) == sorted(web.files)
    assert [path.read_bytes() for path in local_copies(urls)] == list(web.files.values())


def test_files_of_another_process_are_kept_until_it_is_killed(web, cache, monkeypatch):
    monkeypatch.setenv("NUCLR_CACHE_SIZE", "250")
    web.files |= {"/a.bin": b"a" * 200, "/b.bin": b"b" * 200}
    process = start(web.url("/a.bin"))
    ready(process)
    with pytest.raises(UserError, match="of which 200 bytes are in use"):
        local_copy(web.url("/b.bin"))
    process.kill()
    process.communicate()
    assert local_copy(web.url("/b.bin")).read_bytes() == b"b" * 200
    assert names(cache) == {"b.bin"}


def test_killed_during_a_download(web, cache):
    web.files |= {"/a.bin": b"a" * 200, "/b.bin": b"b" * 300_000}
    first = start(web.url("/a.bin"))
    ready(first)
    first.communicate()
    web.pause.set()
    process = start(web.url("/a.bin"), web.url("/b.bin"))
    wait_until(lambda: any(path.stat().st_size for path in cache.glob("*/data/.b.bin.*.tmp")))
    waiting = start(web.url("/b.bin"))  # for the process that is going to be killed
    time.sleep(0.2)
    process.kill()
    process.communicate()
    web.pause.clear()
    ready(waiting)
    waiting.communicate()
    assert [path.read_bytes()[:1] for path in local_copies([web.url("/a.bin"), web.url("/b.bin")])] == [b"a", b"b"]
    assert names(cache) == {"a.bin", "b.bin"}  # nothing is left of the broken download
    assert len(web.gets("/a.bin")) == 1 and len(web.gets("/b.bin")) == 2


def test_what_a_killed_process_left_is_removed_if_nobody_wants_the_file(web, cache):
    web.files |= {"/a.bin": b"a" * 300_000, "/b.bin": b"b"}
    web.pause.set()
    process = start(web.url("/a.bin"))
    wait_until(lambda: list(cache.glob("*/data/.a.bin.*.tmp")))
    process.kill()
    process.communicate()
    web.pause.clear()
    local_copy(web.url("/b.bin"))
    assert names(cache) == {"b.bin"}


def test_interrupted_by_the_user(web):
    web.files["/a.bin"] = b"a" * 300_000
    web.pause.set()
    # A process that a shell started in the background ignores the signal, and so do its children.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    process = start(web.url("/a.bin"), code=heed + WAIT)
    wait_until(web.gets)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    web.pause.clear()
    _, err = process.communicate(timeout=30)
    assert process.returncode != 0 and "KeyboardInterrupt" in err
