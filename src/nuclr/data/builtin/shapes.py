"""The outlines of the twelve kinds of shape."""

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]


def _polar(radius: Points | float, angle: Points) -> Points:
    """Points at these angles, clockwise from the top."""
    return np.stack([radius * np.sin(angle), -radius * np.cos(angle)], axis=-1)


def _heart() -> Points:
    t = np.linspace(0, 2 * np.pi, 48)
    return np.stack([16 * np.sin(t) ** 3, -13 * np.cos(t) + 5 * np.cos(2 * t) + 2 * np.cos(3 * t) + np.cos(4 * t)], -1)


def _moon() -> Points:
    """The unit circle without another one to its right; both arcs run between the points where the two meet."""
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

# Contours (points, 2) in about the unit circle, y downwards; a second contour is a hole.
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
