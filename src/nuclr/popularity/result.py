"""Result of the solver: popularity of the candidates, quality of the solution, extension to new candidates."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nuclr.arrays import Features, as_features, as_matrix
from nuclr.popularity.kernel import log_column_sums
from nuclr.popularity.problem import Problem


@dataclass(frozen=True, repr=False)
class Result:
    """Solution of a Problem.

    Attributes:
        problem: The problem that was solved.
        zeta: tau times the log of the popularity, up to a constant, (n_y,), of mean zero.
        log_z: log Z_i of every anchor at this zeta, (n_x,); `extend` needs it.
        residual: max_j |c_j - 1| at this zeta; with uniform weights c_j = (n_y/n_x) sum_i P_ij. Of an estimate: the
            same over 512 candidates.
        converged: True only if max_j |c_j - 1| is at most the tolerance, rounding included. Always False for an
            estimate, whose residual is known for some candidates only.
        iterations: Number of passes over the scores.
        history: Residual of each pass.
        method: "sparse", "anderson", "sinkhorn" or "gradient" for exact solutions, "sample" for an estimate.
        error: Of an estimate: estimated root mean square error of zeta / tau, that is the relative error of the
            popularity. None for an exact solution.

    """

    problem: Problem
    zeta: Tensor
    log_z: Tensor
    residual: float
    converged: bool
    iterations: int
    history: tuple[float, ...]
    method: str = "sparse"
    error: float | None = None

    def __repr__(self) -> str:
        """Return one line with the sizes and how well the problem was solved."""
        return (
            f"Result(candidates={len(self.zeta)}, anchors={len(self.log_z)}, temperature={self.temperature:g}, "
            f"residual={self.residual:.2g}, converged={self.converged}, iterations={self.iterations})"
        )

    @property
    def temperature(self) -> float:
        """The problem's tau."""
        return self.problem.temperature

    @property
    def popularity(self) -> Tensor:
        """exp(zeta / tau) divided by its mean, (n_y,)."""
        return torch.softmax(self.zeta / self.temperature, dim=0) * len(self.zeta)

    @property
    def ranks(self) -> Tensor:
        """Rank of each candidate, (n_y,) integers: 1 is the most popular. Ties are ranked in the candidates' order."""
        order = self.zeta.argsort(descending=True, stable=True)
        return torch.empty_like(order).scatter_(0, order, torch.arange(1, len(order) + 1, device=order.device))

    def extend(self, y_new: Features) -> Tensor:
        """Compute zeta of new candidates, with the same constant: tau log sum_i a_i exp(s_i / tau) / Z_i.

        Features are treated as in `solve`: refused unless they have unit norm, or normalized with `normalize=True`.

        Args:
            y_new: Features (m, d) if the problem has features, scores (n_x, m) if it has scores.

        Returns:
            (m,). For the problem's own candidates this is zeta + tau log c: their zeta, up to tau times the residual.

        Raises:
            ValueError: If `y_new` has a wrong type or shape, is not finite, or does not have unit norm.

        Example:
            >>> from nuclr.popularity import solve
            >>> result = solve(torch.eye(3), torch.eye(3), temperature=0.5)
            >>> result.extend(torch.eye(3)[:2]).shape
            torch.Size([2])

        """
        p = self.problem
        if p.y is not None:
            new = as_features("y_new", y_new, p.norms, width=p.y.shape[1]).to(p.b.device)
            extended = replace(p, b=p.b.new_ones(len(new)), y=new)
        else:
            new = as_matrix("y_new", y_new).detach().to(p.b.device)
            if len(new) != len(p.a):
                raise ValueError(f"y_new has shape {tuple(new.shape)}; this problem takes scores ({len(p.a)}, m)")
            extended = replace(p, b=p.b.new_ones(new.shape[1]), scores=new)
        log_q = log_column_sums(extended.to(self.zeta.dtype), torch.zeros_like(extended.b), self.log_z[None])[0]
        return (self.temperature * log_q).to(self.zeta)
