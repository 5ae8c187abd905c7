"""Settings from YAML files and overrides."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from nuclr import objectives
from nuclr.errors import UserError
from nuclr.runs import config
from nuclr.runs.run import read_settings
from nuclr.runs.settings import Settings, to_dict

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
AUTHORS = sorted((CONFIGS / "authors").glob("*.yaml"))


def test_there_are_configs():
    assert {"demo", "flickr8k", "cc3m_nuclr"} <= {path.stem for path in FILES}


@pytest.mark.parametrize("path", [*FILES, *AUTHORS], ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_config_in_the_repository_is_valid(path):
    settings = config.load(path)
    assert settings.name == (path.stem if path in FILES else f"authors_{path.stem}")
    objectives.build(settings.objective.name, num_samples=4, **settings.objective.arguments())


def test_the_demo_settings_equal_configs_demo_yaml():
    assert config.load() == config.load(CONFIGS / "demo.yaml")


def test_without_a_file_the_defaults_apply_if_an_override_names_the_data():
    settings = config.load(None, ["data.train=pairs.csv"])
    assert settings == config.fill(Settings(), {"data": {"train": "pairs.csv", "contrast": "sides"}})
    assert config.load(None, ["seed=1"]).name == "demo"


def test_overrides_take_precedence_and_have_types(tmp_path):
    (tmp_path / "a.yaml").write_text("data: {train: builtin}\noptimizer:\n  lr: 1e-4\n")
    settings = config.load(tmp_path / "a.yaml", ["schedule.epochs=3", "data.mask=false", "objective.xi_init=.inf"])
    assert settings.optimizer.lr == 1e-4, "YAML reads 1e-4 as text"
    assert settings.schedule.epochs == 3
    assert settings.data.mask is False
    assert settings.objective.arguments()["xi_init"] == float("inf")
    assert config.load(tmp_path / "a.yaml", ["data.root=", "out=12"]).out == "12"


def test_without_a_name_the_run_has_that_of_its_folder(tmp_path):
    (tmp_path / "a.yaml").write_text("name: mine\ndata: {train: a.csv}\n")
    assert config.load(None, ["data.train=a.csv", "out=runs/kill"]).name == "kill"
    assert config.load(None, ["data.train=a.csv", "out=runs/kill", "name=b"]).name == "b"
    assert config.load(tmp_path / "a.yaml", ["out=runs/kill"]).name == "mine"
    assert config.load(None, ["data.train=a.csv"]).name == "run"


def test_written_settings_are_read_back_unchanged(tmp_path):
    settings = config.load(CONFIGS / "cc3m_nuclr.yaml", ["seed=4"])
    (tmp_path / "b.yaml").write_text(config.to_yaml(settings))
    again = config.load(tmp_path / "b.yaml")
    assert to_dict(again) == to_dict(settings)
    assert config.to_yaml(again) == config.to_yaml(settings)


def test_options_of_other_objectives_are_left_out():
    settings = config.load(CONFIGS / "flickr8k_embeddings.yaml", ["objective.name=sogclr"])
    written = yaml.safe_load(config.to_yaml(settings))["objective"]
    assert written["gamma"] == 0.3
    assert set(written) == {"name", *objectives.options("sogclr")} - {"state_device"}


def test_keys_are_unique_and_belong_to_sections():
    keys = list(config.all_keys())
    assert {"data.train", "objective.zeta_lr", "seed"} <= set(keys)
    assert len(keys) == len(set(keys))
    assert all(dataclasses.is_dataclass(type(getattr(Settings(), key.split(".")[0]))) for key in keys if "." in key)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("bach_size=3", "unknown key 'bach_size'; did you mean data.batch_size?"),
        ("optimzer.lr=3", "unknown key 'optimzer.lr'; did you mean optimizer.lr?"),
        ("lr=3", "did you mean optimizer.lr?"),
        ("image_key=filepath", "unknown key 'image_key'; data.x.key and data.y.key name the columns of both sides"),
        ("seed=-1", "seed is -1; it needs a whole number at least 0 and at most 2147483648"),
        ("=", "overrides are key=value without spaces"),
        ("data.batch_size=1", "data.batch_size is 1; it needs a whole number at least 2"),
        ("data.batch_size=2.5", "needs a whole number"),
        ("optimizer.lr=fast", "optimizer.lr is 'fast'; it needs a number above 0"),
        ("optimizer.lr=nan", "needs a number"),
        ("optimizer.lr=true", "needs a number"),
        ("objective.gamma=0", "objective.gamma must be in (0, 1], but is 0"),
        ("objective.name=nuclear", "did you mean nuclr?"),
        ("objective.tau_plus=3", "objective.tau_plus: nuclr has no such option"),
        ("data.mask=maybe", "needs true or false"),
        ("data=train", "data is a section, not a value"),
        ("schedule.epochs=", "schedule.epochs has no value"),
        ("schedule.zeta_frozen_epochs=99", "more than schedule.epochs, which is 8"),
        ("epochs", "overrides are key=value"),
        ("data.train=", "data.train is missing"),
    ],
)
def test_wrong_overrides_are_refused(override, message):
    with pytest.raises(UserError) as refused:
        config.load(None, [override])
    assert message in str(refused.value)
    assert str(refused.value).count(message.split(";")[0]) == 1 and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "line 1: not valid YAML"),
        ("- a\n- b\n", "holds a list; it needs keys and values"),
        ("seed: 1\nseed: 2\n", "line 2: not valid YAML (key 'seed' is given twice)"),
    ],
)
def test_files_that_are_not_settings_are_refused(tmp_path, text, message):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError) as refused:
        config.load(tmp_path / "bad.yaml")
    assert message in str(refused.value)


def test_a_similar_file_name_is_suggested(tmp_path):
    (tmp_path / "flickr8k.yaml").write_text("")
    with pytest.raises(UserError, match=r"did you mean .*flickr8k.yaml"):
        config.load(tmp_path / "flicker8k.yaml")


def test_every_option_of_every_objective_can_be_set():
    for name in objectives.names():
        for option, default in objectives.options(name).items():
            overrides = [f"objective.name={name}"] + ([] if default is None else [f"objective.{option}={default}"])
            arguments = config.load(None, overrides).objective.arguments()
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
    overrides = [f"plugins={tmp_path / 'mine.py'}", "objective.name=mine", "objective.sharpness=3"]
    try:
        settings = config.load(None, overrides)
        assert settings.objective.arguments() == {"temperature": 0.15, "sharpness": 3.0}
    finally:
        objectives.unregister("mine")


@pytest.mark.parametrize("content", ["filepath,title\na.jpg,a dog\n", "image\tcaption\na: [\n"])
def test_data_in_place_of_a_config_suggests_data_train(tmp_path, content):
    path = tmp_path / "pairs.csv"
    path.write_text(content)
    with pytest.raises(UserError, match=f"not a config file; to train on it, write data.train={path}"):
        config.load(path)


def test_a_file_far_larger_than_settings_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    # PyYAML needed ten seconds and more for such files.
    monkeypatch.setattr("yaml.load", lambda *_: pytest.fail("the file was parsed"))
    monkeypatch.setattr("yaml.safe_load", lambda *_: pytest.fail("the file was parsed"))
    text = "seed: [" + "0, " * 100_000 + "0]\n"
    for name, hint in (("config.yaml", "$"), ("pairs", "; to train on it, write data.train=")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=rf"not a config file \(300,010 bytes; at most 100,000 are allowed\){hint}"):
            config.load(tmp_path / name)
    with pytest.raises(UserError, match="not a config file"):
        read_settings(tmp_path)


def test_a_misspelled_section_suggests_the_whole_key():
    with pytest.raises(UserError, match=r"unknown key 'objektive.gamma'; did you mean objective.gamma\?"):
        config.load(overrides=["objektive.gamma=0.5"])


@pytest.mark.parametrize(
    "text",
    [
        "? {a: b}\n: c",
        "[" * 20000,
        "seed: " + "7" * 5000,
        "seed: 1" + "0" * 400,
        "name: 2001-99-99",
        "name: !!int x",
        "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]\n" for i in range(12)) + "seed: *a11",
    ],
    ids=["dict as key", "nested", "digits", "too large", "date", "tag", "billion laughs"],
)
def test_hostile_yaml_is_one_clear_error(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        config.load(path)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("key", ["seed", "precision"])
def test_huge_values_are_shortened_in_messages(tmp_path, key):
    levels = [f"&a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]" for i in range(12)]
    path = tmp_path / "c.yaml"
    path.write_text(f"{key}:\n" + "".join(f"- {level}\n" for level in levels))
    with pytest.raises(UserError, match=f"{key} is ") as caught:
        config.load(path)
    assert len(str(caught.value)) < 2000


# Nine lists of nine references to the list before: 9^10 items when printed.
BOMB = "seed:\n- &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"- &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        "? [a, b]\n: 1\n",
        "{a: 1}: 2\n",
        "seed: " + "[" * 100_000,
        "seed: 2020-99-99\n",
        "seed: 2020-01-01\n",
        "seed: " + "9" * 5_000 + "\n",
        "optimizer: {lr: " + "9" * 400 + "}\n",
        "seed: !!python/object/apply:os.system [ls]\n",
        "seed: !!int x\n",
        "seed: !!timestamp x\n",
        "seed: &a [*a]\n",
        "name: \x00\n",
        BOMB,
    ],
)
def test_yaml_that_python_cannot_hold_is_refused_in_a_short_line(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text("data: {train: builtin}\n" + text)
    with pytest.raises(UserError) as caught:
        config.load(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 800
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        read_settings(tmp_path)
    assert "config.yaml" in str(caught.value) and len(str(caught.value)) < 800


@pytest.mark.parametrize("value", ["2020-99-99", "[" * 100_000, "9" * 5_000, "{a: 1}: 2", "!!int x"])
def test_an_override_that_yaml_cannot_parse_is_refused(value):
    with pytest.raises(UserError, match="seed is"):
        config.load(None, ["data.train=builtin", f"seed={value}"])
