"""Bad samples are found before training, the same on every process, and left out; `data.keep` selects pairs."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch.multiprocessing

from nuclr.data import (
    ImageOptions,
    Loader,
    check_samples,
    epoch_order,
    open_pairs,
    read_keep,
    selection,
    usable,
    write_bad_samples,
)
from nuclr.data.selection import Source, describe_overlap
from nuclr.errors import UserError
from tests.data import make


def damaged(folder: Path, n: int = 40) -> Path:
    """Write n images with two captions each; BAD lists the bad ones."""
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
BAD |= dict.fromkeys((18, 19), "empty file") | dict.fromkeys((22, 23, 24, 25), "not an image")


def assert_bad(bad: dict[int, str]) -> None:
    assert list(bad) == list(BAD)
    for number, reason in BAD.items():
        assert bad[number].startswith((reason, "broken image") if number in (24, 25) else reason)


def test_bad_samples_are_found_and_written(tmp_path):
    pairs = open_pairs(damaged(tmp_path / "d"))
    bad = check_samples(pairs, max_bad_share=0.2)
    assert_bad(bad)
    write_bad_samples(tmp_path / "bad_samples.jsonl", pairs, bad)
    lines = [json.loads(line) for line in (tmp_path / "bad_samples.jsonl").read_text().splitlines()]
    assert [line["number"] for line in lines] == list(BAD)
    assert lines[1] == {"number": 10, "name": "5.jpg", "reason": bad[10]}


def test_usable_samples_can_be_loaded_and_keep_their_order(tmp_path):
    pairs = open_pairs(damaged(tmp_path / "d"))
    bad = check_samples(pairs, max_bad_share=0.2)
    numbers = usable(pairs, bad)
    assert len(numbers) == len(pairs) - len(bad)
    order = epoch_order(pairs, seed=0, epoch=1, numbers=numbers)
    everything = epoch_order(pairs, seed=0, epoch=1)
    assert order.tolist() == [number for number in everything if number not in bad]
    (batch,) = Loader(pairs, x=ImageOptions(16)).load([order])
    assert batch.numbers.tolist() == order.tolist()
    assert batch.y[0] == pairs.item("y", int(order[0]))


def test_the_result_is_cached_until_a_file_changes(tmp_path, monkeypatch):
    path = damaged(tmp_path / "d")
    check_samples(open_pairs(path), max_bad_share=0.2)
    checks = []
    real = selection._check_all
    monkeypatch.setattr(selection, "_check_all", lambda *args: checks.append(1) or real(*args))
    assert_bad(check_samples(open_pairs(path), max_bad_share=0.2))
    assert not checks
    (tmp_path / "d" / "train" / "7.jpg").write_bytes(make.picture(7))
    assert 14 not in check_samples(open_pairs(path), max_bad_share=0.2)
    assert len(checks) == 1


def test_only_the_requested_samples_are_checked(tmp_path):
    pairs = open_pairs(damaged(tmp_path / "d"))
    assert check_samples(pairs, numbers=np.array([20, 21, 0])) == {}
    assert list(check_samples(pairs, numbers=np.array([14, 6, 7]), max_bad_share=1)) == [7, 14]


def test_a_file_that_breaks_after_the_check_stops_loading(tmp_path):
    pairs = open_pairs(make.jsonl(tmp_path))
    check_samples(pairs)
    (tmp_path / "train" / "c.jpg").write_bytes(b"")
    with pytest.raises(UserError, match=r"sample 5 \(c\.jpg\): empty file"):
        list(Loader(pairs, x=ImageOptions(8)).load([np.arange(8)]))


def _process(rank: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    pairs = open_pairs(Path(folder) / "d" / "train.jsonl")
    if rank == 1:  # this process has no cache, so both have to check again
        selection._read_cache = lambda path: None
    results = [check_samples(pairs, max_bad_share=0.2) for _ in range(2)]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


def test_two_processes_find_the_same_bad_samples(tmp_path):
    damaged(tmp_path / "d")
    torch.multiprocessing.spawn(_process, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        for result in json.loads((tmp_path / f"{rank}.json").read_text()):
            assert_bad({int(number): reason for number, reason in result.items()})


def test_a_list_with_comments_is_read(tmp_path):
    (tmp_path / "keep.txt").write_text("# 3 of 10\n7\n2  # this one, too\n5\n")
    kept = read_keep(tmp_path / "keep.txt", 10)
    assert kept.tolist() == [2, 5, 7]
    pairs = open_pairs("builtin:n=10")
    assert usable(pairs, bad=[5, 9], keep=kept).tolist() == [2, 7]
    assert sorted(epoch_order(pairs, 0, 0, numbers=kept)) == [2, 5, 7]


def test_a_npy_file_with_repeated_numbers_is_read(tmp_path):
    np.save(tmp_path / "keep.npy", np.array([3, 1, 3], np.uint8))
    assert read_keep(tmp_path / "keep.npy", 4).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("k.txt", "1\n10\n11\n", "pair 10"),
        ("k.txt", "-1\n", "pair -1"),
        ("k.txt", "1\n" + "9" * 30, r"k\.txt"),
        ("k.txt", "1\nimage.jpg\n", r"k\.txt.*image\.jpg"),
        ("k.txt", "# nothing\n", r"k\.txt"),
        ("k.npy", np.array([0.5]), "float64"),
        ("k.npy", "text", r"k\.npy"),
        ("gone.txt", None, r"data\.keep=.*gone\.txt"),
    ],
)
def test_a_wrong_list_of_pairs_to_keep_is_refused(tmp_path, name, content, message):
    path = tmp_path / name
    if isinstance(content, np.ndarray):
        np.save(path, content)
    elif content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_keep(path, 10)


def opened(path, text):
    path.write_text(text)
    pairs = open_pairs(path)
    return Source(pairs, np.arange(len(pairs)), {})


def test_overlap_of_texts(tmp_path):
    rows = "question,answer\na,b\nc,d\ne,f\n"
    train = opened(tmp_path / "a.csv", rows)
    assert "data.val" in describe_overlap(train, opened(tmp_path / "same.csv", rows))
    assert "1 of its 2" in describe_overlap(train, opened(tmp_path / "b.csv", "question,answer\na,b\nc,other\n"))
    assert describe_overlap(train, opened(tmp_path / "c.csv", "question,answer\na,other\nnew,b\n")) is None


def test_overlap_of_other_captions_of_the_same_images(tmp_path):
    make.write_images(tmp_path)
    first, second = list(make.CAPTIONS)[:2]
    train = opened(tmp_path / "a.csv", f"image,caption\n{first},one\n{second},two\n")
    val = opened(tmp_path / "b.csv", f"image,caption\n{first},three\n")
    assert "data.val.own: 1 of its 1" in describe_overlap(train, val, "data.val.own")


def test_built_in_pairs_are_compared_as_a_whole():
    train = Source(open_pairs("builtin:n=50"), np.arange(50), {})
    val = Source(open_pairs("builtin:n=50,split=val"), np.arange(50), {})
    assert describe_overlap(train, train) and describe_overlap(train, val) is None
