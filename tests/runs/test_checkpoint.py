"""Checkpoints are complete or absent, and damage is detected."""

import dataclasses
import os
import zipfile

import pytest
import torch

from nuclr.runs import checkpoint
from tests.training.runs import assert_identical

CONTENT = checkpoint.Checkpoint(
    version="1",
    position={"epoch": 3, "step": 2},
    model={"a": torch.arange(7.0)},
    objective={},
    optimizer={"state": {}},
    window={},
    best=-float("inf"),
    metrics_bytes=0,
    data={},
)


def content(step: int) -> checkpoint.Checkpoint:
    return dataclasses.replace(CONTENT, position={"step": step})


def step(saved: checkpoint.Checkpoint | None) -> int:
    return saved.position["step"]


def test_loading_returns_what_was_saved(tmp_path):
    checkpoint.save(tmp_path / "a.pt", CONTENT)
    assert_identical(vars(checkpoint.load(tmp_path / "a.pt")), vars(CONTENT))
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("length", [0, 10, -1, -47, -200, None])
def test_a_truncated_or_changed_file_is_detected(tmp_path, length):
    path = tmp_path / "a.pt"
    checkpoint.save(path, CONTENT)
    content = bytearray(path.read_bytes())
    if length is None:
        content[content.index(CONTENT.model["a"].numpy().tobytes()) + 9] ^= 1
    path.write_bytes(content[:length])
    with pytest.raises(checkpoint.BadCheckpoint):
        checkpoint.load(path)


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def test_code_is_never_unpickled(tmp_path):
    checkpoint.save(tmp_path / "a.pt", dataclasses.replace(CONTENT, model={"evil": Evil()}))
    with pytest.raises(checkpoint.BadCheckpoint, match=r"a\.pt"):
        checkpoint.load(tmp_path / "a.pt")


@pytest.mark.parametrize(
    "changes",
    [
        {"position": {"step": -1}},
        {"model": {"a": torch.zeros(1).expand(2**60)}},
        {"model": {"a": torch.eye(3).to_sparse()}},
        {"objective": {"log_u_x": None}},
        {"metrics_bytes": "all"},
        {"best": None},
        {"data": {"data.train": 3}},
    ],
    ids=str,
)
def test_content_of_another_kind_is_refused(tmp_path, changes):
    checkpoint.save(tmp_path / "a.pt", dataclasses.replace(CONTENT, **changes))
    with pytest.raises(checkpoint.BadCheckpoint, match=r"a\.pt"):
        checkpoint.load(tmp_path / "a.pt")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "archive that expands", "no dict"])
def test_what_is_no_regular_file_of_its_size_is_refused(tmp_path, kind):
    path = tmp_path / "a.pt"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "no dict":
        torch.save([1], path)
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a/data.pkl", bytes(10**6))
    with pytest.raises(checkpoint.BadCheckpoint, match=r"a\.pt"):
        checkpoint.load(path)


def test_the_last_two_and_the_best_are_kept(tmp_path):
    for number in (5, 10, 15, 20):
        checkpoint.save_step(tmp_path, number, content(number))
        if number == 10:
            checkpoint.mark_best(tmp_path, number)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.pt", "step_000000015.pt", "step_000000020.pt"]
    assert step(checkpoint.load(tmp_path / "best.pt")) == 10


def test_the_newest_complete_checkpoint_is_used(tmp_path):
    messages = []
    for number in (1, 2):
        checkpoint.save_step(tmp_path, number, content(number))
    (tmp_path / "step_000000002.pt").write_bytes(b"")
    assert step(checkpoint.load_last(tmp_path, messages.append)) == 1
    assert len(messages) == 1 and "step_000000002.pt" in messages[0]
    (tmp_path / "step_000000001.pt").write_bytes(b"")
    with pytest.raises(checkpoint.BadCheckpoint, match=r"step_000000001\.pt"):
        checkpoint.load_last(tmp_path, messages.append)
    assert checkpoint.load_last(tmp_path / "none", messages.append) is None


def test_a_failed_write_keeps_the_earlier_checkpoint(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "a.pt", content(1))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path / "a.pt", content(2))
    assert step(checkpoint.load(tmp_path / "a.pt")) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
