"""The page of a training run: complete, unfinished and damaged runs."""

import shutil

import numpy as np
import pytest

from nuclr.errors import UserError
from nuclr.evaluation.metrics import METRICS, Metric
from nuclr.report.charts import Chart
from nuclr.report.page import Example, Gallery, Options, Table, Text, Tile
from nuclr.report.write import make_page
from nuclr.runs import config
from nuclr.training.loop import train
from tests.report.folders import HOSTILE, fill_page, of_kind
from tests.training import runs

COMPLETE = ["summary", "curves", "examples", "popularity", "use", "repeat"]


@pytest.fixture
def copied_run(vector_run, tmp_path):
    return shutil.copytree(vector_run, tmp_path / "run")


def texts(blocks):
    return " ".join(block.text for block in of_kind(blocks, Text))


def test_pictures_and_hostile_text(picture_run):
    page = make_page(picture_run, Options())
    assert HOSTILE not in page, "data must never be markup"
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert 'src="http' not in page and "url(" not in page
    assert page.count("data:image/jpeg") > 40


def test_vectors_are_shown_as_curves(vector_run):
    page, sections = fill_page("training", vector_run)
    assert list(sections) == COMPLETE and not page.notes
    without_model, numbers_only = fill_page("training", vector_run, Options(model=False))
    assert list(numbers_only) == ["summary", "curves", "use", "repeat"]
    assert sum("--no-model" in note for note in without_model.notes) == 1
    assert "NUCLR on 120 pairs" in page.verdict
    loss = of_kind(sections["curves"], Chart)[0]
    assert [(key.name, key.color) for key in loss.legend] == [("NUCLR", "#0072B2")], "as in the registry"
    galleries = of_kind(sections["popularity"], Gallery)
    assert len(galleries) == 4 and galleries[0].cards[0].item.curve
    assert of_kind(sections["examples"], Example)[0].query.kind == "numbers"
    assert "predict what a search finds" in texts(sections["popularity"])


def test_without_held_out_pairs(tmp_path):
    settings = [s for s in runs.vector_settings(tmp_path) if not s.startswith("data.val")]
    train(config.load(tmp_path / "empty.yaml", settings), tmp_path / "run")
    page, sections = fill_page("training", tmp_path / "run")
    assert any("data.val" in note for note in page.notes)
    assert [tile.label for tile in of_kind(sections["summary"], Tile)] == ["Training time"]
    assert [table.title for table in of_kind(sections["summary"], Table)] == ["The run"]
    assert "trained on" in texts(sections["examples"])


def test_views_have_neighbors_and_one_popularity(tmp_path):
    train(config.load(None, runs.view_settings(tmp_path, 16)), tmp_path / "run")
    page, sections = fill_page("training", tmp_path / "run")
    assert list(sections) == COMPLETE and "16 images" in page.verdict
    examples = of_kind(sections["examples"], Example)
    assert all(example.query not in [answer.item for answer in example.answers] for example in examples)
    assert len(of_kind(sections["popularity"], Gallery)) == 2
    for chart in of_kind(sections["curves"], Chart):
        assert len({key.name for key in chart.legend}) == len(chart.legend)


def test_unfinished_runs(copied_run):
    (copied_run / "results.json").unlink()
    shutil.rmtree(copied_run / "model")
    page, sections = fill_page("training", copied_run)
    assert "28 steps" in page.notes[0] and {"examples", "popularity"} <= sections.keys()
    shutil.rmtree(copied_run / "checkpoints")
    for name in ("metrics.jsonl", "timing.jsonl"):
        (copied_run / name).unlink()
    page, sections = fill_page("training", copied_run)
    assert list(sections) == ["summary", "repeat"]
    assert any("checkpoint yet" in note for note in page.notes), page.notes


def test_data_that_was_moved(vector_run, copied_run, tmp_path):
    text = (copied_run / "config.yaml").read_text().replace(str(vector_run.parent), str(tmp_path / "gone"))
    (copied_run / "config.yaml").write_text(text)
    page, sections = fill_page("training", copied_run)
    assert any("gone" in note for note in page.notes)
    assert len(of_kind(sections["summary"], Table)) == 2 and of_kind(sections["curves"], Chart)


