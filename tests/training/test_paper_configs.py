"""The paper's configs on data in the layout that they name, with small encoders instead of ResNet-50 and DistilBERT."""

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
    """Write CC3M and CC12M as img2dataset does, with one sample per tar, and COCO with ALBEF's list."""
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
def test_every_config_passes_a_dry_run(root, path):
    estimate = dry_run(config.load(path, [f"data.root={root}", *TOWERS, *MACHINE]))
    assert estimate["pairs"] == (1243 if path.stem.startswith("cc12m") else 332)
    assert estimate["bad_samples"] == 0 and estimate["evaluation_pairs"] == 20
    assert estimate["steps"] == 30 * (estimate["pairs"] // 16)


def test_there_are_eight_configs():
    assert len(CONFIGS) == 8
