"""Tiny synthetic copies of the standard test sets, laid out exactly as their archives unpack."""

import dataclasses
import json
from pathlib import Path

import numpy as np
from PIL import Image

from nuclr.evaluation.test_sets import CLASSIFICATION, RETRIEVAL

CAPTIONS = 5
CIFAR_IMAGES = 6
CIFAR10 = ["airplane", "automobile", "bird"]
CIFAR100 = ["apple", "aquarium_fish", "baby", "bear"]
WORDNET = {"n01440764": "tench, Tinca tinca", "n01443537": "goldfish, Carassius auratus"}


def shrink(monkeypatch) -> None:
    """Let the standard sets have as few images and classes as these copies."""
    for name, sizes in {"mscoco": (3, 2), "flickr30k": (2, 2)}.items():
        both = {split: (count, CAPTIONS * count) for split, count in zip(("test", "val"), sizes, strict=True)}
        monkeypatch.setitem(RETRIEVAL, name, dataclasses.replace(RETRIEVAL[name], sizes=both))
    sizes = {"cifar10": (3, 6), "cifar100": (4, 6), "imagenet1k": (2, 4), "imagenet-r": (2, 4), "dtd": (2, 2)}
    for name, (classes, images) in (sizes | {"food101": (2, 4)}).items():
        small = dataclasses.replace(CLASSIFICATION[name], classes=classes, images=images)
        monkeypatch.setitem(CLASSIFICATION, name, small)


def picture(path: Path, seed: int) -> None:
    """Write a picture of 40 x 32 random pixels in the format of its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(256, size=(4, 5, 3), dtype=np.uint8)
    format_ = "PNG" if path.suffix == ".png" else "JPEG"
    Image.fromarray(pixels).resize((40, 32)).save(path, format_)


def write_text(path: Path, text: str) -> None:
    """Write a file and the folders that lead to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# -- retrieval ---------------------------------------------------------------------------------------------------------


def _captions(name: str) -> list[str]:
    return [f"caption {n} of {name}" for n in range(CAPTIONS)]


def coco(folder: Path, albef: bool = False) -> Path:
    """COCO 2014 with Karpathy's `dataset_coco.json`, or ALBEF's `coco_test.json` and `coco_val.json`."""
    splits = ["train", "test", "val", "test", "restval", "val", "test"]
    entries = []
    for n, split in enumerate(splits):
        place = "train2014" if split in ("train", "restval") else "val2014"
        file = f"COCO_{place}_{391895 + n:012d}.jpg"
        picture(folder / place / file, n)
        sentences = [{"raw": text, "tokens": text.split(), "sentid": 0} for text in _captions(file)]
        entries.append(
            {"filepath": place, "filename": file, "split": split, "cocoid": n, "sentids": [], "sentences": sentences}
        )
    _write_lists(folder, "coco", entries, albef, lambda entry: f"{entry['filepath']}/{entry['filename']}")
    return folder


def flickr30k(folder: Path, albef: bool = False) -> Path:
    """Flickr30k with Karpathy's `dataset_flickr30k.json`, or ALBEF's `flickr30k_test.json` and `flickr30k_val.json`."""
    entries = []
    for n, split in enumerate(["train", "val", "test", "test", "val"]):
        file = f"{1007129816 + n}.jpg"
        picture(folder / "flickr30k-images" / file, n)
        sentences = [{"raw": text, "tokens": text.split()} for text in _captions(file)]
        entries.append({"filename": file, "split": split, "imgid": n, "sentids": [], "sentences": sentences})
    _write_lists(folder, "flickr30k", entries, albef, lambda entry: f"flickr30k-images/{entry['filename']}")
    return folder


def _write_lists(folder: Path, name: str, entries: list, albef: bool, path) -> None:
    if not albef:
        write_text(folder / f"dataset_{name}.json", json.dumps({"images": entries, "dataset": name}))
        return
    for split in ("test", "val"):
        kept = [entry for entry in entries if entry["split"] == split]
        lines = [{"image": path(e), "caption": [sentence["raw"] for sentence in e["sentences"]]} for e in kept]
        write_text(folder / f"{name}_{split}.json", json.dumps(lines))


# -- CIFAR -------------------------------------------------------------------------------------------------------------


def cifar_pixels() -> np.ndarray:
    """Return the pixels of the test images, (n, 3072)."""
    return np.random.default_rng(0).integers(256, size=(CIFAR_IMAGES, 3072), dtype=np.uint8)


