"""`nuclr train` on damaged data, from the command line to the last checkpoint."""

import json
import os
import tarfile

import pytest

from tests.data import make
from tests.training import runs

COUNT, BATCH = 200, 32  # without 8 bad samples, 192 are left: six batches, so one epoch contains every good pair


def damaged_files(folder):
    """Write photographs: two truncated, two that are not images, two missing, and two without a caption."""
    photographs = runs.write_photographs(folder, COUNT)
    for number in (3, 50):
        (folder / f"{number}.jpg").write_bytes(photographs[number][:-60])
    for number in (51, 120):
        (folder / f"{number}.jpg").write_bytes(b"<html>not found</html>")
    for number in (0, 199):
        (folder / f"{number}.jpg").unlink()
    captions = {number: "" if number in (77, 78) else f"photograph {number}" for number in range(COUNT)}
    entries = [{"image": f"{number}.jpg", "caption": caption} for number, caption in captions.items()]
    make.write_lines(folder / "train.jsonl", *entries)
    return "train.jsonl", {0, 3, 50, 51, 77, 78, 120, 199}


def damaged_tars(folder):
    """Write four tars of 50 samples: a broken image, an empty caption, and a tar that ends within its 45th sample."""
    for tar in range(4):
        samples = [make.sample(f"{50 * tar + k:06d}", 50 * tar + k, f"photograph {50 * tar + k}") for k in range(50)]
        if tar == 0:
            samples[7]["000007.jpg"] = samples[7]["000007.jpg"][:-60]
            samples[8] |= {"000008.txt": b" "}
            samples[8].pop("000008.json")
        make.write_tar(folder / f"{tar:05d}.tar", {name: data for sample in samples for name, data in sample.items()})
    with tarfile.open(folder / "00002.tar") as tar:
        cut = tar.getmember("000144.jpg").offset_data + 100
    os.truncate(folder / "00002.tar", cut)
    return ".", {7, 8, *range(144, 150)}


def train(nuclr, folder, source, out):
    own = {"data.root": folder, "model.x.image_size": 16, "data.batch_size": BATCH, "schedule.epochs": 1}
    settings = runs.picture_settings(out.parent, **{"data.train": source, **own})
    settings = [setting for setting in settings if not setting.startswith("data.val=")]
    return nuclr("train", out.parent / "empty.yaml", *settings, f"out={out}")


@pytest.mark.slow
@pytest.mark.parametrize("damage", [damaged_files, damaged_tars])
def test_a_few_bad_samples_are_left_out_and_reported(nuclr, tmp_path, damage):
    source, bad = damage(tmp_path / "data")
    status, _, err = train(nuclr, tmp_path / "data", source, tmp_path / "run")
    assert status == 0, err
    assert "8 bad samples" in err and "bad_samples.jsonl" in err
    lines = [json.loads(line) for line in (tmp_path / "run" / "bad_samples.jsonl").open()]
    assert {line["number"] for line in lines} == bad and len(lines) == len(bad)
    assert all(line["reason"] and line["name"] for line in lines)
    state, _, results = runs.outcome(tmp_path / "run")
    assert (results["pairs"], results["samples_per_epoch"], results["bad_samples"]) == (COUNT, COUNT - 8, 8)
    for side in ("x", "y"):  # state is stored by pair number, so exactly the rows of the bad samples stay unset
        assert set(state["objective"][f"log_u_{side}"].isneginf().nonzero().flatten().tolist()) == bad


def test_too_many_bad_samples_stop_the_run(nuclr, tmp_path):
    source, bad = damaged_files(tmp_path / "data")
    for number in range(100, 100 + COUNT * 3 // 10 - len(bad) + 1):  # 120 is bad already
        (tmp_path / "data" / f"{number}.jpg").write_bytes(b"")
    status, _, err = train(nuclr, tmp_path / "data", source, tmp_path / "run")
    assert status == 2
    assert "60 of 200" in err and "data.max_bad_share" in err and "0.jpg" in err and len(err.splitlines()) <= 2
    assert not (tmp_path / "run").exists()
