"""Every command opens a run as training did: split, columns, fit, bad samples, current temperature."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from nuclr.errors import UserError
from nuclr.runs import checkpoint, config
from nuclr.runs.run import Run
from nuclr.training.loop import train
from tests.training import runs

SIZE = 16


def write_images(folder, count: int) -> None:
    """Write wide images whose left and right edges differ from the center, so that crop and squash differ."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for number in range(count):
        pixels = rng.integers(256, size=(20, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")


def settings_of(folder, **changes):
    """Return the settings of one short run on the images in `folder`."""
    base = {
        "data.root": folder,
        "data.batch_size": 8,
        "model.x.image_size": SIZE,
        "model.width": 8,
        "schedule.epochs": 1,
        "report": "false",
        "threads": 1,
    }
    (folder / "empty.yaml").write_text("name: tiny\n")
    return config.load(folder / "empty.yaml", [f"{key}={value}" for key, value in (base | changes).items()])


def write_jsonl(path, numbers, **extra) -> None:
    entries = ({"image": f"{n}.png", "caption": f"image number {n}", **extra} for n in numbers)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def test_evaluate_uses_the_split_that_training_evaluated(tmp_path, nuclr):
    """`data.val_split` is unset, so training falls back to `data.split`; evaluate used all splits of the file."""
    write_images(tmp_path, 40)
    write_jsonl(tmp_path / "train.jsonl", range(24), split="small")
    entries = [
        {"image": f"{n}.png", "caption": f"image {n}", "split": "small" if n < 30 else "rest"} for n in range(24, 40)
    ]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    settings = settings_of(tmp_path, **{"data.train": "train.jsonl", "data.val": "val.jsonl", "data.split": "small"})
    results = train(settings, tmp_path / "run")
    status, _, err = nuclr("evaluate", tmp_path / "run", "--out", tmp_path / "metrics.json")
    assert status == 0, err
    evaluated = json.loads((tmp_path / "metrics.json").read_text())["retrieval"]["val"]
    assert evaluated["sizes"] == [6, 6]
    assert evaluated["plain"] == pytest.approx(results.val)
    assert len(Run.open(tmp_path / "run").val.numbers) == 6


@pytest.fixture(scope="module")
def squashed(tmp_path_factory):
    """A run trained on squashed images."""
    folder = tmp_path_factory.mktemp("squashed")
    write_images(folder, 24)
    write_jsonl(folder / "train.jsonl", range(24))
    train(settings_of(folder, **{"data.train": "train.jsonl", "data.fit": "squash"}), folder / "run")
    return folder


def squashed_features(folder) -> torch.Tensor:
    model = Run.open(folder / "run").model
    images = [Image.open(folder / f"{n}.png").resize((SIZE, SIZE), Image.Resampling.BICUBIC) for n in range(24)]
    return model.encode_images(images)


def test_embed_reads_images_as_training_did(squashed, tmp_path, nuclr):
    assert nuclr("embed", squashed / "run", "--out", tmp_path / "f.npz")[0] == 0
    x = torch.from_numpy(np.load(tmp_path / "f.npz")["x"])
    torch.testing.assert_close(x, squashed_features(squashed), atol=0.02, rtol=0)
    assert nuclr("embed", squashed / "run", "--images", squashed, "--out", tmp_path / "i.npz")[0] == 0
    names = (tmp_path / "i.txt").read_text().split()
    order = [names.index(f"{n}.png") for n in range(24)]
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "i.npz")["x"])[order], x)


def test_popularity_reads_images_as_training_did(squashed, tmp_path, nuclr):
    """The popularity of a run equals that of the embeddings that `nuclr embed` writes."""
    assert nuclr("embed", squashed / "run", "--out", tmp_path / "f.npz")[0] == 0
    assert nuclr("popularity", squashed / "run", "--out", tmp_path / "of_run")[0] == 0
    arguments = ("--temperature", Run.open(squashed / "run").temperature, "--out", tmp_path / "of_file")
    assert nuclr("popularity", tmp_path / "f.npz", *arguments)[0] == 0
    sides = [json.loads((tmp_path / name / "popularity.json").read_text())["sides"] for name in ("of_run", "of_file")]
    for side in ("x", "y"):
        assert sides[0][side]["quantiles"] == pytest.approx(sides[1][side]["quantiles"], rel=1e-3)


