"""`nuclr evaluate` on tiny trained runs: metrics, their names, corrections, and wrong input."""

import json

import numpy as np
import pytest
from PIL import Image

from nuclr.runs import config
from nuclr.runs import folder as run_folder
from nuclr.training.loop import train
from tests.data import make
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


@pytest.fixture
def nuclr(nuclr):
    return lambda *arguments: nuclr("evaluate", *arguments)


@pytest.fixture
def refused(nuclr):
    def run(message, *arguments):
        status, out, err = nuclr(*arguments)
        assert (status, out) == (2, "")
        line = err.strip().splitlines()[-1]
        assert message in line and "Traceback" not in err, err

    return run


def write_classes(path, width=12, **changes):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(10, width)), "labels": np.arange(10) % 3, "prompts": rng.normal(size=(3, 2, 8))}
    np.savez(path, **{key: value for key, value in (arrays | changes).items() if value is not None})
    return path


def write_folders(path, **counts):
    for name, count in counts.items():
        (path / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (20, 20), (50 * number, 9, 9)).save(path / name / f"{number}.png")
    return path


def test_the_runs_own_held_out_pairs_give_the_metrics_of_training(nuclr, vectors, tmp_path):
    out = tmp_path / "metrics.json"
    status, printed, err = nuclr(
        vectors / "run", "--out", out, "--correct", "bank=train", "--correct", "bank=queries", "--bank-size", 50
    )
    assert status == 0, err
    assert "corrected  transductive" in printed
    assert "each half of the images is ranked with the correction chosen on the other half" in printed
    content = json.loads(out.read_text())
    task = content["retrieval"]["val"]
    assert task["plain"] == pytest.approx(run_folder.read_results(vectors / "run")["val"])
    assert (task["sides"], task["sizes"]) == (["image", "text"], [20, 40])
    assert "val: 20 images, 40 captions" in printed and "recall@1, image to text" in printed
    train_bank, queries = content["corrections"]["train"], content["corrections"]["queries"]
    assert (train_bank["transductive"], queries["transductive"]) == (False, True)
    assert (train_bank["bank_x"], train_bank["bank_y"]) == (50, 50)
    assert train_bank["chosen_on"] == "data.val: val.npz" and train_bank["temperature"] > 0
    assert task["correction_crossed"] and set(task["corrected"]["train"]) == set(task["plain"])
    assert [len(chosen) for chosen in task["corrections_of_halves"].values()] == [2, 2]
    for column, values in (("plain", task["plain"]), ("train", task["corrected"]["train"])):
        named = task["names"][column]
        assert named["paper"]["r1"] == pytest.approx(100 * values["mean_R@1"])
        assert named["clip_benchmark"]["image_retrieval_recall@5"] == named["open_clip"]["text_to_image_R@5"]
    assert content["protocol"]["ties"] and task["duplicates"]["way"] == "merge"


def test_several_test_sets_of_vectors(nuclr, vectors, tmp_path):
    classes, out = write_classes(tmp_path / "classes.npz"), tmp_path / "metrics.json"
    val = vectors / "val.npz"
    status, printed, err = nuclr(
        vectors / "run", "--retrieval", val, "--retrieval", val, "--classification", classes, "--out", out
    )
    assert status == 0, err
    content = json.loads(out.read_text())
    assert list(content["retrieval"]) == [str(val), f"{val} (2)"]
    labeled = content["classification"][str(classes)]
    assert (labeled["images"], labeled["classes"], labeled["templates"]) == (10, 3, None)
    assert labeled["plain"]["zero_shot_acc1"] == labeled["names"]["plain"]["open_clip"]["zeroshot-val-top1"]
    assert "top-1" in printed and content["corrections"] == {}


def test_a_run_on_images(nuclr, pictures, tmp_path):
    """Labeled folders with templates from another file, a caption list, and each treatment of duplicates."""
    images = make.write_images(tmp_path / "pairs")
    lines = [json.dumps({"image": name, "captions": captions}) for name, captions in make.CAPTIONS.items()]
    (images / "list.jsonl").write_text("\n".join(lines))
    (tmp_path / "templates.json").write_text('["a {}", "{}!"]')
    tasks = {}
    for way in ("merge", "miss", "hit"):
        status, _, err = nuclr(
            pictures, "--retrieval", images / "list.jsonl", "--duplicates", way, "--out", tmp_path / f"{way}.json",
            "--classification", write_folders(tmp_path / way, cat=2, dog=3), "--prompts", tmp_path / "templates.json",
        )  # fmt: skip
        assert status == 0, err
        content = json.loads((tmp_path / f"{way}.json").read_text())
        tasks[way] = next(iter(content["retrieval"].values()))
    assert [tasks[way]["sizes"][1] for way in tasks] == [7, 8, 8], "one caption occurs twice"
    assert tasks["hit"]["plain"]["mean_R@1"] >= tasks["miss"]["plain"]["mean_R@1"]
    classes = next(iter(content["classification"].values()))
    assert (classes["class_names"], classes["templates"]) == (["cat", "dog"], ["a {}", "{}!"])
    assert set(content["subject"]["images"]) == {"size", "mean", "std", "fit", "fit_of_labeled_images"}


