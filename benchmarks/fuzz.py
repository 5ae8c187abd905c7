"""Feed damaged files to every reader: each must give a result or a clear error, never a traceback, a crash or a hang.

    python benchmarks/fuzz.py [--cases 4000] [--seed 0] [--readers json,csv,...] [--first 0]

Each case takes a small valid set of files, damages one or two of them (`mutations.py`) and reads it as the program
does: all samples are checked and loaded, embeddings are normalized, reports are written. The cases run in child
processes, a batch in each, so that a crash or a hang ends only its own batch. Outcomes:

- clean: the reader accepted the files (bad samples may have been found).
- error: `UserError`, the message that a user sees.
- traceback: any other exception. crash: the process died. hang: no result within `--patience` seconds, twice.
- memory: the case took more than 1 GiB on top of what the process had before.

The files of the first cases of each distinct failure are stored in `--store`, with the traceback. Case K of a reader
depends only on `--seed` and K: `--readers npz --first K --cases 1` repeats it. Needs Linux (/proc, fork).
"""

import argparse
import contextlib
import csv
import faulthandler
import io
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import mutations

BATCH = 250
MEMORY = 2**30
STORED = 3  # reproducers per distinct failure
FAILURES = ("traceback", "crash", "hang", "memory")
NAMES = ("a.jpg", "b.png", "c.jpg")
CAPTIONS = (["a red square", "something red"], ["a blue one, almost"], ["ein grünes Quadrat"])
QUESTIONS = ("what is a hub?", "which item is rare?", "was ist ein Würfel?")
ANSWERS = (["an item near to many queries", "a popular item"], ["one that no query finds"], ["ein Körper"])
VECTORS = np.random.default_rng(1).normal(size=(3, 4)).astype("f4")

Files = dict[str, bytes]


# -- valid files -------------------------------------------------------------------------------------------------------


