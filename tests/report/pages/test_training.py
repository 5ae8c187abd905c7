"""The page of a training run: complete, unfinished and damaged runs."""

import shutil

import numpy as np
import pytest

from nuclr.report.render import Options
from nuclr.report.write import make_page
from nuclr.runs import config
from nuclr.training.loop import train
from tests.report.folders import HOSTILE, open_page
from tests.training import runs


@pytest.fixture(scope="module")
def vector_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    train(runs.load(folder), folder / "run")
    return folder / "run"


@pytest.fixture
def copied_run(vector_run, tmp_path):
    return shutil.copytree(vector_run, tmp_path / "run")


def test_pictures_and_hostile_text(picture_run):
    page = make_page(picture_run, Options())
    assert HOSTILE not in page, "data must never be markup"
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "\\u003cscript\\u003e" in page
    assert 'src="http' not in page and "url(" not in page
    assert page.count("data:image/jpeg") > 40
    for words in (
        "Zeta of the captions",
        "Image to text",
        "Likely false negatives",
        "Near-duplicate",
        "The worst mistakes",
        "how many queries would pick it",
    ):
        assert words in page


def test_all_sections_are_in_the_navigation(vector_run):
    page = make_page(vector_run, Options())
    for key in ("summary", "use", "curves", "examples", "popularity", "time", "repeat"):
        assert f'<a href="#{key}">' in page and f'<section id="{key}"' in page
    assert "zero-shot" not in page, "vectors have no classes"


def test_labels_and_colors_come_from_the_registry(vector_run):
    context, contents = open_page("training", vector_run)
    assert context.log.method == "NUCLR" and "NUCLR on 120 pairs" in context.sentence
    loss = contents["curves"].charts[0]
    assert [(key.name, key.color) for key in loss.legend] == [("NUCLR", "#0072B2")]


def test_vectors_are_shown_as_curves(vector_run):
    context, contents = open_page("training", vector_run)
    assert not any("pictures" in note for note in context.notes)
    face = contents["popularity"].gallery.cards[0].face
    assert face.text.startswith("y vector ") and face.curve and not face.labels
    assert contents["examples"].directions[0].random[0].query.kind == "numbers"
    assert contents["repeat"].versions["python"] and "-again" in contents["repeat"].again
    assert [chart.title for chart in contents["curves"].charts if chart.title.startswith("Zeta")]
    page = make_page(vector_run, Options())
    assert "Popularity of the y vectors" in page and "captions" not in page.partition("</style>")[2]


def test_without_held_out_pairs(tmp_path):
    settings = [s for s in runs.vector_settings(tmp_path) if not s.startswith("data.val")]
    train(config.load(tmp_path / "empty.yaml", settings), tmp_path / "run")
    context, contents = open_page("training", tmp_path / "run")
    assert any("no held-out pairs" in note for note in context.notes)
    assert contents["summary"].tiles[-1].label == "Training time" and contents["summary"].table is None
    assert "trained on" in contents["examples"].source


def test_without_the_model(vector_run):
    context, contents = open_page("training", vector_run, Options(model=False))
    assert list(contents) == ["summary", "use", "curves", "time", "repeat"]
    assert sum("--no-model" in note for note in context.notes) == 1


def test_unfinished_run(copied_run):
    (copied_run / "results.json").unlink()
    shutil.rmtree(copied_run / "model")
    context, contents = open_page("training", copied_run)
    assert context.notes[0].startswith("This run is not finished: 28 steps")
    assert any("the model after step 28" in note for note in context.notes)
    assert {"examples", "popularity", "time"} <= contents.keys()


def test_run_without_logs_and_checkpoints(copied_run):
    (copied_run / "results.json").unlink()
    shutil.rmtree(copied_run / "model")
    shutil.rmtree(copied_run / "checkpoints")
    for name in ("metrics.jsonl", "timing.jsonl"):
        (copied_run / name).unlink()
    context, contents = open_page("training", copied_run)
    assert list(contents) == ["summary", "repeat"]
    assert sum("no checkpoint" in note for note in context.notes) == 1
    page = make_page(copied_run, Options())
    assert "Nothing was logged yet" in page and "No timing was logged yet" in page


def test_data_that_was_moved(vector_run, copied_run, tmp_path):
    text = (copied_run / "config.yaml").read_text().replace(str(vector_run.parent), str(tmp_path / "gone"))
    (copied_run / "config.yaml").write_text(text)
    context, contents = open_page("training", copied_run)
    assert sum("The training data is missing" in note and "gone" in note for note in context.notes) == 1
    assert contents["summary"].table is not None and contents["curves"].charts


