"""Items of a side as a page shows them: a picture, a text, or numbers as a small curve."""

import base64
from dataclasses import replace
from io import BytesIO

import numpy as np
from markupsafe import Markup
from PIL import Image

from nuclr import image_files
from nuclr.data.modalities import Shown
from nuclr.data.pairs import BadSample, Pairs
from nuclr.data.side import SideName
from nuclr.report import numbers
from nuclr.report.page import Item, shorten

SIDE = 144  # pixels of a picture; shown at up to 150
THUMBNAIL = 72  # pixels of a picture in a list of many items
SMALL = 64  # pixels up to which a picture is stored in higher quality
MOST_POINTS = 96  # of a curve; longer vectors are shown by the means of equal parts
WIDTH = 96  # of a curve, in SVG units
HEIGHT = 28
BROKEN: tuple[type[Exception], ...] = (*image_files.BROKEN, BadSample)


def show_item(
    value: Shown,
    label: str,
    pictures: bool = True,
) -> Item:
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
    detail = f"{numbers.count(len(vector))} numbers, norm {numbers.number(float(np.linalg.norm(vector)))}"
    return Item("numbers", label, curve=draw_curve(vector, f"{label}: {detail}"))


def thumbnail(item: Item) -> Item:
    """Return the item with a picture for a list of many items, if it has a picture."""
    if item.picture is None:
        return item
    image = Image.open(BytesIO(base64.b64decode(item.picture.partition(",")[2])))
    image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    return replace(item, picture=data_uri(image))


def data_uri(image: Image.Image) -> str:
    """Return the picture as a JPEG in a data URI, its longer side at most `SIDE` pixels."""
    quality = 88 if max(image.size) <= SMALL else 74
    image.draft("RGB", (SIDE, SIDE))
    picture = image_files.to_rgb(image)
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    target = BytesIO()
    picture.save(
        target,
        "JPEG",
        quality=quality,
        optimize=True,
    )
    return "data:image/jpeg;base64," + base64.b64encode(target.getvalue()).decode("ascii")


def draw_curve(vector: np.ndarray, label: str) -> Markup:
    """Return a vector as a small curve with a line at zero."""
    if len(vector) > MOST_POINTS:
        vector = np.array([part.mean() for part in np.array_split(vector, MOST_POINTS)])
    low = min(0.0, vector.min(initial=0.0))
    span = (max(0.0, vector.max(initial=0.0)) - low) or 1.0
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
        self.pairs = pairs
        self.pictures = pictures
        self.words = dict(zip(pairs.sides, pairs.words, strict=True))
        self._made: dict[tuple[SideName, int], Item] = {}

    def item(self, side: SideName, number: int) -> Item:
        """Return the x or the y of a pair. A picture is labeled by its file, others by their number."""
        key = side, int(self.pairs.sides[side].ids[number])
        if key not in self._made:
            self._made[key] = self._make(side, number)
        return self._made[key]

    def _make(self, side: SideName, number: int) -> Item:
        label = f"{self.words[side].one} {number}"
        try:
            value = self.pairs.sides[side].modality.show(self.pairs.item(side, number))
            if isinstance(value, Image.Image):
                label = self.pairs.item_name(side, number) or self.pairs.name(number)
            return show_item(value, label, self.pictures)
        except BROKEN:
            return Item("text", label)
