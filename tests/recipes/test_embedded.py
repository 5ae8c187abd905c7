"""Corrected search with stores that run inside a program, and with LangChain and LlamaIndex; ids are strings."""

import importlib
import sqlite3
import sys

import numpy as np
import pytest

from tests.recipes.conftest import K, assert_exact, recall, section

IDS, USEARCH, LANCEDB, CHROMA, SQLITE, MILVUS, LANGCHAIN, LLAMAINDEX = section("Embedded stores and frameworks")


@pytest.fixture
def names(names):
    exec(IDS, names)
    return names


def rows_of(names, found):
    row = {key: number for number, key in enumerate(names["item_ids"] + names["new_ids"])}
    return [[row[key] for key in keys] for keys in found]


def test_usearch(names, search):
    pytest.importorskip("usearch")
    exec(USEARCH, names)
    assert recall(rows_of(names, names["found"]), search.scores()) > 0.95
    queries = search.fix.queries(search.queries).numpy()
    assert_exact(names["index"].search(queries, K, exact=True).keys.astype(int), search.scores(new=True))


def test_lancedb(names, search):
    pytest.importorskip("lancedb")
    exec(LANCEDB, names)
    assert_exact(rows_of(names, names["found"]), search.scores())
    found = [names["search"](query) for query in search.fix.queries(search.queries).numpy()]
    assert_exact(rows_of(names, found), search.scores(new=True))


def test_chroma(names, search):
    pytest.importorskip("chromadb")
    exec(CHROMA, names)
    assert recall(rows_of(names, names["found"]), search.scores()) > 0.95
    queries = search.fix.queries(search.queries).numpy()
    found = names["collection"].query(query_embeddings=queries, n_results=K)["ids"]
    assert recall(rows_of(names, found), search.scores(new=True)) > 0.95


def test_sqlite_vec(names, search, monkeypatch):
    pytest.importorskip("sqlite_vec")
    if not hasattr(sqlite3.Connection, "enable_load_extension"):
        monkeypatch.setitem(sys.modules, "sqlite3", pytest.importorskip("pysqlite3"))
    exec(SQLITE, names)
    assert_exact(rows_of(names, names["found"]), search.scores())
    found = [names["search"](query) for query in search.fix.queries(search.queries, "l2").numpy()]
    assert_exact(rows_of(names, found), search.scores(new=True))


def test_milvus_lite(names, search):
    pytest.importorskip("pymilvus")
    pytest.importorskip("milvus_lite")
    exec(MILVUS, names)
    client = names["client"]
    try:
        assert_exact(rows_of(names, names["found"]), search.scores())
        hits = client.search("items", data=search.fix.queries(search.queries).numpy(), limit=K)
        assert_exact(rows_of(names, [[hit["id"] for hit in row] for row in hits]), search.scores(new=True))
    finally:
        client.close()


def test_langchain(names, search):
    embeddings = pytest.importorskip("langchain_core.embeddings")

    class Table(embeddings.Embeddings):
        """A model that knows the vectors of some texts."""

        def embed_documents(self, texts):
            return [vector_of[text].tolist() for text in texts]

        def embed_query(self, text):
            return vector_of[text].tolist()

    names["texts"] = [f"text of {key}" for key in names["item_ids"]]
    names["questions"] = [f"question {row}" for row in range(40)]
    vector_of = dict(zip(names["texts"] + names["questions"], [*search.items, *search.queries[:40]], strict=True))
    names["model"] = Table()
    exec(LANGCHAIN, names)
    assert_exact(rows_of(names, names["found"]), search.scores()[:40])


def test_llamaindex(names, search):
    pytest.importorskip("llama_index.core")
    schema = importlib.import_module("llama_index.core.schema")
    core = importlib.import_module("llama_index.core")
    vectors = zip(names["item_ids"], search.items.tolist(), strict=True)
    nodes = [schema.TextNode(id_=key, text=key, embedding=vector) for key, vector in vectors]
    model = core.MockEmbedding(embed_dim=search.items.shape[1])  # is not asked: all vectors are given
    names["index"] = core.VectorStoreIndex(nodes, embed_model=model)
    names["questions"] = [schema.QueryBundle("", embedding=query.tolist()) for query in search.queries[:40]]
    exec(LLAMAINDEX, names)
    retrieved = np.argsort(-search.scores(corrected=False)[:40], axis=1)[:, :100]
    scores = np.full((40, len(search.items)), -np.inf)
    np.put_along_axis(scores, retrieved, np.take_along_axis(search.scores()[:40], retrieved, axis=1), axis=1)
    assert_exact(rows_of(names, names["found"]), scores)
