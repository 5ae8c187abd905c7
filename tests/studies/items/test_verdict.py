"""What `nuclr hubness` says about its numbers."""

from dataclasses import replace

import numpy as np
import pytest

from nuclr import files
from nuclr.arrays import as_rows
from nuclr.evaluation.intervals import Interval, change_interval
from nuclr.popularity import hubness
from nuclr.studies.items.hubness_report import Bank, Comparison, HubnessReport, Measures
from nuclr.studies.items.rows import Origin

RISES = Interval(0.02, 0.005, 0.035)
FALLS = Interval(-0.09, -0.12, -0.06)
LEVEL = Interval(0.0, -0.01, 0.01)
UNSURE = Interval(0.01, -0.01, 0.03)


def make_report(
    *changes,
    never_found=0.05,
    corrected=0.02,
    chance=0.0,
    bank=None,
    repeated=0.0,
    recall=0.5,
    links=None,
    p=None,
):
    """Return a report with changes of recall at 1, 5 and 10."""
    by_depth = dict(zip(("1", "5", "10"), changes, strict=False))
    plain = Measures(never_found, 2.0, 0.1, 30, 5.0, [1], dict.fromkeys(by_depth, recall))
    return HubnessReport(
        queries=Origin("q.npy", 10),
        gallery=Origin("g.npy", 20),
        bank=Bank(bank, 5, 20, repeated, p),
        counted=5,
        same=False,
        k=10,
        width=4,
        temperature=0.1,
        strength=1.0,
        tuned_on=0,
        plain=plain,
        corrected=replace(plain, never_found=corrected),
        chance=replace(plain, never_found=chance, recall=dict.fromkeys(by_depth, 0.01)),
        correlation=0.5,
        links=links,
        labeled=5,
        recall_change=by_depth,
        suspicious=[],
        hubs=[],
        found_again=[],
    )


@pytest.mark.parametrize(
    ("changes", "words", "recommended"),
    [
        ((RISES,), ["helps", "recall@1", "+2.0", "[+0.5, +3.5]"], True),
        ((LEVEL, RISES), ["helps", "recall@5", "recall@1"], True),
        ((FALLS,), ["Do not use", "recall@1", "-9.0"], False),
        ((LEVEL, LEVEL, FALLS), ["Do not use", "recall@10"], False),
        ((RISES, LEVEL, FALLS), ["Mixed", "recall@1", "recall@10"], True),
        ((UNSURE, LEVEL), ["No significant difference", "+1.0", "[-1.0, +3.0]"], True),
        ((LEVEL, UNSURE), ["No significant difference", "--tune"], False),
        ((), ["--links"], False),
    ],
)
def test_recall_decides_if_it_is_known(changes, words, recommended):
    report = make_report(*changes)
    assert all(word in report.advice[0] for word in words)
    assert report.recommended == recommended


def test_warnings_name_what_to_beware_of():
    (_, unasked) = make_report(never_found=0.55, chance=0.1).advice
    assert "55%" in unasked and "10%" in unasked
    assert len(make_report(never_found=0.55, chance=0.3).advice) == 1, "few finds per item: missed by chance"
    (_, repeated) = make_report(repeated=0.4).advice
    assert "40%" in repeated and "--links" in repeated
    assert len(make_report(repeated=0.1).advice) == 1
    (_, differs) = make_report(p=0.001).advice
    assert "0.001" in differs
    (_, other_kind) = make_report(never_found=0.05, corrected=0.2, bank="dogs.npy").advice
    assert "dogs.npy" in other_kind
    compressed = replace(make_report(), gallery=Origin("g.faiss", 20, index="IndexPQ"))
    assert "g.faiss" in compressed.advice[1] and "IndexPQ" in compressed.advice[1]


def test_recall_at_chance_level_questions_the_links():
    wrong = make_report(LEVEL, recall=0.015, links="links.csv")
    assert "chance level" in wrong.advice[0] and "links.csv" in wrong.advice[0]
    assert not wrong.recommended
    assert "chance level" not in make_report(LEVEL, recall=0.02).advice[0], "the pairs of a file are right"
    assert "chance level" not in make_report(LEVEL, recall=0.2, links="links.csv").advice[0]


def test_a_report_is_read_back_from_its_json():
    report = make_report(RISES, LEVEL, bank="b.npy", links="l.csv")
    content = report.to_json()
    assert content["written_by"] == "nuclr hubness" and content["recall_change"]["1"]["low"] == 0.005
    assert files.from_record(HubnessReport, content) == report


def test_the_interval_of_recall_is_over_distinct_queries():
    """A query that is asked four times is one observation that weighs four times as much."""
    gallery = np.eye(4, dtype="float32")
    asked = np.array([0, 1, 2, 3, 0, 0, 0])
    links = np.stack([np.arange(7), asked], axis=1)
    plain = hubness(gallery[asked], gallery, k=1)
    worse = hubness(gallery[asked], gallery, k=1, bias=np.array([2, 0, 0, 0], "float32"))
    comparison = Comparison(None, asked, plain, worse, None, links)
    change = comparison.recall_change(as_rows("queries", gallery[asked]))["1"]
    assert change == change_interval(np.ones(7), (asked != 0).astype(float), asked)
    assert change.difference == pytest.approx(-4 / 7)
