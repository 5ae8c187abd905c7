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

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from nuclr.arrays import (
    Array,
    Features,
    Norms,
    Rows,
    Vector,
    as_matrix,
    as_positive,
    as_rows,
    as_vector,
    check_same_device,
)

COPY_COSINE = 1 - 1e-5  # above it, two vectors are copies of one another: float16 rounding passes
COPY_LOGIT = -1e4  # of a pair that is excluded; finite, so that a row of such pairs has a maximum
SAME_SCORE = 1e-4  # a candidate whose score is this near to that of an answer is the answer


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
        answer_scores: (n_x, k), scores of the candidates that an anchor does not choose because they are its answers;
            nan if there are fewer. A candidate is known by its score, so that candidates can be exchanged.

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
    answer_scores: Tensor | None = None

    def __repr__(self) -> str:
        """Return one line with the sizes."""
        source = "scores" if self.y is None else f"features of {self.y.shape[1]} dimensions"
        return (
            f"Problem({source}, anchors={len(self.a)}, candidates={len(self.b)}, temperature={self.temperature:g}, "
            f"{str(self.dtype).removeprefix('torch.')})"
        )

    def to(self, dtype: torch.dtype) -> "Problem":
        """Return the same problem computed in another precision; scores are converted when they are used."""
        x, y = (None if t is None else t.to(dtype) for t in (self.x, self.y))
        return replace(
            self,
            x=x,
            y=y,
            dtype=dtype,
        )

    def part(self, rows: slice) -> "Problem":
        """Return the problem of some anchors with all candidates."""
        x = self.x.part(rows) if isinstance(self.x, Rows) else None if self.x is None else self.x[rows]
        return replace(
            self,
            a=self.a[rows],
            x=x,
            scores=None if self.scores is None else self.scores[rows],
            answer_scores=None if self.answer_scores is None else self.answer_scores[rows],
        )

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

    def logits(
        self,
        rows: slice,
        columns: slice,
        shift: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return s_ij / tau + shift_j of a block; shift is -zeta / tau."""
        if self.scores is not None:
            return torch.add(
                shift[columns],
                self.scores[rows, columns],
                alpha=1 / self.temperature,
                out=out,
            )
        assert self.x is not None and self.y is not None
        x = self.x[rows] / self.temperature if isinstance(self.x, Rows) else self.scaled_x[rows]
        logits = torch.mm(x, self.y[columns].T, out=out)
        if self.exclude_copies:
            logits.masked_fill_(copies(self.x[rows], self.y[columns], logits * self.temperature), COPY_LOGIT)
        if self.answer_scores is not None:
            for own in (self.answer_scores[rows] / self.temperature).to(logits).unbind(dim=1):
                logits.masked_fill_((logits - own[:, None]).abs() < SAME_SCORE / self.temperature, COPY_LOGIT)
        return logits.add_(shift[columns])


def copies(
    x: Tensor,
    y: Tensor,
    scores: Tensor,
) -> Tensor:
    """Return which pairs of rows have the same direction, (n_x, n_y) bool, by their scores <x_i, y_j>."""
    return scores > torch.outer(COPY_COSINE * x.norm(dim=1), y.norm(dim=1))


def make_problem(
    x: Features | None = None,
    y: Features | None = None,
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
    given = [name for name, value in (("x", x), ("y", y), ("scores", scores)) if value is not None]
    if given not in (["x", "y"], ["scores"]):
        raise ValueError(f"got {' and '.join(given) or 'neither features nor scores'}; give x and y, or scores alone")
    if scores is not None:
        if exclude_copies:
            raise ValueError("exclude_copies=True with scores; give features x and y, which show what is equal")
        matrix = as_matrix("scores", scores).detach()
        dtype = torch.promote_types(matrix.dtype, torch.float32)
        a, b = _marginals(x_weight, y_weight, matrix.shape[0], matrix.shape[1], matrix.device)
        return Problem(
            temperature,
            a,
            b,
            dtype,
            scores=matrix,
            norms=norms,
        )
    assert x is not None and y is not None
    x_rows = as_rows("x", x, norms)
    y_rows = as_rows(
        "y",
        y,
        norms,
        width=x_rows.shape[1],
    )
    check_same_device("x", x_rows, "y", y_rows)
    dtype = torch.promote_types(x_rows.dtype, y_rows.dtype)
    x_rows = x_rows.to(dtype)
    y_rows = y_rows.to(dtype)
    a, b = _marginals(x_weight, y_weight, len(x_rows), len(y_rows), x_rows.device)
    return Problem(
        temperature,
        a,
        b,
        dtype,
        x=x_rows if read_in_parts else x_rows[:],
        y=y_rows if read_in_parts else y_rows[:],
        norms=norms,
        exclude_copies=exclude_copies,
    )


def _marginals(
    x_weight: Vector | None,
    y_weight: Vector | None,
    n_x: int,
    n_y: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return the masses of the anchors and of the candidates, each of sum n_y."""
    if n_x < 2 or n_y < 2:
        raise ValueError(f"{n_x} anchors and {n_y} candidates; there must be at least 2 of each")
    return _masses("x_weight", x_weight, n_x, n_y, device), _masses("y_weight", y_weight, n_y, n_y, device)


def _masses(
    name: str,
    weight: Vector | None,
    size: int,
    total: int,
    device: torch.device,
) -> Tensor:
    if weight is None:
        return torch.full(
            (size,),
            total / size,
            dtype=torch.float64,
            device=device,
        )
    mass = as_vector(name, weight, size).to(device)
    if bool((mass < 0).any()) or not bool(mass.sum() > 0):
        raise ValueError(f"{name} has minimum {mass.min():g} and sum {mass.sum():g}; weights must be >= 0, not all 0")
    return mass * (total / mass.sum())
