"""Texts: as the published code prepares captions, compact storage, numbers of distinct entries."""

import numpy as np
import pytest

from nuclr.data.modalities import TextModality, TextOptions, albef_caption
from nuclr.data.modalities.text import Texts, clean, digest, number_distinct


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


def test_texts_are_a_sequence_of_strings():
    strings = ["", "grün ✓", "a\nb", "", "\udc80"]  # the last is a file name that is not UTF-8
    texts = Texts(strings[:2])
    for string in strings[2:]:
        texts.append(string)
    assert [texts[number] for number in range(len(texts))] == strings
    assert number_distinct(texts.keys()).tolist() == [0, 1, 2, 0, 3]
    with pytest.raises(IndexError):
        texts[5]


def test_the_fingerprint_depends_on_the_boundaries():
    assert Texts(["ab", "c"]).fingerprint() != Texts(["a", "bc"]).fingerprint()
    assert Texts(["ab", "c"]).fingerprint() == Texts(iter(["ab", "c"])).fingerprint()


def test_distinct_entries_are_numbered_by_first_appearance():
    keys = np.random.default_rng(0).integers(20, size=200).astype(np.uint64)
    expected: dict[int, int] = {}
    numbers = [expected.setdefault(int(key), len(expected)) for key in keys]
    assert number_distinct(keys).tolist() == numbers


def test_clean_removes_line_breaks_and_repeated_spaces():
    assert clean(" a  b\n\tc ") == "a b c"
    assert digest(b"a b c") == digest(memoryview(b"a b c")) != digest(b"a b")
