"""Checkpoints are complete or absent, and damage is detected."""

import pickle

import pytest
import torch

from nuclr.runs import checkpoint
from tests.training.runs import assert_identical

CONTENT = {
    "weights": {"a": torch.arange(7.0)},
    "position": {"epoch": 3, "step": 2},
    "best": -float("inf"),
    "x": [1, "b"],
}


def test_loading_returns_what_was_saved(tmp_path):
    checkpoint.save(tmp_path / "a.pt", CONTENT)
    assert_identical(checkpoint.load(tmp_path / "a.pt"), CONTENT)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("length", [0, 10, -1, -47, -200, None])
def test_a_truncated_or_changed_file_is_detected(tmp_path, length):
    path = tmp_path / "a.pt"
    checkpoint.save(path, CONTENT)
    content = bytearray(path.read_bytes())
    if length is None:
        content[content.index(CONTENT["weights"]["a"].numpy().tobytes()) + 9] ^= 1
    path.write_bytes(content[:length])
    with pytest.raises(checkpoint.BadCheckpoint):
        checkpoint.load(path)


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def test_code_is_never_unpickled(tmp_path):
    checkpoint.save(tmp_path / "a.pt", {"evil": Evil()})
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.load(tmp_path / "a.pt")


def test_the_last_two_and_the_best_are_kept(tmp_path):
    for step in (5, 10, 15, 20):
        checkpoint.save_step(tmp_path, step, {"step": step})
        if step == 10:
            checkpoint.mark_best(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.pt", "step_000000015.pt", "step_000000020.pt"]
    assert checkpoint.load(tmp_path / "best.pt") == {"step": 10}


def test_the_newest_complete_checkpoint_is_used(tmp_path):
    messages = []
    for step in (1, 2):
        checkpoint.save_step(tmp_path, step, {"step": step})
    (tmp_path / "step_000000002.pt").write_bytes(b"")
    assert checkpoint.load_last(tmp_path, messages.append) == {"step": 1}
    assert len(messages) == 1 and "step_000000002.pt" in messages[0]
    (tmp_path / "step_000000001.pt").write_bytes(b"")
    assert checkpoint.load_last(tmp_path, messages.append) is None


def test_a_failed_write_keeps_the_earlier_checkpoint(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "a.pt", {"step": 1})

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path / "a.pt", {"step": 2})
    assert checkpoint.load(tmp_path / "a.pt") == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
