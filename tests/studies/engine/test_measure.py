"""Test sets, halves, and the outcome of every query."""

import dataclasses
import json

import numpy as np
import pytest

from nuclr.errors import UserError
from nuclr.evaluation.test_sets import RETRIEVAL
from nuclr.runs import config
from nuclr.runs.run import Run
from nuclr.runs.settings import Data
from nuclr.studies.engine import measure
from nuclr.studies.evaluate import evaluate_subject
from nuclr.studies.tasks import open_labels, open_retrieval, open_subject
from nuclr.training.loop import train
from tests.data import layouts, make
from tests.training import runs


def assert_hits_equal_metrics(hits, metrics):
    for key, name in (("x_to_y", "image_to_text"), ("y_to_x", "text_to_image")):
        for column, k in enumerate((1, 5, 10)):
            assert hits[key][:, column].mean() == pytest.approx(metrics[f"{name}_R@{k}"], abs=1e-6)


def test_a_group_is_one_cluster(tmp_path):
    """Rows with three x and three y each; the first two rows share an x, so they are one cluster."""
    rows = [{"en": [f"en {g} {i}" for i in range(3)], "de": [f"de {g} {i}" for i in range(3)]} for g in range(8)]
    rows[1]["en"][2] = rows[0]["en"][0]
    make.write_lines(tmp_path / "pairs.jsonl", *rows)
    changes = {"data.train": "pairs.jsonl", "data.val": "pairs.jsonl", "data.root": tmp_path, "schedule.epochs": 1}
    changes |= {"data.batch_size": 8, "model.width": 8, "model.x.encoder": "bag_of_words"}
    train(config.load(None, [f"{key}={value}" for key, value in changes.items()]), tmp_path / "run")
    run = Run.open(tmp_path / "run")
    whole = measure.val_features(run)["val"]
    texts = {side: [run.val.pairs.item(side, n) for n in getattr(whole, f"{side}_number")] for side in "xy"}
    hits = measure.retrieval_hits(whole)
    clusters = {side: {} for side in "xy"}
    for side, key in (("x", "x_to_y_cluster"), ("y", "y_to_x_cluster")):
        for text, cluster in zip(texts[side], hits[key].tolist(), strict=True):
            clusters[side].setdefault(text.split()[1], set()).add(cluster)
    assert clusters["x"] == clusters["y"]
    assert [len(found) for found in clusters["x"].values()] == [1] * 8
    assert clusters["x"]["0"] == clusters["x"]["1"]
    assert set().union(*clusters["x"].values()) == set(range(7))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    changes = {"schedule.epochs": 1, "data.train": "builtin:n=40"}
    settings = config.load(None, runs.picture_settings(folder, **changes))
    train(settings, folder / "run")
    return settings, folder / "run"


@pytest.mark.parametrize(("name", "duplicates", "captions"), [("flickr30k", "miss", 6), ("pairs", "merge", 5)])
def test_duplicate_captions_count_as_in_evaluate(trained, tmp_path, monkeypatch, name, duplicates, captions):
    """A known set keeps every copy of a caption; other pairs merge copies. `compare` and `evaluate` agree on both."""
    settings, run = trained
    monkeypatch.setitem(RETRIEVAL, "flickr30k", dataclasses.replace(RETRIEVAL["flickr30k"], sizes={"test": (3, 6)}))
    make.write_images(tmp_path / "images")
    test = {image: texts for image, texts in make.CAPTIONS.items() if image in ("a.jpg", "b.png", "c.jpg")}
    entries = [
        {"filename": image, "split": "test", "sentences": [{"raw": text} for text in texts]}
        for image, texts in test.items()
    ]
    (tmp_path / "dataset.json").write_text(json.dumps({"images": entries}))
    pairs = make.write_lines(
        tmp_path / "images" / "pairs.jsonl", *({"image": image, "captions": texts} for image, texts in test.items())
    )
    path = f"flickr30k:{tmp_path}" if name == "flickr30k" else str(pairs)

    parsed = measure.open_test("test", path, settings.data)
    hits = measure.retrieval_hits(measure.test_features(Run.open(run), parsed))
    subject = open_subject(run, best=False, batch_size=None, device="cpu")
    (evaluated,) = evaluate_subject(subject, [open_retrieval(path, Data())]).sets["retrieval"].values()
    assert evaluated.facts["duplicates"]["way"] == duplicates
    assert parsed.key.endswith("_miss") == (duplicates == "miss")
    assert len(hits["y_to_x"]) == evaluated.facts["sizes"][1] == captions
    assert_hits_equal_metrics(hits, evaluated.plain)


def test_prompt_files_belong_to_sets_of_classes(trained, tmp_path, monkeypatch):
    """Another prompt file is another test set; the outcome equals that of evaluation with these prompts."""
    settings, run = trained
    layouts.shrink(monkeypatch)
    cifar = f"cifar10:{layouts.cifar10_binary(tmp_path / 'cifar')}"
    (tmp_path / "prompts.txt").write_text("a {}\nthe {}\n")
    own = measure.open_test("cifar10", cifar, settings.data)
    other = measure.open_test("cifar10", cifar, settings.data, prompts=tmp_path / "prompts.txt")
    assert (own.prompts, other.prompts) == (None, str(tmp_path / "prompts.txt")) and own.key != other.key
    hits = measure.class_hits(Run.open(run), measure.MeasuredSet(**dataclasses.asdict(other)))
    subject = open_subject(run, best=False, batch_size=None, device="cpu")
    task = open_labels(cifar, Data(), kind="zero_shot", prompts=tmp_path / "prompts.txt")
    result = evaluate_subject(subject, [task]).sets["classification"]["cifar10"]
    assert result.facts["templates"] == ["a {}", "the {}"]
    assert hits["top"][:, 0].mean() == pytest.approx(result.plain["zero_shot_acc1"])


def test_pairs_and_classes_are_distinguished(tmp_path):
    data = Data(root=str(tmp_path))
    runs.write_vectors(tmp_path / "pairs.npz", images=5)
    np.savez(tmp_path / "classes.npz", x=np.ones((4, 3), "f"), labels=np.arange(4) % 2, prompts=np.ones((2, 3), "f"))
    assert measure.open_test("test", "pairs.npz", data).kind == "retrieval"
    assert measure.open_test("test", "classes.npz", data).kind == "zero_shot"
    np.savez(tmp_path / "bad.npz", x=np.ones((4, 3), "f"), labels=np.full(4, 7), prompts=np.ones((2, 3), "f"))
    np.savez(tmp_path / "half.npz", x=np.ones((4, 3), "f"), labels=np.arange(4) % 2)
    for name, message in (("nowhere.npz", "nowhere.npz"), ("bad.npz", "7"), ("half.npz", "prompts")):
        with pytest.raises(UserError, match=message):
            measure.open_test("test", name, data)
