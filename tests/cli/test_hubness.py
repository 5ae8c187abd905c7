"""`nuclr hubness` on files of every kind and on a run, as a user meets it."""

import csv
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from nuclr.arrays import as_rows
from nuclr.errors import EXTRAS
from nuclr.evaluation import cut_halves
from nuclr.popularity import PopularityCorrection, hubness
from nuclr.runs import config
from nuclr.studies.items.hubness_report import hubness_report
from nuclr.studies.items.search import split_queries
from nuclr.training.loop import train
from tests.report import folders
from tests.training import runs

N, D = 60, 12


def unit(array):
    return (array / np.linalg.norm(array, axis=1, keepdims=True)).astype("float32")


@pytest.fixture
def pairs(tmp_path) -> Path:
    """Write x with two y each, of which the first is a hub, and a list of captions."""
    for name, seed in (("dev", 0), ("train", 1)):
        rng = np.random.default_rng(seed)
        x = unit(rng.normal(size=(N, D)) + 0.7)
        y_to_x = np.repeat(np.arange(N), 2)
        y = unit(x[y_to_x] + 0.25 * rng.normal(size=(2 * N, D)))
        y[0] = unit(np.ones((1, D)))
        np.savez(tmp_path / f"{name}.npz", x=x, y=y, y_to_x=y_to_x)
    lines = [{"image": f"{i}.jpg", "captions": [f"caption {i}a", f"caption {i}b"]} for i in range(N)]
    lines[0]["captions"][0] = folders.HOSTILE
    (tmp_path / "dev.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    settings = runs.picture_settings(
        folder, **{"schedule.epochs": 1, "data.train": "builtin:n=60", "data.val": "builtin:n=40,seed=1"}
    )
    train(config.load(folder / "empty.yaml", settings), folder / "run")
    return folder / "run"


@pytest.mark.parametrize("name", ["q.npy", "q.npz", "q.safetensors"])
def test_a_pipe_is_refused(nuclr, tmp_path, name):
    os.mkfifo(tmp_path / name)
    done = nuclr("hubness", tmp_path / name, "--out", tmp_path / "out")
    assert done.status == 2 and name in done.err and "regular file" in done.err


def test_an_interrupted_rerun_with_other_settings_leaves_the_earlier_result(nuclr, pairs, monkeypatch):
    out = pairs / "out"
    command = ("hubness", f"{pairs}/dev.npz", "--out", out)
    assert nuclr(*command).status == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PopularityCorrection, "save", interrupted)
        assert nuclr(*command, "--strength", 3).status == 130
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert nuclr(*command, "--strength", 3).status == 0
    assert np.allclose(
        np.load(out / "bias.npy"), PopularityCorrection.load(out / "correction.safetensors").bias(y(pairs))
    )


def y(pairs: Path) -> np.ndarray:
    return np.load(pairs / "dev.npz")["y"]


