"""One pass over the scores: from zeta to the column sums c and the anchors' log Z.

The scores are processed in tiles of rows, and each tile in blocks of columns. A block is exponentiated relative to the
largest entry of each row and summed along its rows. Once all blocks of a tile are done, Z of its rows is known, and the
blocks are summed along their columns. Sums within a block and over the blocks of a row use the precision of the scores;
sums over tiles use float64. Tiles are processed by several threads (`threads`). Under torch.distributed each process
handles its own rows, and one all-reduce adds the results.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from queue import SimpleQueue

import torch
from torch import Tensor

from nuclr import distributed
from nuclr.arrays import free_memory, slices
from nuclr.popularity import threads
from nuclr.popularity.near import Entries, Limits, Near
from nuclr.popularity.problem import Problem

# Rows and columns that fit into a CPU cache, or fill a GPU
CPU_BLOCK = (256, 8192)
GPU_BLOCK = (4096, 32768)
LEAST_HEIGHT = 16
TILES = 16  # of few rows with many columns, to have parts for all threads
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class _Pass:
    """What the parts of a pass have in common.

    Attributes:
        shift: -zeta / tau, if the matrix is to be computed; otherwise it is kept from an earlier pass.
        v: Factor of each column of the matrix.
        bv: v, times the marginal.
        z: Set by the parts: the partition functions, relative to the largest entry of each row.
        sums: Zeros of the shape of the column sums: of the entries, and of their squares if the curvature is renewed.
        limits: Which entries to collect.

    """

    shift: Tensor | None
    v: Tensor
    bv: Tensor
    z: Tensor
    sums: Tensor
    limits: Limits | None


@dataclass(frozen=True)
class State:
    """Result of a pass at zeta.

    Attributes:
        zeta: (n_y,).
        log_c: Log of the column sums, (n_y,).
        log_z: Log of the partition functions of this process's anchors, (n_x,).
        curvature: Diagonal of the objective's Hessian times tau n_y / (b_j c_j), (n_y,). This is
            1 - b_j sum_i a_i A_ij^2 / c_j with A_ij = exp((s_ij - zeta_j)/tau) / Z_i. It is near 0 if the
            anchors that choose candidate j choose almost nothing else.
        objective: The value to be minimized.
        near: Large entries of A, if a pass has collected them.

    """

    zeta: Tensor
    log_c: Tensor
    log_z: Tensor
    curvature: Tensor
    objective: float
    near: Near | None = None

    @cached_property
    def residual(self) -> float:
        """max_j |c_j - 1|."""
        return float(torch.expm1(self.log_c).abs().amax())


class Kernel:
    """Compute State from zeta, with the matrix exp((s_ij - r_j) / tau) at a reference r.

    If the matrix fits into memory, it is kept. At another zeta its columns only need scaling by
    v_j = exp((r_j - zeta_j) / tau), so a pass consists of two matrix-vector products without an exponential. When the
    range of v exceeds exp(DRIFT), the reference moves to the current zeta, so that no relevant entry under- or
    overflows (Schmitzer, "Stabilized sparse scaling algorithms for entropy regularized transport problems", 2019).

    If the matrix does not fit, zeta is its own reference, and one tile is held at a time.

    The curvature needs a product with the squared entries. It is updated while zeta still moves by more than one
    temperature; with a kept matrix, only at every third pass.

    Args:
        problem: The problem.
        memory: Bytes that the matrix may take. If it needs more than half of what is free, it is not kept either.

    """

    DRIFT = 40.0
    SMALLEST_LOG_C = -60.0
    RENEWAL = 3

    def __init__(self, problem: Problem, memory: int) -> None:
        n_x = len(problem.a)
        n_y = len(problem.b)
        self.memory = memory
        self.near: Near | None = None
        self.problem = problem.part(own_rows(n_x))
        device = problem.b.device
        # Each thread has a tile, so a small memory is enough for few of them.
        workers = max(1, min(threads.count(device), memory // (LEAST_HEIGHT * n_y * problem.dtype.itemsize)))
        self.tiles, self.blocks = tiling(self.problem, memory / workers)
        share = -(-n_x // distributed.world_size())  # equal on all processes, so that all take the same decision
        needed = share * n_y * problem.dtype.itemsize
        block = [max((s.stop - s.start for s in parts), default=0) for parts in (self.tiles, self.blocks)]
        tile = [len(self.blocks), *block]
        storage = None
        if needed <= memory:
            if 2 * needed <= free_memory(device):
                storage = _allocate(len(self.tiles), *tile, dtype=problem.dtype, device=device)
            if not all(answer for (answer,) in distributed.exchange([int(storage is not None)])):
                storage = None
        self.storage = storage
        self.keep = storage is not None
        # Each thread takes a space to work in: for a block, and for a tile unless all are kept.
        self.spaces: SimpleQueue[tuple[Tensor, Tensor]] = SimpleQueue()
        for _ in range(workers):
            squares = torch.empty(block, dtype=problem.dtype, device=device)
            self.spaces.put((squares, squares.new_empty(0 if self.keep else tile)))
        self.top = squares.new_empty(len(self.problem.a))
        self.mass = self.problem.a.to(problem.dtype)
        self.scale = squares.new_empty(len(self.blocks), len(self.top))
        self.reference = torch.zeros_like(problem.b)
        self.age = -1
        self.curvature = torch.ones_like(problem.b)
        self.curved_at = torch.full_like(problem.b, math.inf)

    def __call__(self, zeta: Tensor, collects: bool = False) -> State:
        """Pass over the scores once and return the state at zeta, with large entries if the pass collects them."""
        p = self.problem
        drift = (self.reference - zeta) / p.temperature
        fresh = self.age < 0 or not self.keep or float(drift.amax() - drift.amin()) > self.DRIFT
        self.age = 0 if fresh else self.age + 1
        if fresh:
            self.reference = zeta
            drift = torch.zeros_like(zeta)
        renews = self.age % self.RENEWAL == 0 and float((zeta - self.curved_at).abs().amax()) > p.temperature
        self.curved_at = zeta if renews else self.curved_at
        v = drift.exp()
        one = _Pass(
            shift=(zeta / -p.temperature).to(p.dtype) if fresh else None,
            v=v.to(p.dtype),
            bv=(p.b * v).to(p.dtype),
            z=torch.empty_like(self.top),
            sums=zeta.new_zeros(1 + renews, len(zeta)),
            limits=Limits.of(p, self.memory) if collects else None,
        )
        total = torch.zeros_like(one.sums)
        none = torch.empty(0, dtype=torch.int32, device=zeta.device)
        entries = [(none, none, self.top[:0])]

        def add(part: tuple[Tensor, list[Entries]]) -> None:
            total.add_(part[0])
            entries.extend(part[1])

        step = max(1, threads.PART // (len(p.b) * max(1, self.tiles[0].stop if self.tiles else 1)))
        numbers = [range(s.start, s.stop) for s in slices(len(self.tiles), step)]
        threads.in_order(partial(self._sum_tiles, one), numbers, zeta.device, add)
        log_z = self.top.to(zeta) + one.z.to(zeta).log()
        if one.limits:
            self.near = Near.of(entries, one.limits.shape, zeta, log_z)
        return self._state(zeta, v, total, log_z)

    def _sum_tiles(self, one: "_Pass", numbers: range) -> tuple[Tensor, list[Entries]]:
        """Sum the columns of some tiles, set their rows of z, and return the sums and their large entries."""
        sums = torch.zeros_like(one.sums)
        entries = []
        squares, space = self.spaces.get()
        try:
            for number in numbers:
                rows = self.tiles[number]
                whole = space if self.storage is None else self.storage[number]
                tile = [
                    block[: rows.stop - rows.start, : columns.stop - columns.start]
                    for block, columns in zip(whole, self.blocks, strict=True)
                ]
                if one.shift is not None:
                    self._fill(tile, rows, one.shift)
                parts = list(zip(tile, self.blocks, self.scale[:, rows], strict=True))
                one.z[rows] = sum(scale * (block @ one.bv[columns]) for block, columns, scale in parts)
                weight = self.mass[rows] / one.z[rows]
                for block, columns, scale in parts:
                    sums[0, columns] += block.T @ (weight * scale)
                    product = squares[: len(block), : block.shape[1]]
                    if len(sums) == 2:
                        torch.mul(block, block, out=product)
                        sums[1, columns] += product.T @ (weight * scale.square() / one.z[rows])
                    if one.limits:
                        torch.mul(block, one.v[columns], out=product)
                        entries.append(one.limits.large_entries(rows, columns, product, scale / one.z[rows]))
        finally:  # otherwise other threads would wait for the space after an error
            self.spaces.put((squares, space))
        return sums, entries

    def _fill(
        self,
        tile: list[Tensor],
        rows: slice,
        shift: Tensor,
    ) -> None:
        """Fill each block with exp(logit - block row maximum); `scale` holds exp(block row maximum - row maximum)."""
        for block, columns, top in zip(tile, self.blocks, self.scale, strict=True):
            self.problem.logits(
                rows,
                columns,
                shift,
                out=block,
            )
            top[rows] = largest = block.amax(dim=1)
            block.sub_(largest[:, None]).mul_(LOG2_E).exp2_()  # exp2_ is three times as fast as exp_ on CPU
        self.top[rows] = self.scale[:, rows].amax(dim=0)
        self.scale[:, rows] = (self.scale[:, rows] - self.top[rows]).exp()

    def _state(
        self,
        zeta: Tensor,
        v: Tensor,
        sums: Tensor,
        log_z: Tensor,
    ) -> State:
        p = self.problem
        total = distributed.sum_over_processes(torch.cat([sums.flatten(), (p.a @ log_z)[None]]))
        c = total[: len(v)] * v
        log_c = c.log()
        if not bool(log_c.amin() > self.SMALLEST_LOG_C):  # c underflows: use logs
            log_c = distributed.all_gather(log_column_sums(p, zeta, log_z[None])).logsumexp(dim=0)
        if len(sums) == 2:
            self.curvature = (1 - p.b * v.square() * total[len(v) : -1] / c).nan_to_num(nan=1.0)
        objective = (p.temperature * total[-1] + p.b @ zeta) / len(zeta)
        return State(zeta, log_c, log_z, self.curvature, float(objective), self.near)


def _allocate(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    try:
        return torch.empty(
            *size,
            dtype=dtype,
            device=device,
        )
    except (RuntimeError, MemoryError):  # torch raises a RuntimeError on CPU, and a subclass of it on accelerators
        return None


def tiling(problem: Problem, memory: float = math.inf) -> tuple[list[slice], list[slice]]:
    """Return slices of the rows (as high as fits into memory) and of the columns (multiples of 64 wide)."""
    height, width = CPU_BLOCK if problem.b.device.type == "cpu" else GPU_BLOCK
    fitting = memory / (len(problem.b) * problem.dtype.itemsize)
    shared = max(len(problem.a) / TILES, threads.PART / len(problem.b))
    tiles = slices(len(problem.a), int(min(height, max(LEAST_HEIGHT, min(shared, fitting)))))
    count = -(-len(problem.b) // width)
    return tiles, slices(len(problem.b), 64 * -(-len(problem.b) // (64 * count)))


def own_rows(n_x: int) -> slice:
    """Return the slice of the anchors that this process handles."""
    rank = distributed.rank()
    world = distributed.world_size()
    return slice(n_x * rank // world, n_x * (rank + 1) // world)


def gather_rows(own: Tensor, n_x: int) -> Tensor:
    """Gather a value per anchor from all processes, (n_x,)."""
    everyone = own.new_zeros(n_x)
    everyone[own_rows(n_x)] = own
    return distributed.sum_over_processes(everyone)


def log_column_sums(
    problem: Problem,
    zeta: Tensor,
    log_z: Tensor,
    factors: Sequence[float] = (1.0,),
) -> Tensor:
    """Compute log c in logs: slower than a pass, but safe at any distance from the solution.

    Args:
        problem: The problem.
        zeta: (n_y,).
        log_z: (n_x,) for each factor, (k, n_x).
        factors: What logits are multiplied by: at zeta = 0, a factor of 1/2 is twice the problem's temperature.

    Returns:
        (k, n_y).

    """
    shift = (zeta / -problem.temperature).to(problem.dtype)
    log_weight = (problem.a.log() - log_z).to(shift)[:, :, None]
    tiles, blocks = tiling(problem)

    def of_columns(columns: slice) -> Tensor:
        total = torch.full_like(zeta[columns].expand(len(factors), -1), -math.inf)
        for rows in tiles:
            logits = problem.logits(rows, columns, shift)
            for sums, weight, factor in zip(total, log_weight[:, rows], factors, strict=True):
                terms = torch.add(weight, logits, alpha=factor)
                top = terms.amax(dim=0).clamp_min_(torch.finfo(terms.dtype).min)  # finite without any mass
                log_sum = terms.sub_(top).mul_(LOG2_E).exp2_().sum(dim=0).log_().add_(top)
                torch.logaddexp(sums, log_sum.to(sums), out=sums)
        return total

    log_c: list[Tensor] = []
    threads.in_order(of_columns, blocks, zeta.device, log_c.append)
    return torch.cat(log_c, dim=1)
