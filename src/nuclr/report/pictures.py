"""Images -> small pictures within the page."""

import base64
from collections.abc import Callable
from io import BytesIO

from PIL import Image

from nuclr.data.pairs import BadSample, Pairs

SIDE = 144  # pixels; shown at up to 150
_BROKEN = (OSError, ValueError, SyntaxError, EOFError, LookupError, TypeError, Image.DecompressionBombError)

Pictures = Callable[[int], str | None]


def data_uri(image: Image.Image, side: int = SIDE) -> str:
    """A data URI of the picture, its longer side at most `side`; small pictures keep their size and their detail."""
    small = max(image.size) <= 64
    image.draft("RGB", (side, side))
    picture = image.convert("RGB")
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    target = BytesIO()
    picture.save(target, "JPEG", quality=88 if small else 74, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(target.getvalue()).decode("ascii")


def pictures_of(pairs: Pairs) -> Pictures:
    """From a pair's number to its picture; None where there is none or it cannot be read. Each is made once."""
    made: dict[int, str | None] = {}

    def picture(number: int) -> str | None:
        image = int(pairs.x_id[number])
        if image not in made:
            made[image] = _read(pairs, number)
        return made[image]

    return picture


def _read(pairs: Pairs, number: int) -> str | None:
    if pairs.x_kind != "image":
        return None
    try:
        found = pairs.x(number)
        return data_uri(found) if isinstance(found, Image.Image) else None
    except (BadSample, *_BROKEN):
        return None
