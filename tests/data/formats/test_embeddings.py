"""Embedding files and folders: what is read, and the messages for wrong files."""

import io
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from nuclr.data import SideChoice, open_pairs
from nuclr.data.formats.arrow import StoredTexts
from nuclr.data.formats.embeddings import EmbeddingFolder, VectorPairs, is_embedding_folder
from nuclr.data.labeled import LabeledVectors
from nuclr.errors import UserError
from tests.data.embedding_folders import make_clip_retrieval, make_datacomp, make_features, slices, uids


def features(n: int, width: int = 4, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(n).normal(size=(n, width)).astype(dtype)


def npz(tmp_path: Path, **arrays) -> Path:
    path = tmp_path / "pairs.npz"
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(("stored", "read"), [("float16", "float32"), ("float32", "float32"), ("float64", "float64")])
def test_an_npz_file_is_read_as_it_is(tmp_path, stored, read):
    x, y = 10 * features(3, 5, stored), features(4, 2, stored)
    pairs = VectorPairs(npz(tmp_path, x=x, y=y, y_to_x=np.array([0, 2, 2, 1], dtype=np.int32)))
    assert pairs.sides["x"].ids.tolist() == [0, 2, 2, 1]
    assert pairs.item("x", 0).dtype == pairs.item("y", 0).dtype == read
    np.testing.assert_array_equal(pairs.items("x", np.arange(4)), x[[0, 2, 2, 1]])
    np.testing.assert_array_equal(pairs.items("y", np.arange(4)), y)


def test_a_safetensors_file_is_read(tmp_path):
    torch_files = pytest.importorskip("safetensors.torch")
    x, y = torch.randn(3, 5).bfloat16(), torch.randn(3, 2)
    torch_files.save_file({"x": x, "y": y}, tmp_path / "pairs.safetensors")
    pairs = VectorPairs(tmp_path / "pairs.safetensors")
    np.testing.assert_array_equal(pairs.items("x", np.arange(3)), x.float().numpy())
    np.testing.assert_array_equal(pairs.items("y", np.arange(3)), y.numpy())


def broken_rows() -> np.ndarray:
    x = features(5)
    x[3, 1] = np.nan
    x[4, 0] = np.inf
    return x


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({"image": features(3), "y": features(3)}, r"'x'.*found: image, y"),
        ({"x": features(3)}, "'y'"),
        ({"x": np.arange(12).reshape(3, 4), "y": features(3)}, "pairs.npz:x: int64"),
        ({"x": np.array(["a", "b"]), "y": features(2)}, "pairs.npz"),
        ({"x": np.array([{}, {}], dtype=object), "y": features(2)}, "pairs.npz"),
        ({"x": features(3)[0], "y": features(3)}, r"pairs.npz:x: float32 of shape \(4,\)"),
        ({"x": features(1), "y": features(3), "y_to_x": np.zeros(3, int)}, "pairs.npz:x: 1 row"),
        ({"x": features(5), "y": broken_rows()}, r"pairs.npz:y\[3, 1\]=nan"),
        ({"x": features(3), "y": features(4)}, "x has 3 rows and y 4; add y_to_x"),
        ({"x": np.float32(1), "y": features(4)}, r"pairs\.npz:x"),
        ({"x": features(3), "y": features(4), "y_to_x": np.zeros(4)}, "y_to_x is float64"),
        ({"x": features(3), "y": features(4), "y_to_x": np.zeros(3, int)}, r"y_to_x is int64 of shape \(3,\)"),
        ({"x": features(3), "y": features(4), "y_to_x": np.array([0, 1, 3, 2])}, r"y_to_x\[2\] is 3"),
        ({"x": features(3), "y": features(4), "y_to_x": np.array([0, 1, 2, -1])}, r"y_to_x\[3\] is -1"),
    ],
)
def test_wrong_arrays_are_named(tmp_path, arrays, named):
    with pytest.raises(UserError, match=named):
        VectorPairs(npz(tmp_path, **arrays))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"not an archive"])
def test_a_file_that_is_not_an_archive_is_refused(tmp_path, suffix, content):
    path = tmp_path / f"pairs{suffix}"
    path.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read"):
        VectorPairs(path)


@pytest.mark.parametrize("shape", ["((,3)", "(99999999, 99999999)"])
@pytest.mark.parametrize("key", ["x", "labels"])
def test_a_damaged_header_in_an_archive_is_refused(tmp_path, shape, key):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + header.ljust(117).encode() + b"\n"
    with zipfile.ZipFile(tmp_path / "e.npz", "w") as archive:
        for name in ("x", "y", "labels", "prompts"):
            archive.writestr(f"{name}.npy", content)
    read = VectorPairs if key == "x" else LabeledVectors
    with pytest.raises(UserError, match=r"e\.npz: cannot be read as \.npz with numeric arrays"):
        read(tmp_path / "e.npz")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_damaged_compressed_members_are_refused(tmp_path, method):
    file = io.BytesIO()
    np.save(file, np.arange(400, dtype=np.float32).reshape(20, 20))
    with zipfile.ZipFile(tmp_path / "e.npz", "w", method) as archive:
        for name in ("x", "y"):
            archive.writestr(f"{name}.npy", file.getvalue())
    assert len(VectorPairs(tmp_path / "e.npz")) == 20
    content = bytearray((tmp_path / "e.npz").read_bytes())
    content[40:60] = b"\xff" * 20
    (tmp_path / "e.npz").write_bytes(content)
    with pytest.raises(UserError, match=r"cannot be read as \.npz"):
        VectorPairs(tmp_path / "e.npz")


def test_an_archive_that_expands_a_thousandfold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("nuclr.files._LARGE", 2**20)
    header = b"\x93NUMPY\x01\x00" + struct.pack("<H", 118)
    header += b"{'descr': '<f4', 'fortran_order': False, 'shape': (2000, 400), }".ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / "e.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("x", "y"):
            archive.writestr(f"{name}.npy", header + bytes(4 * 2_000 * 400))
    with pytest.raises(UserError, match=r"e\.npz: x\.npy expands from .* to 3 MiB"):
        VectorPairs(tmp_path / "e.npz")


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
    with pytest.raises(UserError, match="h14_img"):
        folder.sides("h14_img")


def test_compressed_arrays_of_another_byte_order_are_read(tmp_path):
    folder = EmbeddingFolder(make_datacomp(tmp_path / "dc", X.astype(">f4"), Y, compressed=True))
    np.testing.assert_array_equal(np.asarray(folder.features("l14_img")), X)


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
