"""Checked arrays: tensors and numpy arrays that users pass, and the rows of large matrices.

This is the only place that checks arrays. `as_features`, `as_matrix`, `as_vector`, `as_integers` and `as_links` return
a tensor, or raise a ValueError that names the argument. `as_rows` checks a matrix once and returns `Rows`, which every
function that takes features accepts without checking it again. Rows may stay in a file (np.memmap, Stacked) and are
then read in blocks.

The last part copies tensors from host memory to an accelerator without making the host wait for the device.
"""

import contextlib
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nuclr.stacked import Stacked

Norms = Literal["unit", "normalize", "any"]

NORM_TOLERANCE = 1e-2  # bfloat16 rounding passes, a forgotten normalization does not
NORMALIZE = "pass normalize=True"  # what a message about other norms suggests
CONTAINER = Path("/sys/fs/cgroup")  # Linux shows the memory limits of a container here
BLOCK = 2**16  # rows read at a time: 96 MiB for 384 columns of float32


class WrongTypeError(TypeError, ValueError):
    """An argument is not an array. It is a TypeError, and a ValueError as for all other mistakes in arguments."""


# ---------------------------------------------------------------------------------------------------------------------
# Rows that have been checked
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Rows:
    """Rows of a matrix that have been checked (`as_rows`), and are converted when they are read.

    Args:
        stored: (n, d), in any floating-point precision; may be backed by a file.
        dtype: Precision of what is read.
        norms: What holds for the norms of the rows that are read: "unit" (checked), "normalize" (scaled to 1 when they
            are read) or "any".

    Example:
        >>> Rows(torch.tensor([[3.0, 4.0]], dtype=torch.float16), torch.float32, "normalize")[:1]
        tensor([[0.6000, 0.8000]])

    """

    stored: Tensor | Stacked
    dtype: torch.dtype
    norms: Norms = "any"

    def __repr__(self) -> str:
        """Return one line with the size."""
        return f"Rows({self.shape[0]} x {self.shape[1]}, {self.dtype}, norms={self.norms!r})"

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.stored)

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """Return some rows, (m, d)."""
        if isinstance(self.stored, Stacked):
            picked = torch.from_numpy(np.asarray(self.stored[rows]))
        elif isinstance(rows, Tensor):
            picked = self.stored.index_select(0, rows.to(self.stored.device))
        else:
            picked = self.stored[rows]
        part = picked.to(self.dtype)
        return unit_rows(part) if self.norms == "normalize" else part

    @property
    def shape(self) -> torch.Size:
        """The shape, (n, d)."""
        return torch.Size(self.stored.shape)

    @property
    def device(self) -> torch.device:
        """The device."""
        return self.stored.device if isinstance(self.stored, Tensor) else torch.device("cpu")

    def to(self, dtype: torch.dtype) -> "Rows":
        """Return the same rows, read in another precision."""
        return replace(self, dtype=dtype)

    def part(self, rows: slice) -> "Rows":
        """Return consecutive rows without reading them."""
        return replace(self, stored=self.stored[rows])

    def tiles(self, height: int | None = None) -> list[slice]:
        """Return slices of at most `height` rows (None: BLOCK) that cover all rows."""
        return slices(len(self), BLOCK if height is None else height)

    def blocks(self, height: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Yield all rows in blocks of at most `height` (None: BLOCK), each with its slice."""
        for tile in self.tiles(height):
            yield tile, self[tile]

    def take(self, rows: slice | Tensor) -> "Rows":
        """Return some rows, which are read now and need not be checked again."""
        return checked_rows(self[rows], "any" if self.norms == "any" else "unit")


Array = Tensor | npt.NDArray[Any]
Features = Array | Stacked | Rows
Vector = Array | Sequence[float]
Integers = Array | Sequence[int] | Sequence[Sequence[int]]


def checked_rows(features: Tensor, norms: Norms = "unit") -> Rows:
    """Return features as Rows without checking them: they were computed from features that are checked.

    Args:
        features: (n, d), at least float32.
        norms: What is known about their norms.

    Returns:
        Rows, which other functions do not check either.

    """
    return Rows(features, features.dtype, norms)


def as_rows(
    name: str,
    value: Features,
    norms: Norms = "unit",
    dtype: torch.dtype | None = None,
    *,
    width: int | None = None,
    hint: str = NORMALIZE,
) -> Rows:
    """Check a matrix of features in blocks of rows, and return it as Rows. Rows are not checked a second time.

    Args:
        name: Name of the argument, for messages.
        value: Tensor or numpy array, also memory-mapped, Stacked, or Rows, (n, d).
        norms: "unit" refuses features whose norm is not 1, "normalize" scales them to norm 1 when they are read, "any"
            takes them as they are.
        dtype: Precision of what is read. None: their own, at least float32.
        width: Number of columns of the features that they are compared with. None: any.
        hint: How the caller's user asks for normalized features, for the message.

    Returns:
        The rows. Nothing is copied.

    Raises:
        ValueError: If it is not a finite floating-point matrix, or a row does not have unit norm.

    Example:
        >>> as_rows("x", np.eye(3, dtype=np.float16)).dtype
        torch.float32

    """
    if norms not in ("unit", "normalize", "any"):
        raise ValueError(f"norms={norms!r}; allowed: 'unit', 'normalize', 'any'")
    is_checked = isinstance(value, Rows)
    rows = value if isinstance(value, Rows) else _unchecked_rows(name, value)
    if dtype is not None:
        rows = rows.to(dtype)
    if width is not None and rows.shape[1] != width:
        raise ValueError(f"{name} has {rows.shape[1]} columns; it needs {width}")
    if is_checked and (norms == "any" or rows.norms == "normalize"):
        return rows
    if rows.norms == "any":
        for tile, block in rows.blocks():
            if not is_checked:
                check_finite(name, block, tile.start)
            check_norms(name, block, norms, tile.start, hint)
    return replace(rows, norms=norms)


def _unchecked_rows(name: str, value: Array | Stacked) -> Rows:
    """Return features in their own precision, at least float32."""
    if isinstance(value, Stacked):
        return Rows(value, torch.promote_types(getattr(torch, value.dtype.name), torch.float32))
    stored = as_floating(name, value, 2).detach()
    return Rows(stored, torch.promote_types(stored.dtype, torch.float32))


def evenly_spaced(total: int, size: int) -> Tensor:
    """Return at most `size` of the numbers 0 to total - 1, evenly spaced: a bank, or a sample of rows.

    Args:
        total: How many numbers there are.
        size: Largest number to return.

    Returns:
        (min(total, size),) int64, ascending, all different.

    Example:
        >>> evenly_spaced(10, 4).tolist()
        [0, 3, 6, 9]

    """
    return torch.linspace(0, total - 1, min(size, total), dtype=torch.float64).round().long()


def slices(total: int, size: int) -> list[slice]:
    """Return consecutive slices of `size` rows, the last one shorter if necessary, that cover `total` rows.

    Example:
        >>> slices(5, 2)
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]

    """
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def join_keys(left: Tensor, right: Tensor) -> Tensor:
    """Return all pairs of rows whose keys are equal.

    Args:
        left: (n,) int64, the key of each row.
        right: (m,) int64, the key of each row.

    Returns:
        Rows (row of `left`, row of `right`), (k, 2), sorted.

    Example:
        >>> join_keys(torch.tensor([7, 5, 7]), torch.tensor([7, 7, 3])).tolist()
        [[0, 0], [0, 1], [2, 0], [2, 1]]

    """
    left = left.contiguous()
    order = torch.argsort(right, stable=True)
    first = torch.searchsorted(right[order], left)
    count = torch.searchsorted(right[order], left, right=True) - first
    row = torch.repeat_interleave(count)
    step = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
    return torch.stack([row, order[first[row] + step]], dim=1)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors from what users pass
# ---------------------------------------------------------------------------------------------------------------------


def as_tensor(
    name: str,
    value: Any,
    lists: bool = False,
) -> Tensor:
    """Return a tensor or numpy array as a tensor, without copying if possible.

    Args:
        name: Name of the argument, for the message.
        value: Tensor or numpy array.
        lists: Also accept sequences of numbers.

    Returns:
        A tensor that must not be written to.

    Raises:
        ValueError: If `value` is something else.

    Example:
        >>> as_tensor("x", np.ones((2, 3), np.float16)).dtype
        torch.float16

    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Rows):
        return value[:]
    if isinstance(value, Stacked):
        return torch.from_numpy(np.asarray(value))
    if lists and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        try:
            value = np.asarray(value)
        except ValueError:
            raise ValueError(f"{name} has rows of unequal length; give one length") from None
    if not isinstance(value, np.ndarray):
        kinds = "a torch tensor, a numpy array or a list" if lists else "a torch tensor or a numpy array"
        shown = repr(value) if isinstance(value, int | float | str | bytes) else type(value).__name__
        raise WrongTypeError(f"{name} is {shown}; give {kinds}")
    if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
        raise WrongTypeError(f"{name} is a numpy array of {value.dtype}; give numbers of at most 64 bits")
    array = np.asarray(value, value.dtype.newbyteorder("="), order="C")  # torch has native byte order, positive strides
    with warnings.catch_warnings():  # torch warns that a read-only array must not be written to
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def as_floating(
    name: str,
    value: Features,
    ndim: int | None = None,
) -> Tensor:
    """Return `value` as a floating-point tensor without looking at its numbers.

    Args:
        name: Name of the argument, for the message.
        value: Tensor or numpy array.
        ndim: Number of dimensions. None: at least one.

    Returns:
        The tensor, in its own precision.

    Raises:
        ValueError: If it is not a floating-point array of this many dimensions.

    """
    tensor = as_tensor(name, value)
    right = tensor.ndim > 0 if ndim is None else tensor.ndim == ndim
    if not right or not tensor.is_floating_point():
        what = {None: "array", 1: "vector", 2: "matrix of two dimensions"}[ndim]
        raise ValueError(f"{name} is {describe(tensor)}; give a floating-point {what}")
    return tensor


