"""`nuclr export`: targets, output folders, and what is refused."""

import json
import shutil

import pytest

from nuclr.errors import UserError, install_command
from nuclr.export import TARGETS, export, find_target, new_folder


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("st", "sentence-transformers"),
        ("openclip", "open-clip"),
        ("open_clip", "open-clip"),
        ("sentence", "use one of hf"),
    ],
)
def test_other_names_of_targets_are_corrected(name, meant):
    with pytest.raises(UserError, match=f"--to {name}: unknown target; (did you mean )?{meant}"):
        find_target(name)


def test_unknown_targets_are_refused(nuclr, runs, tmp_path):
    status, _, err = nuclr("export", runs("separate"), "--to", "caffe", "--out", tmp_path / "out")
    assert status == 2
    assert err.startswith("nuclr: --to caffe: unknown target; use one of hf, sentence-transformers, open-clip, onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_has_a_module_that_writes(name):
    import importlib

    target = find_target(name)
    assert callable(importlib.import_module(target.module).write)
    assert target.summary


@pytest.mark.parametrize("target", ["hf", "sentence-transformers", "open-clip", "onnx"])
class TestSources:
    """The same for every target that takes a run."""

    def refused(self, nuclr, source, target, tmp_path):
        status, _, err = nuclr("export", source, "--to", target, "--out", tmp_path / "out")
        assert status == 2 and len(err.splitlines()) == 1
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
        return err

    def test_a_folder_that_is_not_a_run(self, nuclr, target, tmp_path):
        (tmp_path / "photos").mkdir()
        assert "photos: not a run folder" in self.refused(nuclr, tmp_path / "photos", target, tmp_path)
        assert "nowhere: no such folder" in self.refused(nuclr, tmp_path / "nowhere", target, tmp_path)

    def test_an_unfinished_run(self, nuclr, runs, target, tmp_path):
        shutil.copytree(runs("separate"), tmp_path / "run")
        (tmp_path / "run" / "results.json").unlink()
        assert "this run is not finished; continue it with" in self.refused(nuclr, tmp_path / "run", target, tmp_path)

    def test_an_output_that_exists(self, nuclr, runs, target, tmp_path):
        out = tmp_path / "out"
        out.mkdir()
        (out / "mine.txt").write_text("mine")
        arguments = ["export", runs("separate"), "--to", target, "--out", out]
        status, _, err = nuclr(*arguments)
        assert status == 2 and "out: the folder is not empty; remove it or name another one" in err
        assert [path.name for path in out.iterdir()] == ["mine.txt"]
        (tmp_path / "file").write_text("mine")
        status, _, err = nuclr(*arguments[:-1], tmp_path / "file")
        assert status == 2 and "there is a file with this name" in err


@pytest.mark.parametrize("name", ["vectors", "views"])
@pytest.mark.parametrize("target", ["sentence-transformers", "open-clip", "hf"])
def test_models_without_texts(nuclr, runs, tmp_path, name, target):
    status, _, err = nuclr("export", runs(name), "--to", target, "--out", tmp_path / "out")
    assert status == 2 and err.startswith(f"nuclr: --to {target}: ") and len(err.splitlines()) == 1
    if target == "sentence-transformers":
        takes = "vectors and vectors" if name == "vectors" else "images"
        assert f"has no text side (its model takes {takes}); use --to onnx instead" in err


def test_a_siglip_is_not_a_model_of_open_clip(nuclr, runs, tmp_path):
    status, _, err = nuclr("export", runs("siglip"), "--to", "open-clip", "--out", tmp_path / "out")
    assert status == 2 and "holds a SigLIP, which open_clip builds from timm; use --to hf" in err


def test_a_missing_package_is_named(nuclr, runs, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    status, _, err = nuclr("export", runs("separate"), "--to", "onnx", "--out", tmp_path / "out")
    assert status == 2 and err == f"nuclr: --to onnx: onnx is not installed; {install_command('onnx')}\n"


def test_an_option_of_no_target_is_refused(runs, tmp_path):
    with pytest.raises(UserError, match=r"--colour: not an option of --to hf, but of no target"):
        export(runs("clip"), "hf", tmp_path / "out", colour="red")


def test_an_empty_folder_is_used_and_nothing_else_remains(nuclr, runs, tmp_path):
    (tmp_path / "out").mkdir()
    status, out, err = nuclr("export", runs("clip"), "--to", "hf", "--out", tmp_path / "out")
    assert status == 0, err
    assert out == "out: CLIPModel with processor, tokenizer and model card\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "clip"


def test_the_best_checkpoint(nuclr, runs, tmp_path):
    status, _, err = nuclr("export", runs("clip"), "--to", "hf", "--out", tmp_path / "out", "--best")
    assert status == 0, err
    assert "Of the best checkpoint." in (tmp_path / "out" / "README.md").read_text()


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "out") as folder:
        (folder / "half").write_text("half")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line(tmp_path):
    full = pytest.raises(UserError, match=r"out: cannot be written \(No space left on device\)")
    with full, new_folder(tmp_path / "out"):
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())
