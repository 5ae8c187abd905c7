"""Embedding files: what is read, and the messages for wrong files."""

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from nuclr.data import check_samples, open_pairs
from nuclr.data.formats.embeddings import read_embeddings, unit_rows
from nuclr.errors import UserError
from nuclr.studies.evaluate.tasks import read_classes


def features(n: int, width: int = 4, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(n).normal(size=(n, width)).astype(dtype)


def npz(tmp_path: Path, **arrays) -> Path:
    path = tmp_path / "pairs.npz"
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("stored", "read"), [("float16", torch.float32), ("float32", torch.float32), ("float64", torch.float64)]
)
def test_an_npz_file_is_read(tmp_path, stored, read):
    x, y = features(3, 5, stored), features(4, 2, stored)
    embeddings = read_embeddings(npz(tmp_path, x=x, y=y, y_to_x=np.array([0, 2, 2, 1], dtype=np.int32)))
    assert embeddings.x.dtype == embeddings.y.dtype == read
    np.testing.assert_array_equal(embeddings.x.numpy(), x)
    np.testing.assert_array_equal(embeddings.y.numpy(), y)
    assert embeddings.y_to_x.tolist() == [0, 2, 2, 1]


def test_without_y_to_x_rows_belong_together_by_position(tmp_path):
    embeddings = read_embeddings(
        npz(tmp_path, x=features(3), y=features(3), names=np.array(["a", "b", "c"], dtype=object))
    )
    assert embeddings.y_to_x.tolist() == [0, 1, 2]


def test_a_safetensors_file_is_read(tmp_path):
    torch_files = pytest.importorskip("safetensors.torch")
    x, y = torch.randn(3, 5).bfloat16(), torch.randn(3, 2)
    torch_files.save_file({"x": x, "y": y}, tmp_path / "pairs.safetensors")
    embeddings = read_embeddings(tmp_path / "pairs.safetensors")
    assert embeddings.x.dtype == torch.float32
    torch.testing.assert_close(embeddings.x, x.float())
    torch.testing.assert_close(embeddings.y, y)


def broken_rows() -> np.ndarray:
    x = features(5)
    x[3, 1] = np.nan
    x[4, 0] = np.inf
    return x


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"image": features(3), "y": features(3)}, r"no array named 'x'.*found: image, y"),
        ({"x": features(3)}, "no array named 'y'"),
        ({"x": np.arange(12).reshape(3, 4), "y": features(3)}, "x holds int64; needs floating-point"),
        ({"x": np.array(["a", "b"]), "y": features(2)}, "cannot be read as .npz with numeric arrays"),
        ({"x": np.array([{}, {}], dtype=object), "y": features(2)}, "cannot be read as .npz with numeric arrays"),
        ({"x": features(3)[0], "y": features(3)}, r"x has shape \(4,\); needs \(samples, width\)"),
        ({"x": features(1), "y": features(3), "y_to_x": np.zeros(3, int)}, "at least two samples"),
        ({"x": features(5), "y": broken_rows()}, r"y row 3 holds a NaN or an infinity.*\(2 such rows\)"),
        ({"x": features(3), "y": features(4)}, "x has 3 rows and y 4; add y_to_x"),
        ({"x": features(3), "y": features(4), "y_to_x": np.zeros(4)}, "y_to_x holds float64; needs whole numbers"),
        ({"x": features(3), "y": features(4), "y_to_x": np.zeros(3, int)}, r"y_to_x has shape \(3,\); needs \(4,\)"),
        ({"x": features(3), "y": features(4), "y_to_x": np.array([0, 1, 3, 2])}, r"y_to_x\[2\] is 3; allowed: 0 to 2"),
        ({"x": features(3), "y": features(4), "y_to_x": np.array([0, 1, 2, -1])}, r"y_to_x\[3\] is -1"),
    ],
)
def test_wrong_arrays_are_refused_with_a_message(tmp_path, arrays, message):
    with pytest.raises(UserError, match=message):
        read_embeddings(npz(tmp_path, **arrays))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"not an archive"])
def test_a_file_that_is_not_an_archive_is_refused(tmp_path, suffix, content):
    path = tmp_path / f"pairs{suffix}"
    path.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read"):
        read_embeddings(path)


def test_a_truncated_archive_is_refused(tmp_path):
    path = npz(tmp_path, x=features(300), y=features(300))
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(UserError, match="cannot be read"):
        read_embeddings(path)


def test_a_single_array_is_refused(tmp_path):
    with (tmp_path / "pairs.npz").open("wb") as file:
        np.save(file, features(3))
    with pytest.raises(UserError, match="cannot be read"):
        read_embeddings(tmp_path / "pairs.npz")


def test_missing_files_and_unknown_suffixes_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_embeddings(tmp_path / "none.npz")
    with pytest.raises(UserError, match="a folder"):
        read_embeddings(tmp_path)
    (tmp_path / "pairs.csv").touch()
    with pytest.raises(UserError, match=r"needs .npz or .safetensors"):
        read_embeddings(tmp_path / "pairs.csv")


