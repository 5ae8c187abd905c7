"""The convex problem whose solution is the popularity of every candidate.

    minimize over zeta  (sum_i a_i tau log Z_i + sum_j b_j zeta_j) / n_y,    Z_i = sum_j b_j exp((s_ij - zeta_j)/tau)

with i over n_x anchors and j over n_y candidates. The scores s_ij are <x_i, y_j>, or any matrix. The masses a_i = n_y /
n_x and b_j = 1 (uniform marginals) may be replaced by any with the same total n_y. With the *column sums*

    c_j = sum_i a_i exp((s_ij - zeta_j)/tau) / Z_i

the gradient with respect to zeta_j is b_j (1 - c_j) / n_y. So c = 1 at the optimum, zeta is unique up to a constant,
and the residual is max_j |c_j - 1|. This is the semi-dual of entropic optimal transport between the marginals a and b,
and zeta <- zeta + tau log c is Sinkhorn's iteration. A mass of k stands for k copies; zeta depends on the candidate
only, not on its own mass. Reference: Cuturi and Peyré, "Semidual regularized optimal transport", 2018.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nuclr.norms import rescale_extreme_rows
from nuclr.popularity.rows import READ, Rows
from nuclr.stacked import Stacked

Array = Tensor | npt.NDArray[Any] | Stacked
Vector = Array | Sequence[float]
Indices = Array | Sequence[int] | Sequence[Sequence[int]]
Norms = Literal["unit", "normalize", "any"]

NORM_TOLERANCE = 1e-2  # bfloat16 rounding passes, a forgotten normalization does not
NORMALIZE = "pass normalize=True"  # what a message about other norms suggests
COPY_COSINE = 1 - 1e-5  # above it, two vectors are copies of one another: float16 rounding passes
COPY_LOGIT = -1e4  # of a pair that is excluded; finite, so that a row of such pairs has a maximum


@dataclass(frozen=True, repr=False)
class Problem:
    """Scores, or features of anchors and candidates, with a temperature and masses.

    Scores are computed in `dtype`; masses, sums and potentials are always float64. Use `make_problem` to build one.

    Attributes:
        temperature: tau.
        a: Masses of the anchors, (n_x,).
        b: Masses of the candidates, (n_y,).
        dtype: Precision of the scores.
        x: Features of the anchors, (n_x, d); Rows if they are read a few at a time.
        y: Features of the candidates, (n_y, d); Rows if they are read a few at a time.
        scores: (n_x, n_y), instead of features.
        norms: What holds for the norms of features: "unit" (checked), "normalize" (scaled to 1) or "any".
        exclude_copies: Whether an anchor does not choose candidates that equal it.

    """

    temperature: float
    a: Tensor
    b: Tensor
    dtype: torch.dtype
    x: Tensor | Rows | None = None
    y: Tensor | Rows | None = None
    scores: Tensor | None = None
    norms: Norms = "unit"
    exclude_copies: bool = False

    def __repr__(self) -> str:
        """Return one line with the sizes."""
        source = "scores" if self.y is None else f"features of {self.y.shape[1]} dimensions"
        sizes = f"anchors={len(self.a)}, candidates={len(self.b)}"
        return f"Problem({source}, {sizes}, temperature={self.temperature:g}, {str(self.dtype).removeprefix('torch.')})"

    def to(self, dtype: torch.dtype) -> "Problem":
        """Return the same problem computed in another precision; scores are converted when they are used."""
        x, y = (None if t is None else t.to(dtype) for t in (self.x, self.y))
        return replace(self, x=x, y=y, dtype=dtype)

    def part(self, rows: slice) -> "Problem":
        """Return the problem of some anchors with all candidates."""
        x = self.x.part(rows) if isinstance(self.x, Rows) else None if self.x is None else self.x[rows]
        return replace(self, a=self.a[rows], x=x, scores=None if self.scores is None else self.scores[rows])

    @cached_property
    def scale(self) -> float:
        """A bound on |s_ij|; rounding errors are relative to it."""
        if self.scores is not None:
            return max(abs(float(extreme)) for extreme in self.scores.aminmax())
        assert isinstance(self.x, Tensor) and isinstance(self.y, Tensor)
        return float(self.x.norm(dim=1).amax() * self.y.norm(dim=1).amax())

    @cached_property
    def scaled_x(self) -> Tensor:
        """x / tau."""
        assert isinstance(self.x, Tensor)
        return self.x / self.temperature

    def logits(self, rows: slice, columns: slice, shift: Tensor, out: Tensor | None = None) -> Tensor:
        """Return s_ij / tau + shift_j of a block; shift is -zeta / tau."""
        if self.scores is not None:
            return torch.add(shift[columns], self.scores[rows, columns], alpha=1 / self.temperature, out=out)
        assert self.x is not None and self.y is not None
        x = self.x[rows] / self.temperature if isinstance(self.x, Rows) else self.scaled_x[rows]
        logits = torch.mm(x, self.y[columns].T, out=out)
        if self.exclude_copies:
            logits.masked_fill_(copies(self.x[rows], self.y[columns], logits * self.temperature), COPY_LOGIT)
        return logits.add_(shift[columns])


def copies(x: Tensor, y: Tensor, scores: Tensor) -> Tensor:
    """Return which pairs of rows have the same direction, (n_x, n_y) bool, by their scores <x_i, y_j>."""
    return scores > torch.outer(COPY_COSINE * x.norm(dim=1), y.norm(dim=1))


def make_problem(
    x: Array | None = None,
    y: Array | None = None,
    scores: Array | None = None,
    *,
    temperature: float,
    x_weight: Vector | None = None,
    y_weight: Vector | None = None,
    norms: Norms = "unit",
    read_in_parts: bool = False,
    exclude_copies: bool = False,
) -> Problem:
    """Build a Problem from features or scores, checking all arguments.

    Args:
        x: Features of the anchors, (n_x, d).
        y: Features of the candidates, (n_y, d).
        scores: (n_x, n_y), instead of features.
        temperature: tau.
        x_weight: Masses of the anchors up to a factor, (n_x,).
        y_weight: Masses of the candidates up to a factor, (n_y,).
        norms: "unit" refuses features whose norm is not 1, "normalize" scales them to norm 1, "any" takes them as they
            are.
        read_in_parts: Keep features where they are and read them a few rows at a time (Rows).
        exclude_copies: An anchor does not choose candidates that equal it.

    Returns:
        The problem; tensors are used without copying when their type allows it.

    Raises:
        ValueError: If an argument has a wrong type, shape or value; the message names it.

    Example:
        >>> make_problem(torch.eye(3), torch.eye(3), temperature=0.5)
        Problem(features of 3 dimensions, anchors=3, candidates=3, temperature=0.5, float32)

    """
    temperature = as_positive("temperature", temperature)
    arguments = {name: t for name, t in (("x", x), ("y", y), ("scores", scores)) if t is not None}
    if arguments.keys() not in ({"x", "y"}, {"scores"}):
        names = " and ".join(arguments) or "neither features nor scores"
        raise ValueError(f"got {names}; give x and y, or scores alone")
    if exclude_copies and scores is not None:
        raise ValueError("exclude_copies=True with scores; give features x and y, which show what is equal")
    check = as_floating_matrix if read_in_parts else as_matrix
    tensors: dict[str, Any] = {
        name: t if read_in_parts and isinstance(t, Stacked) else check(name, t).detach()
        for name, t in arguments.items()
    }
    dtype = torch.float64 if any(t.dtype in (torch.float64, np.float64) for t in tensors.values()) else torch.float32
    if scores is None:
        if tensors["x"].shape[1] != tensors["y"].shape[1]:
            columns = tensors["x"].shape[1], tensors["y"].shape[1]
            raise ValueError(f"x has {columns[0]} columns and y {columns[1]}; features must have one size")
        if read_in_parts:
            tensors = {name: as_rows(name, t, dtype, norms) for name, t in tensors.items()}
        else:
            tensors = {name: check_norms(name, t.to(dtype), norms) for name, t in tensors.items()}
        if tensors["x"].device != tensors["y"].device:
            devices = tensors["x"].device, tensors["y"].device
            raise ValueError(f"x is on {devices[0]} and y on {devices[1]}; put both on one device")
        n_x, n_y = len(tensors["x"]), len(tensors["y"])
    else:
        n_x, n_y = tensors["scores"].shape
    if n_x < 2 or n_y < 2:
        raise ValueError(f"{n_x} anchors and {n_y} candidates; there must be at least 2 of each")
    device = next(iter(tensors.values())).device
    a = _masses("x_weight", x_weight, n_x, n_y, device)
    b = _masses("y_weight", y_weight, n_y, n_y, device)
    return Problem(temperature, a, b, dtype, norms=norms, exclude_copies=exclude_copies, **tensors)


def as_tensor(name: str, value: Any, lists: bool = False) -> Tensor:
    """Return a tensor or numpy array as a tensor, without copying if possible.

    Args:
        name: Name of the argument, for the message.
        value: Tensor or numpy array.
        lists: Also accept lists and tuples of numbers.

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
    if isinstance(value, Stacked):
        return torch.from_numpy(np.asarray(value))
    if lists and isinstance(value, (list, tuple)):
        try:
            value = np.asarray(value)
        except ValueError:
            raise ValueError(
                f"{name} is a {type(value).__name__} with rows of unequal length; give one length"
            ) from None
    if not isinstance(value, np.ndarray):
        kinds = "a torch tensor, a numpy array or a list" if lists else "a torch tensor or a numpy array"
        raise ValueError(f"{name} is {type(value).__name__}; give {kinds}")
    if value.dtype.kind not in "biuf":
        raise ValueError(f"{name} is a numpy array of {value.dtype}; give an array of numbers")
    array = np.asarray(value, value.dtype.newbyteorder("="), order="C")  # torch has native byte order, positive strides
    try:
        if isinstance(value, np.memmap) and not array.flags.writeable:
            with warnings.catch_warnings():  # torch warns that writing to it is not possible
                warnings.simplefilter("ignore")
                return torch.from_numpy(array)
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except TypeError:
        raise ValueError(f"{name} is a numpy array of {value.dtype}; give float16, float32 or float64") from None


