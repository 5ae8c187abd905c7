"""Keep the features of images in PostgreSQL with pgvector and search them with texts.

    pip install '.[indexes]'
    python examples/use_pgvector.py runs/demo DATABASE "a red circle"

DATABASE is a connection string, such as "host=localhost dbname=search". The table `pictures` is created.
`examples/corrected_search_postgres.py` does the same with a correction for hubs.
"""

import sys

import psycopg
from pgvector.psycopg import register_vector

from nuclr.data import open_pairs
from nuclr.models import DualEncoder

SEARCH = "SELECT id, caption FROM pictures ORDER BY embedding <#> %s LIMIT 3"  # <#> is the negative inner product


def main() -> None:
    run, database, *queries = sys.argv[1:]
    pairs = open_pairs("builtin:n=200,split=val")
    model = DualEncoder.from_pretrained(f"{run}/model")
    features = model.encode_images([pairs.item("x", i) for i in range(len(pairs))]).numpy()
    with psycopg.connect(database) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        register_vector(connection)
        connection.execute(
            f"CREATE TABLE pictures (id int PRIMARY KEY, caption text, embedding vector({features.shape[1]}))"
        )
        with connection.cursor() as cursor:
            rows = [(number, pairs.item("y", number), row) for number, row in enumerate(features)]
            cursor.executemany("INSERT INTO pictures VALUES (%s, %s, %s)", rows)
        connection.execute("CREATE INDEX ON pictures USING hnsw (embedding vector_ip_ops)")
        for query, vector in zip(queries, model.encode_texts(queries).numpy(), strict=True):
            print(query)
            for number, caption in connection.execute(SEARCH, [vector]):
                print(f"  image {number}: {caption}")


if __name__ == "__main__":
    main()
