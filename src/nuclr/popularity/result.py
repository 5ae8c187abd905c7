"""What the solver returns: every candidate's popularity, how well it was found, and its extension to other ones."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nuclr.popularity.problem import Problem, check_matrix, log_column_sums


@dataclass(frozen=True)
class Result:
    """Solution of a Problem.

    zeta        (n_y,), of mean zero: tau log of the popularity, up to a constant
    log_z       (n_x,), log Z_i of every anchor at this zeta: what `extend` needs
    residual    max_j |c_j - 1| at this zeta; with uniform weights c_j = (n_y/n_x) sum_i P_ij
    converged   whether the residual is at most the tolerance
    iterations  passes over the scores
    history     the residual of each pass
    """

    problem: Problem
    zeta: Tensor
    log_z: Tensor
    residual: float
    converged: bool
    iterations: int
    history: tuple[float, ...]

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
        """(n_y,) integers: 1 for the most popular candidate, n_y for the least; ties in the candidates' order."""
        order = self.zeta.argsort(descending=True, stable=True)
        return torch.empty_like(order).scatter_(0, order, torch.arange(1, len(order) + 1, device=order.device))

    def extend(self, y_new: Tensor) -> Tensor:
        """Zeta of candidates that were not there, in the same gauge: tau log sum_i a_i exp(s_i / tau) / Z_i.

        Args:
            y_new: features (m, d) if the problem was given as features, scores (n_x, m) if it was given as scores.

        Returns:
            (m,). The candidates themselves get zeta + tau log c: their zeta, up to tau times the residual.

        """
        dense, old = self.problem.y is None, self.problem.given[-1]
        y_new = check_matrix("y_new", y_new).detach().to(old)
        if dense and len(y_new) != len(old):
            raise ValueError(
                f"y_new has shape {tuple(y_new.shape)}; solved from scores, this takes scores ({len(old)}, m)"
            )
        if not dense and y_new.shape[1] != old.shape[1]:
            raise ValueError(f"y_new has shape {tuple(y_new.shape)}; it must be (m, {old.shape[1]}), features like y")
        b = self.problem.b.new_ones(y_new.shape[1] if dense else len(y_new))
        new = replace(self.problem, b=b, **{"scores" if dense else "y": y_new}).to(self.zeta.dtype)
        return (self.temperature * log_column_sums(new, torch.zeros_like(b), self.log_z)).to(self.zeta)
