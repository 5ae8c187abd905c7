"""What the solver returns: every candidate's popularity, how well it was found, and its extension to other ones."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nuclr.popularity.kernel import log_column_sums
from nuclr.popularity.problem import Problem, check_matrix


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
        p = self.problem
        y_new = check_matrix("y_new", y_new).detach().to(p.b.device)
        features = p.y is not None
        got, wanted = (y_new.shape[1], p.y.shape[1]) if p.y is not None else (len(y_new), len(p.a))
        if got != wanted:
            what = f"features (m, {wanted})" if features else f"scores ({wanted}, m)"
            raise ValueError(f"y_new has shape {tuple(y_new.shape)}; this problem takes {what}")
        b = p.b.new_ones(len(y_new) if features else y_new.shape[1])
        new = replace(p, b=b, y=y_new) if features else replace(p, b=b, scores=y_new)
        log_q = log_column_sums(new.to(self.zeta.dtype), torch.zeros_like(b), self.log_z)
        return (self.temperature * log_q).to(self.zeta)
