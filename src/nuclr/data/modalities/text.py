"""Texts: cells are texts with single spaces and without line breaks; batches are lists of texts."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nuclr.data.modalities.base import Folder, Modality
from nuclr.data.pairs import BadSample
from nuclr.data.texts import clean, text_problem


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

    def collate(self, items: Sequence[Any] | np.ndarray, options: Any = None) -> list[str]:  # noqa: ARG002
        """Return the list of texts."""
        return list(items)

    def show(self, item: str) -> str:
        """Return the text."""
        return item
