"""Features in several files give the results of the same features in memory."""

import numpy as np
import pytest
import torch

from nuclr.arrays import as_rows
from nuclr.evaluation import popularity_agreement
from nuclr.popularity import PopularityCorrection, hubness, solve
from nuclr.popularity.false_negatives import false_negatives
from nuclr.stacked import Stacked, stored_npy

SIZES = (150, 1, 249)


@pytest.fixture
def features(tmp_path):
    """Return x and y in memory and in files, float16 and of any norm."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sum(SIZES), 8)) + 0.5
    arrays = {"x": (2 * x).astype(np.float16), "y": (x + 0.3 * rng.normal(size=x.shape)).astype(np.float16)}
    stacked = {}
    for name, array in arrays.items():
        parts = np.split(array, np.cumsum(SIZES)[:-1])
        for number, part in enumerate(parts):
            np.save(tmp_path / f"{name}{number}.npy", part)
        stacked[name] = Stacked([stored_npy(tmp_path / f"{name}{number}.npy") for number in range(len(SIZES))])
    return arrays, stacked


@pytest.mark.parametrize("method", ["anderson", "sample"])
def test_solve(features, method):
    options = {"temperature": 0.1, "normalize": True, "method": method}
    zetas = [solve(**given, **options, sample=100).zeta for given in features]
    assert torch.equal(*zetas)


def test_correction_hubness_and_false_negatives(features):
    arrays, stacked = features
    fixes = [PopularityCorrection(0.1, normalize=True).fit(given["x"][::2], given["y"]) for given in features]
    bias = fixes[0].bias(arrays["y"])
    assert torch.equal(fixes[1].bias(stacked["y"]), bias)
    assert torch.equal(fixes[1].gallery(stacked["y"]), fixes[0].gallery(arrays["y"]))
    counts = [hubness(given["x"][1::2], given["y"], normalize=True, bias=bias).counts for given in features]
    assert torch.equal(*counts)
    rows = [[as_rows(name, given[name], "normalize") for name in ("x", "y")] for given in features]
    agreement = [popularity_agreement(x, y, 0.1) for x, y in rows]
    assert agreement[0] == agreement[1] != 0
    links = np.stack([np.arange(sum(SIZES))] * 2, axis=1)
    weight = np.random.default_rng(1).uniform(size=sum(SIZES))
    one, other = (false_negatives(given["x"], given["y"], links, weight, 5, normalize=True) for given in features)
    assert len(one.x) == 5 and torch.equal(one.x, other.x) and torch.equal(one.y, other.y)
    assert torch.equal(one.score, other.score)
