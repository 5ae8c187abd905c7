import dataclasses
from pathlib import Path

import pytest
import yaml

from nuclr.errors import UserError
from nuclr.runs import config
from nuclr.runs.settings import Settings

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_of_ours_is_read(path):
    assert config.load(path).name == path.stem


def test_the_demo_is_its_file():
    assert config.load() == config.load(CONFIGS / "demo.yaml")


def test_overrides_and_types(tmp_path):
    (tmp_path / "a.yaml").write_text("data: {train: builtin}\noptimizer:\n  lr: 1e-4\n")
    settings = config.load(tmp_path / "a.yaml", ["schedule.epochs=3", "data.mask=false", "objective.xi_init=.inf"])
    assert settings.optimizer.lr == 1e-4, "YAML reads 1e-4 as a text"
    assert settings.schedule.epochs == 3
    assert settings.data.mask is False
    assert settings.objective.xi_init == float("inf")
    assert config.load(tmp_path / "a.yaml", ["data.root=", "out=12"]).out == "12"


def test_what_is_written_is_read_back(tmp_path):
    settings = config.load(CONFIGS / "cc3m_nuclr.yaml", ["seed=4"])
    (tmp_path / "b.yaml").write_text(config.to_yaml(settings))
    assert config.load(tmp_path / "b.yaml") == settings


def test_another_objective_drops_what_it_does_not_take():
    settings = config.load(CONFIGS / "flickr8k_embeddings.yaml", ["objective.name=sogclr"])
    assert yaml.safe_load(config.to_yaml(settings))["objective"] == {
        "name": "sogclr",
        "temperature": 0.03,
        "gamma": 0.3,
    }


def test_every_key_has_a_place():
    keys = list(config.all_keys())
    assert {"data.train", "objective.zeta_lr", "seed"} <= set(keys)
    assert len(keys) == len(set(keys))
    assert all(dataclasses.is_dataclass(type(getattr(Settings(), key.split(".")[0]))) for key in keys if "." in key)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("bach_size=3", "unknown key 'bach_size'; did you mean data.batch_size?"),
        ("optimizer.lr=3", "did you mean optimizer.lr?"),
        ("lr=3", "did you mean optimizer.lr?"),
        ("data.batch_size=1", "data.batch_size is 1; needs a whole number at least 2"),
        ("data.batch_size=2.5", "needs a whole number"),
        ("optimizer.lr=fast", "optimizer.lr is 'fast'; needs a number above 0"),
        ("optimizer.lr=nan", "needs a number"),
        ("optimizer.lr=true", "needs a number"),
        ("objective.gamma=0", "objective.gamma is 0; needs a number above 0 and at most 1"),
        ("objective.name=nuclear", "did you mean nuclr?"),
        ("objective.rho=3", "objective.rho: nuclr has no such option"),
        ("data.mask=maybe", "needs true or false"),
        ("data=train", "data is a section, not a value"),
        ("schedule.epochs=", "schedule.epochs has no value"),
        ("schedule.zeta_frozen_epochs=99", "more than schedule.epochs, which is 4"),
        ("epochs", "overrides are key=value"),
        ("data.train=", "data.train is missing"),
    ],
)
def test_refusals(override, message):
    with pytest.raises(UserError) as refused:
        config.load(None, [override])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "line 1: not YAML"),
        ("- a\n- b\n", "holds list"),
        ("seed: 1\nseed: 2\n", "line 2: not YAML (key 'seed' is given twice)"),
    ],
)
def test_bad_files(tmp_path, text, message):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError) as refused:
        config.load(tmp_path / "bad.yaml")
    assert message in str(refused.value)


def test_the_nearest_file(tmp_path):
    (tmp_path / "flickr8k.yaml").write_text("")
    with pytest.raises(UserError, match=r"did you mean .*flickr8k.yaml"):
        config.load(tmp_path / "flicker8k.yaml")


def test_every_option_of_every_objective_can_be_set():
    from nuclr.objectives import names
    from nuclr.runs.settings import Objective, objective_keys

    fields = {field.name for field in dataclasses.fields(Objective)}
    for name in names():
        assert set(objective_keys(name)) <= fields