def as_matrix(name: str, value: Features) -> Tensor:
    """Return `value` as a matrix of finite floating-point numbers.

    Args:
        name: Name of the argument, for the message.
        value: Tensor or numpy array, (rows, columns).

    Returns:
        The matrix as a tensor, in its own precision.

    Raises:
        ValueError: If it is not a floating-point matrix, or holds a NaN or an infinity.

    Example:
        >>> as_matrix("scores", np.zeros((2, 3))).shape
        torch.Size([2, 3])

    """
    matrix = as_floating(name, value, 2)
    if not isinstance(value, Rows):
        check_finite(name, matrix)
    return matrix


def as_features(
    name: str,
    value: Features,
    norms: Norms = "unit",
    dtype: torch.dtype | None = None,
    *,
    width: int | None = None,
    hint: str = NORMALIZE,
) -> Tensor:
    """Return `value` as a matrix of features, after the checks of `as_rows`.

    Args:
        name: Name of the argument, for the message.
        value: Tensor or numpy array, (n, d).
        norms: "unit" refuses other norms than 1, "normalize" scales the rows, "any" takes them as they are.
        dtype: Precision. None: their own, at least float32.
        width: Number of columns of the features that they are compared with. None: any.
        hint: How the caller's user asks for normalized features, for the message.

    Returns:
        The features as a tensor.

    Raises:
        ValueError: If it is not a finite floating-point matrix, or a row does not have unit norm.

    Example:
        >>> as_features("x", np.array([[3.0, 4.0]]), "normalize").tolist()
        [[0.6, 0.8]]

    """
    return as_rows(
        name,
        value,
        norms,
        dtype,
        width=width,
        hint=hint,
    )[:]


