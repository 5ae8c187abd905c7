"""`nuclr popularity` on embedding files, folders of embeddings, and runs."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

from nuclr import files
from nuclr.data import open_pairs
from nuclr.runs import config
from nuclr.studies.items import popularity_report
from nuclr.training.loop import train
from tests.data.embedding_folders import make_clip_retrieval, make_features
from tests.training import runs

X, Y = make_features(rows=60, width=8)
SIZES = (25, 5, 30)


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


def read_table(folder: Path) -> dict[str, list[dict[str, str]]]:
    table = list(csv.DictReader((folder / "popularity.csv").open(newline="")))
    return {side: [row for row in table if row["side"] == side] for side in ("x", "y")}


def read_summary(folder: Path):
    return json.loads((folder / "popularity.json").read_text())


def test_an_interrupted_report_can_be_repeated(nuclr, pairs, monkeypatch):
    out = pairs.parent / "out"
    write_json = files.write_json

    def interrupted(path, content):
        if path.name == "popularity.json" and len(content) > 1:
            raise KeyboardInterrupt
        write_json(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_json", interrupted)
        assert nuclr("popularity", pairs, "--temperature", 0.1, "--out", out).status == 130
    done = nuclr("popularity", pairs, "--temperature", 0.1, "--out", out)
    assert done.status == 0, done.err
    assert {path.name for path in out.iterdir()} == {"popularity.csv", "popularity.json", "report.html"}


def test_popularity_of_an_embedding_file(nuclr, pairs, tmp_path):
    out = tmp_path / "popularity"
    arguments = ("popularity", pairs, "--temperature", 0.1, "--out", out, "--names", tmp_path / "captions.jsonl")
    arguments += ("--top", 3)
    done = nuclr(*arguments)
    assert done.status == 0, done.err
    table = read_table(out)
    assert list(table["y"][0]) == ["side", "number", "zeta", "popularity", "rank", "x", "name"]
    assert (len(table["y"]), len(table["x"])) == (60, 30)
    assert (table["y"][7]["name"], table["y"][7]["x"], table["x"][3]["name"]) == ("caption 3b", "3", "3.jpg")
    popularity_of_y = [float(row["popularity"]) for row in table["y"]]
    assert np.mean(popularity_of_y) == pytest.approx(1)
    side = read_summary(out)["sides"]["y"]
    assert side["converged"] and len(side["most_popular"]) == 3
    assert side["most_popular"][0]["name"] == next(row["name"] for row in table["y"] if row["rank"] == "1")
    assert side["least_popular"][0]["name"] == next(row["name"] for row in table["y"] if row["rank"] == "60")
    assert side["most_popular"][0]["name"] in done.out and side["most_popular"][0]["pair"]["name"].endswith(".jpg")
    page = (out / "report.html").read_text()
    assert side["least_popular"][2]["name"] in page and "<svg" in page
    assert nuclr(*arguments).status == 0, "files of an earlier run of the command may be replaced"


def test_a_solver_that_does_not_converge_is_reported_with_status_1(nuclr, pairs, tmp_path, monkeypatch):
    original = popularity_report.solve
    limits = {"tolerance": 1e-12, "max_iterations": 1}
    monkeypatch.setattr(popularity_report, "solve", lambda **options: original(**(options | limits)))
    done = nuclr("popularity", pairs, "--temperature", 0.05, "--out", tmp_path / "out")
    assert done.status == 1
    assert "side y did not converge: residual" in done.err
    assert not read_summary(tmp_path / "out")["sides"]["y"]["converged"]


def test_an_estimate_from_a_sample_shows_its_error(nuclr, pairs, tmp_path, monkeypatch):
    original = popularity_report.solve
    sampled = {"method": "sample", "sample": 20}
    monkeypatch.setattr(popularity_report, "solve", lambda **options: original(**(options | sampled)))
    done = nuclr("popularity", pairs, "--temperature", 0.2, "--out", tmp_path / "out")
    assert done.status == 0, "the job is done"
    side = read_summary(tmp_path / "out")["sides"]["y"]
    assert f"{side['error']:.2g}" in done.out and not side["converged"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["none.npz"], "none.npz: no such file"),
        (["pairs.npz", "--temperature", "0"], "--temperature is 0"),
        (["pairs.npz", "--temperature", "nan"], "--temperature is nan"),
        (["pairs.npz", "--names", "short.txt"], "short.txt: 1 names"),
        (["pairs.npz", "--images", "none"], "--images none"),
        (["bare:b32_img"], "bare:b32_img: no such file or folder"),
        (["wide"], "x has width 8 and y has width 5"),
        (["broken"], "broken:y[40, 3]=inf"),
        (["empty"], "empty: not a folder of embeddings"),
    ],
)
def test_wrong_options_are_refused(nuclr, pairs, tmp_path, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("one caption\n")
    Path("empty").mkdir()
    broken = Y.copy()
    broken[40, 3] = np.inf
    make_clip_retrieval(tmp_path / "broken", X, broken, SIZES)
    make_clip_retrieval(tmp_path / "bare", X, Y, SIZES, metadata=False)
    make_clip_retrieval(tmp_path / "wide", X, Y[:, :5], SIZES, metadata=False)
    if "--temperature" not in arguments:
        arguments = [*arguments, "--temperature", "0.1"]
    refused = nuclr("popularity", *arguments, "--out", "out")
    assert refused.status == 2
    assert named in refused.err and "Traceback" not in refused.err
    assert len(refused.err.strip().splitlines()) <= 2
    assert Path("short.txt").read_text() == "one caption\n" and not Path("out").exists()


def test_wrong_targets_are_refused_before_encoding_and_left_unchanged(nuclr, pairs, trained, tmp_path, monkeypatch):
    monkeypatch.setattr("nuclr.runs.run.encode_pairs", lambda *_: pytest.fail("pairs were encoded"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "popularity.csv").write_text("mine")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "config.yaml").write_text("name: a\ndata: {train: builtin}\n")
    before = sorted(trained.iterdir())
    for named, *arguments in (
        ("--temperature", pairs),
        ("--resume", tmp_path / "unfinished"),
        (f"--out {tmp_path / 'captions.jsonl'}", pairs, "--temperature", 0.1, "--out", tmp_path / "captions.jsonl"),
        (f"--out {tmp_path / 'mine'}", pairs, "--temperature", 0.1, "--out", tmp_path / "mine"),
        (str(trained / "popularity"), pairs, "--temperature", 0.1, "--out", trained),
        (str(trained / "popularity"), trained, "--out", trained),
    ):
        refused = nuclr("popularity", *arguments)
        assert refused.status == 2 and named in refused.err
    assert (tmp_path / "mine" / "popularity.csv").read_text() == "mine"
    assert sorted(trained.iterdir()) == before and not (tmp_path / "out").exists()


def test_popularity_of_a_run(nuclr, trained, tmp_path):
    out = tmp_path / "popularity"
    done = nuclr("popularity", trained, "--out", out)
    assert done.status == 0, done.err
    assert read_summary(out)["temperature"] == 0.03, "the temperature of the run"
    pairs = open_pairs("builtin:n=60")
    assert [row["name"] for row in read_table(out)["y"]] == [pairs.item("y", i) for i in range(60)]
    page = (out / "report.html").read_text()
    assert "data:image/jpeg" in page and "captions" in page


def test_a_run_on_some_pairs_reports_their_numbers_in_the_data(nuclr, tmp_path):
    kept = list(range(1, 120, 2))
    (tmp_path / "some.txt").write_text("\n".join(map(str, kept)))
    settings = runs.vector_settings(tmp_path, **{"schedule.epochs": 1, "data.keep": "some.txt"})
    train(config.load(tmp_path / "empty.yaml", settings), tmp_path / "run")
    done = nuclr("popularity", tmp_path / "run")
    assert done.status == 0, done.err
    table = read_table(tmp_path / "run" / "popularity")["y"]
    assert [int(row["number"]) for row in table] == kept
    assert [int(row["x"]) for row in table] == kept, "the number of a pair with this x"
    shown = [sample["number"] for sample in read_summary(tmp_path / "run" / "popularity")["sides"]["y"]["most_popular"]]
    assert set(shown) <= set(kept) and f"y[{shown[0]}]" in done.out


def test_names_reach_neither_the_terminal_nor_a_spreadsheet_nor_a_page_as_code(nuclr, pairs, tmp_path):
    names = [f"\x1b]0;owned\x07 {row}" if row % 2 else f'=HYPERLINK("http://evil/{row}")' for row in range(60)]
    names[0] = "\u202e\u202eright to left"
    (tmp_path / "names.txt").write_text("\n".join(names))
    out = tmp_path / "popularity"
    done = nuclr(
        "popularity", pairs, "--temperature", 0.1, "--out", out, "--names", tmp_path / "names.txt", "--top", 60
    )
    assert done.status == 0, done.err
    assert "\x1b" not in done.out and "\\x1b]0;owned\\x07" in done.out
    assert all(row["name"][:1] in ("'", "\x1b", "\u202e") for row in read_table(out)["y"])
    page = (out / "report.html").read_text()
    assert "=HYPERLINK" in page and "&#39;=HYPERLINK" not in page, "the page shows the name itself"
    page = re.sub(r"(?s)<script.*?</script>", "", page)
    page = re.sub(r'"[^"<>]*\u202e[^"<>]*"', '""', page)  # in attributes
    outside = re.sub(rf'(<bdi>|dir="auto">){names[0]}', "", page)
    assert names[0] in page and "\u202e" not in outside, "pages isolate texts that change the direction"


def test_a_folder_gives_what_one_file_gives(nuclr, tmp_path):
    np.savez(tmp_path / "plain.npz", x=X, y=Y)
    assert nuclr("popularity", tmp_path / "plain.npz", "--temperature", 0.1, "--out", tmp_path / "plain").status == 0
    folder = make_clip_retrieval(tmp_path / "data", X, Y, SIZES)
    metadata = folder / "metadata"
    names = ("--names", f"{metadata}:caption", "--x-names", f"{metadata}:image_path")
    out = tmp_path / "out"
    done = nuclr("popularity", folder, "--temperature", 0.1, "--out", out, *names)
    assert done.status == 0, done.err
    table, plain = read_table(out), read_table(tmp_path / "plain")
    for side in ("x", "y"):
        zeta, expected = ([float(row["zeta"]) for row in one[side]] for one in (table, plain))
        np.testing.assert_allclose(zeta, expected, atol=1e-6)
    assert (table["y"][59]["name"], table["x"][59]["name"], table["y"][59]["x"]) == ("caption 59", "59.jpg", "59")
    assert read_summary(out)["false_negatives"]["rows"]
    # The same folder is a search of its text by its images, whose pairs are known.
    done = nuclr("hubness", folder, "--normalize", "--out", out / "h")
    assert done.status == 0 and "recall@1" in done.out, done.err