def as_matrix(name: str, value: Array) -> Tensor:
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
    matrix = as_floating_matrix(name, value)
    check_finite(name, matrix)
    return matrix


def as_floating_matrix(name: str, value: Array) -> Tensor:
    """Return `value` as a floating-point matrix, without looking at its numbers."""
    matrix = as_tensor(name, value)
    if not matrix.is_floating_point() or matrix.ndim != 2:
        kind = str(matrix.dtype).removeprefix("torch.")
        shape = tuple(matrix.shape)
        raise ValueError(f"{name} is {kind} of shape {shape}; give a floating-point matrix of two dimensions")
    return matrix


def check_finite(name: str, matrix: Tensor, first: int = 0) -> None:
    """Raise a ValueError that names the first number that is not finite; `first` is the number of the first row."""
    if matrix.numel() and not bool(torch.stack(matrix.aminmax()).isfinite().all()):  # aminmax needs no temporary matrix
        row, column = (~matrix.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"{name}[{first + row}, {column}]={matrix[row, column]:g}; all numbers must be finite")


def as_rows(name: str, features: Tensor | Stacked, dtype: torch.dtype, norms: Norms) -> Rows:
    """Check features a few rows at a time, and return them as Rows."""
    for start in range(0, len(features), READ):
        part = as_tensor(name, features[start : start + READ]).to(dtype)
        check_finite(name, part, start)
        check_norms(name, part, norms, start)
    return Rows(features, dtype, unit=norms == "normalize")


