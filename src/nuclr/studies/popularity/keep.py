"""Lists of the pairs whose popularity lies in a band, in forms that other tools can read.

`--keep` writes the numbers of the pairs as text. `--uids` writes the subset file of DataComp, which its resharder
reads: a `.npy` file of dtype "u8,u8" with the upper and the lower 64 bits of each uid, in ascending order. The
resharder copies a sample as often as its uid occurs, so each uid is written once.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nuclr import files
from nuclr.data.formats.stored_texts import StoredTexts
from nuclr.errors import UserError, printable

UIDS = np.dtype("u8,u8")  # of DataComp's subset files
_HEADER = "# nuclr popularity: numbers of the pairs kept"
_DIGITS = 32  # of a uid
_BLOCK = 2**16  # rows that are read or written at a time


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
    """Which pairs to list: those whose `side` ("y", "x" or "both") lies in the band.

    Attributes:
        band: limits on popularity.
        side: whose popularity.
        path: file for the numbers of the pairs; None: not written.
        uids: file for the uids of the pairs; None: not written.

    """

    band: Band
    side: str = "y"
    path: Path | None = None
    uids: Path | None = None

    def check_targets(self, folder: Path) -> None:
        """Refuse, before any work, files that cannot be written or that exist; `folder` will exist."""
        if self.path is not None:
            check_target("--keep", self.path, folder)
            if self.path.exists():
                with self.path.open("rb") as file:
                    if file.read(len(_HEADER)) != _HEADER.encode():
                        raise UserError(
                            f"--keep {self.path}: the file exists and was not written by --keep; name another file"
                        )
        if self.uids is not None:
            check_new("--uids", self.uids, ".npy", folder)


def check_target(option: str, path: Path, folder: Path) -> None:
    """Refuse a path that cannot be a file; `folder` will exist."""
    if path.is_dir():
        raise UserError(f"{option} {path}: this is a folder; name a file")
    if not path.absolute().parent.is_dir() and path.absolute().parent != folder.absolute():
        raise UserError(f"{option} {path}: the folder {path.parent} does not exist")


def check_new(option: str, path: Path, suffix: str, folder: Path) -> None:
    """Refuse a path that exists, cannot be a file, or has another suffix; `folder` will exist."""
    check_target(option, path, folder)
    if path.suffix != suffix:
        raise UserError(f"{option} {path}: needs the suffix {suffix}")
    if path.exists():
        raise UserError(f"{option} {path}: the file exists; remove it or name another file")


def write_list(path: Path, numbers: np.ndarray, total: int) -> None:
    """Write one pair number per line, after a comment that `numpy.loadtxt` skips."""
    with files.write_atomically(path) as file:
        file.write(f"{_HEADER}, {len(numbers)} of {total}\n".encode())
        for start in range(0, len(numbers), _BLOCK):
            file.writelines(f"{number}\n".encode() for number in numbers[start : start + _BLOCK].tolist())


def parse_uids(texts: StoredTexts) -> np.ndarray:
    """Return the uids of all pairs as numbers, (n,) of dtype "u8,u8": the upper and the lower 64 bits.

    Raises:
        UserError: if a uid is not a hexadecimal number of at most 32 digits.

    """
    uids = np.empty(len(texts), UIDS)
    for start in range(0, len(texts), _BLOCK):
        block = texts[start : start + _BLOCK]
        try:
            if any(not 0 < len(uid) <= _DIGITS for uid in block):
                raise ValueError
            digits = bytes.fromhex("".join(uid.rjust(_DIGITS, "0") for uid in block))
            if len(digits) != 16 * len(block):  # fromhex skips spaces
                raise ValueError
        except ValueError:
            row = next(row for row, uid in enumerate(block) if not _is_uid(uid))
            raise UserError(
                f"--uids: the uid of row {start + row} is {printable(block[row][:40])!r}; "
                "needs up to 32 hexadecimal digits"
            ) from None
        halves = np.frombuffer(digits, ">u8").reshape(-1, 2)
        uids["f0"][start : start + len(block)], uids["f1"][start : start + len(block)] = halves.T
    return uids


def _is_uid(text: str) -> bool:
    return 0 < len(text) <= _DIGITS and all(digit in "0123456789abcdefABCDEF" for digit in text)


def write_uids(path: Path, uids: np.ndarray) -> int:
    """Write DataComp's subset file and return the number of distinct uids in it.

    Args:
        path: the file to create.
        uids: (n,) of dtype "u8,u8", in any order.

    Returns:
        How many were written: each once.

    Example:
        >>> import tempfile
        >>> uids = np.array([(7, 1), (2, 9), (7, 1)], UIDS)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_uids(Path(folder, "subset.npy"), uids), np.load(Path(folder, "subset.npy")).tolist()
        (2, [(2, 9), (7, 1)])

    """
    uids = uids[np.lexsort((uids["f1"], uids["f0"]))]  # sorting by fields would compare Python objects
    uids = uids[np.append(True, uids[1:] != uids[:-1])] if len(uids) else uids
    with files.write_atomically(path) as file:
        np.save(file, uids)
    return len(uids)
