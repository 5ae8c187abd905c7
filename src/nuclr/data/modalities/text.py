"""Texts: cells are texts with single spaces and without line breaks; batches are lists of texts.

`Texts` stores millions of short texts in two arrays: their UTF-8 bytes, and where each text begins. A list of Python
strings needs about sixty bytes per text in addition to its characters, and the garbage collector visits every string.
These arrays need eight bytes per text.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from nuclr.data.modalities.base import Folder, Modality, WrongCellError, shorten
from nuclr.errors import BadSample

MAX_CHARACTERS = 100_000  # of one text
ALBEF_WORDS = 30
_ALBEF = str.maketrans("-/", "  ", ",.'!?\"()*#:;~")


@dataclass(frozen=True)
class TextOptions:
    """How texts of a side are read.

    Attributes:
        form: "plain", or "albef" for `albef_caption` (setting `data.y.text`).

    """

    form: Literal["plain", "albef"] = "plain"


class TextModality(Modality):
    """Texts. Batches are lists of texts; the encoder's tokenizer makes tensors of them."""

    name = "text"
    decodes = False
    in_memory = True

    def read(self, cell: Any, folder: Folder) -> str:  # noqa: ARG002
        """Return the text with single spaces and without line breaks."""
        text, problem = check_text(cell, "text")
        if problem is not None:
            raise BadSample(problem)
        return text

    def collate(self, items: Sequence[Any] | np.ndarray, options: TextOptions | None = None) -> list[str]:
        """Return the list of texts."""
        if options is not None and options.form == "albef":
            return [albef_caption(item) for item in items]
        return list(items)


def albef_caption(text: str) -> str:
    """Return a caption as ALBEF's code, and the code published with NUCLR, prepare it.

    Args:
        text: the caption.

    Returns:
        Its first 30 words in lower case. Hyphens and slashes separate words, and other punctuation is left out.

    Example:
        >>> albef_caption("Actor's <PERSON>, at a black-tie event!")
        'actors person at a black tie event'

    """
    words = text.lower().translate(_ALBEF).replace("<person>", "person").split()
    return " ".join(words[:ALBEF_WORDS])


class Texts:
    """A sequence of strings to which strings can be appended.

    Text i is `blob[starts[i] : starts[i + 1]]`.

    Args:
        texts: the first texts.

    Example:
        >>> texts = Texts(["a cat", "a dog", "a cat"])
        >>> texts[1], number_distinct(texts.keys())
        ('a dog', array([0, 1, 0]))

    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._blob = bytearray()
        self._starts = array("q", [0])
        for text in texts:
            self.append(text)

    def append(self, text: str) -> None:
        """Add a text at the end."""
        self.append_bytes(text.encode("utf-8", "surrogatepass"))

    def append_bytes(self, content: bytes) -> None:
        """Add bytes at the end, to be read with `get_bytes`."""
        self._blob += content
        self._starts.append(len(self._blob))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> str:
        return self.get_bytes(number).decode("utf-8", "surrogatepass")

    def get_bytes(self, number: int) -> bytearray:
        """Return the bytes of an entry."""
        return self._blob[self._starts[number] : self._starts[number + 1]]

    def keys(self) -> np.ndarray:
        """Return a hash of each text, (n,) uint64, equal for equal texts."""
        return np.fromiter(map(digest, map(self.get_bytes, range(len(self)))), np.uint64, len(self))

    def fingerprint(self, more: bytes = b"") -> str:
        """Return a hash of all texts and their boundaries, and of more bytes."""
        hashed = hashlib.sha256(self._blob)
        hashed.update(self._starts)
        hashed.update(more)
        return hashed.hexdigest()


def digest(text: bytes | bytearray | memoryview) -> int:
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
    text = " ".join(text.split())
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def check_text(cell: Any, what: str) -> tuple[str, str | None]:
    """Return the clean text of a cell, and why it makes its sample a bad one; the text of a bad cell is empty.

    Args:
        cell: a text, bytes that should be UTF-8, or None.
        what: what the text is called in the reason, such as "caption".

    Raises:
        WrongCellError: if the cell is something else.

    """
    problem = None
    if not isinstance(cell, str):
        cell, problem = decode_text("" if cell is None else cell, what)
        if not isinstance(cell, str):
            raise WrongCellError(f"{what} is {shorten(cell)}; needs a text")
    if problem is None and len(cell) > MAX_CHARACTERS:  # an error in the list; it would be copied to pages and tables
        problem = f"{what} of {len(cell):,} characters; at most {MAX_CHARACTERS:,} are allowed"
    elif problem is None and (not cell or cell.isspace()):
        problem = f"empty {what}"
    return "" if problem else clean(cell), problem


def decode_text(cell: Any, what: str) -> tuple[Any, str | None]:
    """Decode a cell of bytes as UTF-8; cells of other types are returned unchanged.

    Returns:
        The cell and None. If the bytes are not UTF-8, the text with invalid bytes replaced, and why it cannot be used.

    """
    if not isinstance(cell, bytes):
        return cell, None
    try:
        return cell.decode(), None
    except UnicodeDecodeError:
        return cell.decode(errors="replace"), f"{what} is not UTF-8 text"
