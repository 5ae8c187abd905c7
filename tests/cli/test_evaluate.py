"""`nuclr evaluate` on tiny trained runs of vectors, images, texts and views: metrics, corrections, wrong input."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import nuclr as package
from nuclr.data.formats.beir import read_beir
from nuclr.evaluation import METRICS, knn_accuracy, linear_probe_accuracy, ranking_metrics
from nuclr.evaluation.metrics import recall_at
from nuclr.models import DualEncoder
from nuclr.runs import config
from nuclr.runs import folder as run_folder
from nuclr.training.loop import train
from tests.data import make
from tests.data.formats.test_beir import write as write_beir
from tests.training import runs


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    names = {"data.x.name": "image", "data.y.name": "text"}
    train(runs.load(folder, **{"schedule.epochs": 3}, **names), folder / "run")
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    settings = runs.picture_settings(folder, **{"schedule.epochs": 1, "data.train": "builtin:n=60"})
    train(config.load(folder / "empty.yaml", settings), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A run on questions and answers, two of each per row, that all belong together."""
    folder = tmp_path_factory.mktemp("texts")
    train(config.load(folder / "empty.yaml", runs.text_settings(folder)), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def views(tmp_path_factory):
    """A run on two views of images, with labeled images for its validation."""
    folder = tmp_path_factory.mktemp("views")
    write_images(folder / "classes", red=7, green=6)
    settings = runs.view_settings(folder, **{"data.classes": folder / "classes", "schedule.epochs": 1})
    train(config.load(folder / "empty.yaml", settings), folder / "run")
    return folder


@pytest.fixture
def evaluate(nuclr, tmp_path):
    """Run the command; return what it prints and what it writes."""

    def run(*arguments):
        out = tmp_path / "metrics.json"
        out.unlink(missing_ok=True)
        status, printed, err = nuclr("evaluate", *arguments, "--out", out)
        assert status == 0, err
        return printed, json.loads(out.read_text())

    return run


@pytest.fixture
def refused(nuclr):
    def run(words, *arguments):
        status, out, err = nuclr("evaluate", *arguments)
        assert (status, out) == (2, "")
        line = err.strip().splitlines()[-1]
        assert words in line and "Traceback" not in err, err

    return run


def write_classes(path, width=12, **changes):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(10, width)), "labels": np.arange(10) % 3, "prompts": rng.normal(size=(3, 2, 8))}
    np.savez(path, **{key: value for key, value in (arrays | changes).items() if value is not None})
    return path