@pytest.mark.parametrize(
    ("name", "content", "note", "lost"),
    [
        ("metrics.jsonl", '{"step": "x", "epoch": "y", "train/loss": {}}\nnot json\n', "metrics.jsonl", {"curves"}),
        ("timing.jsonl", '{"step": [], "seconds": "long"}\n', "timing.jsonl", set()),
        ("metrics.jsonl", '{"step": 1, "epoch": 0.5, "train/loss": 2}\n{"step": 2, "epo', "metrics.jsonl", {"curves"}),
        ("bad_samples.jsonl", "{broken\n", "bad_samples.jsonl", {"popularity"}),
        ("environment.json", "3", "repeat", {"repeat"}),
        ("model/config.json", "{", "config.json", {"examples", "popularity"}),
    ],
)
def test_a_damaged_file_is_a_note(copied_run, name, content, note, lost):
    (copied_run / name).parent.mkdir(exist_ok=True)
    (copied_run / name).write_text(content)
    page, sections = fill_page("training", copied_run)
    assert any(note in text for text in page.notes)
    assert set(COMPLETE) - sections.keys() == lost


def test_damaged_results_are_a_clear_error(copied_run):
    (copied_run / "results.json").write_text("[")
    with pytest.raises(UserError, match=r"results\.json"):
        make_page(copied_run, Options())


def test_a_new_metric_is_one_row(copied_run, monkeypatch):
    row = Metric("R@3", "recall@3", "retrieval", lambda ranks: ranks.hits(3), chance_key="chance@3")
    monkeypatch.setitem(METRICS, row.key, row)
    lines = (copied_run / "metrics.jsonl").read_text()
    lines = lines.replace('"val/x_to_y_R@5"', '"val/x_to_y_R@3": 0.25, "val/x_to_y_R@5"')
    (copied_run / "metrics.jsonl").write_text(lines)
    _, sections = fill_page("training", copied_run, Options(model=False))
    rows = {row[0]: row[2] for row in of_kind(sections["summary"], Table)[0].rows}
    assert rows["recall@3, x to y"] == "25.0 %"
    assert "Recall@3 on held-out pairs" in [chart.title for chart in of_kind(sections["curves"], Chart)]


def test_a_hundred_thousand_samples(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100_000, 4)).astype("float32")
    np.savez(tmp_path / "train.npz", x=x, y=x + 0.1)
    (tmp_path / "run.yaml").write_text("name: large\n")
    settings = {"data.root": tmp_path, "data.train": "train.npz", "data.batch_size": 1000, "model.width": 4}
    settings |= {"schedule.epochs": 1, "threads": 1, "log.every": 100}
    train(config.load(tmp_path / "run.yaml", [f"{k}={v}" for k, v in settings.items()]), tmp_path / "run")
    page = make_page(tmp_path / "run", Options())
    assert "of the 100,000 training pairs" in page
    assert len(page) < 1_000_000


def test_the_lines_that_use_a_model_run(picture_run, tmp_path):
    _, sections = fill_page("training", picture_run, Options(model=False))
    search, commands = [block.text for block in sections["use"] if block.style == "code"]
    images = sorted((picture_run.parent / "images").glob("*.png"))
    names = {"x": images[:3], "past_x": images, "y": ["a thing of kind 1, seen", "thing 3 & others", "things"]}
    exec(search, names)
    assert names["found"].shape == (3, 2) and np.isfinite(names["scores"].numpy()).all()
    assert f"nuclr evaluate {picture_run} " in commands
    odd = shutil.copytree(picture_run, tmp_path / 'it\'s "odd"')
    search, commands = [block.text for block in fill_page("training", odd, Options(model=False))[1]["use"][1::2]]
    compile(search, "page", "exec")
    assert commands.startswith("nuclr evaluate '/")
