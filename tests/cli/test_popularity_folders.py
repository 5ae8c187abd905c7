"""`nuclr popularity` and `nuclr hubness` on folders of clip-retrieval and DataComp."""

import csv
import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from nuclr.studies.popularity import popularity_files
from tests.embedding_folders import make_clip_retrieval, make_datacomp, make_features, uids

X, Y = make_features(rows=60, width=8)
SIZES = (25, 5, 30)
BAND = ("--max-quantile", 0.8)


@pytest.fixture
def plain(nuclr, tmp_path):
    """Return the table of the same embeddings in one file."""
    np.savez(tmp_path / "plain.npz", x=X, y=Y)
    done = nuclr("popularity", tmp_path / "plain.npz", "--temperature", 0.1, "--out", tmp_path / "plain")
    assert done.status == 0, done.err
    return pq.read_table(tmp_path / "plain" / "popularity.parquet")


@pytest.mark.parametrize("kind", ["clip-retrieval", "DataComp", "DataComp, compressed"])
def test_a_folder_gives_what_one_file_gives(nuclr, tmp_path, plain, kind):
    if kind == "clip-retrieval":
        folder = make_clip_retrieval(tmp_path / "data", X, Y, SIZES)
    else:
        folder = make_datacomp(tmp_path / "data", X, Y, SIZES, compressed="compressed" in kind)
    out, subset, table, keep = tmp_path / "out", tmp_path / "subset.npy", tmp_path / "view.parquet", tmp_path / "k.txt"
    done = nuclr("popularity", folder, "--temperature", 0.1, "--out", out, "--uids", subset, "--keep", keep, *BAND,
                 "--table", table)  # fmt: skip
    assert done.status == 0, done.err
    assert "Report page" in done.out and "48 of 60 pairs kept" in done.out
    rows = pq.read_table(out / "popularity.parquet")
    np.testing.assert_allclose(rows["zeta"].to_numpy(), plain["zeta"].to_numpy(), atol=1e-6)
    caption, image = ("caption 59", "59.jpg") if kind == "clip-retrieval" else ("text 59", "http://host/59.jpg")
    last = rows.slice(59, 1).to_pylist()[0]
    assert (last["caption"], last["image"], last["side"], last["x"]) == (caption, image, "y", 59)
    listed = list(csv.DictReader((out / "popularity.csv").open()))
    assert len(listed) == 120 and listed[59]["caption"] == caption
    content = json.loads((out / "popularity.json").read_text())
    assert content["sides"]["y"]["most_popular"][0]["caption"].startswith(caption.split()[0])
    assert content["file"] == str(folder) and content["false_negatives"]["rows"]

    kept = np.loadtxt(keep, dtype=int)
    chosen = np.load(subset)
    assert chosen.dtype == np.dtype("u8,u8") and len(chosen) == len(kept) == 48
    by_formula = np.array([(int(uid[:16], 16), int(uid[16:], 16)) for uid in np.array(uids(60))[kept]], "u8,u8")
    by_formula.sort()
    np.testing.assert_array_equal(chosen, by_formula)

    view = pq.read_table(table)
    first = view.slice(0, 1).to_pylist()[0]
    assert set(first) >= {"path", "text", "uid", "popularity", "zeta", "nearest", "projection_x", "projection_y"}
    assert first["uid"] == uids(60)[0] and first["x_popularity"] == pytest.approx(rows["popularity"][60].as_py())
    np.testing.assert_allclose(view["zeta"].to_numpy(), rows["zeta"].to_numpy()[:60])


def test_a_large_folder_has_no_csv_and_no_page(nuclr, tmp_path, monkeypatch):
    monkeypatch.setattr(popularity_files, "LARGE", 50)
    monkeypatch.setattr(popularity_files, "SCANNED", 20)
    monkeypatch.setattr(popularity_files, "WRITTEN", 7)
    folder = make_clip_retrieval(tmp_path / "data", X, Y, SIZES)
    done = nuclr("popularity", folder, "--temperature", 0.1, "--out", tmp_path / "out")
    assert done.status == 0, done.err
    assert "no popularity.csv and no page" in done.out and "Report page" not in done.out
    assert not (tmp_path / "out" / "popularity.csv").exists() and not (tmp_path / "out" / "report.html").exists()
    rows = pq.read_table(tmp_path / "out" / "popularity.parquet").to_pylist()
    assert [row["number"] for row in rows] == [*range(60)] * 2 and rows[41]["caption"] == "caption 41"


