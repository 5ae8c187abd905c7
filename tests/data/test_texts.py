"""Compact storage of texts, and numbers of distinct entries."""

import numpy as np
import pytest

from nuclr.data.texts import Texts, clean, digest, number_distinct, text_problem


def test_texts_are_a_sequence_of_strings():
    strings = ["", "grün ✓", "a\nb", "", "\udc80"]  # the last is a file name that is not UTF-8
    texts = Texts(strings[:2])
    for string in strings[2:]:
        texts.append(string)
    assert [texts[number] for number in range(len(texts))] == strings
    assert texts.ids().tolist() == [0, 1, 2, 0, 3]
    assert repr(texts) == "Texts(5 texts, 15 bytes)"
    for number in (-1, 5):
        with pytest.raises(IndexError, match=f"number {number}; allowed: 0 to 4"):
            texts[number]


def test_the_fingerprint_depends_on_the_boundaries():
    assert Texts(["ab", "c"]).fingerprint() != Texts(["a", "bc"]).fingerprint()
    assert Texts(["ab", "c"]).fingerprint() == Texts(iter(["ab", "c"])).fingerprint()


def test_a_repeated_text_is_stored_once():
    texts = Texts(["ab", "c"])
    for number in (0, 2, 1):
        texts.repeat(number)
    texts.append("d")
    assert [texts[number] for number in range(len(texts))] == ["ab", "c", "ab", "ab", "c", "d"]
    assert texts.ids().tolist() == [0, 1, 0, 0, 1, 2]
    assert repr(texts) == "Texts(6 texts, 4 bytes)"
    other = Texts(["ab", "c"])
    for number in (0, 1, 1):
        other.repeat(number)
    other.append("d")
    assert other.fingerprint() != texts.fingerprint()


def test_distinct_entries_are_numbered_by_first_appearance():
    keys = np.random.default_rng(0).integers(20, size=200).astype(np.uint64)
    expected: dict[int, int] = {}
    numbers = [expected.setdefault(int(key), len(expected)) for key in keys]
    assert number_distinct(keys).tolist() == numbers


def test_clean_removes_line_breaks_and_repeated_spaces():
    assert clean(" a  b\n\tc ") == "a b c"
    assert digest(b"a b c") == digest(memoryview(b"a b c")) != digest(b"a b")


def test_lone_surrogates_are_replaced_and_pairs_are_joined():
    assert clean("a \ud800 b") == "a \ufffd b"
    assert clean("\ud83d\ude00") == "\U0001f600"
    assert clean("grün ✓") == "grün ✓"


def test_captions_without_text_or_of_megabytes_are_problems():
    assert text_problem(" \n", "caption") == "empty caption"
    assert text_problem("x" * 100_000, "caption") is None
    assert text_problem("x" * 100_001, "answer") == "answer of 100,001 characters; at most 100,000 are allowed"
