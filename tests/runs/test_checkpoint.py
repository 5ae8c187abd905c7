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


def test_round_trip(tmp_path):
    checkpoint.save(tmp_path / "a.pt", CONTENT)
    assert_identical(checkpoint.load(tmp_path / "a.pt"), CONTENT)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("length", [0, 10, -1, -47, -200])
def test_truncated(tmp_path, length):
    path = tmp_path / "a.pt"
    checkpoint.save(path, CONTENT)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(checkpoint.BadCheckpoint, match="truncated"):
        checkpoint.load(path)


def test_damaged(tmp_path):
    path = tmp_path / "a.pt"
    checkpoint.save(path, CONTENT)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(checkpoint.BadCheckpoint, match="checksum"):
        checkpoint.load(path)


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


def test_no_code_is_unpickled(tmp_path):
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


def test_the_newest_whole_one_is_used(tmp_path):
    said = []
    for step in (1, 2):
        checkpoint.save_step(tmp_path, step, {"step": step})
    (tmp_path / "step_000000002.pt").write_bytes(b"")
    assert checkpoint.load_last(tmp_path, said.append) == {"step": 1}
    assert said == [f"{tmp_path / 'step_000000002.pt'}: truncated; going back to the checkpoint before it"]
    (tmp_path / "step_000000001.pt").write_bytes(b"")
    assert checkpoint.load_last(tmp_path, said.append) is None


def test_a_failed_write_leaves_the_one_before(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "a.pt", {"step": 1})

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path / "a.pt", {"step": 2})
    assert checkpoint.load(tmp_path / "a.pt") == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
