"""Draw pictures of scenes: one to three shapes of the same kind and color, or two of any kind, on a background.

Details that the scene does not fix (exact position, size, tilt and shade of the shapes, brightness and texture of the
background) come from the picture's own random words. The ranges of different levels never overlap, so the picture
determines its scene. Coordinates run from 0 to 1, y downwards.
"""

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from nuclr.data.builtin.grammar import ONE_SHAPE, Language, uniforms

Points = NDArray[np.float64]
Words = NDArray[np.uint64]

JITTERS = 20  # three for the light; three for the shade and four for each of at most three shapes; some are unused
SUPERSAMPLE = 4
OUTLINE = 0.55  # brightness of a shape's outline relative to its inside
COLORS = {
    "red": (222, 45, 48), "blue": (40, 90, 225), "yellow": (250, 215, 40), "green": (35, 160, 70),
    "orange": (245, 135, 25), "purple": (130, 55, 180), "pink": (250, 135, 190), "black": (40, 40, 45),
}  # fmt: skip
BACKGROUNDS = {  # color, contrast of the texture, rows and columns of its noise (None: one per pixel)
    "over sand": ((228, 205, 160), 46, (None, None)),
    "over grass": ((178, 212, 150), 60, (3, None)),
    "over water": ((160, 205, 230), 60, (12, 2)),
    "over snow": ((244, 246, 250), 16, (4, 4)),
    "over slate": ((140, 146, 155), 40, (5, 5)),
}
TOWARDS = {
    "in the middle": (0.0, 0.0), "on the left": (-1.0, 0.0), "on the right": (1.0, 0.0),
    "at the top": (0.0, -1.0), "at the bottom": (0.0, 1.0),
}  # fmt: skip
SHIFT = 0.27  # how far towards a side, if the radius permits
RADIUS = {"small": (0.13, 0.12, 0.105), "large": (0.25, 0.2, 0.145)}  # of one, of two and of three shapes
RADIUS_OF_TWO = {"small": 0.13, "large": 0.21}


def picture(
    language: Language,
    scene: int,
    words: Words,
    size: int,
) -> Image.Image:
    """Return a picture of the scene with this code, RGB, from `words_needed(size)` random words."""
    chosen = np.unravel_index(scene, language.levels)
    levels = [slot.levels[i] for slot, i in zip(language.slots, chosen, strict=True)]
    jitters = 2 * uniforms(words[:JITTERS]) - 1
    canvas = _background(
        levels[-1],
        jitters[:3],
        words[JITTERS:].view(np.uint8),
        size,
    )
    if language is not ONE_SHAPE:
        return _with_two_shapes(canvas, levels, jitters[3:])
    kind, color, extent, place, count, _ = levels
    number = 1 + ("a", "two", "three").index(count)
    shapes = _positions(
        place,
        number,
        RADIUS[extent][number - 1],
        jitters[6:],
    )
    return _with_shapes(
        canvas,
        kind,
        COLORS[color] + 14 * jitters[3:6],
        shapes,
    )