def picture(number: int, kind: str, mode: str = "RGB", **options: Any) -> bytes:
    from PIL import Image

    pixels = np.random.default_rng(number).integers(256, size=(3, 3, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((24, 20)).convert(mode).save(file, kind, **options)
    return file.getvalue()


def pictures() -> Files:
    return {name: picture(k, "PNG" if name.endswith("png") else "JPEG") for k, name in enumerate(NAMES)}


def lines(entries: list[Any]) -> bytes:
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode()


def json_seeds(_: Path) -> list[Files]:
    entries = [{"image": name, "caption": texts} for name, texts in zip(NAMES, CAPTIONS, strict=True)]
    single = [{"image": name, "caption": texts[0], "image_id": 3} for name, texts in zip(NAMES, CAPTIONS, strict=True)]
    karpathy = [
        {"filename": name, "split": "train", "sentences": [{"raw": text, "tokens": text.split()} for text in texts]}
        for name, texts in zip(NAMES, CAPTIONS, strict=True)
    ]
    return [
        pictures() | {"pairs.jsonl": lines(entries)},
        pictures() | {"pairs.jsonl": lines(single)},
        pictures() | {"pairs.json": json.dumps(single).encode()},
        pictures() | {"pairs.json": json.dumps({"dataset": "tiny", "images": karpathy}).encode()},
    ]


def csv_seeds(_: Path) -> list[Files]:
    rows = [(name, texts[0].replace(",", "")) for name, texts in zip(NAMES, CAPTIONS, strict=True)]
    texts = [
        (",", "pairs.csv", "filepath,title"),
        (";", "pairs.csv", "image;caption"),
        ("\t", "pairs.tsv", "image\tcaption"),
    ]
    return [
        pictures() | {name: "\n".join([header, *(separator.join(row) for row in rows), ""]).encode()}
        for separator, name, header in texts
    ]


def parquet_seeds(_: Path) -> list[Files]:
    named = parquet({"filepath": list(NAMES), "title": [texts[0] for texts in CAPTIONS]})
    stored = parquet({
        "image": [{"bytes": data, "path": name} for name, data in pictures().items()],
        "captions": [list(texts) for texts in CAPTIONS],
    })  # fmt: skip
    return [pictures() | {"pairs.parquet": named}, pictures() | {"data/train-00000.parquet": stored}]


def hf_seeds(folder: Path) -> list[Files]:
    import datasets

    rows = {
        "image": [{"bytes": data, "path": name} for name, data in pictures().items()],
        "caption": [list(texts) for texts in CAPTIONS],
    }
    features = datasets.Features({"image": datasets.Image(), "caption": datasets.Sequence(datasets.Value("string"))})
    datasets.Dataset.from_dict(rows, features).save_to_disk(folder / "set")
    plain = datasets.Dataset.from_dict({"image": list(NAMES), "caption": [texts[0] for texts in CAPTIONS]})
    datasets.DatasetDict({"train": plain}).save_to_disk(folder / "splits")
    return [files_in(folder / "set"), pictures() | files_in(folder / "splits")]


def tar(members: Files, form: int = tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def tar_seeds(_: Path) -> list[Files]:
    seeds: list[Files] = []
    for several in (False, True):
        members: Files = {}
        for (name, data), texts in zip(pictures().items(), CAPTIONS, strict=True):
            key = name.partition(".")[0]
            metadata = {"captions": texts} if several else {"key": key, "caption": texts[0], "status": "success"}
            members |= {name: data, f"{key}.json": json.dumps(metadata).encode()}
            if not several:
                members[f"{key}.txt"] = texts[0].encode()
        seeds.append({"00000.tar": tar(members, tarfile.PAX_FORMAT if several else tarfile.GNU_FORMAT)})
    return seeds


def text_entries() -> list[list[dict[str, Any]]]:
    """Return rows of one question and one answer, of one and several, and of several and several."""
    pairs = list(zip(QUESTIONS, ANSWERS, strict=True))
    return [
        [{"question": question, "answer": answers[0]} for question, answers in pairs],
        [{"query": question, "positives": answers} for question, answers in pairs],
        [{"sentence1": [question, question.upper()], "sentence2": answers} for question, answers in pairs],
    ]


def text_json_seeds(_: Path) -> list[Files]:
    seeds = [{"pairs.jsonl": lines(entries)} for entries in text_entries()]
    return [*seeds, {"pairs.json": json.dumps(text_entries()[2]).encode()}]


def text_csv_seeds(_: Path) -> list[Files]:
    rows = [(question, answers[0]) for question, answers in zip(QUESTIONS, ANSWERS, strict=True)]
    return [
        {"pairs.csv": table_of(",", ["question", "answer", "id"], [(*row, "7") for row in rows])},
        {"pairs.csv": table_of(",", ["a", "b"], rows)},
        {"pairs.tsv": table_of("\t", ["source", "target"], rows)},
    ]


def table_of(separator: str, header: list[str], rows: list[tuple[str, ...]]) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=separator)
    writer.writerows([header, *rows])
    return file.getvalue().encode()


def parquet(columns: dict[str, Any]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pa.table(columns), file, row_group_size=2)
    return file.getvalue()


def columns_of(entries: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {key: [entry[key] for entry in entries] for key in entries[0]}


def text_parquet_seeds(_: Path) -> list[Files]:
    one, several, groups = (parquet(columns_of(entries)) for entries in text_entries())
    return [{"pairs.parquet": one}, {"pairs.parquet": several}, {"data/train-00000.parquet": groups}]


def text_hf_seeds(folder: Path) -> list[Files]:
    import datasets

    for number, entries in enumerate(text_entries()):
        datasets.Dataset.from_dict(columns_of(entries)).save_to_disk(folder / str(number))
    splits = datasets.Dataset.from_dict(columns_of(text_entries()[0]))
    datasets.DatasetDict({"train": splits, "test": splits}).save_to_disk(folder / "splits")
    return [files_in(folder / name) for name in ("0", "1", "2", "splits")]


def text_tar_seeds(_: Path) -> list[Files]:
    """Return tars with two .txt members per sample, and with two entries of its .json."""
    members: list[Files] = [{}, {}]
    for number, (question, answers) in enumerate(zip(QUESTIONS, ANSWERS, strict=True)):
        members[0] |= {f"{number}.question.txt": question.encode(), f"{number}.answer.txt": answers[0].encode()}
        members[1] |= {f"{number}.json": json.dumps({"question": question, "answer": answers}).encode()}
    return [{"00000.tar": tar(members[0])}, {"00000.tar": tar(members[1], tarfile.GNU_FORMAT)}]


def remote_seeds(folder: Path) -> list[Files]:
    texts = [seeds(folder)[0] for seeds in (text_tar_seeds, text_csv_seeds, text_parquet_seeds)]
    return [*npz_seeds(folder), *texts]


def beir_seeds(_: Path) -> list[Files]:
    answers = [answer for several in ANSWERS for answer in several]
    queries = [{"_id": f"q{number}", "text": question} for number, question in enumerate(QUESTIONS)]
    corpus = [{"_id": f"d{number}", "title": "A title", "text": answer} for number, answer in enumerate(answers)]
    judgments = [("q0", "d0", "2"), ("q0", "d1", "1"), ("q1", "d2", "1"), ("q2", "d3", "1"), ("q2", "d0", "0")]
    header = ["query-id", "corpus-id", "score"]
    common = {"queries.jsonl": lines(queries), "corpus.jsonl": lines(corpus)}
    numbered = {"queries.jsonl": lines([entry | {"_id": number} for number, entry in enumerate(queries)])}
    without_header = "".join("\t".join((row[0].removeprefix("q"), *row[1:])) + "\n" for row in judgments)
    return [
        common | {"qrels/test.tsv": table_of("\t", header, judgments)},
        common
        | {"qrels/test.tsv": table_of("\t", header, judgments), "qrels/dev.tsv": table_of("\t", header, judgments[:1])},
        common | numbered | {"qrels/test.tsv": without_header.encode()},
    ]


def vector_seeds(folder: Path) -> list[Files]:
    """Return every format with a column of vectors next to texts, images or other vectors."""
    import datasets
    import pyarrow as pa

    vectors, few = VECTORS.tolist(), [row[:2] for row in VECTORS.tolist()]
    entries = [{"text": text, "vector": vector} for text, vector in zip(QUESTIONS, vectors, strict=True)]
    both = [{"x": a, "y": b} for a, b in zip(vectors, few, strict=True)]
    several = [{"image": name, "vector": [vector, vector]} for name, vector in zip(NAMES, vectors, strict=True)]
    cells = [(text, json.dumps(vector)) for text, vector in zip(QUESTIONS, vectors, strict=True)]
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(VECTORS.ravel()), 4)
    nested = pa.array([[row, row[::-1]] for row in vectors], pa.list_(pa.list_(pa.float32())))
    members: Files = {}
    for number, (text, vector) in enumerate(zip(QUESTIONS, VECTORS, strict=True)):
        members[f"{number}.text.txt"] = text.encode()
        members[f"{number}.json"] = json.dumps({"text": text, "vector": vector.tolist()}).encode()
    datasets.Dataset.from_dict({"text": list(QUESTIONS), "vector": vectors}).save_to_disk(folder / "hf")
    return [
        {"pairs.jsonl": lines(entries)},
        {"pairs.jsonl": lines(both)},
        pictures() | {"pairs.jsonl": lines(several)},
        {"pairs.csv": table_of(",", ["text", "vector"], cells)},
        {"pairs.tsv": table_of("\t", ["text", "vector"], cells)},
        {"pairs.parquet": parquet({"text": list(QUESTIONS), "vector": vectors})},
        {"pairs.parquet": parquet({"text": list(QUESTIONS), "vector": fixed})},
        {"pairs.parquet": parquet({"text": list(QUESTIONS), "vector": nested})},
        {"pairs.parquet": parquet({"x": pa.array(few, pa.list_(pa.float16())), "y": [[1, 2, 3]] * 3})},
        files_in(folder / "hf"),
        {"pairs.tar": tar(members)},
    ]


def view_seeds(folder: Path) -> list[Files]:
    """Return images alone: a folder, lists without captions, Parquet with bytes, a saved dataset and a tar."""
    import datasets

    stored = [{"bytes": data, "path": name} for name, data in pictures().items()]
    features = datasets.Features({"image": datasets.Image()})
    datasets.Dataset.from_dict({"image": stored}, features).save_to_disk(folder / "hf")
    return [
        pictures() | {"below/d.png": picture(3, "PNG")},
        pictures() | {"pairs.jsonl": lines([{"image": name} for name in NAMES])},
        pictures() | {"pairs.csv": table_of(",", ["image", "label"], [(name, "7") for name in NAMES])},
        {"pairs.parquet": parquet({"image": stored})},
        files_in(folder / "hf"),
        {"pairs.tar": tar({f"{number}.jpg": data for number, data in enumerate(pictures().values())})},
    ]


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 5)).astype("f4"), rng.normal(size=(6, 3)).astype("f4")
    return {"x": x, "y": y, "y_to_x": np.array([0, 0, 1, 1, 2, 3])}


