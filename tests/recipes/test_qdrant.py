"""Corrected search with Qdrant's local mode, which is exact."""

import pytest

from tests.recipes.conftest import K, assert_exact, section

qdrant = pytest.importorskip("qdrant_client")


def found_by(client, requests):
    return [[point.id for point in found.points] for found in client.query_batch_points("items", requests)]


def test_recipe(names, search):
    (block,) = section("Qdrant")
    exec(block, names)
    assert_exact(names["ids"], search.scores())
    assert_exact(found_by(names["client"], names["requests"]), search.scores(new=True))


@pytest.mark.parametrize(("metric", "distance"), [("l2", "EUCLID"), ("cosine", "COSINE")])
def test_other_metrics(search, metric, distance):
    models = qdrant.models
    items = search.fix.gallery(search.items, metric).numpy()
    client = qdrant.QdrantClient(":memory:")
    config = models.VectorParams(size=items.shape[1], distance=models.Distance[distance])
    client.create_collection("items", vectors_config=config)
    client.upload_collection("items", vectors=items, ids=range(len(items)))
    queries = search.fix.queries(search.queries, metric).tolist()
    assert_exact(found_by(client, [models.QueryRequest(query=query, limit=K) for query in queries]), search.scores())
