"""`data.keep`: train on some of the pairs only, under their original numbers."""

from pathlib import Path

import numpy as np

from nuclr.errors import UserError
from nuclr.files import read_text


def read_keep(path: Path, n: int) -> np.ndarray:
    """Numbers, ascending, of the pairs to keep out of n: a text with one a line (# begins a comment), or a `.npy`."""
    if not path.is_file():
        raise UserError(f"{path}: no such file (data.keep)")
    numbers = _from_npy(path) if path.suffix == ".npy" else _from_text(path)
    outside = numbers[(numbers < 0) | (numbers >= n)]
    if len(outside):
        more = f", and {len(outside) - 1} more" if len(outside) > 1 else ""
        raise UserError(f"{path}: pair {outside[0]}{more} does not exist; the data has pairs 0 to {n - 1}")
    if not len(numbers):
        raise UserError(f"{path}: keeps no pairs")
    return np.unique(numbers)


def _from_text(path: Path) -> np.ndarray:
    numbers = []
    for row, line in enumerate(read_text(path).splitlines(), start=1):
        text = line.partition("#")[0].strip()
        try:
            numbers += [int(text)] if text else []
        except ValueError:
            raise UserError(
                f"{path}, line {row}: {text[:40]!r} is no pair's number; needs one whole number a line"
            ) from None
    return np.array(numbers, np.int64)


def _from_npy(path: Path) -> np.ndarray:
    try:
        numbers = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: cannot be read as .npy ({error})") from None
    if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
        raise UserError(f"{path}: holds {numbers.dtype} of shape {numbers.shape}; needs one row of whole numbers")
    return np.asarray(numbers, np.int64)
