"""Texts: cells are texts with single spaces and without line breaks; batches are lists of texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from nuclr.data.modalities.base import Folder, Modality
from nuclr.data.pairs import BadSample
from nuclr.data.texts import clean, text_problem

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

    def read(self, cell: Any, folder: Folder) -> str:  # noqa: ARG002
        """Return the text with single spaces and without line breaks."""
        if not isinstance(cell, str):
            raise BadSample("not a text")
        self.check(cell)
        return clean(cell)

    def check(self, item: str) -> None:
        """Refuse empty texts and texts of megabytes.

        Raises:
            BadSample: if the text is one of these.

        """
        if problem := text_problem(item, "text"):
            raise BadSample(problem)

    def collate(self, items: Sequence[Any] | np.ndarray, options: TextOptions | None = None) -> list[str]:
        """Return the list of texts."""
        if options is not None and options.form == "albef":
            return [albef_caption(item) for item in items]
        return list(items)

    def show(self, item: str) -> str:
        """Return the text."""
        return item


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