def test_unit_rows_scales_rows_and_refuses_zeros_and_wrong_shapes():
    rows = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    torch.testing.assert_close(unit_rows(rows, "x"), torch.tensor([[0.6, 0.8], [0.0, 1.0]]))
    with pytest.raises(UserError, match="x: row 1 is all zeros"):
        unit_rows(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), "x")
    with pytest.raises(UserError, match=r"x: float32 of shape \(2,\); needs floats of shape \(n, d\)"):
        unit_rows(np.ones(2, np.float32), "x")
    with pytest.raises(UserError, match="x: int64 of shape"):
        unit_rows(np.ones((2, 2), np.int64), "x")


def test_unit_rows_accepts_numpy_arrays():
    torch.testing.assert_close(unit_rows(np.array([[3.0, 4.0]]), "x"), torch.tensor([[0.6, 0.8]], dtype=torch.float64))


def test_norms_are_read_as_they_are(tmp_path):
    x = 10 * features(3)
    np.testing.assert_array_equal(read_embeddings(npz(tmp_path, x=x, y=x)).x.numpy(), x)


def test_pairs_of_an_embedding_file(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3, 4)).astype("f4"), rng.normal(size=(5, 2)).astype("f4")
    np.savez(tmp_path / "e.npz", x=x, y=y, y_to_x=[0, 0, 2, 1, 1])
    pairs = open_pairs("e.npz", root=tmp_path)
    assert (pairs.x_kind, pairs.y_kind, len(pairs)) == ("vector", "vector", 5)
    assert pairs.x_id.tolist() == [0, 0, 2, 1, 1] and pairs.y_id.tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(pairs.x(2), x[2])
    np.testing.assert_array_equal(pairs.y(4), y[4])
    assert check_samples(pairs) == {} and pairs.name(3) == "e.npz, x row 1"
    np.savez(tmp_path / "e.npz", x=x, y=y)
    with pytest.raises(UserError, match="x has 3 rows and y 5; add y_to_x"):
        open_pairs(tmp_path / "e.npz")


EXTREMES = [(1e25, torch.float32), (1e-25, torch.float32), (1e-22, torch.float32)]
EXTREMES += [(1e200, torch.float64), (1e-200, torch.float64), (1.2e5, torch.float16)]


@pytest.mark.parametrize(("scale", "dtype"), EXTREMES)
def test_unit_rows_of_extreme_norm(scale, dtype):
    ordinary = torch.nn.functional.normalize(torch.randn(20, 64, generator=torch.Generator().manual_seed(0)), dim=1)
    features = (ordinary.double() * scale).to(dtype)
    rows = unit_rows(features, "x")
    assert rows.dtype == dtype
    torch.testing.assert_close(rows.float(), ordinary, rtol=2e-3, atol=1e-4)


def test_unit_rows_divides_ordinary_rows_by_their_norm():
    features = torch.randn(50, 33)
    assert torch.equal(unit_rows(features, "x"), features / torch.linalg.vector_norm(features, dim=1, keepdim=True))


@pytest.mark.parametrize("shape", ["((,3)", "(99999999, 99999999)"])
@pytest.mark.parametrize("key", ["x", "labels"])
def test_a_damaged_header_in_an_archive_is_refused(tmp_path, shape, key):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + header.ljust(117).encode() + b"\n"
    with zipfile.ZipFile(tmp_path / "e.npz", "w") as archive:
        for name in ("x", "y", "labels", "prompts"):
            archive.writestr(f"{name}.npy", content)
    read = read_embeddings if key == "x" else read_classes
    with pytest.raises(UserError, match=r"e\.npz: cannot be read as \.npz with numeric arrays"):
        read(tmp_path / "e.npz")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_damaged_compressed_members_are_refused(tmp_path, method):
    file = io.BytesIO()
    np.save(file, np.arange(400, dtype=np.float32).reshape(20, 20))
    with zipfile.ZipFile(tmp_path / "e.npz", "w", method) as archive:
        for name in ("x", "y"):
            archive.writestr(f"{name}.npy", file.getvalue())
    assert read_embeddings(tmp_path / "e.npz").x.shape == (20, 20)
    content = bytearray((tmp_path / "e.npz").read_bytes())
    content[40:60] = b"\xff" * 20
    (tmp_path / "e.npz").write_bytes(content)
    with pytest.raises(UserError, match=r"cannot be read as \.npz"):
        read_embeddings(tmp_path / "e.npz")


def test_an_archive_that_expands_a_thousandfold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("nuclr.files._LARGE", 2**20)
    header = b"\x93NUMPY\x01\x00" + struct.pack("<H", 118)
    header += b"{'descr': '<f4', 'fortran_order': False, 'shape': (2000, 400), }".ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / "e.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("x", "y"):
            archive.writestr(f"{name}.npy", header + bytes(4 * 2_000 * 400))
    with pytest.raises(UserError, match=r"e\.npz: x\.npy expands from .* to 3 MiB"):
        read_embeddings(tmp_path / "e.npz")


def test_an_array_instead_of_an_archive_of_classes_is_refused(tmp_path):
    with (tmp_path / "c.npz").open("wb") as file:
        np.save(file, np.eye(3))
    with pytest.raises(UserError, match=r"c\.npz: cannot be read as \.npz"):
        read_classes(tmp_path / "c.npz")
