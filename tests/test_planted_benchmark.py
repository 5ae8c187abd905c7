"""The attacks and measures of benchmarks/planted.py."""

import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

FOLDER = str(Path(__file__).parent.parent / "benchmarks")


@pytest.fixture(scope="module")
def benchmark():
    """Return the module of the benchmark, which imports others by name."""
    pytest.importorskip("scipy")
    sys.path.insert(0, FOLDER)
    try:
        import planted
    finally:
        sys.path.remove(FOLDER)
    return planted


def test_documents_are_moved_to_the_goal_and_no_further(benchmark):
    generator = torch.Generator().manual_seed(0)
    documents = normalize(torch.randn(20, 8, generator=generator), dim=1)
    direction = 0.5 * normalize(torch.ones(8), dim=0)
    moved = benchmark.moved(documents, direction, 0.3)
    start = documents @ direction
    assert torch.allclose(moved @ direction, start.clamp(min=0.3), atol=1e-4)
    assert torch.allclose(moved.norm(dim=1), torch.ones(20))


def test_all_parts_of_a_split(benchmark, tmp_path):
    generator = torch.Generator().manual_seed(0)
    topics = 2 * torch.randn(12, 16, generator=generator)
    topic = torch.arange(600) % 12
    sides = [normalize(topics[topic] + torch.randn(600, 16, generator=generator), dim=1).numpy() for _ in range(2)]
    links = np.arange(600)[:, None].repeat(2, axis=1)
    np.savez(tmp_path / "toy_static.npz", q=sides[0], d=sides[1], f=sides[1], links=links)
    measures = benchmark.measure_split(Namespace(vectors=tmp_path, hubscan=None), "toy", "static", 0)
    assert all(0 <= value <= 1 for value in measures.values())
    assert {key.split("|")[0] for key in measures} == {"before", "inside", "success", "alarms"}
    assert measures["success|topics 30|strength 1"] < measures["success|topics 30|plain"]
    text = benchmark.tables("toy", measures)
    assert all(word in text for word in ("suspicious, twice", "mean cosine", "NNN", "topics 100"))
