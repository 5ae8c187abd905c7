"""Corrected search with faiss: exact indexes rank as brute force does, others lose as much as without correction."""

import numpy as np
import pytest

from tests.recipes.conftest import K, assert_exact, recall, section

faiss = pytest.importorskip("faiss")
faiss.omp_set_num_threads(1)  # several threads build another graph every time
FLAT, IVF, HNSW = section("faiss")
(BUILT_IN,) = section("An index with the correction built in")
MOVED, MOVED_IDS, MOVED_CODES = section("Move an existing index")
(PRODUCT_QUANTIZATION,) = section("What an index loses")


def test_flat(names, search):
    exec(FLAT, names)
    scores = search.scores()
    assert_exact(names["ids"], scores)
    assert np.mean(np.sort(names["ids"]) == np.sort(np.argsort(-search.scores(corrected=False))[:, :K])) < 0.9
    np.testing.assert_allclose(names["scores"], np.take_along_axis(scores, names["ids"], axis=1), atol=1e-5)
    _, ids = names["index"].search(search.fix.queries(search.queries).numpy(), K)
    assert_exact(ids, search.scores(new=True))


def test_ivf(names, search):
    exec(FLAT, names)
    exec(IVF, names)
    assert recall(names["ids"], search.scores()) > 0.9
    names["index"].nprobe = names["index"].nlist
    _, ids = names["index"].search(search.fix.queries(search.queries).numpy(), K)
    assert_exact(ids, search.scores())


def test_hnsw(names, search):
    exec(FLAT, names)
    exec(HNSW, names)
    scores = search.scores()
    assert recall(names["ids"], scores) > 0.95
    # The distance gives the corrected score: squared distance = c - 2 score.
    found = np.take_along_axis(scores, names["ids"], axis=1)
    np.testing.assert_allclose(np.ptp(names["distances"] + 2 * found, axis=1), 0, atol=1e-5)


def test_a_correction_that_is_built_in(names, search):
    exec(FLAT, names)
    exec(BUILT_IN, names)
    assert_exact(names["ids"], search.scores(new=True))


def write_index(path, factory, items, ids=None):
    index = faiss.index_factory(items.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    index.train(items)
    _ = index.add(items) if ids is None else index.add_with_ids(items, ids)
    faiss.write_index(index, path)


@pytest.mark.parametrize("factory", ["Flat", "HNSW32", "IVF16,Flat"])
def test_moving_an_index(names, search, factory):
    exec("import faiss", names)
    write_index("old.faiss", factory, search.items)
    exec(MOVED, names)
    np.testing.assert_array_equal(names["items"], search.fix.gallery(search.items).numpy())
    assert recall(names["ids"], search.scores()) > 0.9


def test_moving_an_index_with_ids(names, search):
    exec("import faiss", names)
    ids = np.random.default_rng(0).permutation(10**6)[: len(search.items)]
    write_index("old_ids.faiss", "IDMap,Flat", search.items, ids)
    exec(MOVED_IDS, names)
    row = {number: n for n, number in enumerate(ids.tolist())}
    assert_exact(np.vectorize(row.get)(names["ids"]), search.scores())


@pytest.mark.slow
def test_moving_a_quantized_index(names, search):
    exec("import faiss", names)
    write_index("old_pq.faiss", "PQ8", search.items)
    exec(MOVED_CODES, names)
    approximate = names["items"][:, :-1]
    assert np.mean(np.sum(approximate * search.items, axis=1)) > 0.95


@pytest.mark.slow
def test_product_quantization_ranked_again(names, search):
    exec(FLAT, names)
    exec(PRODUCT_QUANTIZATION, names)
    scores = search.scores()
    # Two bytes for sixteen coordinates, and one for the bias, are coarse: what is left out of the first 100 stays lost.
    near, again = recall(names["near"][:, :K], scores), recall(names["ids"], scores)
    assert near + 0.1 < again
    fetched = np.zeros(scores.shape, bool)
    np.put_along_axis(fetched, names["near"], True, axis=1)
    assert_exact(names["ids"], np.where(fetched, scores, -np.inf))


@pytest.mark.parametrize("metric", ["ip", "l2", "cosine"])
def test_every_metric_is_exact(search, metric):
    items = search.fix.gallery(search.items, metric).numpy()
    queries = search.fix.queries(search.queries, metric).numpy()
    if metric == "cosine":  # faiss compares normalized vectors by inner product
        faiss.normalize_L2(items)
        faiss.normalize_L2(queries)
    index = faiss.index_factory(
        items.shape[1], "Flat", faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
    )
    index.add(items)
    assert_exact(index.search(queries, K)[1], search.scores())


@pytest.mark.parametrize("factory", ["IVF64,Flat", "HNSW32", "SQ8"])
def test_the_index_loses_as_much_without_correction(search, factory):
    items = search.fix.gallery(search.items).numpy()
    queries = search.fix.queries(search.queries).numpy()
    width = search.items.shape[1]
    shares = []
    for corrected in (False, True):
        stop = None if corrected else width
        rows, asked = (np.ascontiguousarray(array[:, :stop]) for array in (items, queries))
        index = faiss.index_factory(rows.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
        index.train(rows)
        index.add(rows)
        if factory.startswith("IVF"):
            index.nprobe = 16
        shares.append(recall(index.search(asked, K)[1], search.scores(corrected)))
    assert min(shares) > 0.8 and abs(shares[0] - shares[1]) < 0.1, shares
