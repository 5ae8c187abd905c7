"""The progress line: on stderr, only if asked for, with the residual and the time left."""

import math

import pytest

from nuclr.popularity import solve
from nuclr.popularity.progress import passes_left
from tests.popularity.reference import paired


def test_passes_left_follows_the_recent_rate() -> None:
    assert passes_left([1.0, 0.1, 0.01], 1e-4) == pytest.approx(2)
    assert passes_left([0.5**k for k in range(30)], 0.5**40) == pytest.approx(11)
    assert passes_left([1.0, 1e-5], 1e-4) == 0
    assert passes_left([1.0], 1e-4) == math.inf
    assert passes_left([1.0, 2.0], 1e-4) == math.inf


def test_shown_on_stderr_only_when_asked(capfd: pytest.CaptureFixture[str]) -> None:
    x, y = paired(40, 40)
    solve(x, y, temperature=0.05)
    out, err = capfd.readouterr()
    assert not out
    assert not err
    solve(x, y, temperature=0.05, progress=True)
    out, err = capfd.readouterr()
    assert not out
    assert "residual" in err
    assert "left" in err