def test_pairs_with_a_bank(nuclr, pairs):
    out = pairs / "out"
    done = nuclr(
        "hubness", f"{pairs}/dev.npz", "--bank", pairs / "train.npz", "--names", pairs / "dev.jsonl", "--out", out
    )
    assert done.status == 0, done.err
    for words in ("60 queries", "120 items", "recall@1", "correlation", "Largest hubs", "report.html", "bias.npy"):
        assert words in done.out, words
    data, bank = np.load(pairs / "dev.npz"), np.load(pairs / "train.npz")
    fix = PopularityCorrection().fit(bank["x"], bank["y"])
    bias = np.load(out / "bias.npy")
    np.testing.assert_array_equal(bias, fix.bias(data["y"]).numpy())
    loaded = PopularityCorrection.load(out / "correction.safetensors")
    assert torch.equal(loaded.bias(data["y"]), fix.bias(data["y"]))
    plain, corrected = hubness(data["x"], data["y"]), hubness(data["x"], data["y"], bias=bias)
    rows = list(csv.DictReader((out / "hubness.csv").open()))
    assert [int(row["n10"]) for row in rows] == plain.counts.tolist()
    assert [int(row["n10_corrected"]) for row in rows] == corrected.counts.tolist()
    assert rows[3]["name"] == "caption 1b"
    content = json.loads((out / "hubness.json").read_text())
    links = np.stack([data["y_to_x"], np.arange(2 * N)], axis=1)
    assert content["plain"]["recall"]["1"] == pytest.approx(plain.recall(links))
    assert content["corrected"]["recall"]["10"] == pytest.approx(corrected.recall(links, 10))
    assert content["hubs"][0]["row"] == 0 and content["hubs"][0]["corrected"] < content["hubs"][0]["plain"]
    query, instead = re.search(r"\[0\]\n +in query (\d+) it is replaced by .* \[(\d+)\]", done.out).groups()
    before, after = plain.found[int(query)], corrected.found[int(query)]
    assert 0 in before and 0 not in after and int(instead) in after and int(instead) not in before
    assert content["suspicious"][0]["row"] == 0 and content["suspicious"][0]["suspicion"] > 1
    page = (out / "report.html").read_text()
    assert folders.HOSTILE not in page
    before, after = plain.hits(links, 1).bool(), corrected.hits(links, 1).bool()
    assert content["won_count"] == int((after & ~before).sum())
    assert content["lost_count"] == int((before & ~after).sum())
    assert f"{content['won_count']} won, {content['lost_count']} lost" in done.out
    assert content["chance"]["never_found"] < content["plain"]["never_found"]


def test_a_folder_keeps_the_result_of_other_vectors(nuclr, pairs, monkeypatch):
    monkeypatch.chdir(pairs)
    np.save("x.npy", np.load("dev.npz")["x"])
    assert nuclr("hubness", "dev.npz", "--bank", "train.npz").status == 0
    again = nuclr("hubness", pairs / "dev.npz", "--bank", pairs / "train.npz", "-k", 5)
    assert again.status == 0, "the same vectors, named by other paths, replace their result"
    before = (pairs / "hubness" / "bias.npy").read_bytes()
    for arguments in (("dev.npz",), ("x.npy", "dev.npz:y", "--bank", "train.npz")):
        done = nuclr("hubness", *arguments)
        assert done.status == 2
        assert "hubness holds the result of other vectors" in done.err and "--out" in done.err.replace("\n", " ")
    assert (pairs / "hubness" / "bias.npy").read_bytes() == before


def test_a_closed_pipe_is_no_failure_of_the_page(pairs):
    command = f"{sys.executable} -m nuclr hubness {pairs}/dev.npz --out {pairs}/out | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stderr == "" and "queries" in done.stdout
    assert (pairs / "out" / "report.html").exists()


def test_one_set_of_items_never_finds_itself(nuclr, pairs):
    out = pairs / "out"
    done = nuclr("hubness", f"{pairs}/dev.npz:y", f"{pairs}/dev.npz:y", "--bank", pairs / "train.npz", "--out", out)
    assert done.status == 0, done.err
    assert "except itself" in done.out
    y = np.load(pairs / "dev.npz")["y"]
    bank = np.load(pairs / "train.npz")["y"]
    np.testing.assert_array_equal(
        np.load(out / "bias.npy"), PopularityCorrection().fit(bank, bank, items=True).bias(y).numpy()
    )
    content = json.loads((out / "hubness.json").read_text())
    plain = hubness(y, y, exclude=np.arange(2 * N))
    assert content["plain"]["skewness"] == pytest.approx(plain.skewness)
    links = [[i, i ^ 1] for i in range(2 * N)]  # the other caption of the same x
    assert content["plain"]["recall"]["1"] == pytest.approx(plain.recall(links))