def as_vector(
    name: str,
    value: Vector,
    size: int,
) -> Tensor:
    """Return `value` as a float64 vector of `size` finite numbers.

    Args:
        name: Name of the argument, for the message.
        value: Tensor, numpy array or list of numbers, (size,).
        size: Expected length.

    Returns:
        (size,) float64.

    Raises:
        ValueError: If the shape is wrong or a number is not finite.

    Example:
        >>> as_vector("init", [1, 2], 2)
        tensor([1., 2.], dtype=torch.float64)

    """
    vector = as_tensor(name, value, lists=True).detach().to(torch.float64)
    if vector.shape != (size,) or not bool(vector.isfinite().all()):
        raise ValueError(f"{name} has shape {tuple(vector.shape)}; give finite numbers of shape ({size},)")
    return vector


def as_integers(name: str, value: Integers, *shape: int | None) -> Tensor:
    """Return `value` as an int64 tensor.

    Args:
        name: Name of the argument, for the message.
        value: Tensor, numpy array or sequence of integers.
        shape: Expected size of each dimension; None for any size.

    Returns:
        int64, on the device of `value`.

    Raises:
        ValueError: If the shape is wrong or the numbers are not integers.

    Example:
        >>> as_integers("labels", [2, 0, 1], 3)
        tensor([2, 0, 1])

    """
    tensor = as_tensor(name, value, lists=True)
    sizes = [expected in (None, size) for expected, size in zip(shape, tensor.shape, strict=False)]
    is_integer = not (tensor.is_floating_point() or tensor.dtype == torch.bool) or not tensor.numel()
    if tensor.ndim != len(shape) or not all(sizes) or not is_integer:
        wanted = ", ".join("n" if size is None else str(size) for size in shape)
        shown = f"has shape {tuple(tensor.shape)} of {tensor.dtype}"
        raise ValueError(f"{name} {shown}; needs integers of shape ({wanted})")
    return tensor.long()


