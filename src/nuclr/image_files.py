"""Open image files that nobody has checked: limits on format, size and pixels, and the conversion to RGB.

Image files are untrusted. Only common formats are opened, because some of Pillow's other formats start programs (EPS
starts Ghostscript). Sizes are compared with limits before memory is taken: the bytes of the file before it is read, the
number of pixels before they are decoded.
"""

import os
import struct
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from nuclr.errors import BadSample, first_line
from nuclr.files import read_bytes

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF")
MAX_BYTES = 256 * 2**20  # of one file
MAX_PIXELS = 64_000_000  # of one image; decoded, these need 256 MB

# What Pillow raises on damaged files.
BROKEN: tuple[type[Exception], ...] = (OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError)
BROKEN += (ArithmeticError, AttributeError, struct.error, MemoryError, RecursionError, Image.DecompressionBombError)

_BITS_PER_SAMPLE = 258  # TIFF tag
_ROWS = 256


def read_file(path: Path, inside: Path | None = None) -> bytes:
    """Return the content of a regular file of at most `MAX_BYTES` bytes.

    Args:
        path: the file.
        inside: the folder that the file must be in after all symbolic links are followed, itself without links. None
            allows all folders.

    Raises:
        BadSample: if the file is missing, empty, too large, not a regular file, outside of `inside`, or cannot be read.

    """
    try:
        if inside is not None:
            path = Path(os.path.realpath(path))
            if not path.is_relative_to(inside):
                raise BadSample("outside data.root; data.allow_outside=true allows this")
        data = read_bytes(path, MAX_BYTES)
    except FileNotFoundError:
        raise BadSample("missing file") from None
    except (OSError, ValueError) as error:
        raise BadSample(f"cannot be read ({first_line(error)})") from None
    if not data:
        raise BadSample("empty file")
    return data


def open_image(data: bytes) -> Image.Image:
    """Open the image in `data` and check its header. The pixels are not decoded yet.

    Args:
        data: the content of an image file.

    Returns:
        The image, which may have 8 or 16 bits per pixel and channel.

    Raises:
        BadSample: if `data` is not an image in one of `FORMATS`, has more than `MAX_PIXELS` pixels, or has pixels
            without a known range (floats or 32-bit integers).

    """
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise BadSample(f"not an image (allowed: {', '.join(FORMATS)})") from None
    except BROKEN as error:
        raise BadSample(f"broken image ({error})") from None
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadSample(f"{width} x {height} pixels; at most {MAX_PIXELS // 10**6} megapixels are allowed")
    # Pillow gives 16-bit PNG and PPM files the mode "I" or "I;16", with values up to 65535.
    if image.mode == "F" or (image.mode == "I" and image.format == "TIFF"):
        kind = "float" if image.mode == "F" else "32-bit"
        raise BadSample(f"{kind} pixels; save the image with 8 or 16 bits")
    return image


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to RGB; 16-bit values are divided by 256, not clipped.

    Args:
        image: an image of any mode. Images in mode "I" must have values from 0 to 65535.

    Returns:
        The image in mode "RGB". Transparent pixels keep their color.

    Example:
        >>> to_rgb(Image.fromarray(np.array([[0, 256, 65535]], np.uint16))).getpixel((2, 0))
        (255, 255, 255)

    """
    if image.mode == "I" or image.mode.startswith("I;16"):
        bits = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, (16,))
        shift = 4 if tuple(bits) == (12,) else 8
        width, height = image.size
        values = np.empty((height, width), np.uint8)
        for top in range(0, height, _ROWS):  # in strips, because an array of the whole image needs a lot of memory
            strip = image.crop((0, top, width, min(top + _ROWS, height)))
            values[top : top + _ROWS] = (np.asarray(strip) >> shift).clip(0, 255)
        rgb = Image.fromarray(values).convert("RGB")
        rgb.info = {key: value for key, value in image.info.items() if key == "exif"}
        return rgb
    if "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")
