"""Corrected search with hnswlib."""

import numpy as np
import pytest

from tests.recipes.conftest import ITEMS, NEW, K, assert_exact, recall, section

hnswlib = pytest.importorskip("hnswlib")


def test_recipe(names, search):
    (block,) = section("hnswlib")
    exec(block, names)
    scores = search.scores()
    assert recall(names["ids"], scores) > 0.95
    found = np.take_along_axis(scores, names["ids"].astype(int), axis=1)
    np.testing.assert_allclose(np.ptp(names["distances"] + 2 * found, axis=1), 0, atol=1e-5)
    names["index"].set_ef(ITEMS + NEW)
    ids, _ = names["index"].knn_query(search.fix.queries(search.queries, "l2").numpy(), k=K)
    assert recall(ids, search.scores(new=True)) > 0.99


@pytest.mark.parametrize("metric", ["ip", "l2", "cosine"])
def test_exact_search(search, metric):
    items = search.fix.gallery(search.items, metric).numpy()
    index = hnswlib.BFIndex(space=metric, dim=items.shape[1])
    index.init_index(max_elements=len(items))
    index.add_items(items, np.arange(len(items)))
    ids, _ = index.knn_query(search.fix.queries(search.queries, metric).numpy(), k=K)
    assert_exact(ids.astype(int), search.scores())
