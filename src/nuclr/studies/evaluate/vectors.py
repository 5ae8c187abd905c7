"""Classification of vectors: `.npz` with x (n, d_x), labels (n,) and prompts (c, d_y) or, m a class, (c, m, d_y)."""

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nuclr.errors import UserError

KEYS = ("x", "labels", "prompts")


@dataclass(frozen=True)
class VectorClasses:
    """`x` (n, d_x), `prompts` (c, m, d_y), float32 and finite; `labels` (n,), int64, in [0, c)."""

    x: Tensor
    labels: Tensor
    prompts: Tensor


def read_classes(path: Path) -> VectorClasses:
    """Read and check; UserError names what is wrong."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [key for key in KEYS if key not in archive.files]
            if missing:
                found = ", ".join(archive.files)
                raise UserError(f"{path}: no array named {missing[0]!r}; needs {', '.join(KEYS)} (found: {found})")
            x, labels, prompts = (archive[key] for key in KEYS)
    except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: cannot be read as .npz with numeric arrays ({error})") from None
    prompts = prompts[:, None] if prompts.ndim == 2 else prompts
    for key, array, ndim in (("x", x, 2), ("prompts", prompts, 3)):
        if array.dtype.kind != "f" or array.ndim != ndim or not array.size:
            raise UserError(f"{path}: {key} has shape {array.shape} of {array.dtype}; needs vectors, one a row")
        if not np.isfinite(array).all():
            raise UserError(f"{path}: {key} holds a NaN or an infinity; mend or remove it")
    if labels.shape != (len(x),) or labels.dtype.kind not in "iu":
        raise UserError(f"{path}: labels has shape {labels.shape} of {labels.dtype}; needs {len(x)} whole numbers")
    if labels.min() < 0 or labels.max() >= len(prompts):
        odd = int(labels.max() if labels.max() >= len(prompts) else labels.min())
        raise UserError(f"{path}: label {odd}; allowed: 0 to {len(prompts) - 1}, the rows of prompts")
    if len(prompts) < 2:
        raise UserError(f"{path}: prompts of {len(prompts)} class; needs at least two classes")
    return VectorClasses(
        *(torch.from_numpy(array.astype(kind)) for array, kind in ((x, "f4"), (labels, "i8"), (prompts, "f4")))
    )
