"""A cheap model of the problem at a state: large entries as they are, all others as a product.

Let A_ij = exp((s_ij - zeta_j)/tau) / Z_i at a state. Few of these entries are large: those of near pairs, on which most
of Sinkhorn's iterations are spent. `Near` keeps them. The others are many and smooth. The model replaces a_i A_ij b_j
of the others by r_i t_j / T, with r and t their row and column sums and T their total. So it has the log Z and the c of
the problem at this state, and one evaluation takes as many operations as there are large entries.
"""

from itertools import pairwise

import torch
from torch import Tensor

from nuclr import distributed
from nuclr.popularity.kernel import State
from nuclr.popularity.near import Near
from nuclr.popularity.problem import Problem
from nuclr.popularity.threads import PART, in_order


class Model:
    """The model; called with zeta, it returns the State as a Kernel does.

    Args:
        problem: The problem of this process's anchors.
        state: The state at which the model equals the problem.
        near: The large entries.

    """

    def __init__(
        self,
        problem: Problem,
        state: State,
        near: Near,
    ) -> None:
        self.problem = problem
        self.state = state
        self.near = near
        # A is rescaled from where it was collected to this state.
        self.row_scale = (near.log_z - state.log_z).exp()
        self.column_scale = ((near.zeta - state.zeta) / problem.temperature).exp()
        near_z = self.row_scale * _product(near.by_row, self.column_scale * problem.b)
        near_c = self.column_scale * _product(near.by_column, self.row_scale * problem.a)
        self.far_z = (1 - near_z).clamp_min(0)
        self.far_c = (state.log_c.exp() - distributed.sum_over_processes(near_c)).clamp_min(0)
        self.far = float((problem.b @ self.far_c).clamp_min(torch.finfo(self.far_c.dtype).tiny))

    def __call__(self, zeta: Tensor) -> State:
        """Return the model's state at zeta."""
        p = self.problem
        v = ((self.state.zeta - zeta) / p.temperature).exp()
        bv = p.b * v
        near_z = self.row_scale * _product(self.near.by_row, self.column_scale * bv)
        z = near_z + self.far_z * (self.far_c @ bv / self.far)
        weight = p.a / z
        log_z = self.state.log_z + z.log()
        near_c = self.column_scale * _product(self.near.by_column, self.row_scale * weight)
        total = distributed.sum_over_processes(torch.cat([near_c, torch.stack([self.far_z @ weight, p.a @ log_z])]))
        c = v * (total[: len(v)] + self.far_c * total[-2] / self.far)
        log_c = c.clamp_min(torch.finfo(c.dtype).tiny).log()
        objective = (p.temperature * total[-1] + p.b @ zeta) / len(zeta)
        return State(zeta, log_c, log_z, self.state.curvature, float(objective))


def _product(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return matrix @ vector in float64; the product is computed in the precision of the matrix."""
    factor = vector.to(matrix.dtype)[:, None]
    products: list[Tensor] = []
    in_order(lambda part: torch.mm(part, factor), _parts(matrix), matrix.device, products.append)
    return torch.cat(products).squeeze(1).to(vector)


def _parts(matrix: Tensor) -> list[Tensor]:
    """Return consecutive rows of a CSR matrix, several times if it has many entries."""
    steps = min(-(-matrix.values().numel() // PART), len(matrix))
    if steps <= 1 or matrix.device.type != "cpu":
        return [matrix]
    start = matrix.crow_indices()
    edges = [len(matrix) * step // steps for step in range(steps + 1)]
    return [
        torch.sparse_csr_tensor(
            start[first : last + 1] - start[first],
            matrix.col_indices()[start[first] : start[last]],
            matrix.values()[start[first] : start[last]],
            (last - first, matrix.shape[1]),
            check_invariants=False,
        )
        for first, last in pairwise(edges)
    ]