def test_without_a_bank_the_other_half_is_counted(nuclr, pairs):
    data = np.load(pairs / "dev.npz")
    np.save(pairs / "q.npy", data["x"].astype("float16"))
    np.save(pairs / "g.npy", data["y"])
    np.savetxt(
        pairs / "links.csv", [[i, 2 * i] for i in range(N)], fmt="%d", delimiter=",", header="query,item", comments=""
    )
    done = nuclr(
        "hubness", pairs / "q.npy", pairs / "g.npy", "--links", pairs / "links.csv", "--out", pairs / "out", "-k", 5
    )
    assert done.status == 0, done.err
    assert "30 queries" in done.out
    content = json.loads((pairs / "out" / "hubness.json").read_text())
    rows = split_queries(as_rows("q", np.load(pairs / "q.npy")))[1]
    assert len(set(rows % 2)) == 2, "an alternating log is not divided by its kinds"
    counted = hubness(data["x"][rows].astype("float16").astype("float32"), data["y"], k=5)
    links = [[i, 2 * row] for i, row in enumerate(rows)]
    assert content["labeled"] == 30
    assert content["plain"]["recall"] == {str(k): pytest.approx(counted.recall(links, k)) for k in (1, 5)}


def test_a_run(nuclr, trained, tmp_path):
    done = nuclr("hubness", trained, "--out", tmp_path / "out")
    assert done.status == 0, done.err
    content = json.loads((tmp_path / "out" / "hubness.json").read_text())
    assert content["bank"]["name"] == f"{trained}:x" and content["plain"]["recall"]
    assert content["hubs"][0]["name"] in done.out
    assert "Captions, searched by images" in (tmp_path / "out" / "report.html").read_text()
    other = nuclr("hubness", f"{trained}:y", f"{trained}:x", "--out", tmp_path / "other")
    assert other.status == 0, other.err
    page = (tmp_path / "other" / "report.html").read_text()
    assert "data:image/jpeg" in page, "the gallery consists of pictures"
    assert "Images, searched by captions" in page
    hub = json.loads((tmp_path / "other" / "hubness.json").read_text())["hubs"][0]
    assert hub["name"].startswith("builtin/") and hub["name"] in other.out and hub["name"] in page


@pytest.mark.parametrize("name", ["huge.safetensors", "huge.parquet", "huge"])
def test_a_file_larger_than_the_memory_of_this_machine(nuclr, tmp_path, name):
    """The files are as large as they say, but the disk holds only their first bytes."""
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    rows = 2 * pages * size // (4 * D)
    path = tmp_path / name
    header = json.dumps({"x": {"dtype": "F32", "shape": [rows, D], "data_offsets": [0, 4 * D * rows]}}).encode()
    if name == "huge":
        path.mkdir()
        (path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    with (path / "data.arrow" if name == "huge" else path).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4 * D * rows)
    done = nuclr("hubness", path, path, "--out", tmp_path / "out")
    assert done.status == 2 and len(done.err.strip().splitlines()) <= 2
    if name == "huge.safetensors":
        assert f"{path}: needs " in done.err and "numpy.save" in done.err
    else:  # tables are copied a few rows at a time, if they are tables
        assert f"{path}: cannot be read as a table" in done.err.replace("/data.arrow", "")


@pytest.mark.parametrize("one_set", [False, True])
def test_tuning_on_one_half_of_the_pairs(nuclr, pairs, one_set):
    """Temperature and strength are those that the queries which are not counted would choose.

    In one set, both captions of an image are in the same half.
    """
    source = [f"{pairs}/dev.npz:y"] * 2 + ["--strength", 0.9] if one_set else [f"{pairs}/dev.npz"]
    done = nuclr("hubness", *source, "--bank", pairs / "train.npz", "--tune", "--out", pairs / "out")
    assert done.status == 0, done.err
    data, bank = np.load(pairs / "dev.npz"), np.load(pairs / "train.npz")
    y = data["y"]
    if one_set:
        x, queries = y, bank["y"]
        chosen_on, counted = (rows.numpy() for rows in cut_halves(np.repeat(np.arange(N), 2)))
        first, second = ([[i, row ^ 1] for i, row in enumerate(rows)] for rows in (chosen_on, counted))
    else:
        x, queries = data["x"], bank["x"]
        chosen_on, counted = (rows.numpy() for rows in cut_halves(np.arange(N)))
        first, second = (
            [[i, 2 * row + j] for i, row in enumerate(rows) for j in (0, 1)] for rows in (chosen_on, counted)
        )
    assert f"{len(chosen_on)} labeled queries" in done.out
    excluded = [chosen_on, counted] if one_set else [None, None]
    fix = PopularityCorrection(strength=0.9 if one_set else None).fit(
        queries, bank["y"], items=one_set, pairs=(x[chosen_on], y, first), exclude=excluded[0]
    )
    content = json.loads((pairs / "out" / "hubness.json").read_text())
    assert (content["temperature"], content["strength"]) == (fix.temperature_, fix.strength_)
    corrected = hubness(x[counted], y, bias=fix.bias(y), exclude=excluded[1])
    assert content["corrected"]["recall"]["1"] == pytest.approx(corrected.recall(second))


