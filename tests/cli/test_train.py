"""`nuclr train` refuses wrong input of every kind: one or two clear lines, status 2, and nothing is overwritten."""

import json
import os

import numpy as np
import pytest
from PIL import Image

from tests.training import runs


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Good and bad data: vectors, images with captions in several formats, other files."""
    runs.vector_settings(tmp_path)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 12)).astype("float32"), rng.normal(size=(40, 8)).astype("float32")
    np.savez(tmp_path / "no_y.npz", x=x)
    np.savez(tmp_path / "integers.npz", x=x.astype(int), y=y)
    np.savez(tmp_path / "nan.npz", x=np.where(np.arange(40)[:, None] == 7, np.nan, x), y=y)
    np.savez(tmp_path / "unequal.npz", x=x[:30], y=y)
    np.savez(tmp_path / "narrow.npz", x=x[:, :5], y=y)
    np.savez(tmp_path / "bad_links.npz", x=x, y=y, y_to_x=np.arange(40) + 1)
    (tmp_path / "not.npz").write_bytes(b"not an archive")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "data.xyz").write_text("?")
    (tmp_path / "one.csv").write_text("question,answer\nwho,me\n")
    (tmp_path / "line.jsonl").write_text('{"name": "a", "data": "b"}\n')
    (tmp_path / "latin1.csv").write_bytes(b"question,r\xe9ponse\nwho,me\n")
    (tmp_path / "pictures").mkdir()
    for i in range(20):
        pixels = rng.integers(0, 255, size=(16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{i}.png")
    rows = [f"pictures/{i}.png,caption {i}" for i in range(20)]
    (tmp_path / "no_header.csv").write_text("\n".join(rows))
    (tmp_path / "good.csv").write_text("\n".join(["filepath,title", *rows]))
    (tmp_path / "elsewhere.jsonl").write_text(json.dumps({"image": "gone.png", "caption": "a"}) + "\n")
    (tmp_path / "broken.jsonl").write_text('{"image": "pictures/0.png", "caption"\n')
    for i in range(8):
        (tmp_path / "pictures" / f"{i}_bad.png").write_bytes(b"not an image")
    lines = [{"image": f"pictures/{i}{'_bad' if i < 8 else ''}.png", "caption": f"c {i}"} for i in range(20)]
    (tmp_path / "mostly_bad.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "keep_far.txt").write_text("3\n400\n")
    (tmp_path / "keep_one.txt").write_text("3\n")
    (tmp_path / "keep_words.txt").write_text("three\n")
    (tmp_path / "unknown.yaml").write_text("name: a\noptimzer: {lr: 1}\n")
    (tmp_path / "not.yaml").write_text("a: [\n")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis").write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NUCLR_CACHE", str(tmp_path / "cache"))
    return tmp_path


VECTORS = ["empty.yaml", "data.train=train.npz", "data.batch_size=16"]
PICTURES = ["empty.yaml", "data.batch_size=4"]

CASES = {
    "no such config": (["nothing.yaml"], "nothing.yaml: no such config file"),
    "not YAML": (["not.yaml"], "not.yaml, line 2: not valid YAML"),
    "unknown key in a file": (["unknown.yaml"], "unknown key 'optimzer.lr'; did you mean optimizer.lr"),
    "unknown key": ([*VECTORS, "data.bach_size=3"], "did you mean data.batch_size?"),
    "not key=value": ([*VECTORS, "epochs"], "overrides are key=value"),
    "impossible value": ([*VECTORS, "data.batch_size=0"], "data.batch_size is 0; it needs a whole number at least 2"),
    "unknown word": ([*VECTORS, "objective.name=nclr"], "did you mean nuclr?"),
    "option of another objective": ([*VECTORS, "objective.tau_plus=0.1"], "nuclr has no such option"),
    "no data": (["empty.yaml"], "data.train is missing"),
    "no such file": (
        ["empty.yaml", "data.train=trian.npz"],
        "trian.npz: no such file or folder; did you mean train.npz",
    ),
    "no such root": ([*VECTORS, "data.root=nowhere"], "nowhere: no such folder"),
    "unknown format": (["empty.yaml", "data.train=data.xyz"], "unknown format"),
    "empty file": (["empty.yaml", "data.train=empty.jsonl"], "empty.jsonl: empty file"),
    "not an npz": (["empty.yaml", "data.train=not.npz"], "not.npz: cannot be read as .npz"),
    "missing array": (["empty.yaml", "data.train=no_y.npz"], "no array named 'y'"),
    "dtype": (["empty.yaml", "data.train=integers.npz"], "x holds int64; needs floating-point"),
    "nan in the data": (["empty.yaml", "data.train=nan.npz"], "x row 7 holds a NaN"),
    "mismatched sizes": (["empty.yaml", "data.train=unequal.npz"], "x has 30 rows and y 40"),
    "links to nothing": (["empty.yaml", "data.train=bad_links.npz"], "y_to_x[39] is 40"),
    "held-out pairs of another width": (
        [*VECTORS, "data.val=narrow.npz"],
        "data.val has x of width 5, but data.train has width 12",
    ),
    "held-out pairs of another modality": ([*VECTORS, "data.val=good.csv"], "data.val holds images on side x"),
    "batch too large": ([*VECTORS, "data.batch_size=500"], "larger than the 120 samples"),
    "encoder for vectors": ([*VECTORS, "model.x.encoder=tiny_resnet"], "but the data holds vectors there"),
    "vectors for images": ([*PICTURES, "data.train=good.csv", "model.x.encoder=vectors"], "holds images there"),
    "unknown encoder": (
        [*PICTURES, "data.train=good.csv", "model.x.encoder=tiny_resnett"],
        "did you mean 'tiny_resnet'",
    ),
    "classes for vectors": (
        [*VECTORS, "data.classes=builtin"],
        "data.classes needs a model that takes images, but this one takes vectors",
    ),
    "no such classes": ([*PICTURES, "data.train=good.csv", "data.classes=none"], "none: no such folder"),
    "CSV without header": (["empty.yaml", "data.train=no_header.csv"], "no_header.csv"),
    "no such column": (["empty.yaml", "data.train=good.csv", "data.y.key=text"], "text"),
    "JSON broken": (["empty.yaml", "data.train=broken.jsonl"], "broken.jsonl"),
    "images elsewhere": (["empty.yaml", "data.train=elsewhere.jsonl"], "none of its first images exists"),
    "mostly broken": ([*PICTURES, "data.train=mostly_bad.jsonl"], "8 of 20 samples are bad"),
    "keep beyond the data": ([*VECTORS, "data.keep=keep_far.txt"], "pair 400 does not exist"),
    "keep words": ([*VECTORS, "data.keep=keep_words.txt"], "keep_words.txt, line 1"),
    "no such keep": ([*VECTORS, "data.keep=gone.txt"], "gone.txt: no such file"),
    "no such device": ([*VECTORS, "device=gpu9"], "device: 'gpu9' cannot be used here"),
    "folder is a file": ([*VECTORS, "out=file"], "out=file: there is a file with this name"),
    "folder with other files": ([*VECTORS, "out=folder"], "folder is not empty (thesis) and is not a run folder"),
    "not a run": (["folder", "--resume"], "folder: not a run folder (it has no config.yaml)"),
    "no run to resume": (["--resume"], "--resume: name the run to resume, such as nuclr train runs/NAME --resume"),
    "settings and no run to resume": (["seed=1", "--resume"], "--resume: name the run to resume"),
    "no such run": (["runs/nope", "--resume"], "runs/nope: no such run; there are no runs in runs"),
    "folder of data": (
        ["pictures"],
        "pictures: not a run folder (it has no config.yaml); to train on pairs in it, write data",
    ),
    "pairs instead of a config": (
        ["good.csv"],
        "good.csv: not a config file; to train on it, write data.train=good.csv",
    ),
    "a line of JSON is YAML": (["line.jsonl"], "line.jsonl: not a config file; to train on it, write data.train=line"),
    "builtin pairs": (["builtin"], "builtin: not a config file; to train on it, write data.train=builtin"),
    "one pair": (
        ["data.train=one.csv"],
        "data.train=one.csv: has only one pair; training contrasts pairs with each other",
    ),
    "one pair kept": (
        [*VECTORS, "data.keep=keep_one.txt"],
        "train.npz: has only one pair that data.keep lists and that can be used; training",
    ),
    "Latin-1": (["data.train=latin1.csv"], "latin1.csv, line 1: not UTF-8 text (byte 0xE9); if it is Latin-1"),
    "misspelled section": ([*VECTORS, "objektive.gamma=0.5"], "'objektive.gamma'; did you mean objective.gamma?"),
    "setting as an option": (
        [*VECTORS, "--epochs", "3"],
        "--epochs: unknown option; settings are written KEY=VALUE, such as schedule.epochs=3",
    ),
    "pairs as an option": (
        ["--data", "my.csv"],
        "--data: unknown option; settings are written KEY=VALUE, such as data.train=my.csv",
    ),
    "setting without =": (
        [*VECTORS, "data.batch_size", "16"],
        "data.batch_size: settings are written KEY=VALUE, such as data.batch_size=16",
    ),
    "setting first, without =": (["data.batch_size", "16"], "such as data.batch_size=16"),
    "option with a value": ([*VECTORS, "--batch-size=3"], "settings are written KEY=VALUE, such as data.batch_size=3"),
    "misspelled option": ([*VECTORS, "--dryrun"], "--dryrun: unknown option; did you mean --dry-run?"),
    "pattern": ([*PICTURES, "data.train=*.tar"], "*.tar: no file matches this pattern"),
    "builtin option": (["empty.yaml", "data.train=builtin:m=3"], "unknown option 'm'"),
}


@pytest.mark.parametrize(("arguments", "message"), CASES.values(), ids=CASES.keys())
def test_wrong_input_is_refused(folder, nuclr, arguments, message):
    status, _, err = nuclr("train", *arguments)
    assert status == 2, err
    assert message in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 2, err
    assert (folder / "file").read_text() == "mine"
    assert [path.name for path in (folder / "folder").iterdir() if path.name != ".lock"] == ["thesis"]
    assert not list(folder.glob("runs/*/checkpoints/*")), "nothing was trained"


def test_resume_names_runs_that_exist(nuclr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("kill", "done", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    (tmp_path / "runs" / "done" / "results.json").touch()
    os.utime(tmp_path / "runs" / "other" / "config.yaml", (0, 0))
    assert nuclr("train", "--resume").err == (
        "nuclr: --resume: name the run to resume, such as nuclr train runs/kill --resume "
        "(other runs: runs/other, runs/done)\n"
    )
    ended = nuclr("train", "runs/othr", "--resume")
    assert ended.status == 2 and ended.err.startswith("nuclr: runs/othr: no such run; there are runs/other, ")
