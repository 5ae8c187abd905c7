"""Search your own vectors in PostgreSQL with pgvector, ranked by score minus popularity.

    pip install '.[indexes]'
    python examples/corrected_search_postgres.py DATABASE GALLERY.npy CORRECTION.safetensors QUERIES.npy

DATABASE is a connection string, such as "host=localhost dbname=search". `nuclr hubness QUERIES.npy GALLERY.npy` writes
the correction. The first call creates the table `corrected_items`. Later calls add the rows of GALLERY that are not in
it yet, so append new items to the file. Prints the ten items that each query finds.
"""

import sys

import numpy as np
import psycopg
from pgvector.psycopg import register_vector

from nuclr.popularity import PopularityCorrection

CREATE = """
CREATE TABLE corrected_items (id bigint PRIMARY KEY, embedding vector({width}));
CREATE INDEX ON corrected_items USING hnsw (embedding vector_l2_ops);
"""
INSERT = "COPY corrected_items (id, embedding) FROM STDIN WITH (FORMAT BINARY)"
SEARCH = "SELECT id FROM corrected_items ORDER BY embedding <-> %s LIMIT 10"


def main() -> None:
    database, gallery, correction, queries = sys.argv[1:]
    fix = PopularityCorrection.load(correction)
    with psycopg.connect(database) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        register_vector(connection)
        vectors = np.load(gallery, mmap_mode="r")
        if connection.execute("SELECT to_regclass('corrected_items')").fetchone() == (None,):
            connection.execute(CREATE.format(width=fix.gallery(vectors[:1], metric="l2").shape[1]))
        (stored,) = connection.execute("SELECT count(*) FROM corrected_items").fetchone()
        if stored < len(vectors):
            with connection.cursor().copy(INSERT) as copy:
                copy.set_types(["int8", "vector"])
                for number, row in enumerate(fix.gallery(vectors[stored:], metric="l2").numpy(), start=stored):
                    copy.write_row((number, row))
        connection.execute("SET hnsw.ef_search = 100")
        for query in fix.queries(np.load(queries), metric="l2").numpy():
            print(*(number for (number,) in connection.execute(SEARCH, [query])))


if __name__ == "__main__":
    main()
