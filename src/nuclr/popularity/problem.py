"""The convex problem whose solution is the popularity of every candidate.

    minimize over zeta  (sum_i a_i tau log Z_i + sum_j b_j zeta_j) / n_y,    Z_i = sum_j b_j exp((s_ij - zeta_j)/tau)

with i over n_x anchors, j over n_y candidates, s_ij = <x_i, y_j> or given. The masses a_i = n_y / n_x and b_j = 1
(uniform marginals) may be replaced by any with the same total n_y. With the *column sums*

    c_j = sum_i a_i exp((s_ij - zeta_j)/tau) / Z_i

the gradient in zeta_j is b_j (1 - c_j) / n_y. So the optimum has c = 1, zeta is unique up to a constant, and the
residual is max_j |c_j - 1|. This is the semi-dual of entropic optimal transport between the marginals a and b, and
zeta <- zeta + tau log c is Sinkhorn's iteration. A mass of k stands for k copies, and zeta is a function of the
candidate alone, whatever its own mass. Reference: Cuturi and Peyré, "Semidual regularized optimal transport", 2018.

"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """Scores (n_x, n_y), or features x (n_x, d) and y (n_y, d), with a temperature and masses a (n_x,), b (n_y,).

    Scores are computed in dtype; masses, sums and potentials are always float64.
    """

    temperature: float
    a: Tensor
    b: Tensor
    dtype: torch.dtype
    x: Tensor | None = None
    y: Tensor | None = None
    scores: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Problem":
        """The same problem computed in another precision; scores are converted where they are used."""
        x, y = (None if t is None else t.to(dtype) for t in (self.x, self.y))
        return replace(self, x=x, y=y, dtype=dtype)

    def part(self, rows: slice) -> "Problem":
        """Some anchors with all candidates."""
        x, scores = (None if t is None else t[rows] for t in (self.x, self.scores))
        return replace(self, a=self.a[rows], x=x, scores=scores)

    @cached_property
    def scale(self) -> float:
        """A bound on |s_ij|: what rounding errors are relative to."""
        if self.scores is not None:
            return max(abs(float(extreme)) for extreme in self.scores.aminmax())
        assert self.x is not None and self.y is not None
        return float(self.x.norm(dim=1).amax() * self.y.norm(dim=1).amax())

    @cached_property
    def scaled_x(self) -> Tensor:
        """x / tau."""
        assert self.x is not None
        return self.x / self.temperature

    def logits(self, rows: slice, columns: slice, shift: Tensor, out: Tensor | None = None) -> Tensor:
        """s_ij / tau + shift_j of a block; shift is -zeta / tau."""
        if self.scores is not None:
            return torch.add(shift[columns], self.scores[rows, columns], alpha=1 / self.temperature, out=out)
        assert self.y is not None
        return torch.mm(self.scaled_x[rows], self.y[columns].T, out=out).add_(shift[columns])


def make_problem(
    x: Tensor | None,
    y: Tensor | None,
    scores: Tensor | None,
    temperature: float,
    x_weight: Tensor | None = None,
    y_weight: Tensor | None = None,
) -> Problem:
    """A Problem from what a user gives, or a ValueError that names what is wrong with it."""
    if not 0 < float(temperature) < math.inf:
        raise ValueError(f"temperature={temperature}; give a finite number above 0")
    given = {name: t for name, t in (("x", x), ("y", y), ("scores", scores)) if t is not None}
    if given.keys() not in ({"x", "y"}, {"scores"}):
        raise ValueError(f"got {' and '.join(given) or 'neither features nor scores'}; give x and y, or scores alone")
    given = {name: check_matrix(name, t) for name, t in given.items()}
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in given.values()) else torch.float32
    given = {name: t.detach() if name == "scores" else t.detach().to(dtype) for name, t in given.items()}
    if scores is None:
        if given["x"].shape[1] != given["y"].shape[1]:
            raise ValueError(
                f"x has {given['x'].shape[1]} columns and y {given['y'].shape[1]}; features must have one size"
            )
        if given["x"].device != given["y"].device:
            raise ValueError(f"x is on {given['x'].device} and y on {given['y'].device}; put both on one device")
        n_x, n_y = len(given["x"]), len(given["y"])
    else:
        n_x, n_y = given["scores"].shape
    if n_x < 2 or n_y < 2:
        raise ValueError(f"{n_x} anchors and {n_y} candidates; there must be at least 2 of each")
    device = next(iter(given.values())).device
    a = _masses("x_weight", x_weight, n_x, n_y, device)
    b = _masses("y_weight", y_weight, n_y, n_y, device)
    return Problem(float(temperature), a, b, dtype, **given)


def check_matrix(name: str, value: Tensor) -> Tensor:
    """A matrix of finite floating-point numbers, as it is."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim != 2:
        what = f"a tensor of {value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} is {what}; give a floating-point tensor of two dimensions")
    if value.numel() and not bool(torch.stack(value.aminmax()).isfinite().all()):  # aminmax reads once, writes nothing
        row, column = (~value.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"{name}[{row}, {column}]={value[row, column]:g}; all numbers must be finite")
    return value


def check_vector(name: str, value: Tensor, size: int) -> Tensor:
    """A vector of `size` finite numbers, as float64."""
    value = torch.as_tensor(value).detach().to(torch.float64)
    if value.shape != (size,):
        raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be ({size},)")
    if not bool(value.isfinite().all()):
        raise ValueError(f"{name} holds NaN or infinite values; all numbers must be finite")
    return value


def _masses(name: str, weight: Tensor | None, size: int, total: int, device: torch.device) -> Tensor:
    if weight is None:
        return torch.full((size,), total / size, dtype=torch.float64, device=device)
    mass = check_vector(name, weight, size).to(device)
    if bool((mass < 0).any()) or not bool(mass.sum() > 0):
        raise ValueError(f"{name} has smallest {mass.min():g} and sum {mass.sum():g}; weights must be >= 0, not all 0")
    return mass * (total / mass.sum())
