"""The language of the built-in pairs: texts of captions, and details that can be omitted."""

import numpy as np

from nuclr.data.builtin import Truth
from nuclr.data.builtin.grammar import KINDS, LEVELS, WORDS, encode, prompts, text

CAPTIONS = np.arange(np.prod(WORDS), dtype=np.int32)
SCENES = np.arange(np.prod(LEVELS), dtype=np.int32)


def test_different_captions_have_different_texts():
    assert len({text(int(c)) for c in CAPTIONS}) == len(CAPTIONS)


def test_texts_of_captions():
    assert text(encode()) == "shape"
    assert text(encode(kind="arrow", count="a", background="over sand")) == "an arrow over sand"
    words = {"size": "small", "color": "red", "place": "on the left", "background": "over water"}
    assert text(encode(kind="cross", count="two", **words)) == "two small red crosses on the left over water"
    assert {text(int(c)) for c in CAPTIONS}.issuperset(p for kind in KINDS for p in prompts(kind))


def test_every_detail_can_be_omitted_in_every_scene():
    vague = Truth(SCENES, np.array([encode()], np.int32))
    assert np.isfinite(vague.log_p(SCENES, np.array([0]))).all()
