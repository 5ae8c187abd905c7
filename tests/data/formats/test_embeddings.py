"""Embedding files: what is read, and the messages for wrong files."""

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from nuclr.data import check_samples, open_pairs
from nuclr.data.formats.embeddings import VectorPairs
from nuclr.data.labeled import LabeledVectors
from nuclr.errors import UserError


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


def test_a_truncated_archive_is_refused(tmp_path):
    path = npz(tmp_path, x=features(300), y=features(300))
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(UserError, match="cannot be read"):
        VectorPairs(path)


def test_pairs_of_an_embedding_file(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3, 4)).astype("f4"), rng.normal(size=(5, 2)).astype("f4")
    np.savez(tmp_path / "e.npz", x=x, y=y, y_to_x=[0, 0, 2, 1, 1])
    pairs = open_pairs("e.npz", root=tmp_path)
    assert (*pairs.modalities, len(pairs)) == ("vector", "vector", 5)
    assert pairs.sides["x"].ids.tolist() == [0, 0, 2, 1, 1] and pairs.sides["y"].ids.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(pairs.item("x", 2), x[2])
    np.testing.assert_array_equal(pairs.item("y", 4), y[4])
    assert check_samples(pairs) == {} and pairs.name(3) == "e.npz, x row 1"
    np.savez(tmp_path / "e.npz", x=x, y=y)
    with pytest.raises(UserError, match="x has 3 rows and y 5; add y_to_x"):
        open_pairs(tmp_path / "e.npz")


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