def as_links(
    name: str,
    value: Integers,
    n_first: int,
    n_second: int,
    sides: tuple[str, str] = ("x", "y"),
) -> Tensor:
    """Return pairs of row numbers as an int64 tensor (n, 2), after checking that the rows exist.

    Args:
        name: Name of the argument, for the message.
        value: Tensor, array or list of row pairs (row of the first side, row of the second side).
        n_first: Number of rows of the first side.
        n_second: Number of rows of the second side.
        sides: What the two sides are called in messages.

    Returns:
        (n, 2) int64.

    Raises:
        ValueError: If the shape is wrong, values are not integers, or a row does not exist.

    Example:
        >>> as_links("links", [[0, 1], [1, 0]], 2, 2).shape
        torch.Size([2, 2])

    """
    links = as_integers(name, value, None, 2)
    if not len(links):
        raise ValueError(f"{name} has no rows; needs at least one pair ({sides[0]}, {sides[1]})")
    for column, size, side in ((0, n_first, sides[0]), (1, n_second, sides[1])):
        wrong = links[:, column][(links[:, column] < 0) | (links[:, column] >= size)]
        if len(wrong):
            raise ValueError(f"{name} names row {int(wrong[0])} of the {side}, which has {size}")
    return links


def as_positive(name: str, value: Any) -> float:
    """Return `value` as a finite number above 0, or raise a ValueError that names the argument."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{name}={value!r}; give a finite number above 0")
    return number


def describe(tensor: Tensor) -> str:
    """Return the precision and the shape of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


# ---------------------------------------------------------------------------------------------------------------------
# Checks of values
# ---------------------------------------------------------------------------------------------------------------------


def check_finite(
    name: str,
    matrix: Tensor,
    first: int = 0,
) -> None:
    """Raise a ValueError that names the first number that is not finite; `first` is the number of the first row."""
    if matrix.numel() and not bool(torch.stack(matrix.aminmax()).isfinite().all()):  # aminmax needs no temporary matrix
        row, column = (~matrix.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"{name}[{first + row}, {column}]={matrix[row, column]:g}; all numbers must be finite")


def check_norms(
    name: str,
    features: Tensor,
    norms: Norms,
    first: int = 0,
    hint: str = NORMALIZE,
) -> None:
    """Check the norms of features of at least float32.

    Args:
        name: Name of the argument, for the message.
        features: (n, d).
        norms: "unit": all must be 1. "normalize": none may be 0. "any": nothing is checked.
        first: Number of the first row, for the message.
        hint: How the caller's user asks for normalized features, for the message.

    Raises:
        ValueError: If a row does not have unit norm, or is all zeros.

    """
    if norms == "any":
        return
    if norms == "normalize":
        zero = (~features.any(dim=1)).nonzero().flatten()
        if len(zero):
            raise ValueError(f"{name}: row {first + int(zero[0])} is all zeros and has no direction; remove it")
        return
    length: Tensor = torch.linalg.vector_norm(features.detach(), dim=1)
    wrong = ((length - 1).abs() > NORM_TOLERANCE).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        share = f"{len(wrong)} of {len(features)} rows are not unit norm"
        raise ValueError(
            f"{name}: row {first + row} has norm {float(length[row]):.4g} ({share}); {hint}, or divide each row by its "
            "norm (tensors: torch.nn.functional.normalize(features, dim=1))"
        )


def check_same_device(
    first: str,
    a: Tensor | Rows,
    second: str,
    b: Tensor | Rows,
) -> None:
    """Raise a ValueError if two matrices of features are on different devices."""
    if a.device != b.device:
        raise ValueError(f"{first} is on {a.device} and {second} on {b.device}; put both on one device")


