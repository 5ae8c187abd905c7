"""`nuclr evaluate` on a synthetic copy of every standard test set, laid out as its archive unpacks."""

import dataclasses
import json

import pytest
import torch

from nuclr.evaluation.test_sets import RETRIEVAL
from nuclr.models import EncoderSide, build_model
from tests.data import layouts


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model") / "encoders"
    texts = [f"a photo of a {name}" for name in (*layouts.CIFAR10, *layouts.CIFAR100)]
    build_model(EncoderSide(image_size=16), EncoderSide(texts=texts), width=8).eval().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch):
    layouts.shrink(monkeypatch)


@pytest.fixture
def evaluate(nuclr, model, tmp_path):
    def run(*arguments):
        out = tmp_path / "metrics.json"
        status, _, err = nuclr("evaluate", model, *arguments, "--out", out)
        assert status == 0, err
        return json.loads(out.read_text())

    return run


@pytest.fixture
def refused(nuclr, model):
    def run(message, *arguments):
        status, out, err = nuclr("evaluate", model, *arguments)
        assert (status, out) == (2, "")
        assert message in err.strip().splitlines()[-1] and "Traceback" not in err, err

    return run


def test_every_set_is_evaluated_from_its_archive(evaluate, tmp_path):
    coco, flickr = layouts.coco(tmp_path / "coco"), layouts.flickr30k(tmp_path / "flickr")
    albef_coco = layouts.coco(tmp_path / "albef_coco", albef=True)
    albef_flickr = layouts.flickr30k(tmp_path / "albef_flickr", albef=True)
    sets = [f"mscoco:{coco}", f"flickr30k:{flickr}", f"mscoco:{albef_coco}", f"flickr30k:{albef_flickr}"]
    retrieval = [part for text in sets for part in ("--retrieval", text)]
    archives = {
        "cifar10": [layouts.cifar10_binary, layouts.cifar10_folders],
        "cifar100": [layouts.cifar100_binary],
        "imagenet1k": [layouts.imagenet1k],
        "imagenet-r": [layouts.imagenet_r],
        "dtd": [layouts.dtd],
        "food101": [layouts.food101],
    }
    classification = [
        part
        for name, writers in archives.items()
        for writer in writers
        for part in ("--classification", f"{name}:{writer(tmp_path / writer.__name__)}")
    ]
    content = evaluate(*retrieval, *classification, "--classes", classification[1])
    assert content["neighbors"]["cifar10"]["classes"] == 3
    for name, size in (("mscoco", 3), ("flickr30k", 2)):
        karpathy, albef = content["retrieval"][name], content["retrieval"][f"{name} (2)"]
        assert karpathy["sizes"] == albef["sizes"] == [size, 5 * size]
        assert (karpathy["split"], karpathy["duplicates"]["way"]) == ("test", "miss")
        assert karpathy["plain"] == pytest.approx(albef["plain"]), "the same images and captions"
    shapes = {name: (task["images"], task["classes"]) for name, task in content["classification"].items()}
    assert shapes == {
        "cifar10": (6, 3), "cifar10 (2)": (6, 3), "cifar100": (6, 4),
        "imagenet1k": (4, 2), "imagenet-r": (4, 2), "dtd": (2, 2), "food101": (4, 2),
    }  # fmt: skip
    tasks = content["classification"]
    assert tasks["cifar100"]["class_names"] == ["apple", "aquarium fish", "baby", "bear"]
    assert tasks["imagenet1k"]["class_names"] == tasks["imagenet-r"]["class_names"] == ["tench", "goldfish"]
    assert tasks["food101"]["class_names"] == ["apple pie", "baby back ribs"]


@pytest.mark.parametrize(
    ("name", "write", "missing", "message"),
    [
        ("mscoco", layouts.coco, "dataset_coco.json", "dataset_coco.json"),
        ("mscoco", layouts.coco, "val2014", "/val2014"),
        ("mscoco", layouts.coco, "val2014/COCO_val2014_000000391898.jpg", "COCO_val2014_000000391898.jpg"),
        ("flickr30k", layouts.flickr30k, "flickr30k-images", "/flickr30k-images"),
        ("cifar10", layouts.cifar10_binary, "cifar-10-batches-bin/test_batch.bin", "bin/test_batch.bin"),
        ("cifar100", layouts.cifar100_binary, "cifar-100-binary", "cifar-100-binary/"),
        ("imagenet1k", layouts.imagenet1k, "LOC_synset_mapping.txt", "add classes.json"),
        ("imagenet1k", layouts.imagenet1k, "val/n01440764", "does not have 2 class folders"),
        ("imagenet-r", layouts.imagenet_r, "imagenet-r/n01440764/art_0.jpg", "3 test images"),
        ("dtd", layouts.dtd, "dtd/labels/test1.txt", "dtd/labels/test1.txt"),
        ("dtd", layouts.dtd, "dtd/images/banded/banded_0002.jpg", "banded/banded_0002.jpg"),
        ("food101", layouts.food101, "food-101/meta/test.txt", "food-101/meta/test.txt"),
    ],
)
def test_a_missing_file_is_named(refused, tmp_path, name, write, missing, message):
    folder = write(tmp_path / "set")
    path = folder / missing
    if path.is_dir():
        path.rename(tmp_path / "elsewhere")
    else:
        path.unlink()
    refused(message, "--retrieval" if name in RETRIEVAL else "--classification", f"{name}:{folder}")


def test_wrong_names_and_incomplete_copies_are_refused(refused, tmp_path, monkeypatch):
    folder = layouts.flickr30k(tmp_path / "set")
    refused("flickr30k:FOLDER", "--retrieval", "flickr30k")
    refused("Flickr30k: /no/where", "--retrieval", "flickr30k:/no/where")
    refused("DTD: /no/where", "--classification", "dtd:/no/where")
    refused("flickr30k", "--classification", f"flickr30k:{folder}")
    refused("cifar10", "--classification", f"cifar:{folder}")
    small = dataclasses.replace(RETRIEVAL["flickr30k"], sizes={"test": (3, 15)})
    monkeypatch.setitem(RETRIEVAL, "flickr30k", small)
    refused("(2, 10)", "--retrieval", f"flickr30k:{folder}")


def test_prompt_files(evaluate, refused, tmp_path):
    """One file for several sets by name; what a file needs for its classes."""
    cifar, dtd = layouts.cifar10_binary(tmp_path / "cifar"), layouts.dtd(tmp_path / "textures")
    sets = ("--classification", f"cifar10:{cifar}", "--classification", f"dtd:{dtd}")
    own = {name: [f"{name}, a vehicle", "{}!"] for name in layouts.CIFAR10}
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"cifar10": own, "dtd": ["a {c}.", "the {}."]}))
    tasks = evaluate(*sets, "--prompts", path)["classification"]
    assert tasks["dtd"]["templates"] == ["a {}.", "the {}."] and tasks["cifar10"]["templates"] is None
    assert tasks["cifar10"]["prompt_file"] == str(path)
    for content, named in ((own | {"bird": []}, "'bird'"), ({"bird": "a bird"}, "'airplane'")):
        path.write_text(json.dumps(content))
        refused(named, *sets[:2], "--prompts", path)
    refused("own.json", "--retrieval", "builtin:n=4", "--prompts", path)
