"""Items of a side as a page shows them: a picture, a text, or numbers as a small curve."""

import base64
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from markupsafe import Markup
from PIL import Image

from nuclr.data.modalities import Shown, get_modality
from nuclr.data.pairs import BadSample, Pairs
from nuclr.image_files import to_rgb
from nuclr.report import numbers
from nuclr.runs.components import SIDES
from nuclr.runs.side_words import SideWords, words_of_pairs

SIDE = 144  # pixels of a picture; shown at up to 150
SMALL = 64  # pixels up to which a picture is stored in higher quality
LONGEST = 1000  # characters of a text that a page shows
MOST_POINTS = 96  # of a curve; longer vectors are shown by the means of equal parts
WIDTH, HEIGHT = 96, 28  # of a curve, in SVG units
BROKEN = (OSError, ValueError, SyntaxError, EOFError, LookupError, TypeError, Image.DecompressionBombError, BadSample)


@dataclass(frozen=True)
class Item:
    """An item as the page shows it.

    Attributes:
        kind: "picture", "text" or "numbers"; the layout depends on it.
        label: what the page calls the item if it cannot show it: "image 12".
        text: the text itself; empty for other kinds.
        picture: a data URI; None for other kinds, and for a picture that cannot be read or is not wanted.
        curve: numbers as SVG; None for other kinds.
        detail: how many numbers, and their norm.

    """

    kind: str
    label: str
    text: str = ""
    picture: str | None = None
    curve: Markup | None = None
    detail: str = ""

    @property
    def plain(self) -> str:
        """The item in words, for places that show no pictures and curves."""
        return self.text or self.label


def show_item(value: Shown, label: str, pictures: bool = True) -> Item:
    """Return an item for the page.

    Args:
        value: a picture, a text, or numbers, as `Modality.show` returns it.
        label: what the page calls it.
        pictures: False to leave out pictures.

    """
    if isinstance(value, Image.Image):
        return Item("picture", label, picture=data_uri(value) if pictures else None)
    if isinstance(value, str):
        return Item("text", label, text=shorten(value))
    vector = np.nan_to_num(np.asarray(value, np.float64).reshape(-1))
    norm = numbers.number(float(np.linalg.norm(vector)))
    detail = f"{numbers.count(len(vector))} numbers, norm {norm}"
    return Item("numbers", label, curve=draw_curve(vector, f"{label}: {detail}"), detail=detail)


def data_uri(image: Image.Image, side: int = SIDE) -> str:
    """Return the picture as a JPEG in a data URI, its longer side at most `side` pixels."""
    quality = 88 if max(image.size) <= SMALL else 74
    image.draft("RGB", (side, side))
    picture = to_rgb(image)
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    target = BytesIO()
    picture.save(target, "JPEG", quality=quality, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(target.getvalue()).decode("ascii")


def shorten(text: str) -> str:
    """Return a text that a page can show; a long document is cut."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1].rstrip()}…"


def draw_curve(vector: np.ndarray, label: str) -> Markup:
    """Return a vector as a small curve with a line at zero."""
    if len(vector) > MOST_POINTS:
        vector = np.array([part.mean() for part in np.array_split(vector, MOST_POINTS)])
    low, high = min(0.0, vector.min(initial=0.0)), max(0.0, vector.max(initial=0.0))
    span = (high - low) or 1.0
    x = np.linspace(0, WIDTH, max(2, len(vector)))
    y = HEIGHT - 2 - (vector - low) / span * (HEIGHT - 4)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=False))
    zero = f"{HEIGHT - 2 + low / span * (HEIGHT - 4):.1f}"
    return Markup(
        '<svg class="numbers" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<line x1="0" x2="{}" y1="{}" y2="{}"/><polyline points="{}"/></svg>'
    ).format(WIDTH, HEIGHT, label, WIDTH, zero, zero, points)


class Items:
    """The items of a source of pairs. Every picture is made once.

    Args:
        pairs: the source.
        pictures: False to leave out pictures.

    """

    def __init__(self, pairs: Pairs, pictures: bool = True) -> None:
        self.pairs, self.pictures = pairs, pictures
        self.x_words, self.y_words = words_of_pairs(pairs)
        self._made: dict[tuple[str, int], Item] = {}

    def words(self, side: str) -> SideWords:
        """Return the words for side "x" or "y"."""
        return self.x_words if side == "x" else self.y_words

    def item(self, side: str, number: int) -> Item:
        """Return the x or the y of a pair."""
        key = side, int((self.pairs.x_id if side == "x" else self.pairs.y_id)[number])
        if key not in self._made:
            self._made[key] = self._make(side, number)
        return self._made[key]

    def read(self, side: str, number: int) -> Any:
        """Return the x or the y of a pair as the source gives it."""
        return self.pairs.x(number) if side == "x" else self.pairs.y(number)

    def file(self, side: str, number: int) -> str:
        """Return the file name of a side's image, or of the other side's; empty if there is none."""
        for each in SIDES if side == "x" else SIDES[::-1]:
            if self.words(each).kind == "image":
                return self.pairs.item_name(each, number) or self.pairs.name(number)
        return ""

    def _make(self, side: str, number: int) -> Item:
        words = self.words(side)
        label = f"{words.one} {number}"
        missing = Item({"image": "picture", "text": "text"}.get(words.kind, "numbers"), label)
        if words.kind == "image" and not self.pictures:
            return missing
        try:
            return show_item(get_modality(words.kind).show(self.read(side, number)), label)
        except BROKEN:
            return missing
