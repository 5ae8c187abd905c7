"""URLs, and reading them from a real web server that fails in every way."""

import sys
import threading

import numpy as np
import pytest

from nuclr.errors import UserError, install_command
from nuclr.remote import copies_only, file_name, is_url, join_url, list_folder, local_copy, transfer
from nuclr.remote.transfer import shown

CONTENT = np.random.default_rng(0).bytes(300_000)


def problem(url: str) -> str:
    with pytest.raises(UserError) as caught:
        local_copy(url)
    message = str(caught.value)
    assert "\n" not in message
    return message


# URLs


@pytest.mark.parametrize("url", ["s3://b/a.tar", "gs://b/a", "https://h/a", "hf://datasets/a/b/c.npz", "memory://a"])
def test_urls(url):
    assert is_url(url)


@pytest.mark.parametrize("path", ["a.tar", "/data/a.tar", "builtin:n=100", "c:/a", "a/b://c", "s3:/b/a", "", None])
def test_paths_are_not_urls(path):
    assert not is_url(path)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("s3://bucket/shards/00000.tar", "00000.tar"),
        ("https://host/a/train.npz?download=true#x", "train.npz"),
        ("https://host/a%2F..%2F..%2Fb.npz", "b.npz"),
        ("s3://bucket/a?b.tar", "a_b.tar"),
        ("s3://bucket/..", "file"),
        ("https://host/%2e%2e", "file"),
        ("https://host", "file"),
        ("s3://bucket/" + "a" * 500 + ".tar", "a" * 116 + ".tar"),
    ],
)
def test_the_name_of_a_copy_is_a_plain_file_name(url, name):
    assert file_name(url) == name


def test_passwords_and_signatures_are_not_shown(web):
    assert shown("https://me:secret@host:80/a.npz?X-Amz-Signature=abc") == "https://host:80/a.npz"
    web.refuse["/a.npz"] = (403, 9)
    assert "secret" not in problem(web.url("/a.npz?signature=secret"))


def test_join_url():
    assert join_url("s3://bucket/data/", "./a.tar") == "s3://bucket/data/a.tar"


# Broken connections


def download(web, cuts: int) -> tuple[bytes, list[int]]:
    """Read a file whose download breaks off in the middle of what is left, so many times; return the positions, too."""
    web.files["/a.bin"], web.cuts, web.go = CONTENT, cuts, threading.Semaphore(0)
    stop = threading.Event()
    file = transfer.stat_file(web.url("/a.bin"), stop)
    content, cut = b"", file.size // 2
    for position, data in transfer.read_chunks(file, stop):
        assert position == len(content)
        content += data
        if len(content) == cut and web.cuts < cuts:
            cut += (file.size - cut) // 2
            web.go.release()
    return content, [int(part.strip("bytes=-")) if part else 0 for _, _, part in web.gets()]


def test_a_broken_download_continues_where_it_stopped(web):
    content, positions = download(web, cuts=3)
    assert content == CONTENT and positions == [0, 150_000, 225_000, 262_500]


def test_progress_of_a_whole_chunk_allows_new_attempts(web, monkeypatch):
    monkeypatch.setattr(transfer, "CHUNK", 1000)
    content, positions = download(web, cuts=7)  # more than the five attempts without progress
    assert content == CONTENT and len(positions) == 8


def test_without_ranges_it_begins_again(web):
    web.files["/a.bin"], web.cuts, web.ranges = CONTENT, 2, False
    assert local_copy(web.url("/a.bin")).read_bytes() == CONTENT
    assert len(web.gets()) == 3


def test_a_connection_that_always_breaks_is_named(web, cache):
    web.files["/a.bin"], web.cuts, web.ranges = CONTENT, 100, False
    message = problem(web.url("/a.bin"))
    assert message.startswith(f"{web.url('/a.bin')}: cannot be read, 5 attempts within 0.1 s; the last error: ")
    assert len(web.gets()) == 5
    assert not [path for path in cache.rglob("*") if path.suffix == ".tmp" or path.name == "a.bin"]


def test_a_server_that_does_not_answer_is_named():
    message = problem("http://127.0.0.1:1/a.bin")
    assert message.startswith("http://127.0.0.1:1/a.bin: cannot be read, 5 attempts") and "Cannot connect" in message


def test_a_busy_server_is_asked_again(web):
    web.files["/a.bin"], web.refuse["/a.bin"] = CONTENT, (503, 5)
    assert local_copy(web.url("/a.bin")).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("status", "text"), [(404, "no such file"), (410, "no such file"), (401, "access denied"), (403, "access denied")]
)
def test_what_another_attempt_cannot_fix_is_reported_at_once(web, status, text):
    web.files["/a.bin"], web.refuse["/a.bin"] = CONTENT, (status, 9)
    assert problem(web.url("/a.bin")).startswith(f"{web.url('/a.bin')}: {text}")
    assert len(web.requests) <= 2  # HEAD, and GET for servers that do not know HEAD


def test_a_file_of_unknown_size_is_refused(web):
    web.files["/a.bin"], web.sizes = CONTENT, False
    assert "does not say how large the file is" in problem(web.url("/a.bin"))


def test_a_file_that_changes_meanwhile_is_refused(web, monkeypatch):
    web.files["/a.bin"] = CONTENT
    read = transfer._open_at

    def change(*arguments):
        web.files["/a.bin"] = CONTENT[::-1]
        return read(*arguments)

    monkeypatch.setattr(transfer, "_open_at", change)
    assert problem(web.url("/a.bin")).endswith("changed while it was being downloaded; start again")


# Kinds of URLs


@pytest.mark.parametrize(
    ("url", "package", "fix"),
    [
        ("s3://bucket/a.tar", "s3fs", install_command("remote")),
        ("https://127.0.0.1/a.tar", "aiohttp", install_command("remote")),
        ("gs://bucket/a.tar", "gcsfs", "pip install gcsfs"),
        ("hf://datasets/a/b/c.tar", "huggingface_hub", "pip install huggingface_hub"),
        ("memory://a.tar", "fsspec", install_command("remote")),
    ],
)
def test_a_missing_package_is_named(monkeypatch, url, package, fix):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    assert problem(url) == f"{url}: {package} is not installed; {fix}"


def test_an_unknown_kind_of_url():
    assert problem("s4://bucket/a.tar").startswith("s4://bucket/a.tar: unknown kind of URL; allowed: s3://, gs://")


def test_web_servers_do_not_list_folders(web):
    web.files["/tars"] = b'<a href="00000.tar">00000.tar</a>'
    with pytest.raises(UserError, match="a web server does not list folders; name the files"):
        list_folder(web.url("/tars"), ".tar")
    assert not web.requests


def test_no_requests_in_a_block_of_copies_only(web):
    web.files |= {"/a.bin": CONTENT, "/b.bin": CONTENT}
    path = local_copy(web.url("/a.bin"))
    before = len(web.requests)
    with copies_only():
        assert local_copy(web.url("/a.bin")) == path
        assert "not downloaded, because a file names it" in problem(web.url("/b.bin"))
        with pytest.raises(UserError, match="not downloaded"):
            list_folder("memory://folder", ".tar")
    assert len(web.requests) == before