def test_tuning_without_a_bank_fits_on_the_answers_of_the_other_half(monkeypatch):
    generator = np.random.default_rng(0)
    y = generator.normal(size=(200, 16)).astype("float32")
    y /= np.linalg.norm(y, axis=1, keepdims=True)
    x = y + 0.2 * generator.normal(size=y.shape).astype("float32")
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    links = np.stack([np.arange(200)] * 2, axis=1)
    seen = []
    original = PopularityCorrection.fit

    def fit(self, queries, gallery, answers=None, *rest, **options):
        seen.append((queries[:], answers))
        return original(self, queries, gallery, answers, *rest, **options)

    monkeypatch.setattr(PopularityCorrection, "fit", fit)
    hubness_report(x, y, links=links[:120], tune=True, k=5)
    queries, answers = seen[0]
    right = (queries[answers[:, 0]] * y[answers[:, 1]]).sum(1)
    assert len(answers) > 30 and float(right.min()) > 0.5


@pytest.mark.parametrize("kind", ["safetensors", "parquet", "dataset"])
def test_other_files_give_the_same_bias(nuclr, pairs, kind, monkeypatch):
    monkeypatch.chdir(pairs)
    data = np.load("dev.npz")
    for name, array in (("q", data["x"]), ("g", data["y"])):
        rows = {"title": [f"title {i}" for i in range(len(array))], "embedding": array.tolist()}
        if kind == "safetensors":
            save_file({"embedding": array, "other": array[:5]}, f"{name}.safetensors")
        elif kind == "parquet":
            pytest.importorskip("pyarrow.parquet").write_table(
                pytest.importorskip("pyarrow").table(rows), f"{name}.parquet"
            )
        else:
            pytest.importorskip("datasets").Dataset.from_dict(rows).save_to_disk(name)
    suffix = "" if kind == "dataset" else f".{kind}"
    names = [] if kind == "safetensors" else ["--names", f"g{suffix}:title"]
    done = nuclr("hubness", f"q{suffix}:embedding", f"g{suffix}:embedding", *names)
    assert done.status == 0, done.err
    expected = PopularityCorrection().fit(data["x"], data["y"]).bias(data["y"]).numpy()  # of all queries
    np.testing.assert_allclose(np.load("hubness/bias.npy"), expected, atol=1e-5)
    assert ("title 0" in done.out) == bool(names)


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    x = unit(np.random.default_rng(0).normal(size=(N, D)))
    nan = x.copy()
    nan[17, 2] = np.nan
    np.savez(folder / "dev.npz", x=x, y=np.repeat(x, 2, axis=0), y_to_x=np.repeat(np.arange(N), 2))
    np.savez(folder / "holes.npz", x=x, y=nan)
    np.savez(folder / "several.npz", a=x, b=x)
    np.savez(folder / "unequal.npz", x=x, y=x[:40])
    right = np.arange(N)
    wrong_links = {"outside": right + 1, "negative": right - 1, "float": right / 1, "holey": right * np.nan}
    wrong_links |= {"table": np.stack([right, right], axis=1), "short": right[:50]}
    for name, y_to_x in wrong_links.items():
        np.savez(folder / f"{name}.npz", x=x, y=x, y_to_x=y_to_x)
    matrices = {"x": x, "nan": nan, "one": x[:1], "three": x[:3], "none": x[:0], "long": 3 * x, "same": x[[0] * 9]}
    matrices |= {"wide": unit(np.ones((8, D + 1))), "flat": x[0], "ints": np.ones((4, D), int)}
    for name, matrix in matrices.items():
        np.save(folder / f"{name}.npy", matrix)
    archive = bytearray((folder / "dev.npz").read_bytes())
    (folder / "archive.npy").write_bytes(archive)
    archive[archive.index(b"PK\x01\x02") + 6] = 200  # the version of zip that is needed to read the first array
    (folder / "newer.npz").write_bytes(archive)
    for name in ("damaged.npz", "damaged.npy", "damaged.safetensors", "damaged.parquet", "picture.png", "words.txt"):
        (folder / name).write_text("PK no vectors\n")
    (folder / "names.csv").write_text("id,word\n1,cat\n")
    (folder / "links.txt").write_text("0 0\n0 999\n")
    (folder / "swapped.txt").write_text("0 0\n1 100\n")
    (folder / "ids.txt").write_text("0 cat\n")
    (folder / "one_link.txt").write_text("1 0\n")
    (folder / "nothing_in_it").mkdir()
    return folder


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("x.npy wide.npy", "x.npy has 12 columns and wide.npy 13"),
        ("x.npy x.npy --bank wide.npy", "wide.npy has 13 columns and x.npy 12"),
        ("x.npy dev.npz:y --bank x.npy", "--bank x.npy"),
        ("x.npy dev.npz:y --bank one.npy", "one.npy: 1 queries"),
        ("three.npy dev.npz:y", "three.npy: 3 queries"),
        ("x.npy one.npy", "one.npy"),
        ("x.npy none.npy", "none.npy"),
        ("x.npy dev.npz:y --bank nan.npy", "nan.npy[17, 2]=nan"),
        ("x.npy holes.npz:y --normalize", "holes.npz:y[17, 2]=nan"),
        ("long.npy dev.npz:y", "--normalize"),
        ("ints.npy dev.npz:y", "ints.npy: int64"),
        ("flat.npy dev.npz:y", "flat.npy: float32 of shape (12,)"),
        ("nothing.npy x.npy", "nothing.npy"),
        ("x.npy:y x.npy", "x.npy:y"),
        ("several.npz x.npy", "several.npz:NAME; found: a, b"),
        ("several.npz:c x.npy", "several.npz: no array named 'c'"),
        ("damaged.npz x.npy", "damaged.npz"),
        ("newer.npz x.npy", "newer.npz"),
        ("damaged.npy x.npy", "damaged.npy"),
        ("damaged.safetensors x.npy", "damaged.safetensors"),
        ("damaged.parquet x.npy", "damaged.parquet"),
        ("archive.npy x.npy", "archive.npy"),
        ("words.txt x.npy", "words.txt"),
        ("nothing_in_it x.npy", "nothing_in_it"),
        ("picture.png x.npy", "picture.png"),
        ("x.npy dev.npz:y --names names.csv:word", "names.csv:word: 1 names"),
        ("x.npy dev.npz:y --links links.txt", "links.txt names row 999 of the gallery"),
        ("x.npy dev.npz:y", "x.npy: queries: 100% of them are rows of the gallery"),
        ("same.npy dev.npz:y", "same.npy: queries has only equal rows"),
        ("dev.npz:y x.npy --links swapped.txt", "are the files swapped?"),
        ("x.npy dev.npz:y --links ids.txt", "ids.txt: 'cat' is neither a row number nor an id"),
        ("x.npy dev.npz:y -k 121", "--k 121"),
        ("outside.npz:x outside.npz:y", "y_to_x[59] is 60"),
        ("negative.npz:y negative.npz:x", "y_to_x[0] is -1"),
        ("float.npz:x float.npz:y", "y_to_x is float64"),
        ("holey.npz:x holey.npz:y", "y_to_x is float64"),
        ("table.npz:x table.npz:y", "y_to_x is int64 of shape (60, 2)"),
        ("short.npz:x short.npz:y", "y_to_x is int64 of shape (50,)"),
        ("unequal.npz:x unequal.npz:y", "unequal.npz: x has 60 rows and y 40"),
        ("x.npy dev.npz:y --temperature 0", "--temperature is 0"),
        ("x.npy dev.npz:y --temperature 1e-300", "--temperature is 1e-300"),
        ("x.npy dev.npz:y --strength 1e300", "--strength is 1e+300"),
        ("x.npy dev.npz:y --tune", "--links"),
        ("x.npy dev.npz:y --links one_link.txt --tune", "--tune"),
        ("dev.npz --tune --temperature 0.1 --strength 1", "--tune has nothing to choose"),
        ("x.npy dev.npz:y --images .", "--images ."),
        ("x.npy dev.npz:y --out words.txt", "--out words.txt"),
    ],
)
def test_mistakes_are_named(nuclr, mistakes, monkeypatch, arguments, named):
    monkeypatch.chdir(mistakes)
    done = nuclr("hubness", *arguments.split())
    assert done.status == 2
    assert named in done.err and "Traceback" not in done.err
    assert len(done.err.strip().splitlines()) <= 2


