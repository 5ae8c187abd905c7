"""What `nuclr hubness` says about its numbers."""

from dataclasses import replace

import numpy as np
import pytest

from nuclr import files
from nuclr.arrays import as_rows
from nuclr.evaluation.intervals import Interval, change_interval
from nuclr.popularity import hubness
from nuclr.studies.items.hubness_report import Bank, HubnessReport
from nuclr.studies.items.measures import Measures, coverage, recall_change
from nuclr.studies.items.rows import Origin
from nuclr.studies.items.verdict import SMALL_COVERAGE

RISES = Interval(0.02, 0.005, 0.035)
FALLS = Interval(-0.09, -0.12, -0.06)
LEVEL = Interval(0.0, -0.01, 0.01)
UNSURE = Interval(0.01, -0.01, 0.03)


def make_report(
    *changes,
    never_found=0.05,
    corrected=0.02,
    coverage=1.0,
    strength=1.0,
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
        bank=Bank(bank, 5, 5, 20, repeated, coverage, p),
        counted=5,
        same=False,
        k=10,
        width=4,
        temperature=0.1,
        strength=strength,
        tuned_on=0,
        plain=plain,
        corrected=replace(plain, never_found=corrected),
        chance=replace(plain, never_found=0.0, recall=dict.fromkeys(by_depth, 0.01)),
        correlation=0.5,
        links=links,
        labeled=5,
        recall_change=by_depth,
        suspicious=[],
        hubs=[],
        found_again=[],
        won_count=0,
        lost_count=0,
    )


@pytest.mark.parametrize(
    ("changes", "words", "recommended"),
    [
        ((RISES,), ["helps", "right answer is first for 50.0%", "recall@1", "+2.0", "[+0.5, +3.5]"], True),
        ((LEVEL, RISES), ["helps", "recall@5", "recall@1"], True),
        ((FALLS,), ["Do not use", "recall@1", "-9.0"], False),
        ((LEVEL, LEVEL, FALLS), ["Do not use", "recall@10"], False),
        ((RISES, LEVEL, FALLS), ["Mixed", "recall@1", "recall@10"], False),
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
    (_, unasked) = make_report(coverage=0.6).advice
    assert "40%" in unasked and "part" in unasked
    (_, noise) = make_report(strength=0.0).advice
    assert "strength is 0" in noise
    (_, repeated) = make_report(repeated=0.4).advice
    assert "40%" in repeated and "--links" in repeated
    assert len(make_report(repeated=0.1).advice) == 1
    (_, differs) = make_report(p=0.001).advice
    assert "0.001" in differs
    (_, other_kind) = make_report(never_found=0.05, corrected=0.2, bank="dogs.npy").advice
    assert "dogs.npy" in other_kind
    compressed = replace(make_report(), gallery=Origin("g.faiss", 20, index="IndexPQ"))
    assert "g.faiss" in compressed.advice[1] and "IndexPQ" in compressed.advice[1]


@pytest.mark.parametrize("count", [40, 1500])
def test_coverage_shows_a_log_about_one_part(count):
    """Also where chance misses nine items of ten (count = 40), and where all items are found by chance."""
    rng = np.random.default_rng(0)
    centers = unit(rng.normal(size=(8, 16)))
    topic = rng.integers(0, 8, 3000)
    gallery = as_rows("gallery", unit(centers[topic] + 0.3 * rng.normal(size=(3000, 16)))[:2000])
    queries = unit(centers[rng.permutation(topic)] + 0.3 * rng.normal(size=(3000, 16)))
    about_two = unit(centers[topic % 2] + 0.3 * rng.normal(size=(3000, 16)))
    assert coverage(as_rows("queries", queries[:count]), gallery, 10) > SMALL_COVERAGE
    assert coverage(as_rows("queries", about_two[:count]), gallery, 10) < SMALL_COVERAGE
    repeated = np.repeat(queries[:count], 5, axis=0)
    assert coverage(as_rows("queries", repeated), gallery, 10) > SMALL_COVERAGE, "different queries are compared"


def unit(array):
    return (array / np.linalg.norm(array, axis=1, keepdims=True)).astype("float32")


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
    change = recall_change(plain, worse, links, as_rows("queries", gallery[asked]))["1"]
    assert change == change_interval(np.ones(7), (asked != 0).astype(float), asked)
    assert change.difference == pytest.approx(-4 / 7)
