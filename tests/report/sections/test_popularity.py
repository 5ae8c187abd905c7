"""Near-duplicate texts and false negatives."""

import numpy as np

from nuclr.report.sections.gallery import GallerySide
from nuclr.report.sections.popularity import find_duplicates, list_duplicates
from nuclr.runs.side_words import name_sides

TEXTS = ["A dog runs.", "a dog, runs", "the red dog runs fast", "The red dog runs slow", "other words here"]


def test_duplicates():
    same, near = find_duplicates(TEXTS)
    assert same == [[0, 1]]
    assert near == [(2, 3)]


def test_duplicates_come_with_their_popularity():
    side = GallerySide(
        name_sides("en", "text", "de", "text")[1],
        np.arange(5),
        np.arange(5) / 2,
        np.array([1, 3, 1, 2, 1]),
        5,
        0.0,
        True,
    )
    listed = list_duplicates(TEXTS, side)
    assert listed.words.many == "de texts"
    assert (listed.repeated, listed.repeated_pairs, listed.groups) == (2, 5, 1)
    assert [(row.text, row.popularity, row.copies) for row in listed.near[0].rows] == [
        (TEXTS[2], 1.0, 1),
        (TEXTS[3], 1.5, 2),
    ]
    many = list_duplicates(["same words again"] * 5, side)
    assert len(many.same[0].rows) == 4 and many.same[0].more == 1