@pytest.mark.parametrize("arguments", [["x.npy", ""], ["", "x.npy"], ["x.npy", "dev.npz:y", "--bank", ""]])
def test_an_empty_argument_is_refused(nuclr, mistakes, monkeypatch, arguments):
    """Such as a variable of the shell that is not set; an empty gallery would be the queries themselves."""
    monkeypatch.chdir(mistakes)
    done = nuclr("hubness", *arguments)
    assert done.status == 2 and "is empty" in done.err


def test_a_log_that_repeats_few_questions(nuclr, mistakes, monkeypatch, tmp_path):
    """All different queries are used, equal ones are in one half, and fewer than ten are not compared with a bank."""
    monkeypatch.chdir(mistakes)
    x = np.load("x.npy")
    log = np.concatenate([x[np.arange(3000) % 6], unit(x + 0.1)])
    np.save(tmp_path / "log.npy", log)
    done = nuclr("hubness", tmp_path / "log.npy", "several.npz:a", "--out", tmp_path / "out")
    assert done.status == 0, done.err
    content = json.loads((tmp_path / "out" / "hubness.json").read_text())
    assert content["bank"]["used"] == (N + 6) // 2
    assert content["bank"]["queries"] + content["counted"] == len(log)
    assert content["bank"]["repeated"] == pytest.approx(1 - 33 / content["bank"]["queries"])
    saved = PopularityCorrection.load(tmp_path / "out" / "correction.safetensors")
    assert "queries=66," in repr(saved), "what is saved is fitted on the other half as well"
    np.save(tmp_path / "few.npy", x[np.arange(30) % 9])
    done = nuclr(
        "hubness", tmp_path / "few.npy", "dev.npz:y", "--bank", tmp_path / "log.npy", "--out", tmp_path / "few"
    )
    assert done.status == 0, done.err
    assert json.loads((tmp_path / "few" / "hubness.json").read_text())["bank"]["p_value"] is None


