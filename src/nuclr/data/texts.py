"""Millions of short texts in two arrays: one blob of UTF-8 and the places where each text begins.

A list of Python strings costs about sixty bytes a text more than its letters, and each is an object for the
collector to visit; this costs eight.
"""

import hashlib
from array import array
from collections.abc import Iterable

import numpy as np


class Texts:
    """A sequence of strings that only grows; text i is `blob[starts[i] : starts[i + 1]]`."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._blob, self._starts = bytearray(), array("q", [0])
        for text in texts:
            self.append(text)

    def append(self, text: str) -> None:
        """Add a text at the end."""
        self._blob += text.encode("utf-8", "surrogatepass")
        self._starts.append(len(self._blob))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> str:
        return self._bytes(number).decode("utf-8", "surrogatepass")

    def _bytes(self, number: int) -> bytes:
        if not 0 <= number < len(self):
            raise IndexError(f"number {number}; allowed: 0 to {len(self) - 1}")
        return bytes(self._blob[self._starts[number] : self._starts[number + 1]])

    def ids(self) -> np.ndarray:
        """The number of each distinct text, (n,) int64, counted in order of first appearance."""
        return number_distinct(np.fromiter((digest(self._bytes(i)) for i in range(len(self))), np.uint64, len(self)))

    def fingerprint(self) -> str:
        """A hash of all texts and their boundaries."""
        hashed = hashlib.sha256(self._blob)
        hashed.update(self._starts)
        return hashed.hexdigest()


def digest(text: bytes | memoryview) -> int:
    """64 bits by which equal texts are recognized; among ten million texts a clash has probability 3e-6."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def number_distinct(keys: np.ndarray) -> np.ndarray:
    """Equal entries of (n,) get equal numbers, counted in order of first appearance; (n,) int64."""
    order = np.argsort(keys, kind="stable")
    begins = np.ones(len(keys), bool)  # of a run of equal keys, in sorted order
    np.not_equal(keys[order[1:]], keys[order[:-1]], out=begins[1:])
    first = order[begins]
    number_of_run = np.empty(len(first), np.uint32)
    number_of_run[np.argsort(first)] = np.arange(len(first), dtype=np.uint32)
    numbers = np.empty(len(keys), np.int64)
    numbers[order] = number_of_run[np.cumsum(begins, dtype=np.uint32) - 1]
    return numbers


def clean(caption: str) -> str:
    """A caption as all formats give it: no line breaks, single spaces."""
    return " ".join(caption.split())
