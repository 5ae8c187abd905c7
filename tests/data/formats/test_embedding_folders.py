"""Folders of clip-retrieval and DataComp: parts in order, metadata, and what is missing or does not fit."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nuclr.data import SideChoice, open_pairs
from nuclr.data.formats.arrow import StoredTexts
from nuclr.data.formats.embeddings import EmbeddingFolder, is_embedding_folder
from nuclr.errors import UserError
from tests.data.embedding_folders import make_clip_retrieval, make_datacomp, make_features, slices, uids

X, Y = make_features()


def test_clip_retrieval(tmp_path):
    folder = EmbeddingFolder(make_clip_retrieval(tmp_path / "cr", X, Y))
    assert is_embedding_folder(tmp_path / "cr")
    assert folder.sides() == ("img_emb", "text_emb")
    np.testing.assert_array_equal(np.asarray(folder.features("img_emb")), X)
    np.testing.assert_array_equal(np.asarray(folder.features("text_emb")), Y)
    assert list(folder.labels("text_emb")) == [f"caption {row}" for row in range(len(X))]
    assert folder.labels("img_emb").take(np.array([19, 0])) == ["19.jpg", "0.jpg"]
    assert list(folder.texts(["uid"])) == uids(len(X))


def test_parts_are_in_the_order_of_their_numbers(tmp_path):
    rows = np.arange(12, dtype="f2")[:, None] + np.zeros((1, 2), "f2")
    make_clip_retrieval(tmp_path, rows, rows, sizes=(1,) * 12)
    features = EmbeddingFolder(tmp_path).features("img_emb")
    np.testing.assert_array_equal(np.asarray(features)[:, 0], np.arange(12))  # not 0, 1, 10, 11, 2, ...


def test_clip_retrieval_without_metadata_and_with_images_only(tmp_path):
    folder = EmbeddingFolder(make_clip_retrieval(tmp_path / "a", X, Y, metadata=False))
    assert folder.labels("text_emb") is None and len(folder.features("text_emb")) == len(Y)
    make_clip_retrieval(tmp_path / "b", X, Y)
    shutil.rmtree(tmp_path / "b" / "text_emb")
    with pytest.raises(UserError, match="img_emb"):
        EmbeddingFolder(tmp_path / "b").sides()


@pytest.mark.parametrize("compressed", [False, True])
def test_datacomp(tmp_path, compressed, monkeypatch):
    monkeypatch.setenv("NUCLR_CACHE", str(tmp_path / "cache"))
    folder = EmbeddingFolder(make_datacomp(tmp_path / "dc", X, Y, compressed=compressed, models=("b32", "l14")))
    assert list(folder.arrays) == ["b32_img", "b32_txt", "l14_img", "l14_txt"]
    assert folder.sides("l14_img") == ("l14_img", "l14_txt") == folder.sides(y_key="l14_txt")
    np.testing.assert_array_equal(np.asarray(folder.features("l14_img")), X)
    np.testing.assert_array_equal(folder.features("b32_txt")[[19, 2]], Y[[19, 2]])
    assert folder.labels("l14_txt")[8] == "text 8" and folder.labels("l14_img")[-1] == "http://host/19.jpg"
    with pytest.raises(UserError, match="b32_img, b32_txt, l14_img, l14_txt"):
        folder.sides()
    with pytest.raises(UserError, match="'h14_img'"):
        folder.sides("h14_img")


def test_shards_of_datacomp_in_folders(tmp_path):
    make_datacomp(tmp_path / "dc" / "a", X, Y)
    make_datacomp(tmp_path / "dc" / "b", Y, X)
    features = EmbeddingFolder(tmp_path / "dc").features("l14_img")
    np.testing.assert_array_equal(np.asarray(features), np.concatenate([X, Y]))


def test_other_folders_are_not_taken_for_one(tmp_path):
    assert not is_embedding_folder(tmp_path) and not is_embedding_folder(tmp_path / "none")
    np.savez(tmp_path / "pairs.npz", x=X, y=Y)
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "pairs.parquet")
    assert not is_embedding_folder(tmp_path)
    with pytest.raises(UserError, match="clip-retrieval"):
        EmbeddingFolder(tmp_path)


@pytest.mark.parametrize(
    ("write", "removed", "part"),
    [
        (make_clip_retrieval, "metadata/metadata_1.parquet", "1 .* metadata"),
        (make_clip_retrieval, "img_emb/img_emb_0.npy", "0 .* img_emb"),
        (make_datacomp, "00000001.npz", "00000001 .* .npz"),
        (make_datacomp, "00000002.parquet", "00000002 .* .parquet"),
    ],
)
def test_a_missing_file_of_a_part_is_named(tmp_path, write, removed, part):
    (write(tmp_path / "f", X, Y) / removed).unlink()
    with pytest.raises(UserError, match=f"part {part}"):
        EmbeddingFolder(tmp_path / "f")


def test_lengths_and_widths_that_differ_are_named(tmp_path):
    folder = make_clip_retrieval(tmp_path / "cr", X, Y)
    np.save(folder / "text_emb" / "text_emb_2.npy", Y[:11])
    with pytest.raises(UserError, match=r"text_emb_2\.npy.*11.*12.*metadata_2\.parquet"):
        EmbeddingFolder(folder).features("text_emb")
    np.save(folder / "text_emb" / "text_emb_2.npy", Y[slices()[2], :5])
    with pytest.raises(UserError, match=r"text_emb_2\.npy.* 5 .* 6 .*text_emb_0\.npy"):
        EmbeddingFolder(folder).features("text_emb")
    plain = make_clip_retrieval(tmp_path / "plain", X, Y, metadata=False)
    np.save(plain / "text_emb" / "text_emb_1.npy", Y[:3])
    with pytest.raises(UserError, match=r"text_emb_1\.npy.* 3 .* 1 .*img_emb_1\.npy"):
        EmbeddingFolder(plain).features("text_emb")


def test_a_row_that_is_not_finite_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("nuclr.arrays.BLOCK", 4)
    broken = Y.copy()
    broken[10] = np.nan
    folder = make_clip_retrieval(tmp_path / "cr", X, broken)
    with pytest.raises(UserError, match=r"cr:text_emb\[10, 0\]=nan"):
        open_pairs(folder)


def test_too_little_space_for_unpacking_is_a_clear_error(tmp_path, monkeypatch):
    folder = EmbeddingFolder(make_datacomp(tmp_path / "dc", X, Y, compressed=True))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(UserError, match=r"l14_img.*NUCLR_CACHE"):
        folder.features("l14_img")


def test_a_folder_as_pairs_for_training(tmp_path):
    make_clip_retrieval(tmp_path / "cr", X, Y)
    make_datacomp(tmp_path / "dc", X, Y, models=("b32", "l14"))
    pairs = open_pairs(tmp_path / "cr")
    assert len(pairs) == len(X) and pairs.sides["x"].modality.name == pairs.sides["y"].modality.name == "vector"
    sample = pairs[13]
    np.testing.assert_array_equal(sample.x, X[13].astype("f4"))
    np.testing.assert_array_equal(pairs.items("y", np.array([4, 19])), Y[[4, 19]].astype("f4"))
    assert sample.x.dtype == np.float32
    assert open_pairs(tmp_path / "dc", x=SideChoice("l14_img")).fingerprint == pairs.fingerprint
    X2 = X.copy()
    X2[0] += 1
    assert open_pairs(make_clip_retrieval(tmp_path / "other", X2, Y)).fingerprint != pairs.fingerprint


def test_texts_in_files(tmp_path):
    pq.write_table(pa.table({"t": ["a", None, "c", "d"]}), tmp_path / "0.parquet", row_group_size=2)
    pq.write_table(pa.table({"t": ["e"]}), tmp_path / "1.parquet")
    texts = StoredTexts([tmp_path / "0.parquet", tmp_path / "1.parquet"], "t")
    assert list(texts) == ["a", "", "c", "d", "e"] and texts[1:4] == ["", "c", "d"] and texts[-1] == "e"
    assert texts.take([4, 0, 4]) == ["e", "a", "e"] and texts[::-2] == ["e", "c", "a"]
    with pytest.raises(IndexError):
        texts[5]
    (tmp_path / "1.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"1\.parquet"):
        len(StoredTexts([tmp_path / "1.parquet"], "t"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the limit on memory is that of Linux")
def test_ten_million_embeddings_are_not_read_into_memory(tmp_path):
    """Read 4.8 GiB of sparse files completely, and rows at random, by a process that may allocate 1 GiB.

    Pages of files that are mapped do not count: they stay resident as long as nothing else needs the memory.
    """
    (tmp_path / "img_emb").mkdir()
    for part in range(10):
        path = tmp_path / "img_emb" / f"img_emb_{part}.npy"
        np.lib.format.open_memmap(path, "w+", np.float16, (1_000_000, 256))
    code = """if True:
        import resource, sys
        from pathlib import Path
        import numpy as np
        from nuclr.data.formats.embeddings import EmbeddingFolder
        from nuclr.data.vectors import checked_rows

        lines = Path("/proc/self/status").read_text().splitlines()
        data = next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmData:"))
        resource.setrlimit(resource.RLIMIT_DATA, (data + 2**30, data + 2**30))
        folder = EmbeddingFolder(Path(sys.argv[1]))
        features = folder.features("img_emb")
        checked_rows("img_emb", features, "any")
        for seed in range(20):
            features[np.random.default_rng(seed).integers(len(features), size=10_000)]
        try:
            np.ones(2**27 + 2**24)
        except MemoryError:
            print(len(features), "limited")
    """
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.split() == ["10000000", "limited"], done.stderr[-2000:]