def write_images(path, **counts):
    rng = np.random.default_rng(0)
    for channel, (name, count) in enumerate(counts.items()):
        (path / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(60, size=(20, 20, 3), dtype=np.uint8)
            pixels[:, :, channel] += 150
            Image.fromarray(pixels).save(path / name / f"{number}.png")
    return path


def write_captions(folder):
    images = make.write_images(folder)
    entries = [{"image": name, "captions": captions} for name, captions in make.CAPTIONS.items()]
    return make.write_lines(images / "list.jsonl", *entries)


def search_folder(folder):
    """Write questions and answers as a BEIR folder; document 3 has the identifier of a query."""
    rows = runs.text_rows(12, seed=5)
    queries = [(f"q{i}" if i != 3 else "d3", row["question"]) for i, row in enumerate(rows)]
    corpus = [(f"d{i}", "Title", row["answer"]) for i, row in enumerate(rows)]
    judgments = [(key, f"d{i}", 2) for i, (key, _) in enumerate(queries) if i != 3]
    judgments += [("q1", "d2", 1), ("q1", "d4", 0), ("d3", "d5", 1)]
    return write_beir(folder, queries, corpus, test=judgments, dev=judgments[:4])


def test_the_runs_own_held_out_pairs_give_the_metrics_of_training(evaluate, vectors):
    printed, content = evaluate(vectors / "run", "--correct", "bank=train", "--correct", "bank=queries")
    task = content["retrieval"]["val"]
    assert task["plain"] == pytest.approx(run_folder.read_results(vectors / "run").val)
    assert (task["sides"], task["sizes"]) == (["image", "text"], [20, 40])
    train_bank, queries = content["corrections"]["train"], content["corrections"]["queries"]
    assert (train_bank["transductive"], queries["transductive"]) == (False, True)
    assert (train_bank["bank_x"], train_bank["bank_y"]) == (60, 120)
    assert train_bank["chosen_on"] == "data.val: val.npz" and train_bank["temperature"] > 0
    assert task["correction_crossed"] and set(task["corrected"]["train"]) == set(task["plain"])
    assert [len(chosen) for chosen in task["corrections_of_halves"].values()] == [2, 2]
    for direction, gain in task["gains"]["train"].items():
        change = task["corrected"]["train"][f"{direction}_R@1"] - task["plain"][f"{direction}_R@1"]
        assert gain["difference"] == pytest.approx(change)
        assert gain["low"] <= gain["difference"] <= gain["high"]
    for words in ("20 images, 40 captions", "recall@1, image to text", "corrected  transductive", "on the other half"):
        assert words in printed


def test_a_registered_metric_is_in_the_results_and_the_table(vectors, monkeypatch):
    """One row of the registry is enough."""
    monkeypatch.setitem(METRICS, "R@3", recall_at(3))
    result = package.evaluate(vectors / "run", correct=["bank=queries"])
    task = result.to_json()["retrieval"]["val"]
    for metrics in (task["plain"], task["corrected"]["queries"]):
        assert metrics["mean_R@1"] <= metrics["mean_R@3"] <= metrics["mean_R@5"]
        assert {"image_to_text_R@3", "text_to_image_R@3", "mean_chance@3"} <= set(metrics)
    assert "recall@3, image to text" in result.table() and "recall@3, mean" in result.table()
    assert repr(result).startswith("Evaluation(") and "\n" not in repr(result)


def test_several_test_sets_of_vectors(evaluate, vectors, tmp_path):
    classes, val = write_classes(tmp_path / "classes.npz"), vectors / "val.npz"
    sets = ("--retrieval", val, "--retrieval", val, "--retrieval", "val.npz", "--classification", classes)
    printed, content = evaluate(vectors / "run", *sets)
    assert list(content["retrieval"]) == [str(val), f"{val} (2)", "val.npz"], "relative to the run's data.root"
    assert content["corrections"] == {}
    labeled = content["classification"][str(classes)]
    assert (labeled["images"], labeled["classes"], labeled["templates"]) == (10, 3, None)
    assert 0 <= labeled["plain"]["zero_shot_acc1"] <= labeled["plain"]["zero_shot_acc5"] <= 1
    assert "zero-shot accuracy" in printed


def test_a_run_on_images(evaluate, pictures, tmp_path):
    """Labeled folders with templates from another file, a caption list, and each treatment of duplicates."""
    captions, classes = write_captions(tmp_path / "pairs"), write_images(tmp_path / "classes", cat=2, dog=3)
    (tmp_path / "templates.json").write_text('["a {}", "{}!"]')
    options = ("--classification", classes, "--prompts", tmp_path / "templates.json")
    tasks = {}
    for way in ("merge", "miss"):
        _, content = evaluate(pictures, "--retrieval", captions, "--duplicates", way, *options)
        tasks[way] = next(iter(content["retrieval"].values()))
    assert [tasks[way]["sizes"][1] for way in tasks] == [7, 8], "one caption occurs twice"
    labeled = next(iter(content["classification"].values()))
    assert (labeled["class_names"], labeled["templates"]) == (["cat", "dog"], ["a {}", "{}!"])
    assert set(content["subject"]["images"]) == {"size", "mean", "std", "fit", "fit_of_labeled_images"}


def test_encoders_that_are_not_a_run(evaluate, refused, vectors):
    model, pairs = vectors / "run" / "model", ("--retrieval", vectors / "val.npz")
    printed, _ = evaluate(model, *pairs, "--correct", "bank=queries")
    assert "the default of PopularityCorrection" in printed
    refused("bank=train needs a run folder", model, *pairs, "--correct", "bank=train")
    refused("nothing to evaluate on", model)


def test_the_held_out_pairs_of_a_run_on_texts(evaluate, texts):
    printed, content = evaluate(texts, "--correct", "bank=train")
    assert "recall@1, question to answer" in printed and "recall@1, answer to question" in printed
    for word in ("image", "caption"):
        assert word not in printed + json.dumps(content), word
    task = content["retrieval"]["val"]
    assert task["plain"] == pytest.approx(run_folder.read_results(texts).val)
    assert task["sides"] == ["question", "answer"] and task["sizes"] == [30, 30]
    assert task["plain"]["question_to_answer_chance@1"] == pytest.approx(2 / 30), "both answers of a row are right"


def test_a_beir_folder(evaluate, texts, tmp_path):
    folder = search_folder(tmp_path / "set")
    printed, content = evaluate(texts, "--beir", folder, "--correct", "bank=train", "--correct", "bank=queries")
    for text in ("12 queries, 12 documents", "nDCG@10", "MRR@10", "recall@100", "MAP", "transductive"):
        assert text in printed
    task = content["beir"][str(folder)]
    assert (task["split"], task["judgments"], task["bad_samples"]) == ("test", 14, 0)
    assert task["correction_chosen_here"] is False
    model, loaded = DualEncoder.from_pretrained(texts / "model"), read_beir(folder)
    queries = model.encode_x([loaded.queries[i] for i in range(12)])
    documents = model.encode_y([loaded.documents[i] for i in range(12)])
    expected = ranking_metrics(queries, documents, loaded.qrels, loaded.document_ids, ignore=loaded.ignore)
    assert task["plain"] == pytest.approx(expected) and loaded.ignore.tolist() == [[3, 3]]
    assert [set(values) for values in task["corrected"].values()] == [set(expected)] * 2
    printed, _ = evaluate(texts, "--beir", folder, "--split", "dev")
    assert "dev: 4 queries, 12 documents" in printed


@pytest.mark.slow
def test_a_run_on_a_beir_folder(evaluate, tmp_path):
    """Trained on one split and validated on another, whose judgments must not be reported as if they were new."""
    folder = search_folder(tmp_path / "set")
    changes = {"data.train": folder, "data.split": "test", "data.val": folder, "data.val_split": "dev"}
    changes["data.batch_size"] = 8
    train(config.load(tmp_path / "empty.yaml", runs.text_settings(tmp_path, **changes)), tmp_path / "run")
    assert "query_to_document_R@1" in run_folder.read_results(tmp_path / "run").val
    for options, chosen_here in ((("--split", "dev"), True), ((), False)):
        _, content = evaluate(tmp_path / "run", "--beir", folder, *options, "--correct", "bank=train")
        assert next(iter(content["beir"].values()))["correction_chosen_here"] is chosen_here


def test_labeled_images_of_a_run_on_views(evaluate, views):
    contents = {}
    for name, options in {"own": (), "given": ("--classes", views / "classes"), "tower": ("--no-head",)}.items():
        printed, contents[name] = evaluate(views / "run", *options)
        assert "7 labeled, 6 to classify, 2 classes" in printed
        assert "7-nearest neighbors" in printed and "linear probe" in printed
    own, given, tower = (next(iter(contents[name]["probe"].values())) for name in contents)
    assert own["plain"] == given["plain"]
    assert own["plain"]["knn_acc1"] == pytest.approx(run_folder.read_results(views / "run").val["knn_acc1"])
    assert contents["own"]["subject"]["head"] and not contents["tower"]["subject"]["head"]
    model = DualEncoder.from_pretrained(views / "run" / "model")
    files = sorted((views / "classes").glob("*/*.png"))
    labels = torch.tensor([int(file.parent.name == "red") for file in files])
    first = torch.tensor([0, 2, 4, 6, 8, 10, 12])  # green 0 to 5, red 6 to 12: every second image of each class
    second = torch.tensor([1, 3, 5, 7, 9, 11])
    for task, head in ((own, True), (tower, False)):
        x = model.encode_x(files, head=head)
        halves = x[first], labels[first], x[second], labels[second]
        assert task["plain"]["knn_acc1"] == pytest.approx(knn_accuracy(*halves, k=7))
        assert task["plain"]["linear_probe_acc1"] == pytest.approx(linear_probe_accuracy(*halves))


def test_labeled_vectors(evaluate, refused, vectors, texts, tmp_path):
    rng = np.random.default_rng(0)
    run, path, labels = vectors / "run", tmp_path / "classes.npz", np.arange(20) % 3
    for width in (12, 8):  # of side x and of side y
        np.savez(path, x=rng.normal(size=(20, width)) + 3 * np.eye(width)[labels], labels=labels)
        printed, _ = evaluate(run, "--classes", path)
        assert "11 labeled, 9 to classify, 3 classes" in printed
    refused("vectors", texts, "--classes", path)
    for arrays, words in (
        ({"x": rng.normal(size=(20, 12)), "labels": np.arange(20)}, "classes.npz: no class has two"),
        ({"x": rng.normal(size=(20, 11)), "labels": labels}, "width 11"),
        ({"x": rng.normal(size=(20, 12))}, "classes.npz: no array named"),
    ):
        np.savez(path, **arrays)
        refused(words, run, "--classes", path)


def test_wrong_input_for_a_run_on_vectors_is_refused(refused, vectors, tmp_path):
    run, option = vectors / "run", "--classification"
    rng = np.random.default_rng(0)
    (tmp_path / "there.json").write_text("{}")
    np.savez(tmp_path / "wide.npz", x=rng.normal(size=(4, 13)), y=rng.normal(size=(4, 8)))
    classes = write_classes(tmp_path / "classes.npz")
    for words, *arguments in (
        ("nothing", tmp_path / "nothing"),
        ("val.npz", vectors / "val.npz"),
        ("config.yaml", tmp_path),
        ("bank=train, bank=queries", run, "--correct", "bank=test"),
        ("flickr30k", run, "--retrieval", "flickr30:/data"),
        ("nothing.npz", run, "--retrieval", tmp_path / "nothing.npz"),
        ("images on side x", run, "--retrieval", "builtin:n=20"),
        ("there.json", run, "--out", tmp_path / "there.json"),
        (".json", run, "--out", tmp_path / "metrics.txt"),
        ("does not exist", run, "--out", tmp_path / "no" / "metrics.json"),
        ("vectors of width 13", run, "--retrieval", tmp_path / "wide.npz"),
        ("vectors of width 13", run, option, write_classes(tmp_path / "a.npz", width=13)),
        ("'prompts'", run, option, write_classes(tmp_path / "b.npz", prompts=None)),
        ("c.npz", run, option, write_classes(tmp_path / "c.npz", labels=np.arange(10) % 4)),
        ("d.npz", run, option, write_classes(tmp_path / "d.npz", labels=np.arange(9))),
        ("--correct needs --retrieval or --beir", run, option, classes, "--correct", "bank=train"),
    ):
        refused(words, *arguments)


def test_what_a_model_does_not_take_is_refused(refused, pictures, texts, views, vectors, tmp_path):
    option, classes, answers = "--classification", views / "classes", texts.parent / "val.jsonl"
    folders = write_images(tmp_path / "b", cat=1, dog=1)
    (tmp_path / "templates.json").write_text('["a photo"]')
    for words, *arguments in (
        ("no images of this class", pictures, option, write_images(tmp_path / "a", cat=1, dog=0)),
        ("'a photo'", pictures, option, folders, "--prompts", tmp_path / "templates.json"),
        ("nothing.json", pictures, option, folders, "--prompts", tmp_path / "nothing.json"),
        ("vectors", pictures, option, write_classes(tmp_path / "classes.npz")),
        ("images", texts, option, classes),
        ("texts", views / "run", option, classes),
        ("images", texts, "--classes", classes),
        ("x: images, y: images", views / "run", "--beir", search_folder(tmp_path / "set")),
        ("texts on side x", views / "run", "--retrieval", answers),
        ("images on side x", texts, "--retrieval", "builtin:n=20"),
        ("val.jsonl", vectors / "run", "--retrieval", answers),
        ("--correct needs --retrieval or --beir", views / "run", "--correct", "bank=train"),
    ):
        refused(words, *arguments)


def test_wrong_folders_are_refused(refused, texts, views, tmp_path):
    refused("nothing", texts, "--beir", tmp_path / "nothing")
    folder = search_folder(tmp_path / "set")
    refused("--split", texts, "--beir", folder, "--split", "tests")
    write_beir(folder, test="q1\td1\t0\n")
    refused("'q1'", texts, "--beir", folder)
    write_beir(folder, test="q1\td1\thigh\n")
    refused("line 2", texts, "--beir", folder)
    refused("nothing: no such", views / "run", "--classes", tmp_path / "nothing")
    refused("no class has two", views / "run", "--classes", write_images(tmp_path / "one", red=1, green=1))