def as_features(name: str, value: Array, normalize: bool = False, hint: str = NORMALIZE) -> Tensor:
    """Return `value` as a matrix of features of unit norm.

    Args:
        name: Name of the argument, for the message.
        value: Tensor or numpy array, (n, d).
        normalize: Scale the rows to unit norm instead of refusing other norms.
        hint: How the caller's user asks for it, for the message.

    Returns:
        The features as a tensor.

    Raises:
        ValueError: If it is not a finite floating-point matrix, or a row does not have unit norm.

    Example:
        >>> as_features("x", np.array([[3.0, 4.0]]), normalize=True).tolist()
        [[0.6, 0.8]]

    """
    return check_norms(name, as_matrix(name, value), "normalize" if normalize else "unit", hint=hint)


def check_norms(name: str, features: Tensor, norms: Norms, first: int = 0, hint: str = NORMALIZE) -> Tensor:
    """Check or scale the norms of features, as `make_problem` describes.

    Args:
        name: Name of the argument, for the message.
        features: (n, d).
        norms: "unit", "normalize" or "any".
        first: Number of the first row, for the message.
        hint: How the caller's user asks for normalized features, for the message.

    Returns:
        The features, scaled if `norms` is "normalize".

    Raises:
        ValueError: If a row does not have unit norm, or is all zeros.

    """
    if norms == "any" or not features.numel():
        return features
    if norms not in ("unit", "normalize"):
        raise ValueError(f"norms={norms!r}; allowed: 'unit', 'normalize', 'any'")
    if norms == "normalize":
        features = rescale_extreme_rows(features)
    length: Tensor = torch.linalg.vector_norm(features.detach(), dim=1, keepdim=True, dtype=_at_least_float32(features))
    if norms == "normalize":
        zero = (length.squeeze(1) == 0).nonzero().flatten()
        if len(zero):
            raise ValueError(f"{name}: row {first + int(zero[0])} is all zeros and has no direction; remove it")
        return (features / length).to(features.dtype)
    wrong = ((length.squeeze(1) - 1).abs() > NORM_TOLERANCE).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        share = f"{len(wrong)} of {len(features)} rows are not unit norm"
        raise ValueError(
            f"{name}: row {first + row} has norm {float(length[row]):.4g} ({share}); normalize with "
            f"torch.nn.functional.normalize({name}, dim=1) or {hint}"
        )
    return features


def _at_least_float32(features: Tensor) -> torch.dtype:
    return features.dtype if features.dtype.itemsize >= 4 else torch.float32


def as_vector(name: str, value: Vector, size: int) -> Tensor:
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
    if vector.shape != (size,):
        raise ValueError(f"{name} has shape {tuple(vector.shape)}; it must be ({size},)")
    if not bool(vector.isfinite().all()):
        raise ValueError(f"{name} holds NaN or infinite values; all numbers must be finite")
    return vector


def as_positive(name: str, value: Any) -> float:
    """Return `value` as a finite number above 0, or raise a ValueError that names the argument."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={value!r}; give a finite number above 0") from None
    if not 0 < number < math.inf:
        raise ValueError(f"{name}={value}; give a finite number above 0")
    return number


def _masses(name: str, weight: Vector | None, size: int, total: int, device: torch.device) -> Tensor:
    if weight is None:
        return torch.full((size,), total / size, dtype=torch.float64, device=device)
    mass = as_vector(name, weight, size).to(device)
    if bool((mass < 0).any()) or not bool(mass.sum() > 0):
        raise ValueError(f"{name} has minimum {mass.min():g} and sum {mass.sum():g}; weights must be >= 0, not all 0")
    return mass * (total / mass.sum())
