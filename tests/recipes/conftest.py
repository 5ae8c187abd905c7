"""Vectors with hubs and a correction, as the files that the recipes read, and the rankings that they must give."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from nuclr.popularity import PopularityCorrection

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
ITEMS, NEW, QUERIES, WIDTH, K = 3000, 200, 200, 16, 10
ROUNDING = 3e-6  # of scores in float32: an index sums in another order


def section(heading: str) -> list[str]:
    """Return the Python blocks below a heading of the page; an empty heading gives those before the first one."""
    parts = re.split(r"^## (.*)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    text = dict(zip(["", *parts[1::2]], parts[::2], strict=True))[heading]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@dataclass(frozen=True)
class Search:
    """Queries, items, items that are added later, and their correction."""

    queries: np.ndarray
    items: np.ndarray
    new: np.ndarray
    fix: PopularityCorrection

    def scores(self, corrected: bool = True, new: bool = False) -> np.ndarray:
        """Return the score of every query and item in float64, by brute force."""
        items = np.concatenate([self.items, self.new]) if new else self.items
        bias = self.fix.bias(items, center=False).double().numpy() if corrected else 0.0
        return self.queries.astype(np.float64) @ items.T.astype(np.float64) - bias


@pytest.fixture(scope="session")
def search() -> Search:
    """Make queries in ten groups, with items near to them and hubs near to all of them."""
    generator = torch.Generator().manual_seed(0)
    groups = torch.randn(10, WIDTH, generator=generator) + 0.8

    def around(count: int) -> torch.Tensor:
        noise = torch.randn(count, WIDTH, generator=generator)
        return normalize(groups[torch.arange(count) % len(groups)] + 0.7 * noise, dim=1)

    bank, queries, items, new = around(400), around(QUERIES), around(ITEMS), around(NEW)
    center = normalize(groups.mean(dim=0) + 0.2 * torch.randn(20, WIDTH, generator=generator), dim=1)
    items[::150], new[::50] = center, center[:4]
    fix = PopularityCorrection().fit(bank, items)
    return Search(queries.numpy(), items.numpy(), new.numpy(), fix)


@pytest.fixture
def names(search, tmp_path, monkeypatch) -> dict:
    """Write the files of the first block of the page, run it, and return what it has defined."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hubness").mkdir()
    search.fix.save("hubness/correction.safetensors")
    for name, array in (("queries", search.queries), ("gallery", search.items), ("new", search.new)):
        np.save(f"{name}.npy", array)
    defined: dict = {}
    (block,) = section("")
    exec(block, defined)
    return defined


def assert_exact(ids, scores: np.ndarray) -> None:
    """Check that `ids` are the items with the largest scores, in order, up to the rounding of equal ones."""
    ids = np.asarray(ids)
    best = -np.sort(-scores, axis=1)[:, : ids.shape[1]]
    assert ids.shape == (len(scores), K)
    assert all(len(set(row)) == K for row in ids.tolist())
    np.testing.assert_allclose(np.take_along_axis(scores, ids, axis=1), best, rtol=0, atol=ROUNDING)


def recall(ids, scores: np.ndarray) -> float:
    """Return the share of the exact first ten that an index has found, which is what the index loses."""
    exact = np.argsort(-scores, axis=1)[:, :K]
    return float(np.mean([len(np.intersect1d(a, b)) for a, b in zip(np.asarray(ids), exact, strict=True)])) / K
