"""Lists of the pairs whose popularity lies in a band, in a form that other tools can read."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nuclr import files
from nuclr.errors import UserError

_HEADER = "# nuclr popularity: numbers of the pairs kept"


@dataclass(frozen=True)
class Band:
    """Inclusive limits on popularity (mean one) and on its quantile (0 is the least popular, 1 the most)."""

    min_popularity: float = 0.0
    max_popularity: float = float("inf")
    min_quantile: float = 0.0
    max_quantile: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_popularity <= self.max_popularity:
            limits = f"{self.min_popularity} to {self.max_popularity}"
            raise UserError(f"popularity band {limits} is empty; it needs 0 <= --min-popularity <= --max-popularity")
        if not 0 <= self.min_quantile <= self.max_quantile <= 1:
            limits = f"{self.min_quantile} to {self.max_quantile}"
            raise UserError(f"quantile band {limits} is empty; it needs 0 <= --min-quantile <= --max-quantile <= 1")

    def contains(self, popularity: np.ndarray) -> np.ndarray:
        """Return which samples lie in the band, a boolean per entry of `popularity` (n,)."""
        low, high = np.quantile(popularity, [self.min_quantile, self.max_quantile])
        low, high = max(low, self.min_popularity), min(high, self.max_popularity)
        inside: np.ndarray = (popularity >= low) & (popularity <= high)
        return inside


@dataclass(frozen=True)
class Keep:
    """Which pairs to list in which file: those whose `side` ("y", "x" or "both") lies in the band."""

    path: Path
    band: Band
    side: str = "y"


def check_target(path: Path, folder: Path) -> None:
    """Refuse, before any work, a path that cannot be written or that holds another file; `folder` will exist."""
    if path.is_dir():
        raise UserError(f"--keep {path}: this is a folder; name a file")
    if not path.absolute().parent.is_dir() and path.absolute().parent != folder.absolute():
        raise UserError(f"--keep {path}: the folder {path.parent} does not exist")
    if path.exists():
        with path.open("rb") as file:
            if file.read(len(_HEADER)) != _HEADER.encode():
                raise UserError(f"--keep {path}: the file exists and was not written by --keep; name another file")


def write_list(path: Path, numbers: np.ndarray, total: int) -> None:
    """Write one pair number per line, after a comment that `numpy.loadtxt` skips."""
    files.write_text(path, "\n".join([f"{_HEADER}, {len(numbers)} of {total}", *map(str, numbers.tolist()), ""]))
