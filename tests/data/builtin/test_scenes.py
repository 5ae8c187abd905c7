"""Scenes and captions are drawn with the right probabilities."""

import numpy as np

from nuclr.data.builtin import BuiltinPairs
from nuclr.data.builtin.grammar import LEVELS, ONE_SHAPE, WORDS, draw_scenes_and_captions

CAPTIONS = np.arange(np.prod(WORDS), dtype=np.int32)


def test_captions_are_drawn_with_the_probabilities_of_the_grammar():
    """Compare counts of captions with n p, in units of the standard error, for the most frequent scenes."""
    scenes, captions = draw_scenes_and_captions(300_000, seed=0, stream=0)
    for scene in np.bincount(scenes).argsort()[-3:]:
        drawn = np.bincount(captions[scenes == scene], minlength=len(CAPTIONS))
        p = np.ones(len(CAPTIONS))
        levels = np.unravel_index(scene, LEVELS)
        words = np.unravel_index(CAPTIONS, WORDS)
        for slot, level, word in zip(ONE_SHAPE.slots, levels, words, strict=True):
            p *= slot.table[level, word]
        expected = drawn.sum() * p
        assert drawn[p == 0].sum() == 0
        frequent = expected >= 5
        z = (drawn - expected)[frequent] / np.sqrt(expected * (1 - p))[frequent]
        assert frequent.sum() > 20
        assert np.abs(z).max() < 4.5
        assert 0.5 < (z**2).mean() < 1.6


def test_scenes_are_long_tailed():
    counts = np.sort(np.bincount(BuiltinPairs(n=200_000).scenes, minlength=int(np.prod(LEVELS))))[::-1]
    assert counts[:1440].sum() > 0.5 * counts.sum()  # a tenth of the scenes has more than half of the pictures
    assert counts[0] > 100 * max(1, counts[-1440])
