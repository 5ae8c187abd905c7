"""The paper's configs on data in the layout that they name, with small encoders instead of ResNet-50 and DistilBERT."""

import json
from pathlib import Path

import pytest

from nuclr.objectives import names
from nuclr.runs import config
from nuclr.runs.settings import flatten, to_dict
from nuclr.training.dry_run import dry_run
from tests.data import make

FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = sorted(path for folder in (FOLDER, FOLDER / "authors") for path in folder.glob("cc*.yaml"))
METHODS = [name for name in names() if name in ("clip", "siglip", "dcl", "cyclip", "sogclr", "isogclr", "nuclr")]
TOWERS = ["model.x.encoder=tiny_resnet", "model.y.encoder=tiny_text", "model.x.image_size=32"]
MACHINE = ["data.batch_size=16", "data.workers=1", "threads=1"]


def settings_of(path: Path) -> dict:
    return {key: value for key, value in flatten(to_dict(config.load(path))) if key != "name"}


def differences(one: dict, other: dict) -> dict:
    return {key: other.get(key) for key in one | other if one.get(key) != other.get(key)}


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
    for name in ("coco", "flickr30k"):
        (folder / f"{name}_val.json").write_text(json.dumps(listed))
    return folder


# The others differ from these in the objective only, which tests/runs/test_config.py builds.
@pytest.mark.parametrize("name", [*(f"cc3m_{method}" for method in METHODS), "cc12m_nuclr", "authors/cc3m_nuclr"])
def test_configs_pass_a_dry_run(root, name):
    estimate = dry_run(config.load(FOLDER / f"{name}.yaml", [f"data.root={root}", *TOWERS, *MACHINE]))
    assert estimate.pairs == (1243 if name.startswith("cc12m") else 332)
    assert estimate.bad_samples == 0
    assert estimate.steps == 30 * (estimate.pairs // 16)


@pytest.mark.parametrize("recipe", [FOLDER, FOLDER / "authors"], ids=lambda folder: folder.name)
@pytest.mark.parametrize("method", METHODS)
def test_the_data_sets_have_the_same_recipe(recipe, method):
    changed = differences(settings_of(recipe / f"cc3m_{method}.yaml"), settings_of(recipe / f"cc12m_{method}.yaml"))
    own = {"objective.zeta_init": 0.0} if method == "nuclr" else {}
    assert changed == {"data.train": "cc12m/{00000..01242}.tar", **own}


# The table "Differences between the recipes" of docs/reproduce.md.
OWN = {
    "siglip": {"objective.learn_temperature": True, "objective.temperature": 0.1},
    "nuclr": {
        "objective.name": "nuclr-authors",
        "objective.zeta_estimator": "reference",
        "objective.zeta_lr": 5e-6,
        "schedule.zeta_steps": True,
    },
}


@pytest.mark.parametrize("method", METHODS)
def test_the_authors_recipe_differs_from_the_papers_as_documented(method):
    paper, authors = (settings_of(folder / f"cc3m_{method}.yaml") for folder in (FOLDER, FOLDER / "authors"))
    changed = differences(paper, authors)
    if method == "nuclr":  # two classes: options that only one of them has are left out
        for key in set(changed) - (paper.keys() & authors.keys()):
            if key.startswith("objective."):
                del changed[key]
    assert changed == OWN.get(method, {})