@pytest.mark.parametrize(
    ("name", "content", "note", "lost"),
    [
        ("results.json", "{", "results.json could not be read", set()),
        ("results.json", "[]", "results.json could not be read", set()),
        ("results.json", "{}", "results.json does not hold the results of a run", set()),
        ("results.json", '{"timing": 3, "pairs": "many"}', "results.json does not hold the results of a run", set()),
        ("metrics.jsonl", '{"step": "x", "epoch": "y", "train/loss": {}}\nnot json\n', "metrics.jsonl: 1 lines", set()),
        ("timing.jsonl", '{"step": [], "seconds": "long"}\n', "timing.jsonl: 1 lines", set()),
        ("bad_samples.jsonl", "{broken\n", "bad_samples.jsonl: damaged", {"popularity"}),
        ("environment.json", "3", "environment.json could not be read", set()),
        ("model/config.json", "{", "The model is missing: ", {"use", "examples", "popularity"}),
        ("sogclr/config.yaml", "[", "The baseline is missing: ", set()),
    ],
)
def test_a_damaged_file_is_a_note(copied_run, name, content, note, lost):
    complete = {"summary", "use", "curves", "examples", "popularity", "time", "repeat"}
    context, contents = open_page("training", copied_run, Options(samples=40))
    assert contents.keys() == complete and not any(note in text for text in context.notes)
    (copied_run / name).parent.mkdir(exist_ok=True)
    (copied_run / name).write_text(content)
    context, contents = open_page("training", copied_run, Options(samples=40))
    assert sum(note in text for text in context.notes) == 1
    assert complete - contents.keys() == lost


def test_a_damaged_checkpoint_is_not_needed(copied_run):
    for path in (copied_run / "checkpoints").glob("*.pt"):
        path.write_bytes(path.read_bytes()[:100])
    _, contents = open_page("training", copied_run)
    assert contents["popularity"].gallery.cards[0].zeta is None


def test_baseline_in_a_folder_of_the_run(copied_run, tmp_path):
    settings = [s for s in runs.vector_settings(tmp_path) if not s.startswith("objective")]
    train(config.load(tmp_path / "empty.yaml", [*settings, "objective.name=sogclr"]), copied_run / "baseline")
    context, contents = open_page("training", copied_run)
    assert context.baseline.method == "SogCLR"
    assert contents["summary"].table.columns == ["", "chance", "NUCLR", "SogCLR"]
    assert [key.name for key in contents["curves"].charts[0].legend] == ["NUCLR", "SogCLR"]


def test_what_was_logged_once_is_a_table(copied_run):
    lines = (copied_run / "metrics.jsonl").read_text().splitlines(keepends=True)
    evaluations = [line for line in lines if "val/" in line]
    kept = [line for line in lines if line not in evaluations[:-1] and ("val/" in line or "state/" not in line)]
    (copied_run / "metrics.jsonl").write_text("".join(kept))
    _, contents = open_page("training", copied_run, Options(model=False))
    curves = contents["curves"]
    assert all(len(chart.data["series"][0]["x"]) > 1 for chart in curves.charts)
    assert not any("Recall" in chart.title for chart in curves.charts)
    rows = {row[0]: row[1:] for row in curves.once.rows}
    assert rows["Recall@1 on held-out pairs: x to y"][1] == "4" and "%" in rows["Recall@1 on held-out pairs: x to y"][0]
    (copied_run / "metrics.jsonl").write_text(evaluations[-1])
    (copied_run / "timing.jsonl").unlink()
    page = make_page(copied_run, Options(model=False))
    assert "Logged once in this run" in page and "Point at a chart" not in page


def test_popularity_is_checked_on_held_out_queries(copied_run):
    _, contents = open_page("training", copied_run)
    popularity = contents["popularity"]
    labels = ["found by no query", "skewness of N_10", "recall@1", "gain in recall@1, points"]
    assert [row[0] for row in popularity.hubness.rows] == labels
    assert len(popularity.hubness.columns) == 5 and all(len(row) == 5 for row in popularity.hubness.rows)
    for side in popularity.gallery.sides:
        assert side.checked and -1 <= side.agreement <= 1
    page = make_page(copied_run, Options())
    assert "Does it predict what a search finds?" in page and "true popularity of" not in page


def test_a_hundred_thousand_samples(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100_000, 4)).astype("float32")
    np.savez(tmp_path / "train.npz", x=x, y=x + 0.1)
    (tmp_path / "run.yaml").write_text("name: large\n")
    settings = {"data.root": tmp_path, "data.train": "train.npz", "data.batch_size": 1000, "model.width": 4}
    settings |= {"schedule.epochs": 1, "threads": 1, "log.every": 100}
    train(config.load(tmp_path / "run.yaml", [f"{k}={v}" for k, v in settings.items()]), tmp_path / "run")
    page = make_page(tmp_path / "run", Options(samples=500))
    assert "500 of the 100,000 training pairs, drawn at random" in page
    assert len(page) < 1_000_000
