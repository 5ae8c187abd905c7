"""Embedding files and folders: what is read, and the messages for wrong files."""

import io
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from nuclr.data import open_pairs
from nuclr.data.formats.embeddings import VectorPairs
from nuclr.data.labeled import LabeledVectors
from nuclr.data.vectors import open_sides, open_vectors
from nuclr.errors import UserError
from tests.data.embedding_folders import make_clip_retrieval, make_features, slices


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
    with pytest.raises(UserError, match=r"e\.npz: cannot be read as numeric arrays"):
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
    with pytest.raises(UserError, match="cannot be read as numeric arrays"):
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
    folder = make_clip_retrieval(tmp_path / "cr", X, Y)
    x, y = open_sides(str(folder))
    assert (x.name, y.name) == (f"{folder}:x", f"{folder}:y")
    np.testing.assert_array_equal(np.asarray(x.rows), X)
    np.testing.assert_array_equal(np.asarray(y.rows), Y)
    np.testing.assert_array_equal(np.asarray(open_vectors(folder / "text_emb").rows), Y)
    with pytest.raises(UserError, match=r"has the sides .*cr:x and .*cr:y"):
        open_vectors(f"{folder}:img_emb")


def test_clip_retrieval_with_images_only(tmp_path):
    folder = make_clip_retrieval(tmp_path / "b", X, Y)
    shutil.rmtree(folder / "text_emb")
    assert len(open_vectors(f"{folder}:x")) == len(X)
    with pytest.raises(UserError, match="text_emb: no such file or folder"):
        open_sides(str(folder))


@pytest.mark.parametrize("removed", ["img_emb/img_emb_0.npy", "text_emb/text_emb_2.npy"])
def test_a_missing_part_is_refused(tmp_path, removed):
    folder = make_clip_retrieval(tmp_path / "f", X, Y)
    (folder / removed).unlink()
    with pytest.raises(UserError, match="rows"):
        open_pairs(folder)


def test_lengths_and_widths_that_differ_are_named(tmp_path):
    folder = make_clip_retrieval(tmp_path / "cr", X, Y)
    np.save(folder / "text_emb" / "text_emb_2.npy", Y[:11])
    with pytest.raises(UserError, match=r"img_emb_2\.npy and .*text_emb_2\.npy have 12 and 11 rows"):
        open_pairs(folder)
    np.save(folder / "text_emb" / "text_emb_2.npy", Y[slices()[2], :5])
    with pytest.raises(UserError, match=r"text_emb: widths of the parts: \[5, 6\]"):
        open_pairs(folder)


def test_a_row_that_is_not_finite_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("nuclr.arrays.BLOCK", 4)
    broken = Y.copy()
    broken[10] = np.nan
    folder = make_clip_retrieval(tmp_path / "cr", X, broken)
    with pytest.raises(UserError, match=r"cr:y\[10, 0\]=nan"):
        open_pairs(folder)


def test_a_folder_as_pairs_for_training(tmp_path):
    make_clip_retrieval(tmp_path / "cr", X, Y)
    pairs = open_pairs(tmp_path / "cr")
    assert len(pairs) == len(X) and pairs.sides["x"].modality.name == pairs.sides["y"].modality.name == "vector"
    sample = pairs[13]
    np.testing.assert_array_equal(sample.x, X[13].astype("f4"))
    np.testing.assert_array_equal(pairs.items("y", np.array([4, 19])), Y[[4, 19]].astype("f4"))
    assert sample.x.dtype == np.float32
    X2 = X.copy()
    X2[0] += 1
    assert open_pairs(make_clip_retrieval(tmp_path / "other", X2, Y)).fingerprint != pairs.fingerprint


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
        from nuclr.data.vectors import checked_rows, open_vectors

        lines = Path("/proc/self/status").read_text().splitlines()
        data = next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmData:"))
        resource.setrlimit(resource.RLIMIT_DATA, (data + 2**30, data + 2**30))
        features = open_vectors(f"{sys.argv[1]}:x").rows
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
