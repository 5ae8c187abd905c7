"""Embedding files: what is read, and what is refused in words that help."""

from pathlib import Path

import numpy as np
import pytest
import torch

from nuclr.data.formats.embeddings import read_embeddings, unit_rows
from nuclr.errors import UserError


def features(n: int, width: int = 4, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(n).normal(size=(n, width)).astype(dtype)


def npz(tmp_path: Path, **arrays) -> Path:
    path = tmp_path / "pairs.npz"
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("stored", "read"), [("float16", torch.float32), ("float32", torch.float32), ("float64", torch.float64)]
)
def test_reads_npz(tmp_path, stored, read):
    x, y = features(3, 5, stored), features(4, 2, stored)
    found = read_embeddings(npz(tmp_path, x=x, y=y, y_to_x=np.array([0, 2, 2, 1], dtype=np.int32)))
    assert found.x.dtype == found.y.dtype == read
    np.testing.assert_array_equal(found.x.numpy(), x)
    np.testing.assert_array_equal(found.y.numpy(), y)
    assert found.y_to_x.tolist() == [0, 2, 2, 1]


def test_without_links_pairs_go_by_number(tmp_path):
    found = read_embeddings(npz(tmp_path, x=features(3), y=features(3), names=np.array(["a", "b", "c"], dtype=object)))
    assert found.y_to_x.tolist() == [0, 1, 2]


def test_reads_safetensors(tmp_path):
    torch_files = pytest.importorskip("safetensors.torch")
    x, y = torch.randn(3, 5).bfloat16(), torch.randn(3, 2)
    torch_files.save_file({"x": x, "y": y}, tmp_path / "pairs.safetensors")
    found = read_embeddings(tmp_path / "pairs.safetensors")
    assert found.x.dtype == torch.float32
    torch.testing.assert_close(found.x, x.float())
    torch.testing.assert_close(found.y, y)


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
def test_refuses(tmp_path, arrays, message):
    with pytest.raises(UserError, match=message):
        read_embeddings(npz(tmp_path, **arrays))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"not an archive"])
def test_refuses_what_is_no_archive(tmp_path, suffix, content):
    path = tmp_path / f"pairs{suffix}"
    path.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read"):
        read_embeddings(path)


def test_refuses_a_truncated_archive(tmp_path):
    path = npz(tmp_path, x=features(300), y=features(300))
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(UserError, match="cannot be read"):
        read_embeddings(path)


def test_refuses_a_bare_array(tmp_path):
    with (tmp_path / "pairs.npz").open("wb") as file:
        np.save(file, features(3))
    with pytest.raises(UserError, match="cannot be read"):
        read_embeddings(tmp_path / "pairs.npz")


def test_refuses_files_that_are_not_there_or_unknown(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_embeddings(tmp_path / "none.npz")
    with pytest.raises(UserError, match="a folder"):
        read_embeddings(tmp_path)
    (tmp_path / "pairs.csv").touch()
    with pytest.raises(UserError, match=r"allowed: .npz, .safetensors"):
        read_embeddings(tmp_path / "pairs.csv")


def test_unit_rows():
    rows = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    torch.testing.assert_close(unit_rows(rows, "x"), torch.tensor([[0.6, 0.8], [0.0, 1.0]]))
    with pytest.raises(UserError, match="x: row 1 is all zeros"):
        unit_rows(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), "x")
