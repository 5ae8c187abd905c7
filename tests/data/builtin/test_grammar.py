"""The language of the built-in pairs: texts of captions, and details that can be omitted."""

import numpy as np

from nuclr.data.builtin.grammar import KINDS, ONE_SHAPE, TWO_SHAPES, WORDS, encode, prompts, text

CAPTIONS = np.arange(np.prod(WORDS), dtype=np.int32)


def test_different_captions_have_different_texts():
    assert len({text(int(c)) for c in CAPTIONS}) == len(CAPTIONS)


def test_texts_of_captions():
    assert text(encode()) == "shape"
    assert text(encode(kind="arrow", count="a", background="over sand")) == "an arrow over sand"
    words = {"size": "small", "color": "red", "place": "on the left", "background": "over water"}
    assert text(encode(kind="cross", count="two", **words)) == "two small red crosses on the left over water"
    assert {text(int(c)) for c in CAPTIONS}.issuperset(p for kind in KINDS for p in prompts(kind))


def test_captions_of_two_shapes():
    words = ["star", "red", "small", "shape", "", "", "left of", "over sand"]
    code = np.ravel_multi_index(
        [slot.words.index(w) for slot, w in zip(TWO_SHAPES.slots, words, strict=True)], TWO_SHAPES.words
    )
    assert TWO_SHAPES.text(int(code)) == "a small red star left of a shape over sand"
    drawn = np.random.default_rng(0).choice(int(np.prod(TWO_SHAPES.words)), 3000, replace=False)
    assert len({TWO_SHAPES.text(int(c)) for c in drawn}) == len(drawn)


def test_every_detail_can_be_omitted_and_probabilities_sum_to_one():
    for slot in (*ONE_SHAPE.slots, *TWO_SHAPES.slots):
        omitted = [slot.words.index(word) for word in ("", "shape", "and") if word in slot.words]
        assert (slot.table[:, omitted] > 0).all()
        assert np.allclose(slot.table.sum(axis=1), 1)
