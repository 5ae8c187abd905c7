"""`nuclr index`: what it prints and writes, and what it refuses."""

import numpy as np

from nuclr.data import KeyIndex
from tests.data.formats.test_keys import sample, write_tar


def test_index_of_tars_and_its_extension(nuclr, tmp_path):
    write_tar(tmp_path / "a" / "0.tar", sample("x") + sample("y"))
    write_tar(tmp_path / "a" / "1.tar", sample("z"))
    write_tar(tmp_path / "b" / "2.tar", sample("w"))
    out = tmp_path / "a.keys"
    ended = nuclr("index", f"{tmp_path}/a/{{0..1}}.tar", "--out", out)
    assert ended == (0, f"{out}: 3 keys, 112 bytes; num_samples=3\n", "")
    first = KeyIndex.open(out).numbers("xyz")

    ended = nuclr("index", tmp_path / "b", tmp_path / "a", "--extend", out, "--out", tmp_path / "all.keys")
    assert ended.status == 0, ended.err
    assert "all.keys: 4 keys (1 new; 3 of 3 old keys were read again), 128 bytes; num_samples=4" in ended.out
    longer = KeyIndex.open(tmp_path / "all.keys")
    assert np.array_equal(longer.numbers("xyz"), first) and longer["w"] == 3

    ended = nuclr("index", f"{tmp_path}/b/*.tar", "--extend", out, "--out", out)  # in place
    assert ended.status == 0 and out.read_bytes() == (tmp_path / "all.keys").read_bytes()


def test_nothing_is_overwritten(nuclr, tmp_path):
    (tmp_path / "a.txt").write_text("a\n")
    out = tmp_path / "a.keys"
    out.write_text("mine")
    ended = nuclr("index", tmp_path / "a.txt", "--out", out)
    assert ended.status == 2 and f"--out {out}: exists; name another file, or keep its numbers" in ended.err
    ended = nuclr("index", tmp_path / "a.txt", "--extend", out, "--out", out)
    assert ended.status == 2 and f"{out}: not an index of keys" in ended.err
    assert out.read_text() == "mine"


def test_two_tars_with_the_same_key(nuclr, tmp_path):
    for n in range(2):
        write_tar(tmp_path / f"{n}.tar", sample("x"))
    out = tmp_path / "a.keys"
    ended = nuclr("index", tmp_path, "--out", out)
    assert ended.status == 2 and not out.exists()
    assert f"key 'x' occurs in {tmp_path}/0.tar and in {tmp_path}/1.tar" in ended.err
    assert ended.err.rstrip().endswith("; if keys start again in every tar, use --with-tar")
    ended = nuclr("index", tmp_path, "--with-tar", "--out", out)
    assert ended.status == 0 and sorted(KeyIndex.open(out).numbers(["x", "x"], ["0.tar", "1.tar"]).tolist()) == [0, 1]
    ended = nuclr("index", tmp_path, "--extend", out, "--out", tmp_path / "b.keys")
    assert ended.status == 2 and "was made with --with-tar; add it" in ended.err


def test_a_truncated_tar_is_reported(nuclr, tmp_path):
    tar = write_tar(tmp_path / "0.tar", sample("x") + sample("y"))
    tar.write_bytes(tar.read_bytes()[: 512 * 8])
    ended = nuclr("index", tar, "--out", tmp_path / "a.keys")
    assert ended.status == 0 and "1 keys" in ended.out
    assert ended.err.startswith(f"nuclr: {tar}: truncated; its lost samples have no number yet")


def test_wrong_columns_and_files(nuclr, tmp_path):
    (tmp_path / "a.txt").write_text("a\na\n")
    ended = nuclr("index", tmp_path / "a.txt", "--out", tmp_path / "a.keys")
    assert ended.status == 2
    assert f"key 'a' occurs in line 1 of {tmp_path}/a.txt and in line 2 of {tmp_path}/a.txt" in ended.err
    ended = nuclr("index", tmp_path / "nothing.tar", "--out", tmp_path / "a.keys")
    assert ended == (2, "", f"nuclr: {tmp_path}/nothing.tar: no such file\n")
