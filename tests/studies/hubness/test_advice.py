"""What `nuclr hubness` says about its numbers."""

import numpy as np
import pytest

from nuclr.popularity import hubness
from nuclr.studies.hubness.advice import advice, is_recommended
from nuclr.studies.hubness.hubness_files import _recall_change

RISES, FALLS, LEVEL, UNSURE = (0.02, 0.005, 0.035), (-0.09, -0.12, -0.06), (0.0, -0.01, 0.01), (0.01, -0.01, 0.03)


def content(*changes, never_found=0.05, corrected=0.02, chance=0.0, bank=None, repeated=0.0, recall=0.5, links=None):
    """Return hubness.json with changes of recall at 1, 5 and 10."""
    keys = ("difference", "low", "high")
    by_depth = {d: dict(zip(keys, change, strict=True)) for d, change in zip(("1", "5", "10"), changes, strict=False)}
    plain = {"never_found": never_found, "skewness": 2.0, "recall": dict.fromkeys(by_depth, recall)}
    return {
        "plain": plain,
        "corrected": plain | {"never_found": corrected, "skewness": 0.5},
        "chance": {"never_found": chance, "recall": dict.fromkeys(by_depth, 0.01)},
        "queries": {"name": "q.npy", "index": None},
        "gallery": {"name": "g.npy", "index": None},
        "bank": {"name": bank, "repeated": repeated},
        "recall_change": by_depth,
        "links": links,
        "same": False,
        "tuned_on": 0,
    }


@pytest.mark.parametrize(
    ("changes", "sentence", "recommended"),
    [
        ((RISES,), "The correction helps: recall@1 changes by +2.0 points [+0.5, +3.5].", True),
        ((LEVEL, RISES), "not at the first result: recall@5 changes by +2.0 points [+0.5, +3.5]; recall@1", True),
        ((FALLS,), "Do not use this correction: recall@1 changes by -9.0 points", False),
        ((LEVEL, LEVEL, FALLS), "Do not use this correction: recall@10 changes by -9.0 points", False),
        ((RISES, LEVEL, FALLS), "Mixed: recall@1 changes by +2.0 points [+0.5, +3.5], but recall@10", True),
        ((UNSURE, LEVEL), "No significant difference: recall@1 changes by +1.0 points [-1.0, +3.0].", True),
        ((LEVEL, UNSURE), "do not use it without labeled queries that show one (try --tune).", False),
        ((), "Without known answers", True),
    ],
)
def test_recall_decides_if_it_is_known(changes, sentence, recommended):
    assert sentence in advice(content(*changes))[0]
    assert is_recommended(content(*changes)) == recommended


def test_items_that_nobody_asks_for_get_a_warning():
    (_, sentence) = advice(content(never_found=0.55, chance=0.1))
    assert "55% of the items are found by no query (10% by chance)" in sentence
    assert len(advice(content(never_found=0.55, chance=0.3))) == 1, "few finds per item: missed by chance"


def test_repeated_queries_are_named():
    (_, sentence) = advice(content(repeated=0.4))
    assert sentence.startswith("40% of the queries repeat others") and sentence.endswith("with --links or --tune.")
    assert advice(content(RISES, repeated=0.4))[1].endswith("treats all items alike.")
    assert len(advice(content(repeated=0.1))) == 1


def test_recall_at_chance_level_questions_the_links():
    wrong = content(LEVEL, recall=0.02, links="links.csv")
    assert advice(wrong)[0].startswith("Recall is at chance level: are the rows of links.csv numbered from 0")
    assert not is_recommended(wrong)
    assert "chance level" not in advice(content(LEVEL, recall=0.02))[0], "the pairs of a file are right"
    assert "chance level" not in advice(content(LEVEL, recall=0.2, links="links.csv"))[0]


def test_compressed_vectors_are_named():
    compressed = content() | {"gallery": {"name": "g.faiss", "index": "IndexPQ"}}
    assert advice(compressed)[1].startswith("g.faiss holds compressed vectors (IndexPQ), so all numbers are")


def test_a_bank_of_another_kind_is_named():
    (_, sentence) = advice(content(never_found=0.05, corrected=0.2, bank="dogs.npy"))
    assert "the bank dogs.npy may be too few, or of another kind" in sentence


def test_the_change_of_recall_has_an_interval_over_distinct_queries():
    gallery = np.eye(4, dtype="float32")
    queries = gallery[[0, 1, 2, 3, 0, 0, 0]]
    links = np.stack([np.arange(7), [0, 1, 2, 3, 0, 0, 0]], axis=1)
    plain = hubness(queries, gallery, k=1)
    worse = hubness(queries, gallery, k=1, bias=np.array([2, 0, 0, 0], "float32"))
    change = _recall_change(plain, worse, links, queries)["1"]
    differences = np.array([float(worse.found[q, 0] == a) - float(plain.found[q, 0] == a) for q, a in links])
    assert differences.tolist() == [-1, 0, 0, 0, -1, -1, -1]
    mean = differences.mean()
    groups = [differences[[0, 4, 5, 6]], differences[[1]], differences[[2]], differences[[3]]]
    reach = 1.96 * sum((group - mean).sum() ** 2 for group in groups) ** 0.5 / 7
    np.testing.assert_allclose(list(change.values()), [mean, mean - reach, mean + reach], atol=1e-12)
    alone = _recall_change(plain, worse, links[:4], queries)["1"]
    assert alone["difference"] == -0.25 and alone["low"] == -0.25 - 1.96 * differences[:4].std() / 2