def cifar10_binary(folder: Path) -> Path:
    """`cifar-10-binary.tar.gz`, unpacked."""
    inner = folder / "cifar-10-batches-bin"
    labels = np.arange(CIFAR_IMAGES, dtype=np.uint8)[:, None] % len(CIFAR10)
    write_text(inner / "batches.meta.txt", "\n".join(CIFAR10) + "\n\n")
    write_text(inner / "readme.html", "<html></html>")
    for name in ("data_batch_1.bin", "test_batch.bin"):
        (inner / name).write_bytes(np.hstack([labels, cifar_pixels()]).tobytes())
    return folder


def cifar100_binary(folder: Path) -> Path:
    """`cifar-100-binary.tar.gz`, unpacked."""
    inner = folder / "cifar-100-binary"
    fine = np.arange(CIFAR_IMAGES, dtype=np.uint8)[:, None] % len(CIFAR100)
    write_text(inner / "fine_label_names.txt", "\n".join(CIFAR100) + "\n")
    write_text(inner / "coarse_label_names.txt", "fruit\nanimals\n")
    for name in ("train.bin", "test.bin"):
        (inner / name).write_bytes(np.hstack([fine // 2, fine, cifar_pixels()]).tobytes())
    return folder


# -- folders of classes ------------------------------------------------------------------------------------------------


def cifar10_folders(folder: Path) -> Path:
    """The test images of CIFAR-10 as PNG, one folder per class."""
    for n in range(CIFAR_IMAGES):
        picture(folder / "test" / CIFAR10[n % 3] / f"{n:04d}.png", n)
        picture(folder / "train" / CIFAR10[n % 3] / f"{n:04d}.png", n)
    return folder


def imagenet1k(folder: Path) -> Path:
    """The validation images of ImageNet, sorted into folders, with the contest's list of names."""
    for n, number in enumerate(sorted(WORDNET) * 2):
        picture(folder / "val" / number / f"ILSVRC2012_val_{n + 1:08d}.JPEG", n)
    write_text(folder / "LOC_synset_mapping.txt", "".join(f"{key} {name}\n" for key, name in WORDNET.items()))
    return folder


def imagenet_r(folder: Path) -> Path:
    """`imagenet-r.tar`, unpacked."""
    inner = folder / "imagenet-r"
    for n, number in enumerate(sorted(WORDNET) * 2):
        picture(inner / number / f"art_{n}.jpg", n)
    lines = "".join(f"{key} {name.split(',')[0]}\n" for key, name in WORDNET.items())
    write_text(inner / "README.txt", f"ImageNet-R(endition)\n\nThe classes are\n{lines}")
    return folder


def dtd(folder: Path) -> Path:
    """`dtd-r1.0.1.tar.gz`, unpacked."""
    inner = folder / "dtd"
    for n, name in enumerate(["banded", "polka-dotted"] * 3):
        picture(inner / "images" / name / f"{name}_{n // 2:04d}.jpg", n)
    for part, split in enumerate(("train1", "val1", "test1")):
        write_text(
            inner / "labels" / f"{split}.txt",
            f"banded/banded_{part:04d}.jpg\npolka-dotted/polka-dotted_{part:04d}.jpg\n",
        )
    write_text(inner / "labels" / "labels_joint_anno.txt", "banded/banded_0000.jpg banded\n")
    write_text(inner / "imdb" / "imdb.mat", "")
    write_text(inner / "images" / "banded" / ".directory", "")
    return folder


def food101(folder: Path) -> Path:
    """`food-101.tar.gz`, unpacked."""
    inner, parts = folder / "food-101", {"train": [], "test": []}
    for n, name in enumerate(["apple_pie", "baby_back_ribs"] * 4):
        picture(inner / "images" / name / f"{1005649 + n}.jpg", n)
        parts["test" if n < 4 else "train"].append(f"{name}/{1005649 + n}")
    for part, lines in parts.items():
        write_text(inner / "meta" / f"{part}.txt", "\n".join(lines))
        write_text(inner / "meta" / f"{part}.json", "{}")
    write_text(inner / "meta" / "classes.txt", "apple_pie\nbaby_back_ribs\n")
    write_text(inner / "meta" / "labels.txt", "Apple pie\nBaby back ribs\n")
    write_text(inner / "README.txt", "")
    return folder
