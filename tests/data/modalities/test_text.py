"""Texts as the published code prepares captions."""

import pytest

from nuclr.data.modalities import TextModality, TextOptions, albef_caption


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("A cat.", "a cat"),
        ("<PERSON> and <PERSON>'s dog!", "person and persons dog"),
        ("black-and-white photo/drawing", "black and white photo drawing"),
        ('one,two ; three: (four) #five *six* "seven" ~8?', "onetwo three four five six seven 8"),
        ("kept: $5 & 100%", "kept $5 & 100%"),
        ("...", ""),
        (" ".join(f"w{k}" for k in range(40)), " ".join(f"w{k}" for k in range(30))),
    ],
)
def test_a_caption_as_in_the_published_code(caption, expected):
    assert albef_caption(caption) == expected


def test_the_option_applies_to_batches():
    texts = ["A Cat.", "Two dogs!"]
    assert TextModality().collate(texts) == TextModality().collate(texts, TextOptions()) == texts
    assert TextModality().collate(texts, TextOptions("albef")) == ["a cat", "two dogs"]
