"""The examples for indexes run as their first lines say, in processes of their own."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nuclr.data import open_pairs
from nuclr.models import EncoderSide, build_model
from nuclr.popularity import PopularityCorrection
from tests.recipes.conftest import assert_exact, recall
from tests.recipes.postgres import running_server

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: object) -> str:
    command = [sys.executable, EXAMPLES / name, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_corrected_search(search, tmp_path):
    pytest.importorskip("faiss")
    queries, gallery, found = (tmp_path / f"{name}.npy" for name in ("queries", "gallery", "found"))
    np.save(queries, search.queries)
    np.save(gallery, search.items)
    assert "corrected: " in run("corrected_search.py", queries, gallery, found)
    bias = PopularityCorrection(normalize=True).fit(search.queries[::2], search.items).bias(search.items)
    scores = search.queries[1::2].astype(np.float64) @ search.items.T.astype(np.float64) - bias.double().numpy()
    assert_exact(np.load(found), scores)


@pytest.mark.slow
def test_corrected_search_postgres(search, tmp_path):
    pytest.importorskip("psycopg")
    pytest.importorskip("pgvector")
    queries, gallery, fix = tmp_path / "queries.npy", tmp_path / "gallery.npy", tmp_path / "fix.safetensors"
    np.save(queries, search.queries)
    search.fix.save(fix)
    with running_server() as database:
        for new, items in ((False, search.items), (True, np.concatenate([search.items, search.new]))):
            np.save(gallery, items)
            lines = run("corrected_search_postgres.py", database, gallery, fix, queries).splitlines()
            assert recall([list(map(int, line.split())) for line in lines], search.scores(new=new)) > 0.95


@pytest.mark.slow
def test_use_pgvector(tmp_path):
    pytest.importorskip("psycopg")
    pytest.importorskip("pgvector")
    pairs = open_pairs("builtin:n=200,split=val")
    texts = [pairs.item("y", i) for i in range(len(pairs))]
    model = build_model(EncoderSide(image_size=pairs.size), EncoderSide(texts=texts), width=16).eval()
    model.save_pretrained(tmp_path / "run" / "model")
    with running_server() as database:
        lines = run("use_pgvector.py", tmp_path / "run", database, "a red circle").splitlines()
    scores = model.encode_texts("a red circle") @ model.encode_images([pairs.item("x", i) for i in range(len(pairs))]).T
    expected = [f"  image {number}: {pairs.item('y', number)}" for number in scores[0].topk(3).indices.tolist()]
    assert lines == ["a red circle", *expected]