def npz(content: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **content)
    return file.getvalue()


def npy(content: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, content)
    return file.getvalue()


def npz_seeds(_: Path) -> list[Files]:
    return [{"pairs.npz": npz(arrays())}]


def safetensors_seeds(_: Path) -> list[Files]:
    from safetensors.numpy import save

    return [{"pairs.safetensors": save(arrays())}]


def hubness_seeds(folder: Path) -> list[Files]:
    """Return vectors in every file that `nuclr hubness` takes, with names and links of the rows."""
    import datasets
    import pyarrow as pa
    from safetensors.numpy import save

    y = np.random.default_rng(2).normal(size=(8, 4)).astype("f4")
    titles = [f"title {number}" for number in range(8)]
    pairs = {"x": y[:4], "y": y, "y_to_x": np.repeat(np.arange(4), 2)}
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(y.ravel()), 4)
    datasets.Dataset.from_dict({"title": titles, "vector": y.tolist()}).save_to_disk(folder / "hf")
    links = {"links.txt": b"query,item\n0,1\n2,3\n", "names.txt": "\n".join(titles).encode()}
    return [
        links | {"vectors.npy": npy(y)},
        {"vectors.npy": npy(y.astype("f2")), "links.npy": npy(np.array([[0, 1], [2, 3]]))},
        links | {"vectors.npz": npz(pairs)},
        {"vectors.safetensors": save(pairs)},
        {"vectors.parquet": parquet({"title": titles, "vector": fixed})},
        {"vectors.parquet": parquet({"title": titles, "vector": y.tolist()})},
        {"data/a.parquet": parquet({"vector": y.tolist()}), "data/b.parquet": parquet({"vector": y.tolist()})},
        files_in(folder / "hf"),
    ]


def folder_seeds(_: Path) -> list[Files]:
    """Return a folder of embeddings as clip-retrieval writes it, in two parts."""
    y = np.random.default_rng(4).normal(size=(8, 4)).astype("f2")
    clip_retrieval = {}
    for part, rows in enumerate((slice(0, 3), slice(3, 8))):
        clip_retrieval |= {
            f"img_emb/img_emb_{part}.npy": npy(y[rows]),
            f"text_emb/text_emb_{part}.npy": npy(y[rows] + 1),
        }
    return [clip_retrieval]


def correction_seeds(folder: Path) -> list[Files]:
    from nuclr.popularity import PopularityCorrection

    folder.mkdir(parents=True, exist_ok=True)
    x = np.random.default_rng(3).normal(size=(6, 4))
    PopularityCorrection(normalize=True).fit(x[:3], x[3:]).save(folder / "fix.safetensors")
    return [files_in(folder)]


def image_seeds(_: Path) -> list[Files]:
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6
    images = {
        "a.jpg": [picture(0, "JPEG"), picture(1, "JPEG", exif=exif, progressive=True), picture(2, "JPEG", "CMYK")],
        "b.png": [picture(0, "PNG"), picture(1, "PNG", "P"), picture(2, "PNG", "RGBA"), picture(3, "PNG", "I;16")],
        "c.gif": [picture(0, "GIF", "P")],
        "d.bmp": [picture(0, "BMP"), picture(1, "BMP", "P")],
        "e.ppm": [picture(0, "PPM"), picture(1, "PPM", "L")],
        "f.tif": [picture(0, "TIFF"), picture(1, "TIFF", "F"), picture(2, "TIFF", compression="tiff_lzw")],
        "g.webp": [picture(0, "WEBP")],
    }
    return [
        {name: data, "pairs.jsonl": lines([{"image": name, "caption": "a"}])}
        for name, variants in images.items()
        for data in variants
    ]