def test_hubness_of_a_folder(nuclr, tmp_path):
    folder = make_clip_retrieval(tmp_path / "data", X, Y, SIZES)
    bank = make_clip_retrieval(tmp_path / "bank", *make_features(1, 40, 8), (40,))
    np.savez(tmp_path / "plain.npz", x=X, y=Y)
    np.savez(tmp_path / "plain_bank.npz", **dict(zip("xy", make_features(1, 40, 8), strict=True)))
    for name, *arguments in (
        ("folder", folder, "--bank", bank),
        ("sides", f"{folder}:img_emb", f"{folder}:text_emb", "--bank", bank),
        ("file", tmp_path / "plain.npz", "--bank", tmp_path / "plain_bank.npz"),
    ):
        done = nuclr("hubness", *arguments, "--normalize", "--out", tmp_path / name)
        assert done.status == 0, done.err
    for name in ("folder", "sides"):
        np.testing.assert_allclose(
            np.load(tmp_path / name / "bias.npy"), np.load(tmp_path / "file" / "bias.npy"), atol=1e-6
        )
    rows = list(csv.DictReader((tmp_path / "folder" / "hubness.csv").open()))
    assert len(rows) == 60 and rows[7]["name"] == "caption 7"
    assert "recall@1" in done.out  # the pairs are known


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--uids", "s.npy"], "--uids needs a band"),
        (["--uids", "s.txt", *BAND], "--uids s.txt: needs the suffix .npy"),
        (["--uids", "old.npy", *BAND], "--uids old.npy: the file exists"),
        (["--table", "t.csv"], "--table t.csv: needs the suffix .parquet"),
        (["--table", "none/t.parquet"], "--table none/t.parquet: the folder none does not exist"),
        (["--x-key", "b32_img"], "no array 'b32_img' for side x; found: img_emb, text_emb"),
        (["--captions", "c.txt"], "--captions belongs to an embedding file; the folder data has its own metadata"),
        (["--images", "none"], "--images none: no such folder"),
    ],
)
def test_wrong_options(nuclr, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    make_clip_retrieval(tmp_path / "data", X, Y, SIZES)
    (tmp_path / "old.npy").write_text("mine")
    refused = nuclr("popularity", "data", "--temperature", 0.1, "--out", "out", *arguments)
    assert refused.status == 2 and words in refused.err, refused.err
    assert len(refused.err.strip().splitlines()) == 1 and (tmp_path / "old.npy").read_text() == "mine"


def test_wrong_folders(nuclr, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    broken = Y.copy()
    broken[40, 3] = np.inf
    make_clip_retrieval(tmp_path / "rows", X, broken, SIZES)
    (make_clip_retrieval(tmp_path / "parts", X, Y, SIZES) / "metadata" / "metadata_0.parquet").unlink()
    make_clip_retrieval(tmp_path / "widths", X, Y[:, :5], SIZES)
    make_clip_retrieval(tmp_path / "bare", X, Y, SIZES, metadata=False)
    np.savez(tmp_path / "plain.npz", x=X, y=Y)
    for source, words, *more in (
        ("rows", "text_emb_2.npy: text_emb row 10 (row 40 of the folder) holds a NaN or an infinity"),
        ("parts", "part 0 is missing"),
        ("widths", "x has width 8 and y has width 5"),
        ("bare", "bare has no metadata with a column 'uid'", "--uids", "s.npy", *BAND),
        ("plain.npz", "plain.npz has no metadata with a column 'uid'", "--uids", "s.npy", *BAND),
        ("plain.npz", "--x-key belongs to a folder of embeddings", "--x-key", "img_emb"),
    ):
        refused = nuclr("popularity", source, "--temperature", 0.1, "--out", "out", *more)
        assert refused.status == 2 and words in refused.err, refused.err
    refused = nuclr("hubness", "rows", "--normalize", "--out", "hubs")
    assert refused.status == 2 and "row 40 holds a NaN" in refused.err
    refused = nuclr("hubness", "widths", "--normalize", "--out", "hubs")
    assert refused.status == 2 and "columns" in refused.err
