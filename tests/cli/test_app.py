"""The command line as its users meet it: help at once, results on disk, mistakes in a line or two and status 2."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nuclr import __version__


@pytest.fixture
def pairs(tmp_path) -> Path:
    """Thirty images in three groups of unequal size, two captions each."""
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


def test_help_and_version_need_no_torch():
    program = (
        "import sys; from nuclr import cli; sys.argv = ['nuclr', '{}']\n"
        "try: cli.main()\n"
        "finally: assert not {{'torch', 'matplotlib', 'numpy'}} & set(sys.modules)"
    )
    for option, expected in (("--help", "popularity"), ("--version", f"nuclr {__version__}")):
        command = [sys.executable, "-c", program.format(option)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr
        assert expected in found.stdout


def test_runs_as_a_module():
    found = subprocess.run([sys.executable, "-m", "nuclr", "--version"], capture_output=True, text=True, check=False)
    assert found.stdout == f"nuclr {__version__}\n"


def test_toy(nuclr, tmp_path):
    done = nuclr("toy", "--out", tmp_path / "toy", "--seeds", 2, "--max-n", 100)
    assert done.status == 0, done.err
    content = json.loads((tmp_path / "toy" / "toy.json").read_text())
    assert {"tau", "n", "method", "error_mean", "error_std"} <= set(content["records"][0])
    assert "tau = 0.2" in done.out
    assert str(tmp_path / "toy") in done.out


def test_popularity(nuclr, pairs, tmp_path):
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
    assert nuclr(*arguments).status == 0, "a former run of ours may be replaced"


def test_popularity_parquet(nuclr, pairs, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    done = nuclr("popularity", pairs, "--temperature", 0.1, "--out", tmp_path / "out", "--weights", "x")
    assert done.status == 0, done.err
    table = parquet.read_table(tmp_path / "out" / "popularity.parquet").to_pylist()
    rows = list(csv.DictReader((tmp_path / "out" / "popularity.csv").open()))
    assert len(table) == len(rows) == 90
    assert table[5]["popularity"] == pytest.approx(float(rows[5]["popularity"]))


def test_keep_by_both_sides(nuclr, pairs, tmp_path):
    lists = {}
    for side in ("y", "x", "both"):
        arguments = ("--keep", tmp_path / f"{side}.txt", "--min-popularity", 0.5, "--keep-side", side)
        assert nuclr("popularity", pairs, "--temperature", 0.1, "--out", tmp_path / "out", *arguments).status == 0
        lists[side] = set(np.loadtxt(tmp_path / f"{side}.txt", dtype=int).tolist())
    assert lists["both"] == lists["y"] & lists["x"]
    assert {pair ^ 1 for pair in lists["x"]} == lists["x"], "both captions of an image are kept with it"


def test_unequal_widths_need_align(nuclr, pairs, tmp_path):
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


def test_unsolved_is_said_and_not_a_success(nuclr, pairs, tmp_path):
    arguments = ("--tolerance", 1e-9, "--max-iterations", 1)
    done = nuclr("popularity", pairs, "--temperature", 0.05, "--out", tmp_path / "out", *arguments)
    assert done.status == 1
    assert "side y is not solved" in done.err
    assert not json.loads((tmp_path / "out" / "popularity.json").read_text())["sides"]["y"]["converged"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.npz", "--temperature", "0.1"], "none.npz: no such file"),
        (["pairs.npz", "--temperature", "0"], "--temperature is 0; needs a number above 0"),
        (["pairs.npz", "--temperature", "nan"], "--temperature is nan"),
        (["pairs.npz", "--temperature", "0.1", "--tolerance", "-1"], "--tolerance is -1"),
        (
            ["pairs.npz", "--temperature", "0.1", "--captions", "short.txt"],
            "1 captions, but the embedding file has 60 y",
        ),
        (["pairs.npz", "--temperature", "0.1", "--max-quantile", "0.5"], "--max-quantile needs --keep"),
        (["pairs.npz", "--temperature", "0.1", "--keep", "k.txt"], "--keep needs a band"),
        (["pairs.npz", "--temperature", "0.1", "--keep", "short.txt", "--max-quantile", "0.5"], "not a list of ours"),
        (["pairs.npz", "--temperature", "0.1", "--keep", "no/k.txt", "--max-quantile", "0.5"], "folder does not exist"),
        (["pairs.npz", "--temperature", "0.1", "--keep", "k.txt", "--min-quantile", "2"], "quantile band 2.0 to 1.0"),
        (
            ["pairs.npz", "--temperature", "0.1", "--keep", "k.txt", "--min-popularity", "3", "--max-popularity", "2"],
            "popularity band 3.0 to 2.0 is empty",
        ),
    ],
)
def test_popularity_refuses(nuclr, pairs, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("one caption\n")
    refused = nuclr("popularity", *arguments, "--out", "out")
    assert refused.status == 2
    assert message in refused.err
    assert "Traceback" not in refused.err
    assert len(refused.err.strip().splitlines()) <= 2
    assert Path("short.txt").read_text() == "one caption\n"
    assert not Path("out").exists()


def test_what_the_user_had_stays(nuclr, pairs, tmp_path):
    for command in (["toy"], ["popularity", pairs, "--temperature", 0.1]):
        (tmp_path / "file").write_text("mine")
        refused = nuclr(*command, "--out", tmp_path / "file")
        assert refused.status == 2
        assert "a file is in the way" in refused.err
        assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "popularity.csv").write_text("mine")
    refused = nuclr("popularity", pairs, "--temperature", 0.1, "--out", tmp_path / "out")
    assert refused.status == 2
    assert "was not written by `nuclr popularity`" in refused.err
    assert (tmp_path / "out" / "popularity.csv").read_text() == "mine"


def test_interrupted(nuclr, monkeypatch, tmp_path):
    from nuclr.studies.toy import study

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "write_study", interrupt)
    assert nuclr("toy", "--out", tmp_path).status == 130
