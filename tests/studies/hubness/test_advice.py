"""What `nuclr hubness` says about its numbers."""

import numpy as np

from nuclr.popularity import hubness
from nuclr.studies.hubness.advice import advice
from nuclr.studies.hubness.hubness_files import _recall_change


def content(change=None, never_found=0.05, corrected=0.02, mean=10.0, bank=None):
    plain = {"never_found": never_found, "skewness": 2.0, "mean": mean}
    changes = {} if change is None else {"1": dict(zip(("difference", "low", "high"), change, strict=True))}
    after = plain | {"never_found": corrected, "skewness": 0.5}
    return {"plain": plain, "corrected": after, "bank": {"name": bank}, "recall_change": changes, "k": 10}


def test_recall_decides_if_it_is_known():
    assert advice(content((0.02, 0.005, 0.035))) == [
        "The correction helps: recall@1 changes by +2.0 points [+0.5, +3.5]."
    ]
    assert advice(content((-0.09, -0.12, -0.06)))[0].startswith("Do not use this correction: recall@1 changes by -9.0")
    assert advice(content((0.01, -0.01, 0.03)))[0].startswith("No significant difference in recall@1: +1.0 points")
    assert advice(content())[0].startswith("Without known answers")


def test_items_that_nobody_asks_for_get_a_warning():
    assert "55% of the items are found by no query" in advice(content(never_found=0.55))[1]
    assert len(advice(content(never_found=0.55, mean=1.0))) == 1, "few finds per item: missed by chance"


def test_a_bank_of_another_kind_is_named():
    (_, sentence) = advice(content(never_found=0.05, corrected=0.2, bank="dogs.npy"))
    assert "the bank dogs.npy may be too few, or of another kind" in sentence


def test_the_change_of_recall_has_a_paired_interval():
    gallery = np.eye(4, dtype="float32")
    queries = gallery[[0, 1, 2, 3, 0, 1, 2, 3]]
    links = np.stack([np.arange(8), [0, 1, 2, 3, 1, 2, 3, 0]], axis=1)
    plain = hubness(queries, gallery, k=1)
    worse = hubness(queries, gallery, k=1, bias=np.array([2, 0, 0, 0], "float32"))
    change = _recall_change(plain, worse, links)["1"]
    differences = np.array([float(worse.found[q, 0] == a) - float(plain.found[q, 0] == a) for q, a in links])
    assert differences[0] == -1 and not differences[1:4].any()
    mean, reach = differences.mean(), 1.96 * differences.std() / 8**0.5
    np.testing.assert_allclose(list(change.values()), [mean, mean - reach, mean + reach], atol=1e-12)
