"""Keeping the pairs whose popularity lies in a band, as a list of numbers that other tools can read."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nuclr.errors import UserError
from nuclr.studies import output

_HEADER = "# nuclr popularity: numbers of the pairs kept"


@dataclass(frozen=True)
class Band:
    """Limits, inclusive, on popularity (mean one) and on its quantile (0 the least popular, 1 the most)."""

    min_popularity: float = 0.0
    max_popularity: float = float("inf")
    min_quantile: float = 0.0
    max_quantile: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_popularity <= self.max_popularity:
            limits = f"{self.min_popularity} to {self.max_popularity}"
            raise UserError(f"popularity band {limits} is empty; needs 0 <= --min-popularity <= --max-popularity")
        if not 0 <= self.min_quantile <= self.max_quantile <= 1:
            limits = f"{self.min_quantile} to {self.max_quantile}"
            raise UserError(f"quantile band {limits} is empty; needs 0 <= --min-quantile <= --max-quantile <= 1")

    def admits(self, popularity: np.ndarray) -> np.ndarray:
        """Which samples lie in the band, a boolean of the shape of `popularity` (n,)."""
        low, high = np.quantile(popularity, [self.min_quantile, self.max_quantile])
        low, high = max(low, self.min_popularity), min(high, self.max_popularity)
        admitted: np.ndarray = (popularity >= low) & (popularity <= high)
        return admitted


def check_target(path: Path, folder: Path) -> None:
    """See, before the work begins, that the list can be written over no other file; `folder` will exist."""
    if path.is_dir():
        raise UserError(f"--keep {path}: a folder, not a file")
    if not path.absolute().parent.is_dir() and path.absolute().parent != folder.absolute():
        raise UserError(f"--keep {path}: its folder does not exist")
    if path.exists():
        with path.open("rb") as file:
            if not file.read(len(_HEADER)) == _HEADER.encode():
                raise UserError(f"--keep {path}: exists and is not a list of ours; name another file")


def write_list(path: Path, pairs: np.ndarray, total: int) -> None:
    """One pair's number a line, after a comment that `numpy.loadtxt` skips."""
    output.write_text(path, "\n".join([f"{_HEADER}, {len(pairs)} of {total}", *map(str, pairs.tolist()), ""]))
