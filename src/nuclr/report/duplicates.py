"""Captions that say the same: equal once case, punctuation, articles and order are left out, or but for one word.

Linear in the number of captions: each is looked up by the set of its words, and by that set without each of its words.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

SMALL_WORDS = frozenset(("a", "an", "the", "is", "are", "of", "in", "on", "at", "to", "and", "with", "by", "its"))
_WORD = re.compile(r"\w+")
FEWEST_WORDS = 3  # below this, sharing all words but one says nothing


@dataclass(frozen=True)
class Duplicates:
    """Groups of rows with the same words, the largest first, and pairs of rows that differ in one word."""

    same: list[list[int]]
    near: list[tuple[int, int]]


def words(caption: str) -> frozenset[str]:
    """What it says: its words without case, punctuation and small words."""
    found = frozenset(_WORD.findall(caption.casefold()))
    return found - SMALL_WORDS or found


def duplicates(captions: Iterable[str], most: int = 20) -> Duplicates:
    """The largest groups and up to `most` pairs that differ in one word, longest captions first, no caption twice."""
    by_words: dict[frozenset[str], list[int]] = defaultdict(list)
    for row, caption in enumerate(captions):
        by_words[words(caption)].append(row)
    same = sorted((rows for rows in by_words.values() if len(rows) > 1), key=lambda rows: (-len(rows), rows[0]))
    without: dict[frozenset[str], list[frozenset[str]]] = defaultdict(list)
    for said in by_words:
        if len(said) >= FEWEST_WORDS:
            for word in said:
                without[said - {word}].append(said)
    near: list[tuple[int, int]] = []
    taken: set[frozenset[str]] = set()
    for _, group in sorted(without.items(), key=lambda item: (-len(item[0]), by_words[item[1][0]][0])):
        free = [said for said in group if said not in taken]
        if len(free) > 1 and len(near) < most:
            taken |= {free[0], free[1]}
            near.append((by_words[free[0]][0], by_words[free[1]][0]))
    return Duplicates(same, near)