def keep_seeds(_: Path) -> list[Files]:
    return [{"keep.txt": b"# numbers\n0\n3  # three\n7\n99\n"}, {"keep.npy": npy(np.arange(5))}]


def config_seeds(_: Path) -> list[Files]:
    import yaml

    from nuclr.runs import config
    from nuclr.studies import demo

    tiny = "name: tiny\nseed: 3\ndata:\n  train: pairs.npz\n  batch_size: 16\nobjective:\n  name: nuclr\n  gamma: 0.8\n"
    whole = config.to_yaml(config.load(None, ["data.train=pairs.npz"])).encode()
    return [{"c.yaml": tiny.encode()}, {"c.yaml": whole}, {"c.yaml": yaml.safe_dump(demo.SETTINGS).encode()}]


def class_seeds(_: Path) -> list[Files]:
    folders = {f"{name}/1.png": picture(k, "PNG") for k, name in enumerate(("cat", "dog", "owl"))}
    rng = np.random.default_rng(0)
    content = {"x": rng.normal(size=(4, 5)), "labels": np.array([0, 1, 1, 0]), "prompts": rng.normal(size=(2, 5))}
    return [
        folders | {"classes.json": b'["cat", "dog", "owl"]', "templates.json": b'["a photo of a {}.", "{}"]'},
        folders | {"classes.json": b'{"classes": {"cat": "Cat", "dog": "Dog", "owl": "Owl"}, "templates": ["{}"]}'},
        {"classes.npz": npz(content)},
    ]


