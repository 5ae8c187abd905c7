"""Bad samples: found beforehand, named, left out, the same on every process; too many of them stop the run."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch.multiprocessing

from nuclr.data import Loader, check_samples, epoch_order, open_pairs, usable, write_bad_samples
from nuclr.data import selection as check_module
from nuclr.errors import UserError
from tests.data import make


def damaged(folder: Path, n: int = 40) -> Path:
    """n images with two captions each; what is wrong with which: see BAD."""
    (folder / "train").mkdir(parents=True)
    entries = []
    for number in range(n):
        data = make.picture(number, (40, 30))
        data = {5: data[: len(data) // 2], 9: b"", 11: b"no image", 12: data[:20]}.get(number, data)
        if number != 7:
            (folder / "train" / f"{number}.jpg").write_bytes(data)
        entries.append({"image": f"{number}.jpg", "captions": [f"caption {number}", "" if number == 3 else "other"]})
    return make.write_lines(folder / "train.jsonl", *entries)


BAD = {7: "empty caption", 10: "broken image", 11: "broken image", 14: "missing file", 15: "missing file"}
BAD |= {
    18: "empty file",
    19: "empty file",
    22: "not an image",
    23: "not an image",
    24: "not an image",
    25: "not an image",
}


def assert_bad(found: dict[int, str]) -> None:
    assert list(found) == list(BAD)
    for number, reason in BAD.items():
        assert found[number].startswith((reason, "broken image") if number in (24, 25) else reason)


def test_found_and_written(tmp_path):
    pairs = open_pairs(damaged(tmp_path / "d"))
    seen = []
    bad = check_samples(pairs, max_bad_share=0.2, progress=lambda done, total: seen.append((done, total)))
    assert_bad(bad)
    assert seen[-1] == (40, 40)
    write_bad_samples(tmp_path / "bad_samples.jsonl", pairs, bad)
    lines = [json.loads(line) for line in (tmp_path / "bad_samples.jsonl").read_text().splitlines()]
    assert [line["number"] for line in lines] == list(BAD)
    assert lines[1] == {"number": 10, "name": "5.jpg", "reason": bad[10]}


def test_all_that_is_left_can_be_loaded_and_keeps_its_order(tmp_path):
    pairs = open_pairs(damaged(tmp_path / "d"))
    bad = check_samples(pairs, max_bad_share=0.2)
    numbers = usable(pairs, bad)
    assert len(numbers) == len(pairs) - len(bad)
    order = epoch_order(pairs, seed=0, epoch=1, numbers=numbers)
    everything = epoch_order(pairs, seed=0, epoch=1)
    assert order.tolist() == [number for number in everything if number not in bad]
    (batch,) = Loader(pairs, size=16).load([order])
    assert batch.numbers.tolist() == order.tolist()
    assert batch.y[0] == pairs.y(int(order[0]))


def test_too_many_stop_the_run(tmp_path):
    pairs = open_pairs(damaged(tmp_path / "d"))
    with pytest.raises(
        UserError, match=r"11 of 80 samples are bad, 13\.8%, more than the 5\.0% allowed \(data\.max_bad_share\)"
    ):
        check_samples(pairs)


def test_kept_until_a_file_changes(tmp_path, monkeypatch):
    path = damaged(tmp_path / "d")
    check_samples(open_pairs(path), max_bad_share=0.2)
    looked = []
    real = check_module._check_all
    monkeypatch.setattr(check_module, "_check_all", lambda *args: looked.append(1) or real(*args))
    assert_bad(check_samples(open_pairs(path), max_bad_share=0.2))
    assert not looked
    (tmp_path / "d" / "train" / "7.jpg").write_bytes(make.picture(7))
    assert 14 not in check_samples(open_pairs(path), max_bad_share=0.2)
    assert len(looked) == 1


def test_some_numbers_only(tmp_path):
    pairs = open_pairs(damaged(tmp_path / "d"))
    assert check_samples(pairs, numbers=np.array([20, 21, 0])) == {}
    assert list(check_samples(pairs, numbers=np.array([14, 6, 7]), max_bad_share=1)) == [7, 14]


def shards(folder: Path, broken: int) -> Path:
    """Four tars of 100 samples; the first `broken` of each have a broken image or no caption, in turn."""
    for tar in range(4):
        members: dict[str, bytes] = {}
        for number in range(100):
            sample = make.sample(f"{100 * tar + number:06d}", number, f"caption {100 * tar + number}")
            if number < broken:
                name = next(n for n in sample if n.endswith("txt" if number % 2 else "jpg"))
                sample[name] = b"" if number % 2 else sample[name][:-40]
            members |= sample
        make.write_tar(folder / f"{tar:05d}.tar", members)
    return folder


def test_a_few_bad_samples_and_a_truncated_tar_do_not_matter(tmp_path):
    folder = shards(tmp_path / "t", broken=1)
    clean = open_pairs(shards(tmp_path / "clean", broken=0))
    os.truncate(folder / "00002.tar", (folder / "00002.tar").stat().st_size - 22_000)
    pairs = open_pairs(folder)
    bad = check_samples(pairs)
    assert [number for number in bad if number % 100 == 0] == [0, 100, 200, 300]
    lost = [number for number, reason in bad.items() if reason == "truncated tar"]
    assert 1 < len(lost) < 12 and lost == list(range(lost[0], 300))
    assert len(bad) == len(lost) + 4
    for number in usable(pairs, bad).tolist():
        assert pairs.y(number) == clean.y(number) and pairs.name(number) == clean.name(number)


def test_many_bad_samples_in_tars_stop_the_run(tmp_path):
    with pytest.raises(UserError, match=r"120 of 400 samples are bad, 30\.0%, .*60 x broken image, 60 x empty caption"):
        check_samples(open_pairs(shards(tmp_path / "t", broken=30)))


def test_broken_after_the_check(tmp_path):
    pairs = open_pairs(make.jsonl(tmp_path))
    check_samples(pairs)
    (tmp_path / "train" / "c.jpg").write_bytes(b"")
    with pytest.raises(UserError, match=r"sample 5 \(c\.jpg\): empty file; it was good when the run began"):
        list(Loader(pairs, size=8).load([np.arange(8)]))


def test_embedding_and_builtin_pairs_have_nothing_to_check():
    assert check_samples(open_pairs("builtin:n=5")) == {}


def _process(rank: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    pairs = open_pairs(Path(folder) / "d" / "train.jsonl")
    if rank == 1:  # whatever one process finds in its cache, all do the same
        check_module._read_cache = lambda path: None
    found = [check_samples(pairs, max_bad_share=0.2) for _ in range(2)]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def test_two_processes_find_the_same(tmp_path):
    damaged(tmp_path / "d")
    torch.multiprocessing.spawn(_process, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        for found in json.loads((tmp_path / f"{rank}.json").read_text()):
            assert_bad({int(number): reason for number, reason in found.items()})
