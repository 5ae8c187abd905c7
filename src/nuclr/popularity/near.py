"""The large entries of the matrix A_ij = exp((s_ij - zeta_j)/tau) / Z_i, collected during a pass over the scores."""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from nuclr.popularity.problem import Problem

LARGE = 1e-3  # share in Z of an anchor, or in c of a candidate, above which an entry is kept
LEAST_PER_ROW = 16
BYTES = 16  # per entry: value and index, by row and by column
MEMORY_SHARE = 8  # the entries take at most this part of the memory


@dataclass(frozen=True)
class Near:
    """The large entries of this process's anchors.

    Attributes:
        by_row: A, (n_x, n_y), sparse CSR.
        by_column: Its transpose, sparse CSR.
        zeta: Zeta at which A was computed, (n_y,).
        log_z: log Z there, (n_x,).

    """

    by_row: Tensor
    by_column: Tensor
    zeta: Tensor
    log_z: Tensor


class Collector:
    """Collect large entries, a tile of rows at a time.

    Args:
        problem: The problem of this process's anchors.
        memory: Bytes that the solver may use.

    """

    def __init__(self, problem: Problem, memory: int) -> None:
        self.shape = len(problem.a), len(problem.b)
        # A_ij is the share in Z of an anchor, and a_i A_ij that in c of a candidate whose c is 1.
        self.limit = LARGE / max(1.0, float(problem.a.mean()))
        self.per_row = max(LEAST_PER_ROW, memory // (MEMORY_SHARE * BYTES * max(1, self.shape[0])))
        index = torch.empty(
            0,
            dtype=torch.int32,
            device=problem.b.device,
        )
        self.rows = [index]
        self.columns = [index]
        self.values = [index.to(problem.dtype)]

    def add(
        self,
        rows: slice,
        columns: slice,
        block: Tensor,
        row_factor: Tensor,
    ) -> None:
        """Add the large entries of a block of A, whose rows are to be multiplied by `row_factor`."""
        index = (block > (self.limit / row_factor)[:, None]).flatten().nonzero().squeeze(1)
        row = index // block.shape[1]
        column = index % block.shape[1]
        value = block[row, column] * row_factor[row]
        most = self.per_row * len(block) * block.shape[1] // self.shape[1]
        if len(value) > most:
            largest = value.topk(most).indices
            row = row[largest]
            column = column[largest]
            value = value[largest]
        self.rows.append((row + rows.start).int())
        self.columns.append((column + columns.start).int())
        self.values.append(value)

    def finish(self, zeta: Tensor, log_z: Tensor) -> Near:
        """Return the entries, which were computed at this zeta and log Z."""
        row = torch.cat(self.rows)
        column = torch.cat(self.columns)
        value = torch.cat(self.values)
        by_row = _sparse(row, column, value, self.shape)
        by_column = _sparse(column, row, value, self.shape[::-1])
        return Near(by_row, by_column, zeta, log_z)


def _sparse(
    row: Tensor,
    column: Tensor,
    value: Tensor,
    shape: tuple[int, ...],
) -> Tensor:
    order = row.argsort(stable=True)
    start = torch.bincount(row, minlength=shape[0]).cumsum(0).int()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            torch.nn.functional.pad(start, (1, 0)),
            column[order],
            value[order],
            shape,
            check_invariants=False,
        )
