"""Vectors of faiss indexes, as `nuclr hubness` reads them."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from nuclr.data.vectors import open_vectors
from nuclr.errors import UserError

faiss = pytest.importorskip("faiss")
faiss.omp_set_num_threads(1)
N, D = 2000, 16


@pytest.fixture(scope="module")
def items():
    x = np.random.default_rng(0).normal(size=(N, D)).astype("float32")
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def write(path, factory, items, ids=None):
    index = faiss.index_factory(D, factory, faiss.METRIC_INNER_PRODUCT)
    index.train(items)
    _ = index.add(items) if ids is None else index.add_with_ids(items, ids)
    faiss.write_index(index, str(path))
    return str(path)


@pytest.mark.parametrize("factory", ["Flat", "IVF16,Flat", "HNSW16", "PQ4,RFlat"])
def test_exact_vectors(tmp_path, items, factory):
    vectors = open_vectors(write(tmp_path / "a.faiss", factory, items), "y")
    np.testing.assert_allclose(vectors.rows, items, atol=1e-6)
    assert vectors.ids is None and vectors.compressed is None


@pytest.mark.parametrize("factory", ["IDMap,Flat", "IDMap2,HNSW16", "IDMap,IVF16,Flat"])
def test_ids(tmp_path, items, factory):
    ids = np.random.default_rng(1).permutation(10**6)[:N]
    vectors = open_vectors(write(tmp_path / "a.faiss", factory, items, ids), "y")
    row = {number: n for n, number in enumerate(ids.tolist())}
    np.testing.assert_array_equal(vectors.rows, items[[row[int(number)] for number in vectors.ids]])


@pytest.mark.parametrize("factory", ["SQ8", "PQ4", "IVF16,SQ8", "HNSW16_SQ8", "PCA8,Flat", "IDMap,PQ4"])
def test_compressed_vectors(tmp_path, items, factory):
    ids = np.arange(N) if factory.startswith("IDMap") else None
    vectors = open_vectors(write(tmp_path / "a.faiss", factory, items, ids), "y")
    assert vectors.rows.shape == (N, D) and vectors.compressed.startswith("Index")


def test_indexes_that_cannot_be_read(tmp_path, items):
    (tmp_path / "damaged.faiss").write_bytes(b"no index")
    with pytest.raises(UserError, match=r"damaged\.faiss"):
        open_vectors(str(tmp_path / "damaged.faiss"), "y")
    with pytest.raises(UserError, match="IndexIVFPQFastScan"):
        open_vectors(write(tmp_path / "fast.faiss", "IVF16,PQ4x4fs", items), "y")
    with pytest.raises(UserError, match=r"ids\.faiss: IndexIVFFlat"):  # a row of another id would be any numbers
        open_vectors(write(tmp_path / "ids.faiss", "IVF16,Flat", items, np.arange(N) + 1), "y")
    with pytest.raises(UserError, match=r"flat\.faiss.*y"):
        open_vectors(f"{write(tmp_path / 'flat.faiss', 'Flat', items)}:y", "y")


def test_commands(nuclr, tmp_path, items, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ids = np.random.default_rng(1).permutation(10**6)[:N]
    write("old.faiss", "IDMap,PQ4", items, ids)
    np.save("queries.npy", items[::10])
    done = nuclr("hubness", "queries.npy", "old.faiss", "--normalize")
    assert done.status == 0, done.err
    assert "old.faiss holds compressed vectors (IndexPQ)" in done.out
    assert [
        int(row["name"]) for row in csv.DictReader(Path("hubness/hubness.csv").read_text().splitlines())
    ] == ids.tolist()
    assert json.loads(Path("hubness/hubness.json").read_text())["gallery"]["index"] == "IndexPQ"
