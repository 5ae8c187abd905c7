"""`nuclr evaluate` on runs of texts and of views: names of sides, BEIR folders, neighbors, linear probe, refusals."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from nuclr.data.formats.beir import read_beir
from nuclr.evaluation import knn_accuracy, linear_probe_accuracy, ranking_metrics
from nuclr.models import DualEncoder
from nuclr.runs import config
from nuclr.runs import folder as run_folder
from nuclr.training.loop import train
from tests.data.formats.test_beir import write as write_beir
from tests.training import runs


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
    write_classes(folder / "classes", red=7, green=6)
    settings = runs.view_settings(folder, **{"data.classes": folder / "classes", "schedule.epochs": 1})
    train(config.load(folder / "empty.yaml", settings), folder / "run")
    return folder


@pytest.fixture
def nuclr(nuclr):
    return lambda *arguments: nuclr("evaluate", *arguments)


@pytest.fixture
def refused(nuclr):
    def run(message, *arguments):
        status, out, err = nuclr(*arguments)
        assert (status, out) == (2, "")
        assert message in err.strip().splitlines()[-1] and "Traceback" not in err, err

    return run


def write_classes(path, **counts):
    rng = np.random.default_rng(0)
    for channel, (name, count) in enumerate(counts.items()):
        (path / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(60, size=(20, 20, 3), dtype=np.uint8)
            pixels[:, :, channel] += 150
            Image.fromarray(pixels).save(path / name / f"{number}.png")
    return path


def search_folder(folder):
    """Write questions and answers as a BEIR folder; document 3 has the identifier of a query."""
    rows = runs.text_rows(12, seed=5)
    queries = [(f"q{i}" if i != 3 else "d3", row["question"]) for i, row in enumerate(rows)]
    corpus = [(f"d{i}", "Title", row["answer"]) for i, row in enumerate(rows)]
    judgments = [(key, f"d{i}", 2) for i, (key, _) in enumerate(queries) if i != 3]
    judgments += [("q1", "d2", 1), ("q1", "d4", 0), ("d3", "d5", 1)]
    return write_beir(folder, queries, corpus, test=judgments, dev=judgments[:4])


def test_the_held_out_pairs_of_a_run_on_texts(nuclr, texts, tmp_path):
    out = tmp_path / "metrics.json"
    status, printed, err = nuclr(texts, "--out", out, "--correct", "bank=train", "--bank-size", 40)
    assert status == 0, err
    assert "recall@1, question to answer" in printed and "recall@1, answer to question" in printed
    assert "each half of the question texts is ranked with the correction chosen on the other half" in printed
    text = out.read_text()
    for word in ("image", "caption"):
        assert word not in printed + err + text, word
    task = json.loads(text)["retrieval"]["val"]
    assert task["plain"] == pytest.approx(run_folder.read_results(texts)["val"])
    assert task["sides"] == ["question", "answer"] and task["sizes"] == [30, 30]
    assert task["plain"]["question_to_answer_chance@1"] == pytest.approx(2 / 30), "both answers of a row are right"
    assert task["names"]["plain"] == {"open_clip": {}, "clip_benchmark": {}, "paper": {}}
    assert set(task["corrected"]["train"]) == set(task["plain"])


def test_other_pairs_have_the_runs_columns_or_the_usual_ones(nuclr, texts, tmp_path):
    rows = [{"id": 1, "answer": row["answer"], "question": row["question"]} for row in runs.text_rows(9, seed=3)]
    (tmp_path / "three.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "usual.csv").write_text("query,positive\n" + "".join(f"question {i},answer {i}\n" for i in range(5)))
    out = tmp_path / "metrics.json"
    status, _, err = nuclr(
        texts, "--retrieval", tmp_path / "three.jsonl", "--retrieval", tmp_path / "usual.csv", "--out", out
    )
    assert status == 0, err
    first, second = json.loads(out.read_text())["retrieval"].values()
    assert first["sides"] == second["sides"] == ["question", "answer"]
    assert (first["sizes"][0], second["sizes"]) == (9, [5, 5])


def test_a_beir_folder(nuclr, texts, tmp_path):
    folder, out = search_folder(tmp_path / "set"), tmp_path / "metrics.json"
    status, printed, err = nuclr(
        texts, "--beir", folder, "--out", out, "--correct", "bank=train", "--correct", "bank=queries"
    )
    assert status == 0, err
    for text in (f"{folder}, test: 12 queries, 12 documents", "nDCG@10", "MRR@10", "recall@100", "MAP", "transductive"):
        assert text in printed
    task = json.loads(out.read_text())["beir"][str(folder)]
    assert (task["split"], task["judgments"], task["bad_samples"]) == ("test", 14, 0)
    assert task["correction_chosen_here"] is False

    model, loaded = DualEncoder.from_pretrained(texts / "model"), read_beir(folder)
    queries = model.encode_x([loaded.queries[i] for i in range(12)])
    documents = model.encode_y([loaded.documents[i] for i in range(12)])
    expected = ranking_metrics(queries, documents, loaded.qrels, loaded.document_ids, ignore=loaded.ignore)
    assert task["plain"] == pytest.approx(expected) and loaded.ignore.tolist() == [[3, 3]]
    assert set(task["corrected"]) == {"train", "queries"}
    assert all(set(values) == set(expected) for values in task["corrected"].values())
    status, printed, err = nuclr(texts, "--beir", folder, "--split", "dev")
    assert status == 0 and "dev: 4 queries, 12 documents" in printed, err


@pytest.mark.slow
def test_a_run_on_a_beir_folder(nuclr, tmp_path):
    """Trained on one split and validated on another, whose judgments must not be reported as if they were new."""
    folder = search_folder(tmp_path / "set")
    changes = {"data.train": folder, "data.split": "test", "data.val": folder, "data.val_split": "dev"}
    changes["data.batch_size"] = 8
    settings = config.load(tmp_path / "empty.yaml", runs.text_settings(tmp_path, **changes))
    train(settings, tmp_path / "run")
    assert "query_to_document_R@1" in run_folder.read_results(tmp_path / "run")["val"]
    status, printed, err = nuclr(tmp_path / "run", "--beir", folder, "--split", "dev", "--correct", "bank=train")
    assert status == 0 and "chosen on these judgments (data.val)" in printed, err
    status, printed, err = nuclr(tmp_path / "run", "--beir", folder, "--correct", "bank=train")
    assert status == 0 and "chosen on these judgments" not in printed, err


def test_labeled_images_of_a_run_on_views(nuclr, views, tmp_path):
    contents = {}
    for name, options in {"own": (), "given": ("--classes", views / "classes"), "tower": ("--no-head",)}.items():
        out = tmp_path / f"{name}.json"
        status, printed, err = nuclr(views / "run", *options, "--out", out)
        assert status == 0, err
        assert "7 labeled, 6 to classify, 2 classes" in printed
        assert "7-nearest neighbors" in printed and "linear probe" in printed
        contents[name] = json.loads(out.read_text())
    own, given, tower = (next(iter(contents[name]["probe"].values())) for name in contents)
    assert own["plain"] == given["plain"]
    assert own["plain"]["knn_acc1"] == pytest.approx(run_folder.read_results(views / "run")["val"]["knn_acc1"])
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
        assert task["plain"]["knn_vote_acc1"] == pytest.approx(knn_accuracy(*halves, k=7, temperature=None))
        assert task["plain"]["linear_probe_acc1"] == pytest.approx(linear_probe_accuracy(*halves))


def test_labeled_vectors(nuclr, refused, texts, tmp_path):
    rng = np.random.default_rng(0)
    train(runs.load(tmp_path, **{"schedule.epochs": 1}), tmp_path / "run")
    path = tmp_path / "classes.npz"
    labels = np.arange(20) % 3
    np.savez(path, x=rng.normal(size=(20, 12)) + 3 * np.eye(12)[labels], labels=labels)
    status, printed, err = nuclr(tmp_path / "run", "--classes", path)
    assert status == 0 and "11 labeled, 9 to classify, 3 classes" in printed, err
    refused("holds vectors, but", texts, "--classes", path)
    np.savez(path, x=rng.normal(size=(20, 8)) + 3 * np.eye(8)[labels], labels=labels)  # the width of side y
    status, printed, err = nuclr(tmp_path / "run", "--classes", path)
    assert status == 0 and "11 labeled, 9 to classify, 3 classes" in printed, err
    np.savez(path, x=rng.normal(size=(20, 12)), labels=np.arange(20))
    refused("labels needs at least two classes, and two rows of one of them", tmp_path / "run", "--classes", path)
    np.savez(path, x=rng.normal(size=(20, 11)), labels=labels)
    refused("x has 11 coordinates, but", tmp_path / "run", "--classes", path)
    np.savez(path, x=rng.normal(size=(20, 12)))
    refused("no array named 'labels'; it needs x, labels", tmp_path / "run", "--classes", path)


def test_what_a_model_does_not_take_is_refused(refused, texts, views, tmp_path):
    classes, folder = views / "classes", search_folder(tmp_path / "set")
    needs = "zero-shot classification needs images on one side and texts on the other, but"
    refused(needs, texts, "--classification", classes)
    refused(f"takes images on both sides; --classes {classes} classifies by neighbors",
            views / "run", "--classification", classes)  # fmt: skip
    refused("holds images, but", texts, "--classes", classes)
    refused("needs a model of texts on both sides, but", views / "run", "--beir", folder)
    refused("takes images on both sides", views / "run", "--beir", folder)
    refused("holds texts on side x, but", views / "run", "--retrieval", texts.parent / "val.jsonl")
    refused("holds images on side x, but", texts, "--retrieval", "builtin:n=20")
    train(runs.load(tmp_path, **{"schedule.epochs": 1}), tmp_path / "vectors")
    refused("holds texts on side x, but", tmp_path / "vectors", "--retrieval", texts.parent / "val.jsonl")
    refused("--correct needs --retrieval or --beir", views / "run", "--correct", "bank=train")


def test_wrong_folders_are_refused(refused, texts, views, tmp_path):
    refused("no such folder; a BEIR folder has corpus.jsonl", texts, "--beir", tmp_path / "nothing")
    folder = search_folder(tmp_path / "set")
    refused("no split 'tests' (--split); found: dev, test; nearest: test", texts, "--beir", folder, "--split", "tests")
    write_beir(folder, test="q1\td1\t0\n")
    refused("query 'q1' has no relevant document (relevance 1 or more)", texts, "--beir", folder)
    write_beir(folder, test="q1\td1\thigh\n")
    refused('line 2: relevance "high"; needs a whole number', texts, "--beir", folder)
    refused("no such folder; needs one folder of images per class", views / "run", "--classes", tmp_path / "nothing")
    one = write_classes(tmp_path / "one", red=1, green=1)
    refused("no class has two usable images", views / "run", "--classes", one)
    rows = [{"question": "what?", "answer": ""}, {"question": "is it red?", "answer": "it is red"}]
    (tmp_path / "empty.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused("line 1: question has no answer", texts, "--retrieval", tmp_path / "empty.jsonl")
