"""Counting what queries find, against loops; the skewness against scipy."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from nuclr.popularity import PopularityCorrection, chance_hubness, hubness, hubs
from nuclr.popularity.hubs import nearest
from tests.popularity.test_correction import features

stats = pytest.importorskip("scipy.stats")


def test_counts_equal_a_loop():
    x, y, _ = features(n=40)
    bias = 0.1 * torch.arange(40).sin()
    found = hubness(x, y, k=5, bias=bias)
    counts = np.zeros(40, int)
    for query in x.double():
        scores = y.double() @ query - bias.double()
        counts[np.argsort(-scores.numpy())[:5]] += 1
    assert found.counts.tolist() == counts.tolist()
    assert found.skewness == pytest.approx(float(stats.skew(counts)))
    assert found.never_found == float((counts == 0).mean())
    assert found.worst(3).tolist() == sorted(range(40), key=lambda j: (-counts[j], j))[:3]
    assert found.top_share(0.05) == pytest.approx(np.sort(counts)[-2:].sum() / counts.sum())
    assert "queries=40, gallery=40, k=5" in repr(found)
    assert hubness(torch.eye(4), torch.eye(4), k=1).skewness == 0.0, "equal counts"


def test_tiles_do_not_change_the_result(monkeypatch):
    x, y, _ = features(n=100)
    exclude = torch.arange(100)
    scores, rows = nearest(x, y, 7, exclude=exclude)
    monkeypatch.setattr(hubs, "QUERY_ROWS", 13)
    monkeypatch.setattr(hubs, "GALLERY_ROWS", 5)
    tiled_scores, tiled_rows = nearest(x, y, 7, exclude=exclude)
    assert torch.allclose(tiled_scores, scores, atol=1e-6)
    assert torch.equal(tiled_rows, rows)
    assert not bool((rows == exclude[:, None]).any())
    assert torch.equal(hubness(x.numpy(), y.numpy(), k=7, exclude=np.arange(100)).found, rows)
    assert torch.equal(nearest(3 * x, 2 * y, 7, exclude=exclude, normalize=True)[1], rows)


def test_recall_and_correction():
    x, y, links = features(n=300)
    bank_x, bank_y, _ = features(seed=1, n=400)
    fix = PopularityCorrection(0.05).fit(bank_x, bank_y)
    plain, corrected = hubness(x, y), hubness(x, y, bias=fix.bias(y))
    assert int(plain.worst(1)) == 0, "the hub"
    assert corrected.skewness < plain.skewness and corrected.never_found <= plain.never_found
    assert corrected.recall(links) > plain.recall(links)
    hits = [(plain.found[query] == item).any() for query, item in links.tolist()]
    assert plain.recall(links, 10) == pytest.approx(float(np.mean(hits)))
    with pytest.raises(ValueError, match="k=11"):
        plain.recall(links, 11)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: hubness(x, x, k=0), "k=0"),
        (lambda x: hubness(x, x, k=20, exclude=torch.arange(20)), "k=20"),
        (lambda x: hubness(x, x[:, :3], k=1), "gallery has 3 columns.* 8"),
        (lambda x: hubness(x, x, k=1, bias=torch.zeros(3)), "bias has shape"),
        (lambda x: hubness(x, x, k=1, exclude=[1, 2]), "exclude has shape"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    x = normalize(torch.randn(20, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    with pytest.raises(ValueError, match=message):
        call(x)


def test_chance_is_binomial():
    chance = chance_hubness(queries=500, items=20_000, k=10)
    assert abs(float(chance.counts.double().mean()) - 0.25) < 0.02
    assert abs(chance.never_found - (1 - 10 / 20_000) ** 500) < 0.02
    assert abs(chance.skewness - 0.25**-0.5) < 0.2, "random results are skewed if items are found rarely"
    assert torch.equal(chance.counts, chance_hubness(queries=500, items=20_000, k=10).counts)
    with pytest.raises(ValueError, match="k=11"):
        chance_hubness(queries=5, items=10, k=11)
