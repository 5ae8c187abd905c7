"""`nuclr hubness` on files of every kind and on a run, as a user meets it."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from nuclr.popularity import PopularityCorrection, hubness
from nuclr.runs import config
from nuclr.studies.hubness.hubness_files import split_queries
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


def test_pairs_with_a_bank(nuclr, pairs):
    out = pairs / "out"
    done = nuclr(
        "hubness", f"{pairs}/dev.npz", "--bank", pairs / "train.npz", "--names", pairs / "dev.jsonl", "--out", out
    )
    assert done.status == 0, done.err
    for words in ("60 queries look at their first 10 of 120 items", "items that nobody finds", "skewness of N_10",
                  "recall@1", "rank correlation with N_10", "Largest hubs", "Report page", "bias.npy"):  # fmt: skip
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
    assert content["hubs"][0]["crowds_out"]
    page = (out / "report.html").read_text()
    assert folders.HOSTILE not in page and "caption 1b" in (out / "hubness.csv").read_text()
    assert "What they crowd out" in page
    assert "by chance" in done.out and set(content["chance"]) == set(content["plain"])
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
        assert "hubness holds the result of" in done.err and "dev.npz:x searching" in done.err.replace("\n", " ")
        assert "name another folder with --out" in done.err.replace("\n", " ")
    assert (pairs / "hubness" / "bias.npy").read_bytes() == before


def test_a_closed_pipe_is_no_failure_of_the_page(pairs):
    command = f"{sys.executable} -m nuclr hubness {pairs}/dev.npz --out {pairs}/out | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stderr == "" and "queries look at their first 10" in done.stdout
    assert (pairs / "out" / "report.html").exists()


def test_one_set_of_items_never_finds_itself(nuclr, pairs):
    out = pairs / "out"
    done = nuclr("hubness", f"{pairs}/dev.npz:y", f"{pairs}/dev.npz:y", "--bank", pairs / "train.npz", "--out", out)
    assert done.status == 0, done.err
    assert "except itself" in done.out
    y = np.load(pairs / "dev.npz")["y"]
    bank = np.load(pairs / "train.npz")["y"]
    np.testing.assert_array_equal(np.load(out / "bias.npy"), PopularityCorrection().fit(bank, bank).bias(y).numpy())
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
    assert "30 queries look at their first 5 of 120 items" in done.out and "other half of the queries" in done.out
    content = json.loads((pairs / "out" / "hubness.json").read_text())
    rows = split_queries(N)[1]
    assert len(set(rows % 2)) == 2, "an alternating log is not divided by its kinds"
    counted = hubness(data["x"][rows].astype("float16").astype("float32"), data["y"], k=5)
    links = [[i, 2 * row] for i, row in enumerate(rows)]
    assert content["labeled"] == 30
    assert content["plain"]["recall"] == {str(k): pytest.approx(counted.recall(links, k)) for k in (1, 5)}
    assert content["hubs"][0]["crowds_out"] == [] or "name" not in content["hubs"][0]["crowds_out"][0]["query"]


def test_tuning_on_one_half_of_the_pairs(nuclr, pairs):
    """Temperature and strength are those that the queries which are not counted would choose."""
    out = pairs / "out"
    done = nuclr("hubness", pairs / "dev.npz", "--bank", pairs / "train.npz", "--tune", "--out", out)
    assert done.status == 0, done.err
    assert "chosen on 30 labeled queries that are not counted" in done.out
    assert "30 queries look at their first 10 of 120 items" in done.out
    data, bank = np.load(pairs / "dev.npz"), np.load(pairs / "train.npz")
    half = [[i, 2 * (2 * i) + j] for i in range(N // 2) for j in (0, 1)]  # of the queries 0, 2, 4, ...
    fix = PopularityCorrection().fit(bank["x"], bank["y"], pairs=(data["x"][::2], data["y"], half))
    content = json.loads((out / "hubness.json").read_text())
    assert (content["temperature"], content["strength"]) == (fix.temperature, fix.strength)
    other = [[i, 2 * (2 * i + 1) + j] for i in range(N // 2) for j in (0, 1)]
    corrected = hubness(data["x"][1::2], data["y"], bias=fix.bias(data["y"]))
    assert content["corrected"]["recall"]["1"] == pytest.approx(corrected.recall(other))


def test_tuning_in_one_set_keeps_captions_of_an_image_together(nuclr, pairs):
    out = pairs / "out"
    items = f"{pairs}/dev.npz:y"
    done = nuclr("hubness", items, items, "--bank", pairs / "train.npz", "--tune", "--strength", 0.9, "--out", out)
    assert done.status == 0, done.err
    assert "chosen on 60 labeled queries" in done.out and "60 queries look at" in done.out
    y, bank = np.load(pairs / "dev.npz")["y"], np.load(pairs / "train.npz")["y"]
    rows = np.array([4 * i + j for i in range(N // 2) for j in (0, 1)])  # both captions of the images 0, 2, 4, ...
    fix = PopularityCorrection(strength=0.9).fit(
        bank, bank, pairs=(y[rows], y, [[n, row ^ 1] for n, row in enumerate(rows)]), exclude=rows
    )
    content = json.loads((out / "hubness.json").read_text())
    assert (content["temperature"], content["strength"]) == (fix.temperature, 0.9)


def write_safetensors(folder, x, y):
    save_file({"queries": x}, folder / "q.safetensors")
    save_file({"a": y, "b": y[:5]}, folder / "g.safetensors")
    return "q.safetensors", "g.safetensors:a", None


def write_parquet(folder, x, y):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, array in (("q", x), ("g", y)):
        table = pyarrow.table({"title": [f"title {i}" for i in range(len(array))], "embedding": list(array)})
        parquet.write_table(table, folder / f"{name}.parquet")
    return "q.parquet", "g.parquet:embedding", "g.parquet:title"


def write_dataset(folder, x, y):
    datasets = pytest.importorskip("datasets")
    for name, array in (("q", x), ("g", y)):
        rows = {"title": [f"title {i}" for i in range(len(array))], "embedding": array.tolist()}
        datasets.Dataset.from_dict(rows).save_to_disk(folder / name)
    return "q", "g:embedding", "g:title"


@pytest.mark.parametrize("write", [write_safetensors, write_parquet, write_dataset])
def test_other_files_give_the_same_bias(nuclr, pairs, write, monkeypatch):
    monkeypatch.chdir(pairs)
    data = np.load("dev.npz")
    queries, gallery, names = write(pairs, data["x"], data["y"])
    done = nuclr("hubness", queries, gallery, *(["--names", names] if names else []))
    assert done.status == 0, done.err
    expected = PopularityCorrection().fit(data["x"][split_queries(N)[0]], data["y"]).bias(data["y"]).numpy()
    np.testing.assert_allclose(np.load("hubness/bias.npy"), expected, atol=1e-5)
    assert ("title 0" in done.out) == (names is not None)


def test_a_run(nuclr, trained, tmp_path):
    done = nuclr("hubness", trained, "--out", tmp_path / "out")
    assert done.status == 0, done.err
    content = json.loads((tmp_path / "out" / "hubness.json").read_text())
    assert content["bank"]["name"] == f"{trained}:x" and content["plain"]["recall"]
    assert content["hubs"][0]["name"] in done.out
    assert "Captions searched by images" in (tmp_path / "out" / "report.html").read_text()
    other = nuclr("hubness", f"{trained}:y", f"{trained}:x", "--out", tmp_path / "other")
    assert other.status == 0, other.err
    page = (tmp_path / "other" / "report.html").read_text()
    assert "data:image/jpeg" in page, "the gallery consists of pictures"
    assert "Images searched by captions" in page and "captions of the run run search" in page
    rows = list(csv.DictReader((tmp_path / "other" / "hubness.csv").open()))
    assert all(row["name"].startswith("builtin/") for row in rows)
    hub = json.loads((tmp_path / "other" / "hubness.json").read_text())["hubs"][0]
    assert hub["name"] in other.out and hub["name"] in page


def test_links_of_other_rows_are_not_a_finding(nuclr, pairs, monkeypatch):
    monkeypatch.chdir(pairs)
    data = np.load("dev.npz")
    np.savez("pairs.npz", x=data["x"], y=np.concatenate([data["y"], data["y"][::-1]] * 5) * 0.999)
    np.save("wrong.npy", (1200 - 2 * np.arange(N)) % 1200)
    done = nuclr("hubness", "pairs.npz:x", "pairs.npz:y", "--links", "wrong.npy", "-k", 1)
    assert done.status == 0, done.err
    assert "Recall is at chance level: are the rows of wrong.npy numbered from 0, in" in done.out
    assert "To use it" not in done.out and "The bias is in hubness/bias.npy" in done.out


def test_a_log_that_repeats_queries(nuclr, pairs, monkeypatch):
    monkeypatch.chdir(pairs)
    data = np.load("dev.npz")
    np.save("log.npy", np.concatenate([data["x"], data["x"], data["x"]]))
    done = nuclr("hubness", "log.npy", "dev.npz:y")
    assert done.status == 0, done.err
    assert "% of the queries repeat others; each counts once." in done.out and "with --links or --tune." in done.out
    assert "To use it: subtract hubness/bias.npy" in done.out
    assert "repeat others" in (pairs / "hubness" / "report.html").read_text()


def test_pictures_of_a_folder(nuclr, pairs, tmp_path):
    names = folders.write_pictures(tmp_path / "images", 2 * N, 32)
    (tmp_path / "names.txt").write_text("\n".join(["../secret.png", *names[1:]]) + "\n")
    arguments = ("hubness", pairs / "dev.npz", "--names", tmp_path / "names.txt", "--images", tmp_path / "images")
    done = nuclr(*arguments, "--out", tmp_path / "out")
    assert done.status == 0, done.err
    assert "data:image/jpeg" in (tmp_path / "out" / "report.html").read_text()


def break_files(folder: Path) -> None:
    data = dict(np.load(folder / "dev.npz"))
    (folder / "nothing_in_it").mkdir()
    (folder / "names.csv").write_text("id,word\n1,cat\n")
    (folder / "archive.npy").write_bytes((folder / "dev.npz").read_bytes())
    (folder / "numbers.csv").write_text("0.6,0.8\n0.8,0.6\n")
    (folder / "header.csv").write_text("a,b\n0.6,0.8\n")
    (folder / "numbers.txt").write_text("0.6 0.8\n0.8 0.6\n")
    (folder / "picture.png").write_bytes(b"no vectors")
    np.save(folder / "wide.npy", unit(np.ones((8, D + 1))))
    np.save(folder / "one.npy", data["x"][:1])
    np.save(folder / "three.npy", data["x"][:3])
    np.save(folder / "none.npy", data["x"][:0])
    np.save(folder / "ints.npy", np.ones((4, D), int))
    np.save(folder / "flat.npy", np.ones(4, "float32"))
    np.save(folder / "long.npy", 3 * data["x"])
    x = data["x"].copy()
    x[17, 2] = np.nan
    np.save(folder / "nan.npy", x)
    x[17] = 0
    np.save(folder / "zero.npy", x)
    np.save(folder / "x.npy", data["x"])
    holes = data["y"].copy()
    holes[3] = np.inf
    np.savez(folder / "holes.npz", x=data["x"], y=holes)
    (folder / "damaged.npz").write_bytes(b"PK no archive")
    archive = bytearray((folder / "dev.npz").read_bytes())
    archive[archive.index(b"PK\x01\x02") + 6] = 200  # the version of zip that is needed to read the first array
    (folder / "newer.npz").write_bytes(archive)
    (folder / "damaged.npy").write_bytes(b"no array")
    (folder / "damaged.safetensors").write_bytes(b"no tensors")
    (folder / "damaged.parquet").write_bytes(b"no table")
    (folder / "words.txt").write_text("a\nb\n")
    (folder / "links.txt").write_text("0 0\n0 999\n")
    (folder / "one_link.txt").write_text("1 0\n")
    (folder / "bad_links.txt").write_text("0 0\nzero one\n")
    np.savez(folder / "several.npz", a=data["x"], b=data["x"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("x.npy wide.npy", "x.npy has 12 columns and wide.npy 13; queries, gallery and bank must"),
        ("x.npy x.npy --bank wide.npy", "wide.npy has 13 columns and x.npy 12"),
        ("x.npy dev.npz:y --bank x.npy", "--bank x.npy: these are the queries themselves"),
        ("x.npy dev.npz:y --bank one.npy", "--bank one.npy: 1 rows are too few"),
        ("three.npy dev.npz:y", "three.npy: 3 queries; without --bank, at least 4 are needed"),
        ("x.npy one.npy", "one.npy: has one row; a gallery needs at least two items"),
        ("x.npy none.npy", "none.npy: has no rows"),
        ("none.npy dev.npz:y", "none.npy: has no rows"),
        ("x.npy dev.npz:y --bank none.npy", "none.npy: has no rows"),
        ("x.npy nan.npy", "nan.npy: row 17 holds a NaN or an infinity; fix or remove it"),
        ("x.npy dev.npz:y --bank nan.npy", "nan.npy: row 17 holds a NaN or an infinity; fix or remove it"),
        ("x.npy holes.npz:y --normalize", "holes.npz:y: row 3 holds a NaN"),
        ("nan.npy dev.npz:y", "nan.npy: row 17 holds a NaN or an infinity; fix or remove it"),
        ("zero.npy dev.npz:y --normalize", "zero.npy: row 17 is all zeros"),
        ("long.npy dev.npz:y", "row 0 has norm 3 (60 of 60 rows are not unit norm); to compare by cosine, add --norm"),
        ("ints.npy dev.npz:y", "ints.npy: int64 of shape (4, 12); needs floating-point numbers"),
        ("flat.npy dev.npz:y", "flat.npy: float32 of shape (4,)"),
        ("nothing.npy x.npy", "nothing.npy: no such file"),
        ("x.npy:y x.npy", "x.npy:y: a .npy file holds one array"),
        ("several.npz x.npy", "several.npz: name one of its arrays as several.npz:NAME; found: a, b"),
        ("several.npz:c x.npy", "several.npz: no array named 'c'"),
        ("damaged.npz x.npy", "damaged.npz: cannot be read as .npz"),
        ("newer.npz x.npy", "newer.npz: cannot be read as .npz (zip file version 20.0)"),
        ("damaged.npy x.npy", "damaged.npy: cannot be read as .npy"),
        ("damaged.safetensors x.npy", "damaged.safetensors: cannot be read as .safetensors"),
        ("damaged.parquet x.npy", "damaged.parquet: cannot be read"),
        ("archive.npy x.npy", "archive.npy: this is an .npz archive; rename it to archive.npz"),
        ("words.txt x.npy", "words.txt: these are texts, not vectors; embed them first"),
        ("dev.jsonl x.npy", "dev.jsonl: these are texts, not vectors; embed them first"),
        ("numbers.csv x.npy", "np.save('numbers.npy', np.loadtxt('numbers.csv', dtype='float32', delimiter=','))"),
        ("header.csv x.npy", "np.loadtxt('header.csv', dtype='float32', delimiter=',', skiprows=1))"),
        ("numbers.txt x.npy", "np.loadtxt('numbers.txt', dtype='float32'))"),
        ("nothing_in_it x.npy", "nothing_in_it: the folder is empty"),
        ("picture.png x.npy", "picture.png: unknown kind of file; allowed: .npy"),
        ("x.npy dev.npz:y --names names.csv", "names.csv: no column of captions among id, word; name it as names.csv:"),
        ("x.npy dev.npz:y --names names.csv:word", "names.csv:word: 1 names, but dev.npz:y has 120 rows"),
        ("x.npy dev.npz:y --names words.txt", "words.txt: 2 names, but dev.npz:y has 120 rows"),
        ("x.npy dev.npz:y --links links.txt", "links.txt: row 1 names item 999"),
        ("x.npy dev.npz:y --links bad_links.txt", "bad_links.txt: line 2 does not have two whole numbers"),
        ("x.npy dev.npz:y -k 121", "--k 121: the gallery has only 120 items"),
        ("x.npy dev.npz:y --temperature 0", "--temperature is 0"),
        ("x.npy dev.npz:y --tune", "--tune needs right answers; name a file of rows (query, item) with --links"),
        ("x.npy dev.npz:y --links one_link.txt --tune", "--tune needs at least two queries with right answers of"),
        ("dev.npz --tune --temperature 0.1 --strength 1", "--tune has nothing to choose: leave out --temperature or"),
        ("x.npy dev.npz:y --images .", "--images .: needs a folder, and --names"),
        ("x.npy dev.npz:y --out words.txt", "--out words.txt: there is a file with this name"),
    ],
)  # fmt: skip
def test_mistakes_are_named(nuclr, pairs, monkeypatch, arguments, message):
    monkeypatch.chdir(pairs)
    break_files(pairs)
    done = nuclr("hubness", *arguments.split())
    assert done.status == 2
    assert message in done.err and "Traceback" not in done.err
    assert len(done.err.strip().splitlines()) <= 2


def test_a_file_too_large_for_memory(nuclr, pairs, monkeypatch):
    """A machine with little memory: the size in the archive is compared with what is free before anything is read."""
    monkeypatch.setattr("nuclr.runs.vectors.free_memory", lambda device: 1000.0)
    done = nuclr("hubness", pairs / "dev.npz", "--out", pairs / "out")
    assert done.status == 2
    assert "of memory are free; save the vectors with numpy.save as .npy, which is read in parts" in done.err
    data = np.load(pairs / "dev.npz")
    np.save(pairs / "x.npy", data["x"])
    np.save(pairs / "y.npy", data["y"])
    assert nuclr("hubness", pairs / "x.npy", pairs / "y.npy", "--out", pairs / "out").status == 0


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
    assert f"{path}: needs " in done.err and "save the vectors with numpy.save as .npy" in done.err