def test_embed_finds_the_columns_that_training_used(tmp_path, nuclr):
    write_images(tmp_path, 16)
    rows = [f"{n}.png,something,image number {n}" for n in range(16)]
    (tmp_path / "pairs.csv").write_text("\n".join(["picture,caption,words", *rows]) + "\n")
    settings = settings_of(
        tmp_path, **{"data.train": "pairs.csv", "data.x.key": "picture", "data.y.key": "words", "data.mask": "false"}
    )
    train(settings, tmp_path / "run")
    assert Run.open(tmp_path / "run").settings.data.y.key == "words"
    status, _, err = nuclr("embed", tmp_path / "run", "--out", tmp_path / "f.npz")
    assert status == 0, err
    assert len(np.unique(np.load(tmp_path / "f.npz")["y"], axis=0)) == 16
    assert nuclr("embed", tmp_path / "run", "--pairs", "pairs.csv", "--out", tmp_path / "g.npz")[0] == 0


@pytest.mark.parametrize("objective", ["clip", "siglip", "isogclr"])
def test_the_learnt_temperature_is_used_everywhere(tmp_path, nuclr, objective):
    changes = {
        "clip": {"objective.learn_temperature": "true"},
        "siglip": {},
        "isogclr": {"objective.temperatures.tau_lr": 0.01},
    }[objective]
    settings = runs.load(tmp_path, **{"objective.name": objective, "objective.zeta_lr": "", **changes})
    results = train(settings, tmp_path / "run")
    state = checkpoint.load(checkpoint.newest_first(tmp_path / "run" / "checkpoints")[0]).objective
    if objective == "isogclr":
        expected = float(torch.cat([state["tau_x"], state["tau_y"]]).mean())
    else:
        expected = math.exp(-float(state["log_scale"]))
    initial = settings.objective.arguments()["temperature"]
    assert results.temperature == pytest.approx(expected, rel=1e-5)
    assert results.temperature != pytest.approx(initial, rel=1e-3)
    assert nuclr("popularity", tmp_path / "run")[0] == 0
    content = json.loads((tmp_path / "run" / "popularity" / "popularity.json").read_text())
    assert content["temperature"] == results.temperature
    (tmp_path / "run" / "results.json").unlink()  # an unfinished run: the checkpoint knows the temperature
    assert Run.open(tmp_path / "run").temperature == pytest.approx(expected, rel=1e-5)


def test_samples_that_training_left_out_stay_out(tmp_path):
    write_images(tmp_path, 24)
    (tmp_path / "3.png").write_bytes(b"not an image")
    write_jsonl(tmp_path / "train.jsonl", range(24))
    train(settings_of(tmp_path, **{"data.train": "train.jsonl", "data.max_bad_share": 0.1}), tmp_path / "run")
    run = Run.open(tmp_path / "run")
    assert run.train.numbers.tolist() == [n for n in range(24) if n != 3]
    assert list(run.train.bad) == [3]


def test_run_of_an_unfinished_run_and_repr(tmp_path):
    settings = runs.load(tmp_path)
    train(settings, tmp_path / "run")
    finished = Run.open(tmp_path / "run")
    assert repr(finished) == f"Run({str(tmp_path / 'run')!r}, nuclr on train.npz, finished)"
    features = finished.features(finished.val)
    (tmp_path / "run" / "results.json").unlink()
    run = Run.open(tmp_path / "run")
    assert not run.finished and "unfinished" in repr(run)
    torch.testing.assert_close(run.features(run.val).x, features.x)
    for other in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=str(other)):
            Run.open(other)


def test_config_holds_every_value_as_used(tmp_path):
    """No nulls, and loading it again gives the same settings."""
    write_images(tmp_path, 16)
    rows = [f"{n}.png,image number {n}" for n in range(16)]
    (tmp_path / "pairs.csv").write_text("\n".join(["filepath,title", *rows]) + "\n")
    train(settings_of(tmp_path, **{"data.train": "pairs.csv", "data.val": "pairs.csv"}), tmp_path / "run")
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert "null" not in text
    settings = Run.open(tmp_path / "run").settings
    assert settings.model.x.encoder == "tiny_resnet" and settings.model.x.image_size == SIZE
    assert settings.model.y.encoder == "tiny_text" and settings.model.y.max_length == 32
    assert settings.model.width == 8 and settings.device == "cpu" and settings.threads == 1
    assert settings.objective.options["xi_init"] == 0.0 and settings.objective.options["temperature"] == 0.03
    assert settings.out == str(tmp_path / "run")
    assert (settings.data.x.key, settings.data.y.key) == ("filepath", "title")
    assert config.to_yaml(settings) == text


@pytest.mark.parametrize("wrong", [0, -1, 1e-320, 1e400, "x", None])
def test_a_forged_temperature_is_refused(squashed, tmp_path, wrong):
    shutil.copytree(squashed / "run", tmp_path / "run")
    results = tmp_path / "run" / "results.json"
    results.write_text(json.dumps(json.loads(results.read_text()) | {"temperature": wrong}))
    with pytest.raises(UserError, match=r"results\.json"):
        Run.open(tmp_path / "run").temperature  # noqa: B018