# ---------------------------------------------------------------------------------------------------------------------
# Norms
# ---------------------------------------------------------------------------------------------------------------------


def rescale_extreme_rows(features: Tensor, small: bool = True) -> Tensor:
    """Divide the rows whose squares over- or underflow by their largest absolute entry.

    Squares of float32 numbers overflow above 1.8e19 and underflow below 1.1e-19. The direction of a row does not
    change, so its unit vector can be computed afterwards. Without this, a float32 row with entries of 1e25 has an
    infinite norm, and dividing by it gives zeros. Rows of ordinary size are returned bit for bit. The gradient of the
    normalized rows is not affected either.

    Args:
        features: (n, d), floating-point.
        small: Also rescale rows that underflow. Rows of zeros are never changed.

    Returns:
        (n, d). On CPU, `features` itself if there is no extreme row.

    Example:
        >>> rescale_extreme_rows(torch.tensor([[3.0, 4.0], [3e25, 4e25]]))
        tensor([[3.0000, 4.0000],
                [0.7500, 1.0000]])

    """
    if not features.numel():
        return features
    limits = torch.finfo(features.dtype)
    largest = features.detach().abs().amax(dim=1, keepdim=True)
    extreme = largest > math.sqrt(limits.max / features.shape[1])
    if small:
        extreme |= (largest < math.sqrt(limits.tiny)) & (largest > 0)
    # On CPU, looking at a value is free. On an accelerator it would wait for the device.
    if features.device.type == "cpu" and not bool(extreme.any()):
        return features
    return features / torch.where(extreme, largest, torch.ones_like(largest))


def unit_rows(features: Tensor) -> Tensor:
    """Return the rows (n, d) scaled to unit norm, however large or small they are."""
    return torch.nn.functional.normalize(rescale_extreme_rows(features), dim=1)


# ---------------------------------------------------------------------------------------------------------------------
# Copies to a device
# ---------------------------------------------------------------------------------------------------------------------


def can_pin(device: torch.device) -> bool:
    """Return whether copies to a device are faster from page-locked memory: on an accelerator other than Apple's.

    From ordinary memory, a copy first waits for the work that is queued on the device. From page-locked (pinned) memory
    it is queued like any other operation. Torch reuses a block of page-locked memory only after the copies that read it
    are done, so a tensor may be dropped, but not overwritten, as soon as its copy is queued.

    Args:
        device: the target of the copies.

    Example:
        >>> can_pin(torch.device("cpu"))
        False

    """
    if device.type in ("cpu", "meta", "mps"):
        return False
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator is not None and accelerator.type == device.type


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; a copy from the host to an accelerator is only queued.

    Args:
        tensor: on any device. A host tensor that is not page-locked yet is copied to page-locked memory first.
        device: the target. The host waits for copies from an accelerator to the host.

    Returns:
        The tensor itself if it is on the device already.

    Example:
        >>> to_device(torch.arange(3), torch.device("cpu"))
        tensor([0, 1, 2])

    """
    if tensor.device == device:
        return tensor
    if tensor.device.type != "cpu":
        return tensor.to(device)
    if can_pin(device):
        tensor = tensor.pin_memory()  # returns the tensor itself if it is page-locked already
    return tensor.to(device, non_blocking=True)


def free_memory(device: torch.device) -> float:
    """Return the bytes of memory that are free for new tensors; infinity if the system does not say."""
    # On CPU, reserving memory that does not exist succeeds, and writing to it ends the process.
    free = math.inf
    if device.type != "cpu":
        return free
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = min(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    with contextlib.suppress(OSError, ValueError, KeyError):  # without a limit, memory.max holds the word "max"
        limit, used = (int((CONTAINER / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        use = dict(line.split() for line in (CONTAINER / "memory.stat").read_text(encoding="ascii").splitlines())
        free = min(free, limit - used + int(use["active_file"]) + int(use["inactive_file"]))  # cached files give way
    return free


def shorten(features: Tensor, width: int) -> Tensor:
    """Return the first `width` coordinates of features (..., d), scaled to unit norm.

    Example:
        >>> shorten(torch.tensor([[0.3, 0.4, 0.5]]), 2)
        tensor([[0.6000, 0.8000]])

    """
    return torch.nn.functional.normalize(features[..., :width], dim=-1)
