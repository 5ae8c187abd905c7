"""Settings from YAML files and overrides."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from nuclr import objectives
from nuclr.errors import UserError
from nuclr.runs import config
from nuclr.runs.run import Run
from nuclr.runs.settings import change, to_dict

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = [*CONFIGS.glob("*.yaml"), *(CONFIGS / "authors").glob("*.yaml")]
DATA = "data.train=pairs.csv"


@pytest.mark.parametrize("path", sorted(FILES), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_config_in_the_repository_is_valid(path):
    settings = config.load(path)
    assert settings.name == (path.stem if path.parent == CONFIGS else f"authors_{path.stem}")


def test_overrides_take_precedence_and_have_types(tmp_path):
    (tmp_path / "a.yaml").write_text("data: {train: builtin}\noptimizer:\n  lr: 1e-4\n")
    overrides = ["schedule.epochs=3", "data.mask=false", "schedule.warmup_steps=1e2", "objective.xi_init=.inf"]
    settings = config.load(tmp_path / "a.yaml", overrides)
    assert settings.optimizer.lr == 1e-4, "YAML reads 1e-4 as text"
    assert (settings.schedule.epochs, settings.schedule.warmup_steps) == (3, 100)
    assert settings.data.mask is False
    assert settings.objective.arguments()["xi_init"] == float("inf")
    assert config.load(tmp_path / "a.yaml", ["data.root=", "out=12"]).out == "12"


def test_without_a_name_the_run_has_that_of_its_folder(tmp_path):
    (tmp_path / "a.yaml").write_text("name: mine\ndata: {train: a.csv}\n")
    assert config.load(None, [DATA, "out=runs/kill"]).name == "kill"
    assert config.load(None, [DATA, "out=runs/kill", "name=b"]).name == "b"
    assert config.load(tmp_path / "a.yaml", ["out=runs/kill"]).name == "mine"
    assert config.load(None, [DATA]).name == "run"


def test_written_settings_are_read_back_unchanged(tmp_path):
    settings = config.load(CONFIGS / "cc3m_nuclr.yaml", ["seed=4"])
    (tmp_path / "b.yaml").write_text(config.to_yaml(settings))
    again = config.load(tmp_path / "b.yaml")
    assert config.load(to_dict(settings)) == again, "nested dicts, in Python"
    assert config.to_yaml(again) == config.to_yaml(settings)


def test_options_of_other_objectives_are_left_out():
    settings = config.load(CONFIGS / "flickr8k_embeddings.yaml", ["objective.name=sogclr"])
    written = yaml.safe_load(config.to_yaml(settings))["objective"]
    assert written["gamma"] == 0.3
    assert set(written) <= {"name", *objectives.options("sogclr")}


def test_the_step_of_zeta_of_one_form_is_not_that_of_another():
    """Their units differ, so a config file for one form must not slow the other down."""
    file = CONFIGS / "flickr8k_embeddings.yaml"
    assert config.load(file).objective.arguments()["zeta_lr"] == 3e-3
    other = config.load(file, ["objective.name=nuclr", "data.train=pairs.csv"]).objective.arguments()
    assert (other["zeta_lr"], other["gamma"]) == (objectives.options("nuclr")["zeta_lr"], 0.3)
    assert config.load(file, ["objective.name=nuclr", "objective.zeta_lr=0.1"]).objective.arguments()["zeta_lr"] == 0.1
    assert config.load(file, ["objective.name=nuclr-authors"]).objective.arguments()["zeta_lr"] == 3e-3


def test_settings_are_frozen_and_changed_by_key():
    settings = config.load(None, [DATA])
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.seed = 3
    assert change(settings, "data.x.key", "question").data.x.key == "question"
    assert change(settings, "objective.gamma", 0.5).objective.arguments()["gamma"] == 0.5


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("bach_size=3", ["'bach_size'", "data.batch_size"]),
        ("objective.gama=0.5", ["'objective.gama'", "objective.gamma"]),
        ("seed=-1", ["seed is -1", "0"]),
        ("=", ["key=value"]),
        ("data.batch_size=1", ["data.batch_size is 1", "2"]),
        ("optimizer.lr=fast", ["optimizer.lr is 'fast'", "number"]),
        ("objective.gamma=0", ["objective.gamma", "0"]),
        ("objective.name=nuclear", ["objective.name", "'nuclear'", "sogclr, isogclr, nuclr"]),
        ("objective.tau_plus=3", ["objective.tau_plus", "gamma"]),
        ("objective.zeta_estimator=reference", ["objective.zeta_estimator", "'reference'", "paper"]),
        ("objective.state_sharding=true", ["objective.state_sharding", "state.sharding"]),
        ("objective.temperatures=3", ["objective.temperatures", "section"]),
        ("objective.temperatures.roh=3", ["objective.temperatures.roh", "objective.temperatures.rho"]),
        ("data.mask=maybe", ["data.mask is 'maybe'", "true or false"]),
        ("data.fit=x", ["data.fit is 'x'", "'crop' or 'squash'"]),
        ("data.train.x=3", ["data.train is {'x': 3}"]),
        ("data.val={a b: c}", ["data.val.a b", "letters"]),
        ("data.val={coco: {path: a, spilt: b}}", ["data.val.coco.spilt"]),
        ("data.val={coco: {split: b}}", ["data.val.coco.path"]),
        ("schedule.epochs=", ["schedule.epochs", "integer"]),
        ("schedule.zeta_frozen_epochs=99", ["schedule.zeta_frozen_epochs", "schedule.epochs", "10"]),
        ("data.train=", ["data.train"]),
        ("plugins=nowhere.py", ["plugins", "nowhere.py"]),
    ],
)
def test_wrong_overrides_are_refused_in_one_line(override, named):
    with pytest.raises(UserError) as refused:
        config.load(None, [DATA, override])
    message = str(refused.value)
    assert all(part in message for part in named) and "\n" not in message, message


def test_a_file_is_named_in_messages_about_it_but_not_about_overrides(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("seed: 1\nseed: 2\n")
    with pytest.raises(UserError, match=r"a.yaml, line 2"):
        config.load(path)
    path.write_text("- a\n")
    with pytest.raises(UserError, match=r"a.yaml.*list"):
        config.load(path)
    path.write_text("data: {train: builtin}\nseed: -1\n")
    with pytest.raises(UserError, match=r"a.yaml: seed is -1"):
        config.load(path, ["seed=3"])
    path.write_text("data: {train: builtin}\n")
    with pytest.raises(UserError, match=r"^seed is -1"):
        config.load(path, ["seed=-1"])


def test_every_option_of_every_objective_can_be_set():
    for name in objectives.names():
        for option, default in config.flatten(objectives.options(name)):
            overrides = [f"objective.name={name}"] + ([] if default is None else [f"objective.{option}={default}"])
            arguments = dict(config.flatten(config.load(None, [DATA, *overrides]).objective.arguments()))
            assert arguments[option] == default, f"objective.{option} of {name}"


def test_options_of_an_objective_outside_the_package_can_be_set(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from nuclr import objectives\n"
        "from nuclr.objectives import CLIP\n"
        "class Mine(CLIP):\n"
        "    def __init__(self, temperature: float = 0.07, sharpness: float = 2.0) -> None:\n"
        "        super().__init__(temperature=temperature)\n"
        "objectives.register('mine', Mine, label='Mine', color='#123456', tune=('sharpness', (1.0, 2.0)))\n"
    )
    overrides = [DATA, f"plugins={tmp_path / 'mine.py'}", "objective.name=mine", "objective.sharpness=3"]
    try:
        settings = config.load(None, overrides)
        expected = {"temperature": 0.07, "sharpness": 3.0, "false_negative_margin": None, "margin_strategy": "absolute"}
        assert settings.objective.arguments() == expected
        assert to_dict(config.load(to_dict(settings))) == to_dict(settings)
    finally:
        objectives.unregister("mine")


# Nine lists of nine references to the list before: 9^10 items when printed.
BOMB = "seed:\n- &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"- &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        "? [a, b]\n: 1\n",
        "seed: " + "[" * 100_000,
        "seed: 2020-99-99\n",
        "seed: " + "9" * 5_000 + "\n",
        "seed: 0x" + "f" * 5_000 + "\n",
        "optimizer: {lr: " + "9" * 400 + "}\n",
        "seed: !!python/object/apply:os.system [ls]\n",
        "seed: &a [*a]\n",
        "name: \x00\n",
        "seed: [" + "0, " * 100_000 + "0]\n",
        BOMB,
    ],
)
def test_hostile_yaml_is_refused_in_a_short_line(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text("data: {train: builtin}\n" + text)
    with pytest.raises(UserError) as caught:
        config.load(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 800
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        Run.open(tmp_path)
    assert "config.yaml" in str(caught.value) and len(str(caught.value)) < 800


def test_a_file_far_larger_than_settings_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    # PyYAML needed ten seconds and more for such files.
    monkeypatch.setattr("yaml.load", lambda *_: pytest.fail("the file was parsed"))
    for name in ("config.yaml", "pairs.csv"):
        (tmp_path / name).write_text("seed: [" + "0, " * 100_000 + "0]\n")
        with pytest.raises(UserError, match=f"data.train={tmp_path / name}"):
            config.load(tmp_path / name)


@pytest.mark.parametrize("value", ["2020-99-99", "[" * 100_000, "9" * 5_000, "{a: 1}: 2", "!!int x"])
def test_an_override_that_yaml_cannot_parse_is_refused(value):
    with pytest.raises(UserError, match="seed is"):
        config.load(None, [DATA, f"seed={value}"])