def test_the_extra_search_is_enough_for_files_of_vectors(mistakes, tmp_path):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    installed = {re.split("[><=]", need)[0] for need in project["optional-dependencies"]["search"]}
    blocked = sorted(set(EXTRAS) - installed - {"rich"})  # typer depends on rich
    arguments = ["nuclr", "hubness", "x.npy", "x.npy", "--out", str(tmp_path / "out")]
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); sys.argv = {arguments!r}\n"
    code += "from nuclr.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=mistakes, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "report.html" in done.stdout, done.stderr


def test_answers_of_queries_that_are_not_counted_are_no_verdict(nuclr, tmp_path):
    """Half of the queries fits the correction; an answer of one of these says nothing about results."""
    rows = torch.nn.functional.normalize(torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(0)), dim=2)
    np.save(tmp_path / "x.npy", rows[0].numpy())
    np.save(tmp_path / "y.npy", rows[1].numpy())
    links = tmp_path / "links.tsv"
    verdicts = []
    for row in range(6):
        links.write_text(f"{row}\t{row}\n")
        done = nuclr("hubness", tmp_path / "x.npy", tmp_path / "y.npy", "--links", links, "--out", tmp_path / str(row))
        assert done.status == 0, done.err
        verdicts.append(f"{links} has no answer of a query that is counted" in done.out)
        assert "as clicks" in done.out
    assert True in verdicts and False in verdicts