def model_seeds(folder: Path) -> list[Files]:
    from nuclr.models import EncoderSide, build_model

    texts = [text for captions in CAPTIONS for text in captions]
    captions = EncoderSide("tiny_text", texts=texts, max_length=8)
    models = {
        "pictures": build_model(EncoderSide("tiny_resnet", image_size=16), captions, width=4),
        "vit": build_model(EncoderSide("tiny_vit", image_size=16), captions, width=4),
        "vectors": build_model(EncoderSide("vectors", width=5, head="mlp"), EncoderSide("vectors", width=3), width=4),
        "texts": build_model(EncoderSide("bag_of_words", texts=texts), shared=True, width=4),
        "views": build_model(EncoderSide("tiny_resnet", image_size=16), shared=True, width=4),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
    return [files_in(folder / name) for name in models]


def run_seeds(folder: Path) -> list[Files]:
    """Return the folders of runs on vectors, texts and views, and of `nuclr popularity`."""
    from nuclr.cli.app import app

    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train.npz", 40), ("val.npz", 20)):
        x = rng.normal(size=(count, 5)).astype("f4")
        (folder / name).write_bytes(npz({"x": x, "y": x[:, :3] + rng.normal(size=(count, 3)).astype("f4")}))
    vectors = trained(folder, ["data.train=train.npz", "data.val=val.npz", "objective.zeta_lr=0.01"])
    square = folder / "square.npz"
    square.write_bytes(npz({"x": x, "y": x + rng.normal(size=x.shape).astype("f4")}))
    options = ["data.batch_size=8", "model.width=4", "schedule.epochs=1", "threads=1", "methods=clip", "seeds=1"]
    commands = [
        ["popularity", str(square), "--temperature", "0.1"],
        ["hubness", f"{square}:x", f"{square}:y", "--normalize"],
        ["toy", "--seeds", "2", "--max-n", "100"],
        ["compare", f"data.train={square}", f"data.val={square}", *options, "--temperatures", "0.1", "--workers", "1"],
    ]
    results = []
    for command in commands:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            app([*command, "--out", str(folder / "run")], standalone_mode=False)
        results.append(emptied(folder, keep="*.npz"))
    entries = [{"question": f"what is {k}?", "answer": [f"it is {k}", f"{k} it is"]} for k in range(24)]
    for name in ("train.jsonl", "val.jsonl"):
        (folder / name).write_bytes(lines(entries))
    texts = trained(folder, ["data.train=train.jsonl", "data.val=val.jsonl", "model.x.encoder=bag_of_words"])
    (folder / "images").mkdir()
    for number in range(16):
        (folder / "images" / f"{number}.png").write_bytes(picture(number, "PNG"))
    views = trained(folder, ["data.train=images", "model.x.image_size=16"])
    return [vectors, vectors, vectors, *results, texts, views]


def checkpoint_seeds(folder: Path) -> list[Files]:
    """Return the folder of a run that was stopped at its last step."""
    files = run_seeds(folder)[0]
    return [{name: data for name, data in files.items() if name != "run/results.json" and "/model/" not in name}]


def state_seeds(_: Path) -> list[Files]:
    """Return the content of a file that `save_state` writes, which `read_state` puts together with a right checksum."""
    import torch

    from nuclr.integrations.state import snapshot
    from nuclr.objectives import NUCLR

    file = io.BytesIO()
    header = snapshot(NUCLR(num_samples=6))
    state = header.pop("state")
    torch.save({"objective": state, "model": state, "header": header | {"pairs": {}}}, file)
    return [{"state.pt": file.getvalue()}]


def trained(folder: Path, changes: list[str]) -> Files:
    """Train for two epochs in `folder / "run"` and return all files of the folder, which is then empty."""
    from nuclr.runs import config
    from nuclr.training.loop import train

    common = [f"data.root={folder}", "data.batch_size=8", "model.width=4", "schedule.epochs=2", "log.every=2"]
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        train(config.load(None, [*common, "report=false", "threads=1", *changes]), folder / "run")
    return emptied(folder, keep="*.npz")


def emptied(folder: Path, keep: str = "") -> Files:
    """Return all files of a folder and remove them, except for those that match `keep`."""
    files = files_in(folder)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif not (keep and path.match(keep)):
            path.unlink()
    return files


def files_in(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# -- readers -----------------------------------------------------------------------------------------------------------


def read_pairs(path: Path | str, split: str | None = None, **options: Any) -> None:
    """Check all samples and load the good ones, as a run does."""
    from nuclr.data import ImageOptions, Loader, all_batches, check_samples, open_pairs, usable, write_bad_samples

    pairs = open_pairs(path, split=split, **options)
    bad = check_samples(pairs, max_bad_share=1.0, workers=1)
    write_bad_samples(Path(str(path).removeprefix("file://")).parent / "bad.jsonl", pairs, bad)
    numbers = usable(pairs, bad)
    if len(numbers):
        sizes = {side: ImageOptions(8) for side in ("x", "y") if pairs.sides[side].modality.name == "image"}
        for _ in Loader(pairs, **sizes, workers=1, ahead=1).load(all_batches(numbers, 64)):
            pass
        for number in numbers[:2].tolist():
            pairs[number]
            pairs.name(number)


def read_lists(folder: Path, _: int) -> None:
    read_pairs(next(path for path in folder.iterdir() if path.stem == "pairs"))


def read_parquet(folder: Path, _: int) -> None:
    path = folder / "pairs.parquet"
    read_pairs(path if path.exists() else folder / "data")


def read_folder(folder: Path, _: int) -> None:
    read_pairs(folder, "train" if (folder / "dataset_dict.json").exists() else None)


def read_text_tar(folder: Path, case: int) -> None:
    """Name the two texts by the suffixes of members, or by entries of the .json."""
    from nuclr.data import SideChoice
    from nuclr.errors import UserError

    texts = [("question.txt", "answer.txt"), ("question", "answer"), ("json:question", "json:answer")]
    for x, y in texts[case % 3 :] + texts[: case % 3]:
        try:
            read_pairs(folder / "00000.tar", x=SideChoice(x), y=SideChoice(y))
            return
        except UserError as error:
            last = error
    raise last


def read_beir_folder(folder: Path, case: int) -> None:
    """Read the folder as `nuclr evaluate` does, or its pairs as `nuclr train` does."""
    from nuclr.data.formats.beir import read_beir

    if case % 2:
        read_beir(folder, max_bad_share=1.0)
    else:
        read_pairs(folder, "test")


def source_in(folder: Path) -> Path:
    """Return the file of pairs, or the folder if it has none."""
    return next((path for path in sorted(folder.iterdir()) if path.stem == "pairs"), folder)


def read_vectors(folder: Path, case: int) -> None:
    from nuclr.data import SideChoice

    path = source_in(folder)
    if path.suffix != ".tar":
        read_pairs(path)
        return
    keys = [("text.txt", "vector"), ("json:text", "json:vector"), ("vector", "vector")]
    x, y = keys[case % 3]
    read_pairs(path, x=SideChoice(x), y=SideChoice(y))


def read_views(folder: Path, _: int) -> None:
    read_pairs(source_in(folder), views=True)


def read_arrays(folder: Path, _: int) -> None:
    read_pairs(next(folder.glob("pairs.*")))


def read_remote(folder: Path, _: int) -> None:
    """Read a file, or a tar and its index, by a URL."""
    read_pairs(f"file://{next(path for path in sorted(folder.iterdir()) if path.suffix in REMOTE)}")


def read_hubness(folder: Path, _: int) -> None:
    """Measure the hubness of the items among themselves, as `nuclr hubness` does, without its page."""
    from nuclr.studies.items.hubness_report import hubness_report

    path = next(folder.glob("vectors.*"), folder / "data" if (folder / "data").exists() else folder)
    items = f"{path}:y" if path.suffix in (".npz", ".safetensors") else str(path)
    names = folder / "names.txt" if (folder / "names.txt").exists() else None
    if names is None and path.suffix == ".parquet":
        names = f"{path}:title"
    links = next(folder.glob("links.*"), None)
    hubness_report(items, items, links=links, names=names, k=1, normalize=True, out=folder / "out")


def read_embedding_folder(folder: Path, _: int) -> None:
    """Read all embeddings as `nuclr popularity` does, without solving, and as pairs."""
    from nuclr.data.vectors import open_sides
    from nuclr.studies.items.rows import check_rows

    for side in open_sides(str(folder)):
        check_rows(side, normalize=True)
    read_pairs(folder)


def read_correction(folder: Path, _: int) -> None:
    from nuclr.popularity import PopularityCorrection

    fix = PopularityCorrection.load(folder / "fix.safetensors")
    fix.gallery(np.eye(4), "l2")


def read_keep_list(folder: Path, _: int) -> None:
    from nuclr.data import read_keep

    read_keep(next(folder.glob("keep.*")), 100)


def read_config(folder: Path, _: int) -> None:
    from nuclr.runs import config

    config.to_yaml(config.load(folder / "c.yaml"))


def read_classes(folder: Path, _: int) -> None:
    from nuclr.data import check_samples, open_labeled, usable

    vectors = folder / "classes.npz"
    labeled = open_labeled(vectors if vectors.exists() else folder)
    labeled.prompts()
    for number in usable(labeled, check_samples(labeled, max_bad_share=1.0, workers=1)).tolist():
        labeled[number]


def read_model(folder: Path, _: int) -> None:
    from nuclr.models import DualEncoder

    DualEncoder.from_pretrained(folder)


def read_run(folder: Path, case: int) -> None:
    """Write the page of the run; one case in eight encodes samples with the model, and one opens it for an export."""
    from nuclr.export.trained import open_trained
    from nuclr.report import Options, write_report

    if case % 8 == 1 and (folder / "run" / "config.yaml").is_file():
        open_trained(folder / "run", "onnx", best=case % 16 == 1)
    else:
        write_report(folder / "run", folder / "page.html", Options(model=case % 8 == 0))


def read_checkpoint(folder: Path, _: int) -> None:
    """Resume the run in a copy, whose files may change."""
    from nuclr.runs import config
    from nuclr.training.loop import train

    shutil.copytree(folder / "run", folder / "copy")
    train(config.load(folder / "copy" / "config.yaml"), folder / "copy", resume=True)


def read_state(folder: Path, _: int) -> None:
    import torch
    from safetensors.torch import save

    from nuclr.errors import UserError
    from nuclr.integrations import state
    from nuclr.objectives import NUCLR

    try:
        content = torch.load(folder / "state.pt", weights_only=True)
        header = content["header"] | {"sha256": state._digest(content["objective"])}
        data = save(content["objective"], {state.FORMAT: json.dumps(header)})
    except Exception:
        raise UserError("not what save_state can write") from None
    (folder / state.STATE_FILE).write_bytes(data)
    state.load_state(NUCLR(num_samples=6), folder, resumes=False)


REMOTE = (".npz", ".tar", ".csv", ".parquet")


@dataclass(frozen=True)
class Reader:
    """How to make valid files, which of them are damaged, and how they are read."""

    seeds: Callable[[Path], list[Files]]
    read: Callable[[Path, int], None]
    damaged: tuple[str, ...]


READERS = {
    "json": Reader(json_seeds, read_lists, ("pairs.*",)),
    "csv": Reader(csv_seeds, read_lists, ("pairs.*",)),
    "parquet": Reader(parquet_seeds, read_parquet, ("*.parquet",)),
    "hf": Reader(hf_seeds, read_folder, ("*.json", "*.arrow")),
    "tar": Reader(tar_seeds, read_folder, ("*.tar",)),
    "text-json": Reader(text_json_seeds, read_lists, ("pairs.*",)),
    "text-csv": Reader(text_csv_seeds, read_lists, ("pairs.*",)),
    "text-parquet": Reader(text_parquet_seeds, read_parquet, ("*.parquet",)),
    "text-hf": Reader(text_hf_seeds, read_folder, ("*.json", "*.arrow")),
    "text-tar": Reader(text_tar_seeds, read_text_tar, ("*.tar",)),
    "beir": Reader(beir_seeds, read_beir_folder, ("*.jsonl", "*.tsv")),
    "vectors": Reader(vector_seeds, read_vectors, ("pairs.*", "*.json", "*.arrow")),
    "views": Reader(view_seeds, read_views, ("pairs.*", "[a-d].*", "*.json", "*.arrow")),
    "npz": Reader(npz_seeds, read_arrays, ("*.npz",)),
    "safetensors": Reader(safetensors_seeds, read_arrays, ("*.safetensors",)),
    "hubness": Reader(
        hubness_seeds, read_hubness, ("*.npy", "*.npz", "*.safetensors", "*.parquet", "*.json", "*.arrow", "*.txt")
    ),
    "folders": Reader(folder_seeds, read_embedding_folder, ("*.npy",)),
    "correction": Reader(correction_seeds, read_correction, ("*.safetensors",)),
    "images": Reader(image_seeds, read_lists, ("[a-g].*",)),
    "keep": Reader(keep_seeds, read_keep_list, ("keep.*",)),
    "config": Reader(config_seeds, read_config, ("*.yaml",)),
    "classes": Reader(class_seeds, read_classes, ("*.json", "*.npz")),
    "model": Reader(model_seeds, read_model, ("*.json", "*.json", "*")),
    "run": Reader(run_seeds, read_run, ("run/*.json*", "run/*.yaml", "run/*", "run/*/*")),
    "checkpoint": Reader(checkpoint_seeds, read_checkpoint, ("*.pt", "*.pt", "*.pt", "run/*.json*", "run/*.yaml")),
    "state": Reader(state_seeds, read_state, ("*.pt",)),
    "remote": Reader(remote_seeds, read_remote, tuple(f"*{suffix}" for suffix in REMOTE)),
}


# -- one batch, in a child process -------------------------------------------------------------------------------------


class Workspace:
    """The folder that a reader reads. Only files that differ from the last case are written."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._written = folder, {}

    def write(self, files: Files) -> None:
        """Make the folder hold these files, a FIFO and an empty folder, and nothing else."""
        for path in sorted(self.folder.rglob("*"), reverse=True):
            name = str(path.relative_to(self.folder))
            if path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):
                    path.rmdir()
            elif name not in files or self._written.get(name) != files[name]:
                path.unlink()
        for name, content in files.items():
            path = self.folder / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        self._written = dict(files)


def make_case(reader: str, seeds: list[Files], seed: int, case: int) -> Files:
    """Return the files of a case, one or two of them damaged."""
    rng = random.Random(f"{seed} {reader} {case}")
    files = dict(rng.choice(seeds))
    groups = [[name for name in files if Path(name).match(pattern)] for pattern in READERS[reader].damaged]
    candidates = rng.choice([group for group in groups if group])
    for name in rng.sample(candidates, min(len(candidates), rng.choice([1, 1, 1, 2]))):
        if len(candidates) > 1 and rng.random() < 0.03:
            del files[name]
        else:
            files[name] = mutations.mutate(rng, name, files[name])
    return files


def run_case(reader: str, folder: Path, case: int) -> dict[str, Any]:
    """Read the files of a case and return the outcome."""
    from nuclr.errors import UserError

    before = _peak(reset=True)
    begin = time.perf_counter()
    outcome: dict[str, Any] = {"outcome": "clean"}
    try:
        READERS[reader].read(folder, case)
    except UserError as error:
        outcome = {"outcome": "error", "text": str(error)[:300]}
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "/nuclr/" in frame.filename] or frames
        signature = f"{type(error).__name__} in {Path(ours[-1].filename).name}:{ours[-1].name}"
        outcome = {"outcome": "traceback", "signature": signature, "text": traceback.format_exc()[-6000:]}
    outcome |= {"case": case, "bytes": _peak() - before, "seconds": time.perf_counter() - begin}
    if outcome["bytes"] > MEMORY or "MemoryError" in outcome.get("signature", ""):
        outcome |= {"outcome": "memory", "signature": outcome.get("signature", "more than 1 GiB")}
    return outcome


def _peak(reset: bool = False) -> int:
    """Return the peak of resident memory in bytes since the last reset; after a reset, the present amount."""
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def run_batch(
    reader: str, seeds: list[Files], seed: int, cases: range, folder: Path, patience: float, pipe: int
) -> None:
    """Run cases and write one line per case to the pipe."""
    for key in ("NUCLR_CACHE", "HF_HOME", "HF_DATASETS_CACHE"):
        os.environ[key] = str(folder.with_name("cache"))
    os.environ["HF_HUB_OFFLINE"] = "1"
    # A file that asks for a huge allocation gets a MemoryError instead of the machine's memory.
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + 4 * MEMORY, size + 4 * MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet = (folder.parent / "stderr").open("w")
    faulthandler.enable(quiet)
    for number in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR) if number == 0 else quiet.fileno(), number)
    folder.mkdir(parents=True, exist_ok=True)
    workspace = Workspace(folder)
    for case in cases:
        files = make_case(reader, seeds, seed, case)
        workspace.write(files)
        if not (folder / "pipe.jpg").exists():
            os.mkfifo(folder / "pipe.jpg")
        os.write(pipe, b"\n")  # patience begins here; making the files may take a while
        faulthandler.dump_traceback_later(0.8 * patience, file=quiet)  # shows where a hang is
        outcome = run_case(reader, folder, case)
        faulthandler.cancel_dump_traceback_later()
        os.write(pipe, (json.dumps(outcome) + "\n").encode())
        shutil.rmtree(folder.with_name("cache"), ignore_errors=True)


def forked(function: Callable[[], None]) -> int:
    """Run a function in a child process and return its id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return child


# -- all batches -------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """The outcomes of one reader."""

    counts: Counter = field(default_factory=Counter)
    signatures: Counter = field(default_factory=Counter)
    seconds: float = 0.0
    slowest: float = 0.0
    bytes: int = 0


def outcomes(
    reader: str, seeds: list[Files], seed: int, cases: range, folder: Path, patience: float
) -> Iterator[dict[str, Any]]:
    """Yield the outcome of every case; after a crash or a hang a new child continues with the next case.

    A case that gave no answer in time is repeated alone, because a busy machine may have caused the delay.
    """
    at, repeated = cases.start, -1
    while at < cases.stop:
        batch = range(at, at + 1 if at == repeated else min(at + BATCH, cases.stop))
        source, sink = os.pipe()
        child = forked(lambda batch=batch, sink=sink: run_batch(reader, seeds, seed, batch, folder, patience, sink))  # type: ignore[misc]
        os.close(sink)
        hung, rest = False, b""
        with os.fdopen(source, "rb", buffering=0) as stream:
            while True:
                if not select.select([stream], [], [], patience)[0]:
                    os.kill(child, signal.SIGKILL)
                    hung = True
                    break
                part = stream.read(1 << 16)
                if not part:
                    break
                *lines_read, rest = (rest + part).split(b"\n")
                for line in filter(None, lines_read):
                    outcome = json.loads(line)
                    at = outcome["case"] + 1
                    yield outcome
        _, status = os.waitpid(child, 0)
        if hung and at != repeated:
            repeated = at
        elif at < batch.stop:
            stderr = (
                (folder.parent / "stderr").read_text(errors="replace") if (folder.parent / "stderr").exists() else ""
            )
            name = "hang" if hung else "crash"
            how = f"no answer for {patience:g} s" if hung else f"status {status}"
            frames = [line.strip() for line in stderr.splitlines() if line.strip().startswith('File "')]
            ours = next((frame for frame in frames if "/nuclr/" in frame), "")
            yield {"outcome": name, "case": at, "signature": f"{name} ({how}) {ours}", "text": stderr[-6000:]}
            at += 1


def store_case(reader: str, seeds: list[Files], seed: int, outcome: dict[str, Any], store: Path) -> None:
    """Write the files of a case that failed, and how it failed."""
    target = store / reader / str(outcome["case"])
    for name, data in make_case(reader, seeds, seed, outcome["case"]).items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(data)
    (target / "outcome.txt").write_text(f"{outcome['signature']}\n\n{outcome.get('text', '')}")


def fuzz(reader: str, cases: range, seed: int, patience: float, store: Path, folder: Path) -> Tally:
    """Run the cases of one reader and store reproducers."""
    folder.mkdir(parents=True, exist_ok=True)
    seeds_folder = folder / "seeds"
    pickled = folder / "seeds.json"

    def build() -> None:
        content = READERS[reader].seeds(folder / "files" if reader in ("run", "checkpoint") else seeds_folder)
        pickled.write_text(json.dumps([{name: data.hex() for name, data in files.items()} for files in content]))

    # In a child, because a process in which torch or Arrow has started threads cannot be forked safely.
    if os.waitpid(forked(build), 0)[1] != 0:
        sys.exit(f"{reader}: the valid files could not be made")
    seeds = [{name: bytes.fromhex(data) for name, data in files.items()} for files in json.loads(pickled.read_text())]
    shutil.rmtree(folder / "files", ignore_errors=True)
    tally = Tally()
    begin = time.perf_counter()
    for outcome in outcomes(reader, seeds, seed, cases, folder / "files", patience):
        tally.counts[outcome["outcome"]] += 1
        tally.slowest = max(tally.slowest, outcome.get("seconds", 0.0))
        tally.bytes = max(tally.bytes, outcome.get("bytes", 0))
        if outcome["outcome"] in FAILURES:
            tally.signatures[outcome["signature"]] += 1
            if tally.signatures[outcome["signature"]] <= STORED:
                os.waitpid(forked(lambda outcome=outcome: store_case(reader, seeds, seed, outcome, store)), 0)  # type: ignore[misc]
    tally.seconds = time.perf_counter() - begin
    return tally


def table(tallies: dict[str, Tally]) -> str:
    """Return one row per reader."""
    columns = ("clean", "error", *FAILURES)
    rows = [
        f"{'reader':12}{'cases':>7}"
        + "".join(f"{name:>11}" for name in columns)
        + f"{'peak MiB':>10}{'slowest s':>11}{'s':>7}"
    ]
    for reader, tally in tallies.items():
        cells = "".join(f"{tally.counts[name]:>11}" for name in columns)
        rows.append(
            f"{reader:12}{sum(tally.counts.values()):>7}{cells}{tally.bytes / 2**20:>10.0f}"
            f"{tally.slowest:>11.2f}{tally.seconds:>7.0f}"
        )
    return "\n".join(rows)


def import_everything() -> None:
    """Import what the readers need, once for all children."""
    import datasets  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import transformers
    from PIL import Image

    import nuclr.models
    import nuclr.report
    import nuclr.runs.run
    import nuclr.studies.items.popularity_report
    import nuclr.studies.tasks
    import nuclr.training.loop  # noqa: F401

    Image.init()
    for name in ("AutoModel", "AutoTokenizer", "DistilBertModel", "ResNetModel", "ViTModel", "PreTrainedTokenizerFast"):
        getattr(transformers, name)  # imported when it is first used


def main(arguments: list[str] | None = None) -> int:
    """Print the table, write JSON, and return 1 if a reader failed in any way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).parent / "results"
    parser.add_argument("--cases", type=int, default=4000, help="per reader")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--readers", default=",".join(READERS))
    parser.add_argument("--patience", type=float, default=10.0, help="seconds after which a case counts as a hang")
    parser.add_argument("--store", type=Path, default=here / "fuzz", help="folder for reproducers")
    parser.add_argument("--out", type=Path, default=here / "fuzz.json")
    options = parser.parse_args(arguments)
    readers = options.readers.split(",")
    unknown = [reader for reader in readers if reader not in READERS]
    if unknown:
        parser.error(f"--readers: {unknown[0]!r} is not one of {', '.join(READERS)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import_everything()
    cases = range(options.first, options.first + options.cases)
    tallies = {}
    for reader in readers:
        with tempfile.TemporaryDirectory(prefix="nuclr-fuzz-") as name:
            tallies[reader] = fuzz(reader, cases, options.seed, options.patience, options.store, Path(name))
        print(table(tallies).splitlines()[-1] if len(tallies) > 1 else table(tallies), flush=True)
        for signature, count in tallies[reader].signatures.most_common():
            print(f"    {count} x {signature}", flush=True)
    report = {
        "seed": options.seed,
        "first": options.first,
        "readers": {
            reader: {"cases": sum(tally.counts.values()), **tally.counts, "peak_mib": tally.bytes / 2**20,
                     "slowest_seconds": tally.slowest, "seconds": tally.seconds, "failures": dict(tally.signatures)}
            for reader, tally in tallies.items()
        },
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(tally.counts[name] for tally in tallies.values() for name in FAILURES))


if __name__ == "__main__":
    sys.exit(main())
