"""Store millions of short texts in two arrays: their UTF-8 bytes, and where each text begins.

A list of Python strings needs about sixty bytes per text in addition to its characters, and the garbage collector
visits every string. These arrays need eight bytes per text.
"""

import hashlib
from array import array
from collections.abc import Iterable

import numpy as np

MAX_CHARACTERS = 100_000  # of one text


class Texts:
    """A sequence of strings to which strings can be appended.

    Stored text i is `blob[starts[i] : starts[i + 1]]`. A text that is repeated with `repeat` is stored once.

    Args:
        texts: the first texts.

    Example:
        >>> texts = Texts(["a cat", "a dog", "a cat"])
        >>> texts[1], texts.ids()
        ('a dog', array([0, 1, 0]))

    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._blob, self._starts = bytearray(), array("q", [0])
        self._rows: array[int] | None = None  # the stored text of each entry; None until a text is repeated
        for text in texts:
            self.append(text)

    def append(self, text: str) -> None:
        """Add a text at the end."""
        self.append_bytes(text.encode("utf-8", "surrogatepass"))

    def append_bytes(self, content: bytes) -> None:
        """Add bytes at the end, to be read with `get_bytes`."""
        if self._rows is not None:
            self._rows.append(len(self._starts) - 1)
        self._blob += content
        self._starts.append(len(self._blob))

    def repeat(self, number: int) -> None:
        """Add an entry that equals entry `number`, without storing its text again."""
        if self._rows is None:
            self._rows = array("q", range(len(self)))
        self._rows.append(self._rows[number])

    def __len__(self) -> int:
        return len(self._starts) - 1 if self._rows is None else len(self._rows)

    def __getitem__(self, number: int) -> str:
        return self.get_bytes(number).decode("utf-8", "surrogatepass")

    def __repr__(self) -> str:
        return f"Texts({len(self):,} texts, {len(self._blob):,} bytes)"

    def get_bytes(self, number: int) -> bytes:
        """Return the bytes of an entry."""
        if not 0 <= number < len(self):
            raise IndexError(f"number {number}; allowed: 0 to {len(self) - 1}")
        stored = number if self._rows is None else self._rows[number]
        return bytes(self._blob[self._starts[stored] : self._starts[stored + 1]])

    def ids(self) -> np.ndarray:
        """Return the number of each distinct text, (n,) int64, in order of first appearance."""
        starts = self._starts
        texts = (bytes(self._blob[starts[i] : starts[i + 1]]) for i in range(len(starts) - 1))
        keys = np.fromiter((digest(text) for text in texts), np.uint64, len(starts) - 1)
        return number_distinct(keys if self._rows is None else keys[np.frombuffer(self._rows, np.int64)])

    def fingerprint(self) -> str:
        """Return a hash of all texts and their boundaries, and of which entries repeat which."""
        hashed = hashlib.sha256(self._blob)
        hashed.update(self._starts)
        if self._rows is not None:
            hashed.update(self._rows)
        return hashed.hexdigest()


def digest(text: bytes | memoryview) -> int:
    """Return a 64-bit hash by which equal texts are recognized.

    Among ten million different texts, two have the same hash with probability 3e-6.
    """
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def number_distinct(keys: np.ndarray) -> np.ndarray:
    """Number the distinct entries of (n,) in order of first appearance; equal entries get equal numbers.

    Example:
        >>> number_distinct(np.array([7, 3, 7, 9]))
        array([0, 1, 0, 2])

    """
    order = np.argsort(keys, kind="stable")
    begins = np.ones(len(keys), bool)  # in sorted order, True at the start of each run of equal keys
    np.not_equal(keys[order[1:]], keys[order[:-1]], out=begins[1:])
    first = order[begins]
    number_of_run = np.empty(len(first), np.uint32)
    number_of_run[np.argsort(first)] = np.arange(len(first), dtype=np.uint32)
    numbers = np.empty(len(keys), np.int64)
    numbers[order] = number_of_run[np.cumsum(begins, dtype=np.uint32) - 1]
    return numbers


def clean(text: str) -> str:
    r"""Return a text without line breaks and with single spaces, the same in all formats.

    Lone surrogates, which JSON can escape but UTF-8 cannot represent, become U+FFFD.

    Example:
        >>> clean(" a \n cat \ud800")
        'a cat �'

    """
    return replace_surrogates(" ".join(text.split()))


def replace_surrogates(text: str) -> str:
    """Return a text that UTF-8 can represent: lone surrogates become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def text_problem(text: str, what: str) -> str | None:
    """Return why a text makes its sample a bad one, or None if it does not.

    A text of megabytes is an error in the list. It would be copied to pages and tables.

    Args:
        text: the text, before `clean`.
        what: what to call it, for example "caption" or "answer".

    """
    if len(text) > MAX_CHARACTERS:
        return f"{what} of {len(text):,} characters; at most {MAX_CHARACTERS:,} are allowed"
    return None if text and not text.isspace() else f"empty {what}"
