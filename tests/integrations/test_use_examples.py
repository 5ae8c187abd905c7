"""The examples run as their first lines say. `use_pgvector.py` is run by tests/recipes."""

import re
import runpy
import sys

import pytest
import torch

from tests.export.runs import images, largest_difference, texts
from tests.integrations.common import EXAMPLES, launch


@pytest.fixture
def example(monkeypatch, capsys):
    def run(name: str, *arguments: object) -> list[str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_encode(runs, example):
    lines = example("use_encode.py", runs("separate"))
    assert len(lines) == 5 and all(re.match(r"( +-?\d\.\d\d){5}   \w", line) for line in lines)


def test_numbered_keys_of_a_stream(tmp_path):
    pytest.importorskip("webdataset")
    printed = launch(EXAMPLES / "webdataset_stream.py", cwd=tmp_path)
    assert "100% of the pairs seen" in printed
    assert float(printed.split("recall@1 ")[1].split("%")[0]) > 50


def test_search(runs, example):
    lines = example("use_search.py", runs("separate"), "a red circle", "two stars")
    assert lines[0] == "a red circle" and lines[4] == "two stars" and len(lines) == 8
    assert re.match(r"  -?\d\.\d{3}  image \d+: \w", lines[1])


def test_corrected_search(runs, example):
    plain, corrected, skewness = example("use_corrected_search.py", runs("separate"))
    assert plain.startswith("plain: recall@10 ") and corrected.startswith("corrected: recall@10 ")
    never = [float(re.search(r"([\d.]+)% of the images", line)[1]) for line in (plain, corrected)]
    assert never[1] <= never[0] and skewness


def test_onnx(runs, example):
    for module in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(module)
    demo = runs.export("other_encoders", "onnx")
    (line,) = example("use_onnx.py", demo)
    assert line.startswith("100 images and texts of width 8, recall@1 ")
    variables = runpy.run_path(str(EXAMPLES / "use_onnx.py"))
    model = runs.model("other_encoders")
    assert largest_difference(variables["encode_images"](demo, images()), model.encode_images(images())) < 1e-5
    assert largest_difference(variables["encode_texts"](demo, texts()), model.encode_texts(texts())) < 1e-5


def test_sentence_transformers(runs, example):
    pytest.importorskip("sentence_transformers")
    demo = runs.export("separate", "sentence-transformers")
    lines = example("use_sentence_transformers.py", demo, "a red circle")
    assert lines[0] == "a red circle" and len(lines) == 4


@pytest.mark.open_clip
def test_open_clip(runs, example):
    pytest.importorskip("open_clip")
    demo = runs.export("clip", "open-clip")
    lines = example("use_open_clip.py", demo, "a circle", "a square")
    assert len(lines) == 5 and all(re.search(r"a circle \d+%, a square \d+%$", line) for line in lines)


@pytest.mark.parametrize("name", ["shared_texts", "questions"])
def test_mteb(runs, example, name):
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("mteb")
    from nuclr.runs.folder import read_results

    demo = runs.export(name, "sentence-transformers")
    scores = dict(line.split() for line in example("use_mteb.py", demo, runs(name)))
    measured = read_results(runs(name)).val
    assert float(scores["recall_at_1"]) == pytest.approx(measured["question_to_answer_R@1"], abs=1e-4)
    assert float(scores["recall_at_10"]) == pytest.approx(measured["question_to_answer_R@10"], abs=1e-4)


def test_mteb_with_a_corrected_score(runs, example, tmp_path):
    """The scores of MTEB are those of the bias, subtracted by hand."""
    pytest.importorskip("mteb")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from nuclr.popularity import PopularityCorrection
    from nuclr.runs.run import Run

    demo = runs.export("questions", "sentence-transformers")
    held_out = Run.open_finished(runs("questions")).val
    asked, answers = ([held_out.pairs.item(side, int(n)) for n in held_out.numbers] for side in "xy")
    documents = list(dict.fromkeys(answers))
    model = sentence_transformers.SentenceTransformer(str(demo), device="cpu")
    queries, gallery = model.encode_query(list(dict.fromkeys(asked))), model.encode_document(documents)
    fix = PopularityCorrection(strength=1.0).fit(queries, gallery)
    fix.save(tmp_path / "fix.safetensors")
    arguments = ("use_mteb.py", demo, runs("questions"))
    plain = dict(line.split() for line in example(*arguments))
    corrected = dict(line.split() for line in example(*arguments, tmp_path / "fix.safetensors"))

    right = {question: documents.index(answer) for question, answer in zip(asked, answers, strict=True)}
    assert len(right) == len(asked)  # each question has one answer
    scores = torch.as_tensor(queries @ gallery.T)
    for measured, bias in ((plain, 0), (corrected, fix.bias(gallery))):
        best = (scores - bias).argmax(dim=1)
        recall = (best == torch.tensor(list(right.values()))).float().mean().item()
        assert float(measured["recall_at_1"]) == pytest.approx(recall, abs=1e-4)
    assert plain != corrected
