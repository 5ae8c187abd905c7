"""The large entries of the matrix A_ij = exp((s_ij - zeta_j)/tau) / Z_i, collected during a pass over the scores."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nuclr.popularity.problem import Problem

LARGE = 1e-3  # share in Z of an anchor, or in c of a candidate, above which an entry is kept
LEAST_PER_ROW = 16
BYTES = 16  # per entry: value and index, by row and by column
MEMORY_SHARE = 8  # the entries take at most this part of the memory


Entries = tuple[Tensor, Tensor, Tensor]  # rows and columns, int32, and values


@dataclass(frozen=True)
class Limits:
    """Which entries are large.

    Attributes:
        shape: (n_x, n_y), of this process's anchors.
        least: Smallest entry that is kept.
        per_row: Largest number of entries per anchor, in the mean of a block.

    """

    shape: tuple[int, int]
    least: float
    per_row: int

    @classmethod
    def of(cls, problem: Problem, memory: int) -> "Limits":
        """Return the limits for the problem of this process's anchors, if the solver may use `memory` bytes."""
        n_x = len(problem.a)
        # A_ij is the share in Z of an anchor, and a_i A_ij that in c of a candidate whose c is 1.
        least = LARGE / max(1.0, float(problem.a.mean()))
        return cls((n_x, len(problem.b)), least, max(LEAST_PER_ROW, memory // (MEMORY_SHARE * BYTES * max(1, n_x))))

    def large_entries(self, rows: slice, columns: slice, block: Tensor, row_factor: Tensor) -> Entries:
        """Return the large entries of a block of A, whose rows are to be multiplied by `row_factor`."""
        index = (block > (self.least / row_factor)[:, None]).flatten().nonzero().squeeze(1)
        row = index // block.shape[1]
        column = index % block.shape[1]
        value = block[row, column] * row_factor[row]
        most = self.per_row * len(block) * block.shape[1] // self.shape[1]
        if len(value) > most:
            largest = value.topk(most).indices
            row = row[largest]
            column = column[largest]
            value = value[largest]
        return (row + rows.start).int(), (column + columns.start).int(), value


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

    @classmethod
    def of(cls, entries: Sequence[Entries], shape: tuple[int, int], zeta: Tensor, log_z: Tensor) -> "Near":
        """Put together the entries of all blocks, which were computed at this zeta and log Z."""
        row, column, value = (torch.cat(parts) for parts in zip(*entries, strict=True))
        return cls(_sparse(row, column, value, shape), _sparse(column, row, value, shape[::-1]), zeta, log_z)


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