def words_needed(size: int) -> int:
    """Return the number of random 64-bit words per picture: the jitters, and one byte of texture per pixel."""
    return JITTERS + -(-size * size // 8)


def _background(
    name: str,
    light: Points,
    noise: NDArray[np.uint8],
    size: int,
) -> Image.Image:
    color, contrast, grid = BACKGROUNDS[name]
    rows, columns = (cells or size for cells in grid)
    texture = Image.fromarray(noise[: rows * columns].reshape(rows, columns))
    if (rows, columns) != (size, size):
        texture = texture.resize((size, size), Image.Resampling.BICUBIC)
    shade = contrast * (np.asarray(texture, np.float32) / 255 - 0.5)
    pixels = (np.array(color) + 8 * light).astype(np.float32) + shade[..., None]
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _positions(
    place: str,
    count: int,
    radius: float,
    jitters: Points,
) -> Points:
    """Return (count, 4): x, y, radius and tilt of each shape. Shapes are lined up across the direction of `place`."""
    towards = np.array(TOWARDS[place])
    across = np.array([1.0, 0.0]) if towards[0] == 0 else np.array([0.0, 1.0])
    reach = 0.5 - 1.2 * radius  # largest distance of a shape from the middle
    gap = min(2.4 * radius, 2 * reach / max(count - 1, 1))
    steps = (np.arange(count) - (count - 1) / 2) * gap
    own = jitters[: 4 * count].reshape(count, 4)
    centers = 0.5 + min(reach, SHIFT) * towards + steps[:, None] * across + 0.025 * own[:, :2]
    return np.column_stack([centers, radius * (1 + 0.07 * own[:, 2]), np.deg2rad(12) * own[:, 3]])


def _with_two_shapes(
    canvas: Image.Image,
    levels: list[str],
    jitters: Points,
) -> Image.Image:
    """Draw the first shape to the left of the second one or above it."""
    along = ("left of", "above").index(levels[6])
    for number, own in enumerate(jitters[:14].reshape(2, 7)):
        kind, color, extent = levels[3 * number : 3 * number + 3]
        center = np.full(2, 0.5)
        center[along] += (-0.24, 0.24)[number] + 0.02 * own[3]
        center[1 - along] += 0.12 * own[4]
        shape = np.array([*center, RADIUS_OF_TWO[extent] * (1 + 0.07 * own[5]), np.deg2rad(12) * own[6]])
        canvas = _with_shapes(
            canvas,
            kind,
            COLORS[color] + 14 * own[:3],
            shape[None],
        )
    return canvas


def _with_shapes(
    canvas: Image.Image,
    kind: str,
    color: Points,
    shapes: Points,
) -> Image.Image:
    fill, edge = (tuple(c.clip(0, 255).astype(int).tolist()) for c in (color, OUTLINE * color))
    scale = SUPERSAMPLE * canvas.width
    cover = Image.new("RGB", (scale, scale))  # red on outlines, yellow inside
    draw = ImageDraw.Draw(cover)
    for x, y, radius, tilt in shapes:
        cos, sin = radius * np.cos(tilt), radius * np.sin(tilt)
        turn = np.array([[cos, sin], [-sin, cos]])
        contours = [(scale * (contour @ turn + (x, y))).ravel().tolist() for contour in CONTOURS[kind]]
        draw.polygon([coordinate for contour in contours for coordinate in contour], fill=(255, 255, 0))
        for contour in contours:
            draw.line(
                contour + contour[:4],
                fill=(255, 0, 0),
                width=SUPERSAMPLE,
                joint="curve",
            )
    covered, inside, _ = cover.reduce(SUPERSAMPLE).split()
    canvas.paste(edge, mask=covered)
    canvas.paste(fill, mask=inside)
    return canvas


def _polar(radius: Points | float, angle: Points) -> Points:
    """Return points at these angles, clockwise from the top."""
    return np.stack([radius * np.sin(angle), -radius * np.cos(angle)], axis=-1)


def _heart() -> Points:
    t = np.linspace(0, 2 * np.pi, 48)
    return np.stack([16 * np.sin(t) ** 3, -13 * np.cos(t) + 5 * np.cos(2 * t) + 2 * np.cos(3 * t) + np.cos(4 * t)], -1)


def _moon() -> Points:
    """Return the unit circle minus another circle to its right; both arcs end where the circles intersect."""
    radius, away = 0.85, 0.5
    meet = (1 - radius**2 + away**2) / (2 * away)
    outer, inner = (np.arctan2(np.sqrt(1 - meet**2), x) for x in (meet, meet - away))
    right = np.pi / 2
    outside = _polar(1.0, np.linspace(right + outer, right + 2 * np.pi - outer, 40))
    inside = _polar(radius, np.linspace(right + 2 * np.pi - inner, right + inner, 40)) + np.array([away, 0.0])
    return np.concatenate([outside, inside]) + np.array([0.15, 0.0])


TURN = np.linspace(0, 2 * np.pi, 48)
BAR = [(-1, -3), (1, -3), (1, -1), (3, -1), (3, 1), (1, 1), (1, 3), (-1, 3), (-1, 1), (-3, 1), (-3, -1), (-1, -1)]
BOLT = [(0.25, -1.15), (-0.75, 0.2), (-0.1, 0.2), (-0.3, 1.15), (0.75, -0.3), (0.1, -0.3), (0.55, -1.15)]

# Contours (points, 2), roughly within the unit circle, y downwards; a second contour is a hole.
CONTOURS: dict[str, list[Points]] = {
    "circle": [_polar(0.95, TURN)],
    "square": [0.85 * np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)])],
    "star": [_polar(np.tile([1.12, 0.48], 5), np.arange(10) * np.pi / 5) + np.array([0.0, 0.06])],
    "heart": [_heart() / 16],
    "triangle": [np.array([(0, -1), (1.05, 0.85), (-1.05, 0.85)])],
    "moon": [_moon()],
    "cross": [np.array(BAR) / 3],
    "ring": [_polar(1.0, TURN), _polar(0.48, TURN)],
    "diamond": [np.array([(0, -1.15), (0.72, 0), (0, 1.15), (-0.72, 0)])],
    "arrow": [np.array([(0, -1.1), (0.95, 0), (0.36, 0), (0.36, 1), (-0.36, 1), (-0.36, 0), (-0.95, 0)])],
    "flower": [_polar(0.84 + 0.24 * np.cos(6 * TURN), TURN), _polar(0.28, TURN)],
    "bolt": [np.array(BOLT)],
}
