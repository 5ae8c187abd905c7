"""Several sets of held-out pairs: settings, metrics, resume, the best checkpoint, evaluation."""

import json

import pytest

from nuclr.errors import UserError
from nuclr.runs import checkpoint, config, folder
from nuclr.runs.components import val_split
from nuclr.runs.run import Run
from nuclr.training import loop
from nuclr.training.build import build_parts
from nuclr.training.loop import train
from tests.data import layouts
from tests.training import runs

TWO = "{near: val.npz, far: {path: far.npz}}"


def load(tmp_path, **changes):
    runs.write_vectors(tmp_path / "far.npz", images=15, captions=1, seed=2)
    return runs.load(tmp_path, **({"data.val": TWO, "schedule.epochs": 3} | changes))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on two sets, and the same on the first one alone."""
    path = tmp_path_factory.mktemp("sets")
    names = {"data.x.name": "image", "data.y.name": "text"}
    train(load(path, **names), path / "two")
    train(load(path, **{"data.val": "val.npz"}, **names), path / "one")
    return path


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").open()]


def test_metrics_have_the_names_of_the_sets(trained):
    two, one = (
        [{k: v for k, v in line.items() if k.startswith("val/")} for line in lines(trained / name)]
        for name in ("two", "one")
    )
    two, one = ([line for line in rows if line] for rows in (two, one))
    assert len(two) == len(one) == 3, "every epoch"
    for both, first in zip(two, one, strict=True):
        assert {k.replace("val/near/", "val/"): v for k, v in both.items() if "/near/" in k} == first
        assert {k.replace("/far/", "/") for k in both if "/far/" in k} == set(first)
        assert both["val/far/mean_chance@1"] == pytest.approx(1 / 15)
    both, first = (folder.read_results(trained / name) for name in ("two", "one"))
    assert {k.removeprefix("val/") for k in two[-1]} == set(both.val)
    assert both.best == first.best, "the first set chooses the best checkpoint"


def test_a_killed_run_is_resumed_exactly(tmp_path, monkeypatch, trained):
    settings = load(tmp_path, **{"data.x.name": "image", "data.y.name": "text"})
    for step in (5, 8, 15):
        runs.train_until(monkeypatch, step, settings, tmp_path / "run")
    train(settings, tmp_path / "run", resume=True)
    runs.assert_same_outcome(trained / "two", tmp_path / "run")


def test_changed_sets_are_refused_on_resume(tmp_path, monkeypatch):
    settings = load(tmp_path)
    runs.train_until(monkeypatch, 9, settings, tmp_path / "run")
    with pytest.raises(UserError, match=r"data\.val\.far\.path.*'far\.npz'"):
        train(
            runs.load(tmp_path, **{"data.val": "{near: val.npz}", "schedule.epochs": 3}), tmp_path / "run", resume=True
        )
    runs.write_vectors(tmp_path / "far.npz", images=15, captions=1, seed=3)
    with pytest.raises(UserError, match=r"data\.val\.far"):
        train(settings, tmp_path / "run", resume=True)


def test_all_commands_know_the_sets(trained, nuclr, tmp_path):
    run = Run.open(trained / "two")
    assert list(run.held_out) == ["near", "far"] and run.held_out["near"] is run.val
    status, printed, err = nuclr("evaluate", trained / "two", "--correct", "bank=train", "--out", tmp_path / "out.json")
    assert status == 0, err
    content = json.loads((tmp_path / "out.json").read_text())
    results = folder.read_results(trained / "two").val
    for name in ("near", "far"):
        assert content["retrieval"][name]["plain"]["mean_R@1"] == pytest.approx(results[f"{name}/mean_R@1"])
    assert content["corrections"]["train"]["chosen_on"] == "data.val.near: val.npz"
    assert (content["retrieval"]["near"]["correction_crossed"], "far: 15 images" in printed) == (True, True)
    assert checkpoint.BEST in {path.name for path in (trained / "two" / "checkpoints").iterdir()}


def test_sets_can_be_added_changed_and_removed(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("data: {train: builtin, val: {a: one.npz, b: {path: two.npz, split: val, root: there}}}\n")

    def sets(*overrides):
        return {name: chosen.path for name, chosen in config.load(path, overrides).data.val.items()}

    assert sets() == {"a": "one.npz", "b": "two.npz"}
    assert sets("data.val.b=three.npz", "data.val.c=four.npz") == {"a": "one.npz", "b": "three.npz", "c": "four.npz"}
    assert sets("data.val.a=") == {"b": "two.npz"}
    assert sets("data.val={c: four.npz}") == {"c": "four.npz"} and sets("data.val=five.npz") == {"val": "five.npz"}
    assert sets("data.val=") == {}
    settings = config.load(path, ["data.val.b.split=test"])
    assert settings.data.val["b"].split == "test" and settings.data.val["b"].root == "there"
    assert config.load(json.loads(json.dumps(config.to_dict(settings)))).data.val == settings.data.val


def test_sets_of_another_kind_are_named(tmp_path):
    settings = load(tmp_path, **{"data.val": "{near: val.npz, other: 'builtin:n=10,split=val'}"})
    with pytest.raises(UserError, match=r"data\.val\.other.*data\.train"):
        build_parts(settings, loop.pick_device("cpu"))
    with pytest.raises(UserError, match=r"data\.val\.far: .*nothing\.npz"):
        build_parts(load(tmp_path, **{"data.val": "{near: val.npz, far: nothing.npz}"}), loop.pick_device("cpu"))


def test_standard_sets_and_columns_of_their_own(tmp_path, monkeypatch):
    """Karpathy's validation split by default, another split if named, ALBEF's list, a list with other columns."""
    layouts.shrink(monkeypatch)
    coco = layouts.coco(tmp_path / "coco")
    flickr = layouts.flickr30k(tmp_path / "flickr", albef=True)
    rows = [{"picture": f"{1007129816 + n}.jpg", "de": f"Bild {n}", "en": f"picture {n}"} for n in range(3)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = (
        f"{{coco: 'mscoco:{coco}', test: {{path: 'mscoco:{coco}', split: test}}, flickr30k: 'flickr30k:{flickr}', "
        f"own: {{path: {tmp_path / 'own.jsonl'}, root: {flickr / 'flickr30k-images'}, x_key: picture, y_key: en}}}}"
    )
    settings = config.load(None, runs.picture_settings(tmp_path, **{"data.val": sets, "data.train": "builtin:n=40"}))
    _, validation, _ = build_parts(settings, loop.pick_device("cpu"))
    sizes = {key: len(source.numbers) for key, source in validation.sources.items()}
    assert sizes == {"data.val.coco": 10, "data.val.test": 15, "data.val.flickr30k": 10, "data.val.own": 3}
    assert validation.sources["data.val.own"].pairs.item("y", 1) == "picture 1"
    assert validation.prefixes["data.val.coco"] == "coco/"
    assert [val_split(settings.data, name) for name in settings.data.val] == ["val", "test", "val", None]
    single = config.load(None, ["data.train=builtin", "data.split=train", f"data.val=mscoco:{coco}"]).data
    assert val_split(single, "val") == "val"
    (coco / "dataset_coco.json").unlink()
    with pytest.raises(UserError, match=r"data\.val\.coco: .*dataset_coco\.json"):
        build_parts(settings, loop.pick_device("cpu"))
    wrong = runs.picture_settings(tmp_path, **{"data.val": "{a: 'flickr:/data'}"})
    with pytest.raises(UserError, match=r"data\.val\.a .*flickr:/data"):
        build_parts(config.load(None, wrong), loop.pick_device("cpu"))
