"""`nuclr popularity` on embedding files and on runs."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

from nuclr.data import open_pairs
from nuclr.runs import config
from nuclr.training.loop import train
from tests.training import runs


@pytest.fixture
def pairs(tmp_path) -> Path:
    """Write thirty x in three groups of unequal size with two y each, and a list of captions."""
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(3, 8))
    group = np.repeat([0, 0, 0, 1, 2], 6)
    x = centers[group] + 0.4 * rng.normal(size=(30, 8))
    y_to_x = np.repeat(np.arange(30), 2)
    y = x[y_to_x] + 0.4 * rng.normal(size=(60, 8))
    np.savez(tmp_path / "pairs.npz", x=x.astype("float32"), y=y.astype("float32"), y_to_x=y_to_x)
    lines = [{"image": f"{i}.jpg", "captions": [f"caption {i}a", f"caption {i}b"]} for i in range(30)]
    (tmp_path / "captions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "pairs.npz"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    settings = runs.picture_settings(folder, **{"schedule.epochs": 1, "data.train": "builtin:n=60"})
    train(config.load(folder / "empty.yaml", settings), folder / "run")
    return folder / "run"


def test_popularity_of_an_embedding_file(nuclr, pairs, tmp_path):
    out = tmp_path / "popularity"
    arguments = ("popularity", pairs, "--temperature", 0.1, "--out", out, "--captions", tmp_path / "captions.jsonl")
    arguments += ("--keep", tmp_path / "kept.txt", "--max-quantile", 0.9, "--top", 3)
    done = nuclr(*arguments)
    assert done.status == 0, done.err
    assert "most popular" in done.out

    rows = list(csv.DictReader((out / "popularity.csv").open()))
    assert list(rows[0]) == ["side", "number", "zeta", "popularity", "rank", "x", "caption", "image"]
    y = [row for row in rows if row["side"] == "y"]
    x = [row for row in rows if row["side"] == "x"]
    assert (len(y), len(x)) == (60, 30)
    assert (y[7]["caption"], y[7]["image"], y[7]["x"]) == ("caption 3b", "3.jpg", "3")
    assert np.mean([float(row["popularity"]) for row in y]) == pytest.approx(1)

    content = json.loads((out / "popularity.json").read_text())
    side = content["sides"]["y"]
    assert side["converged"]
    assert side["most_popular"][0]["caption"] == next(row["caption"] for row in y if row["rank"] == "1")
    assert side["least_popular"][0]["caption"] == next(row["caption"] for row in y if row["rank"] == "60")
    assert len(side["most_popular"]) == 3
    assert side["most_popular"][0]["caption"] in done.out

    kept = np.loadtxt(tmp_path / "kept.txt", dtype=int)
    limit = np.quantile([float(row["popularity"]) for row in y], 0.9)
    assert kept.tolist() == [int(row["number"]) for row in y if float(row["popularity"]) <= limit]
    for name in ("histogram.png", "histogram.svg"):
        assert (out / name).stat().st_size > 5_000
    assert nuclr(*arguments).status == 0, "files of an earlier run of the command may be replaced"


def test_the_parquet_table_equals_the_csv(nuclr, pairs, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    done = nuclr("popularity", pairs, "--temperature", 0.1, "--out", tmp_path / "out", "--weights", "x")
    assert done.status == 0, done.err
    table = parquet.read_table(tmp_path / "out" / "popularity.parquet").to_pylist()
    rows = list(csv.DictReader((tmp_path / "out" / "popularity.csv").open()))
    assert len(table) == len(rows) == 90
    assert table[5]["popularity"] == pytest.approx(float(rows[5]["popularity"]))


def test_pairs_are_kept_by_the_popularity_of_either_side_or_of_both(nuclr, pairs, tmp_path):
    lists = {}
    for side in ("y", "x", "both"):
        arguments = ("--keep", tmp_path / f"{side}.txt", "--min-popularity", 0.5, "--keep-side", side)
        assert nuclr("popularity", pairs, "--temperature", 0.1, "--out", tmp_path / "out", *arguments).status == 0
        lists[side] = set(np.loadtxt(tmp_path / f"{side}.txt", dtype=int).tolist())
    assert lists["both"] == lists["y"] & lists["x"]
    assert {pair ^ 1 for pair in lists["x"]} == lists["x"], "both captions of an image are kept with it"


def test_different_widths_need_align(nuclr, pairs, tmp_path):
    arrays = dict(np.load(pairs))
    arrays["x"] = np.concatenate([arrays["x"], arrays["x"]], axis=1)
    np.savez(tmp_path / "wide.npz", **arrays)
    arguments = ("popularity", tmp_path / "wide.npz", "--temperature", 0.1, "--out", tmp_path / "out")
    refused = nuclr(*arguments)
    assert refused.status == 2
    assert "--align ridge" in refused.err
    assert not (tmp_path / "out").exists()
    done = nuclr(*arguments, "--align", "ridge")
    assert done.status == 0, done.err
    assert "ridge regression" in done.out
    align = json.loads((tmp_path / "out" / "popularity.json").read_text())["align"]
    assert align["method"] == "ridge"
    assert 0 < align["explained_variance"] < 1


def test_a_solver_that_does_not_converge_is_reported_with_status_1(nuclr, pairs, tmp_path):
    arguments = ("--tolerance", 1e-9, "--max-iterations", 1)
    done = nuclr("popularity", pairs, "--temperature", 0.05, "--out", tmp_path / "out", *arguments)
    assert done.status == 1
    assert "side y did not converge: residual" in done.err
    assert not json.loads((tmp_path / "out" / "popularity.json").read_text())["sides"]["y"]["converged"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.npz", "--temperature", "0.1"], "none.npz: no such file"),
        (["pairs.npz", "--temperature", "0"], "--temperature is 0; it needs a number above 0"),
        (["pairs.npz", "--temperature", "nan"], "--temperature is nan"),
        (["pairs.npz", "--temperature", "0.1", "--tolerance", "-1"], "--tolerance is -1"),
        (
            ["pairs.npz", "--temperature", "0.1", "--captions", "short.txt"],
            "1 captions, but the embedding file has 60 y",
        ),
        (["pairs.npz", "--temperature", "0.1", "--max-quantile", "0.5"], "--max-quantile needs --keep"),
        (["pairs.npz", "--temperature", "0.1", "--keep", "k.txt"], "--keep needs a band"),
        (
            ["pairs.npz", "--temperature", "0.1", "--keep", "short.txt", "--max-quantile", "0.5"],
            "short.txt: the file exists and was not written by --keep",
        ),
        (
            ["pairs.npz", "--temperature", "0.1", "--keep", "no/k.txt", "--max-quantile", "0.5"],
            "no/k.txt: the folder no does not exist",
        ),
        (["pairs.npz", "--temperature", "0.1", "--keep", "k.txt", "--min-quantile", "2"], "quantile band 2.0 to 1.0"),
        (
            ["pairs.npz", "--temperature", "0.1", "--keep", "k.txt", "--min-popularity", "3", "--max-popularity", "2"],
            "popularity band 3.0 to 2.0 is empty",
        ),
    ],
)
def test_wrong_options_are_refused(nuclr, pairs, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("one caption\n")
    refused = nuclr("popularity", *arguments, "--out", "out")
    assert refused.status == 2
    assert message in refused.err
    assert "Traceback" not in refused.err
    assert len(refused.err.strip().splitlines()) <= 2
    assert Path("short.txt").read_text() == "one caption\n"
    assert not Path("out").exists()


def test_files_of_the_user_are_refused_and_left_unchanged(nuclr, pairs, tmp_path):
    (tmp_path / "file").write_text("mine")
    refused = nuclr("popularity", pairs, "--temperature", 0.1, "--out", tmp_path / "file")
    assert refused.status == 2
    assert f"--out {tmp_path / 'file'}: there is a file with this name; name a folder" in refused.err
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "popularity.csv").write_text("mine")
    refused = nuclr("popularity", pairs, "--temperature", 0.1, "--out", tmp_path / "out")
    assert refused.status == 2
    assert "was not written by `nuclr popularity`" in refused.err
    assert (tmp_path / "out" / "popularity.csv").read_text() == "mine"


def test_the_folder_of_a_run_is_refused_before_encoding(nuclr, pairs, trained, tmp_path, monkeypatch):
    monkeypatch.setattr("nuclr.studies.popularity.inputs.embed_pairs", lambda *_: pytest.fail("pairs were encoded"))
    before = sorted(trained.iterdir())
    for source in ((pairs, "--temperature", 0.1), (trained,)):
        refused = nuclr("popularity", *source, "--out", trained)
        assert refused.status == 2
        assert f"the folder of a training run; name another folder, such as {trained / 'popularity'}" in refused.err
    assert sorted(trained.iterdir()) == before
    refused = nuclr("popularity", tmp_path)
    assert refused.status == 2 and "neither a run folder (no config.yaml) nor a folder of embeddings" in refused.err


def test_a_list_that_cannot_be_written_is_refused_before_encoding(nuclr, trained, tmp_path):
    keep = ("--keep", tmp_path / "nowhere" / "keep.txt", "--max-quantile", 0.8)
    status, _, err = nuclr("popularity", trained, "--out", tmp_path / "out", *keep)
    assert status == 2 and f"the folder {tmp_path / 'nowhere'} does not exist" in err
    assert not (tmp_path / "out").exists()


def test_popularity_of_a_run(nuclr, trained, tmp_path):
    out, keep = tmp_path / "popularity", tmp_path / "popularity" / "keep.txt"  # the command creates the folder
    status, printed, err = nuclr("popularity", trained, "--out", out, "--keep", keep, "--max-quantile", 0.8)
    assert status == 0, err
    assert not (out / "embeddings.npz").exists() and not (out / "captions.jsonl").exists()
    content = json.loads((out / "popularity.json").read_text())
    assert content["temperature"] == 0.03, "the temperature of the run"
    rows = [row for row in csv.DictReader((out / "popularity.csv").open()) if row["side"] == "y"]
    pairs = open_pairs("builtin:n=60")
    assert [row["caption"] for row in rows] == [pairs.y(i) for i in range(60)]
    assert "most popular" in printed
    again = config.load(trained / "config.yaml", [f"data.keep={keep}"])
    assert 0 < train(again, tmp_path / "again")["samples_per_epoch"] < 60


def test_a_run_on_some_pairs_reports_their_numbers_in_the_data(nuclr, tmp_path):
    kept = list(range(1, 120, 2))
    (tmp_path / "some.txt").write_text("\n".join(map(str, kept)))
    settings = runs.vector_settings(tmp_path, **{"schedule.epochs": 1, "data.keep": "some.txt"})
    train(config.load(tmp_path / "empty.yaml", settings), tmp_path / "run")
    status, printed, err = nuclr("popularity", tmp_path / "run", "--keep", tmp_path / "k.txt", "--min-quantile", 0.5)
    assert status == 0, err
    numbers = np.loadtxt(tmp_path / "k.txt", dtype=int).tolist()
    assert len(numbers) == 30 and set(numbers) <= set(kept)
    rows = list(csv.DictReader((tmp_path / "run" / "popularity" / "popularity.csv").open()))
    assert [int(row["number"]) for row in rows if row["side"] == "y"] == kept
    assert [int(row["x"]) for row in rows if row["side"] == "y"] == [number // 2 for number in kept]
    content = json.loads((tmp_path / "run" / "popularity" / "popularity.json").read_text())
    shown = [sample["number"] for sample in content["sides"]["y"]["most_popular"]]
    assert set(shown) <= set(kept) and f"y[{shown[0]}]" in printed


def test_an_unfinished_run_is_refused(nuclr, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("name: a\ndata: {train: builtin}\n")
    status, _, err = nuclr("popularity", tmp_path / "run")
    assert status == 2 and "this run is not finished; continue it with nuclr train" in err


def test_captions_reach_neither_the_terminal_nor_a_spreadsheet_as_code(nuclr, pairs, tmp_path):
    captions = [f"\x1b]0;owned\x07 {row}" if row % 2 else f'=HYPERLINK("http://evil/{row}")' for row in range(60)]
    (tmp_path / "captions.jsonl").write_text(
        "".join(json.dumps({"image": "i.jpg", "caption": caption}) + "\n" for caption in captions)
    )
    (tmp_path / "images.txt").write_text("@image\n" * 30)
    (tmp_path / "captions.txt").write_text("\n".join(captions))
    out = tmp_path / "popularity"
    done = nuclr(
        "popularity", pairs, "--temperature", 0.1, "--out", out, "--captions", tmp_path / "captions.txt",
        "--images", tmp_path / "images.txt",
    )  # fmt: skip
    assert done.status == 0, done.err
    assert "\x1b" not in done.out and "\\x1b]0;owned\\x07" in done.out
    for row in csv.DictReader((out / "popularity.csv").open(newline="")):
        assert row["caption"][:1] in ("'", "\x1b") and row["image"] == "'@image"
        assert np.isfinite(float(row["zeta"]))
    assert "&#39;=HYPERLINK" not in (out / "report.html").read_text()  # the page shows the caption itself
    assert "=HYPERLINK" in (out / "report.html").read_text()


def test_captions_of_megabytes_are_cut(nuclr, pairs, tmp_path):
    captions = ["x" * 10_000_000, *(f"caption {row}" for row in range(1, 60))]
    (tmp_path / "captions.txt").write_text("\n".join(captions))
    out = tmp_path / "popularity"
    done = nuclr("popularity", pairs, "--temperature", 0.1, "--out", out, "--captions", tmp_path / "captions.txt")
    assert done.status == 0, done.err
    assert (out / "popularity.csv").stat().st_size < 1_000_000
    assert (out / "report.html").stat().st_size < 2_000_000


def test_pages_isolate_captions_that_change_the_direction_of_text(nuclr, pairs, tmp_path):
    caption = "\u202e\u202eright to left"
    (tmp_path / "captions.txt").write_text("".join(f"{caption} {row}\n" for row in range(60)), encoding="utf-8")
    done = nuclr(
        "popularity", pairs, "--temperature", 0.1, "--captions", tmp_path / "captions.txt", "--out", tmp_path / "o"
    )
    assert done.status == 0, done.err
    page = re.sub(r"(?s)<script.*?</script>", "", (tmp_path / "o" / "report.html").read_text(encoding="utf-8"))
    page = re.sub(r'"[^"<>]*\u202e[^"<>]*"', '""', page)  # in attributes
    assert caption in page
    outside = re.sub(rf'(<bdi>|dir="auto">){caption}', "", page)
    assert "\u202e" not in outside, outside[outside.index("\u202e") - 100 :][:300]
