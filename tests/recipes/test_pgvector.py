"""Corrected search in a real PostgreSQL server with pgvector."""

import pytest

from tests.recipes.conftest import assert_exact, recall, section
from tests.recipes.postgres import running_server

psycopg = pytest.importorskip("psycopg")
pytest.importorskip("pgvector")
TABLE, INDEX = section("PostgreSQL with pgvector")


@pytest.fixture(scope="module")
def server():
    with running_server() as database:
        yield database


@pytest.fixture
def database(server):
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS items")
    return server


def create_index(names, block, operator):
    """Run the recipe's second block, on a table that is so small that PostgreSQL would rather read all of it."""
    names["connection"].execute("SET enable_seqscan = off")
    exec(block, names)
    question = f"EXPLAIN SELECT id FROM items ORDER BY embedding {operator} %s LIMIT 10"
    plan = str(names["connection"].execute(question, [names["items"][0]]).fetchall())
    assert "Index Scan using items_embedding_idx" in plan


def test_recipe(names, search, database):
    names["database"] = database
    exec(TABLE, names)
    with names["connection"]:
        assert_exact(names["ids"], search.scores())
        queries = search.fix.queries(search.queries, "l2").numpy()
        assert_exact([names["search"](query) for query in queries], search.scores(new=True))
        create_index(names, INDEX, "<->")
        assert recall(names["ids"], search.scores(new=True)) > 0.95


@pytest.mark.parametrize(("metric", "operator"), [("ip", "<#>"), ("cosine", "<=>")])
def test_other_metrics(names, search, database, metric, operator):
    names["database"] = database
    exec(TABLE.replace('"l2"', f'"{metric}"').replace("<->", operator), names)
    with names["connection"]:
        assert_exact(names["ids"], search.scores())
        create_index(names, INDEX.replace('"l2"', f'"{metric}"').replace("l2_ops", f"{metric}_ops"), operator)
        assert recall(names["ids"], search.scores(new=True)) > 0.9