def test_the_root_of_the_run_is_the_default(nuclr, tmp_path, monkeypatch):
    make.write_images(tmp_path / "photos")
    lines = [json.dumps({"image": name, "captions": captions}) for name, captions in make.CAPTIONS.items()]
    (tmp_path / "photos" / "list.jsonl").write_text("\n".join(lines))
    (tmp_path / "other.jsonl").write_text("\n".join(lines[:3]))
    changes = {"schedule.epochs": 1, "data.root": tmp_path / "photos", "data.train": "list.jsonl", "data.batch_size": 4}
    settings = runs.picture_settings(tmp_path, **changes)
    train(config.load(tmp_path / "empty.yaml", settings), tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for name in ("list.jsonl", "other.jsonl"):
        status, _, err = nuclr("run", "--retrieval", name)
        assert status == 0, err


def test_images_outside_of_the_root_need_an_option(nuclr, refused, pictures, tmp_path):
    make.write_images(tmp_path / "elsewhere")
    (tmp_path / "lists").mkdir()
    entries = ({"image": f"../elsewhere/{name}", "captions": texts} for name, texts in make.CAPTIONS.items())
    path = make.write_lines(tmp_path / "lists" / "list.jsonl", *entries)
    refused("--allow-outside allows this", pictures, "--retrieval", path)
    status, _, err = nuclr(pictures, "--retrieval", path, "--allow-outside")
    assert status == 0, err


def test_encoders_that_are_not_a_run(nuclr, refused, vectors):
    model = vectors / "run" / "model"
    status, printed, err = nuclr(model, "--retrieval", vectors / "val.npz", "--correct", "bank=queries")
    assert status == 0, err
    assert "chosen on no labels (the run has no held-out pairs): the default of PopularityCorrection" in printed
    refused("bank=train needs a run folder", model, "--retrieval", vectors / "val.npz", "--correct", "bank=train")
    refused("is not a run folder, so there is nothing to evaluate on", model)


def test_wrong_input_for_a_run_on_vectors_is_refused(refused, vectors, tmp_path):
    run = vectors / "run"
    refused("no such folder", tmp_path / "nothing")
    refused("val.npz: a file, not a folder; name a run folder", vectors / "val.npz")
    refused("neither a run folder (no config.yaml) nor encoders", tmp_path)
    refused("--correct bank=test: unknown; allowed: bank=train or bank=queries", run, "--correct", "bank=test")
    refused("there is no set called 'flickr30'; did you mean flickr30k?", run, "--retrieval", "flickr30:/data")
    refused("no such file", run, "--retrieval", tmp_path / "nothing.npz")
    refused("holds images on side x", run, "--retrieval", "builtin:n=20")
    (tmp_path / "there.json").write_text("{}")
    refused("the file exists; remove it", run, "--out", tmp_path / "there.json")
    refused("ends in .json", run, "--out", tmp_path / "metrics.txt")
    refused("does not exist", run, "--out", tmp_path / "no" / "metrics.json")
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "wide.npz", x=rng.normal(size=(4, 13)), y=rng.normal(size=(4, 8)))
    refused("x has 13 coordinates, but", run, "--retrieval", tmp_path / "wide.npz")
    np.savez(tmp_path / "bare.npz", x=rng.normal(size=(3, 12)), y=rng.normal(size=(2, 8)), y_to_x=[0, 2])
    refused("x row 1 has no y: y_to_x never names it", run, "--retrieval", tmp_path / "bare.npz")
    option = "--classification"
    refused("x has 13 coordinates, but", run, option, write_classes(tmp_path / "a.npz", width=13))
    refused("no array named 'prompts'", run, option, write_classes(tmp_path / "b.npz", prompts=None))
    refused("label 3; allowed: 0 to 2", run, option, write_classes(tmp_path / "c.npz", labels=np.arange(10) % 4))
    refused("needs 10 whole numbers", run, option, write_classes(tmp_path / "d.npz", labels=np.arange(9)))
    refused(
        "--correct needs --retrieval or --beir",
        run,
        option,
        write_classes(tmp_path / "e.npz"),
        "--correct",
        "bank=train",
    )


def test_wrong_input_for_a_run_on_images_is_refused(refused, pictures, tmp_path):
    images = make.write_images(tmp_path / "pairs")
    for number, empty in enumerate(([], [""], None)):
        lines = [{"image": "a.jpg", "captions": ["one"]}, {"image": "b.png", "captions": empty}]
        if empty is None:
            lines[1] = {"image": "b.png", "caption": None}
        (images / f"{number}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        refused("image b.png has no caption; add one", pictures, "--retrieval", images / f"{number}.jsonl")
    refused("no images of this class", pictures, "--classification", write_folders(tmp_path / "a", cat=1, dog=0))
    folders = write_folders(tmp_path / "b", cat=1, dog=1)
    (tmp_path / "templates.json").write_text('["a photo"]')
    templates = ("--prompts", tmp_path / "templates.json")
    refused("'a photo' does not have it", pictures, "--classification", folders, *templates)
    refused("no such file", pictures, "--classification", folders, "--prompts", tmp_path / "nothing.json")
    refused("holds vectors, but", pictures, "--classification", write_classes(tmp_path / "classes.npz"))
