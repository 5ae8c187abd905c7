"""The paper's configs on data of the layout that they name, with small towers for ResNet-50 and DistilBERT."""

import json
from pathlib import Path

import pytest

from nuclr.runs import config
from nuclr.training.dry_run import dry_run
from tests.data import make

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("cc*.yaml"))
TOWERS = ["model.x.encoder=tiny_resnet", "model.y.encoder=tiny_text", "model.x.image_size=32"]
MACHINE = ["data.batch_size=16", "data.workers=1", "threads=1"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """CC3M and CC12M as img2dataset leaves them, a sample a tar; COCO as ALBEF lists it."""
    folder = tmp_path_factory.mktemp("data")
    for name, tars in (("cc3m", 332), ("cc12m", 1243)):
        for tar in range(tars):
            make.write_tar(folder / name / f"{tar:05d}.tar", make.sample(f"{tar:05d}0000", tar, f"photograph {tar}"))
    (folder / "val2014").mkdir()
    for number in range(4):
        (folder / "val2014" / f"COCO_val2014_{number:012d}.jpg").write_bytes(make.picture(number))
    listed = [
        {"image": f"val2014/COCO_val2014_{number:012d}.jpg", "caption": [f"picture {number}, {k}" for k in range(5)]}
        for number in range(4)
    ]
    (folder / "coco_val.json").write_text(json.dumps(listed))
    return folder


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_dry_run(root, path):
    found = dry_run(config.load(path, [f"data.root={root}", *TOWERS, *MACHINE]))
    assert found["pairs"] == (1243 if path.stem.startswith("cc12m") else 332)
    assert found["bad_samples"] == 0 and found["evaluation_pairs"] == 20
    assert found["steps"] == 30 * (found["pairs"] // 16)


def test_all_are_there():
    assert len(CONFIGS) == 8
