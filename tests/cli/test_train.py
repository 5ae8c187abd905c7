"""`nuclr train` refuses wrong input of every kind: one or two clear lines, status 2, and nothing is overwritten."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.training import runs

TEXTS = {
    "one.csv": "question,answer\nwho,me\n",
    "line.jsonl": '{"name": "a", "data": "b"}\n',
    "elsewhere.jsonl": '{"image": "gone.png", "caption": "a"}\n',
    "keep_far.txt": "3\n400\n",
    "keep_one.txt": "3\n",
    "keep_words.txt": "three\n",
    "unknown.yaml": "name: a\noptimzer: {lr: 1}\n",
    "not.yaml": "a: [\n",
    "file": "mine",
    "folder/thesis": "mine",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Good and bad data: vectors, images with captions in several formats, other files."""
    runs.vector_settings(tmp_path)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 12)).astype("float32")
    y = rng.normal(size=(40, 8)).astype("float32")
    np.savez(tmp_path / "no_y.npz", x=x)
    np.savez(tmp_path / "nan.npz", x=np.where(np.arange(40)[:, None] == 7, np.nan, x), y=y)
    np.savez(tmp_path / "narrow.npz", x=x[:, :5], y=y)
    np.savez(tmp_path / "bad_links.npz", x=x, y=y, y_to_x=np.arange(40) + 1)
    (tmp_path / "latin1.csv").write_bytes(b"question,r\xe9ponse\nwho,me\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "pictures").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    for i in range(20):
        pixels = rng.integers(0, 255, size=(16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{i}.png")
    for i in range(8):
        (tmp_path / "pictures" / f"{i}_bad.png").write_bytes(b"not an image")
    rows = [f"pictures/{i}.png,caption {i}" for i in range(20)]
    (tmp_path / "no_header.csv").write_text("\n".join(rows))
    (tmp_path / "good.csv").write_text("\n".join(["filepath,title", *rows]))
    lines = [{"image": f"pictures/{i}{'_bad' if i < 8 else ''}.png", "caption": f"c {i}"} for i in range(20)]
    (tmp_path / "mostly_bad.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NUCLR_CACHE", str(tmp_path / "cache"))
    return tmp_path


VECTORS = "empty.yaml data.train=train.npz data.batch_size=16"
PICTURES = "empty.yaml data.batch_size=4 data.train=good.csv"

# Arguments, and what the message names.
CASES = [
    ("", ["data.train"]),
    ("nothing.yaml", ["nothing.yaml"]),
    ("not.yaml", ["not.yaml, line 2"]),
    ("unknown.yaml", ["unknown.yaml", "optimzer.lr", "optimizer.lr"]),
    (f"{VECTORS} data.bach_size=3", ["data.bach_size", "data.batch_size"]),
    (f"{VECTORS} data.batch_size=0", ["data.batch_size is 0"]),
    (f"{VECTORS} objective.name=nclr", ["objective.name", "'nclr'", "'nuclr'"]),
    ("empty.yaml data.train=trian.npz", ["trian.npz"]),
    (f"{VECTORS} data.root=nowhere", ["nowhere"]),
    ("empty.yaml data.train=no_y.npz", ["no_y.npz", "'y'"]),
    ("empty.yaml data.train=nan.npz", ["nan.npz", "7"]),
    ("empty.yaml data.train=bad_links.npz", ["bad_links.npz", "y_to_x[39] is 40"]),
    (f"{VECTORS} data.val=narrow.npz", ["data.val", "5", "12"]),
    (f"{VECTORS} data.val=good.csv", ["data.val", "images"]),
    (f"{VECTORS} data.batch_size=500", ["500", "120"]),
    (f"{VECTORS} model.x.encoder=tiny_resnet", ["model.x.encoder", "'tiny_resnet'"]),
    (f"{PICTURES} model.x.encoder=vectors", ["model.x.encoder", "'vectors'"]),
    (f"{PICTURES} model.x.encoder=tiny_resnett", ["tiny_resnett", "tiny_resnet,"]),
    (f"{VECTORS} data.classes=builtin", ["data.classes", "vectors"]),
    (f"{PICTURES} data.classes=none", ["none"]),
    ("empty.yaml data.train=no_header.csv", ["no_header.csv"]),
    ("empty.yaml data.train=good.csv data.y.key=text", ["text"]),
    ("empty.yaml data.train=elsewhere.jsonl", ["elsewhere.jsonl"]),
    (f"{PICTURES} data.train=mostly_bad.jsonl", ["mostly_bad.jsonl", "8 of 20", "data.max_bad_share"]),
    (f"{VECTORS} data.keep=keep_far.txt", ["keep_far.txt", "400"]),
    (f"{VECTORS} data.keep=keep_words.txt", ["keep_words.txt", "three"]),
    (f"{VECTORS} data.keep=keep_one.txt", ["train.npz", "data.keep"]),
    (f"{VECTORS} device=gpu9", ["device", "'gpu9'"]),
    (f"{VECTORS} out=file", ["out=file"]),
    (f"{VECTORS} out=folder", ["folder", "thesis"]),
    ("folder --resume", ["folder", "config.yaml"]),
    ("--resume", ["--resume", "nuclr train runs/NAME --resume"]),
    ("runs/nope --resume", ["runs/nope"]),
    ("pictures", ["pictures", "config.yaml", "data.train=pictures"]),
    ("line.jsonl", ["data.train=line.jsonl"]),
    ("builtin", ["data.train=builtin"]),
    ("data.train=one.csv", ["data.train=one.csv"]),
    ("data.train=latin1.csv", ["latin1.csv", "UTF-8"]),
    (f"{VECTORS} --epochs 3", ["--epochs", "schedule.epochs="]),
    ("--data my.csv", ["--data", "data.train="]),
    (f"{VECTORS} data.batch_size 16", ["data.batch_size="]),
    (f"{VECTORS} --batch-size=3", ["data.batch_size=3"]),
    (f"{VECTORS} --dryrun", ["--dryrun", "--dry-run"]),
    (f"{PICTURES} data.train=*.tar", ["*.tar"]),
    ("empty.yaml data.train=builtin:m=3", ["m=3"]),
]


@pytest.mark.parametrize(("arguments", "named"), CASES)
def test_wrong_input_is_refused(folder, nuclr, arguments, named):
    status, _, err = nuclr("train", *arguments.split())
    assert status == 2, err
    assert all(part in err for part in named), err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 2, err
    assert (folder / "file").read_text() == "mine"
    assert [path.name for path in (folder / "folder").iterdir() if path.name != ".lock"] == ["thesis"]
    assert not list(folder.glob("runs/*/checkpoints/*")), "nothing was trained"


def test_a_model_that_is_too_large_for_memory_gives_one_line(nuclr, tmp_path, monkeypatch):
    settings = runs.vector_settings(tmp_path)
    done = nuclr("train", *settings, "model.width=10000000000", f"out={tmp_path / 'run'}")
    assert done.status == 2 and "model.width" in done.err and len(done.err.splitlines()) == 1

    def full(*arguments, **options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr("nuclr.runs.components.make_model", full)
    done = nuclr("train", *settings, f"out={tmp_path / 'run'}")
    assert done.status == 1 and "memory" in done.err and "Traceback" not in done.err
