"""`nuclr export`: targets, output folders, and what is refused."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from nuclr.errors import UserError, install_command
from nuclr.export import TARGETS, export, new_folder


def refused(nuclr, source, target, tmp_path, *words):
    """Check that an export ends with status 2 and one line with these words, and leaves nothing."""
    status, _, err = nuclr("export", source, "--to", target, "--out", tmp_path / "out")
    lines = [line for line in err.splitlines() if line and "Writing model shards" not in line]  # transformers' progress
    assert status == 2 and len(lines) == 1
    assert all(word in err for word in words), err
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_unknown_targets_are_refused(nuclr, runs, tmp_path):
    refused(nuclr, runs("separate"), "faiss", tmp_path, "--to faiss", *TARGETS)


def test_folders_that_are_not_a_finished_run(nuclr, runs, tmp_path):
    (tmp_path / "photos").mkdir()
    shutil.copytree(runs("separate"), tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    for name, word in (("photos", "photos"), ("nowhere", "nowhere"), ("run", "--resume")):
        refused(nuclr, tmp_path / name, "onnx", tmp_path, word)


def test_an_output_that_exists(runs, tmp_path):
    (tmp_path / "out").mkdir()
    mine = [tmp_path / "out" / "mine.txt", tmp_path / "file"]
    for path in mine:
        path.write_text("mine")
        taken = path if path.name == "file" else path.parent
        with pytest.raises(UserError, match=f"--out {taken}"):
            export(runs("separate"), "onnx", taken)
        assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("target", "name", "words"),
    [
        *((target, "vectors", ["use --to onnx"]) for target in ("sentence-transformers", "hf")),
        ("hf", "separate", ["model.pretrained", "sentence-transformers"]),
        ("open-clip", "shared_texts", ["model.pretrained"]),
        ("open-clip", "siglip", ["SigLIP", "--to hf"]),
    ],
)
def test_models_that_a_target_cannot_hold(nuclr, runs, tmp_path, target, name, words):
    refused(nuclr, runs(name), target, tmp_path, f"--to {target}", *words)


def test_a_missing_package_is_named(nuclr, runs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(sys.modules, "onnx", None)
    refused(nuclr, runs("separate"), "onnx", tmp_path, install_command("onnx"))


def test_an_empty_folder_is_used_and_nothing_else_remains(nuclr, runs, tmp_path):
    (tmp_path / "out").mkdir()
    status, out, err = nuclr("export", runs("clip"), "--to", "hf", "--out", tmp_path / "out", "--best")
    assert status == 0 and "CLIPModel" in out, err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "clip"
    assert "the best checkpoint" in (tmp_path / "out" / "README.md").read_text()


def write(out, **content):
    with new_folder(out) as folder:
        (folder / "inner").mkdir()
        for name, text in content.items():
            (folder / "inner" / name).write_text(text)


def test_an_earlier_export_is_kept(tmp_path):
    out = tmp_path / "out"
    write(out, a="1")
    (tmp_path / "link").symlink_to(out)
    for path in (out, tmp_path / "link"):
        with pytest.raises(UserError, match=f"--out {out}: exists"):
            write(path, a="2")
    assert (out / "inner" / "a").read_text() == "1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]


def test_a_file_that_appears_while_an_export_is_written_is_kept(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UserError, match=f"--out {out}"), new_folder(out) as folder:
        (folder / "a").write_text("1")
        out.mkdir()
        (out / "mine").write_text("mine")
    assert (out / "mine").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("error", "raised"), [(ZeroDivisionError(), ZeroDivisionError), (OSError(28, "No space left"), UserError)]
)
def test_a_failure_leaves_nothing(tmp_path, error, raised):
    with pytest.raises(raised), new_folder(tmp_path / "out") as folder:
        (folder / "half").write_text("half")
        raise error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_later_export_clears_up_after_a_killed_one(tmp_path, moment):
    out = tmp_path / "out"
    if os.fork() == 0:
        rename = Path.rename
        Path.rename = lambda *paths: (moment == "after" and rename(*paths), os._exit(9))
        write(out, a="1")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 9
    assert out.exists() == (moment == "after")
    if moment == "after":
        shutil.rmtree(out)
    write(out, a="2")
    assert (out / "inner" / "a").read_text() == "2"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
