"""The convex problem whose solution is the popularity of every candidate.

    minimise over zeta  (sum_i a_i tau log Z_i + sum_j b_j zeta_j) / n_y,    Z_i = sum_j b_j exp((s_ij - zeta_j)/tau)

with i over n_x anchors, j over n_y candidates, s_ij = <x_i, y_j> or given. The masses a_i = n_y / n_x and b_j = 1
(uniform marginals) may be replaced by any with the same total n_y. With the *column sums*

    c_j = sum_i a_i exp((s_ij - zeta_j)/tau) / Z_i

the gradient in zeta_j is b_j (1 - c_j) / n_y. So the optimum has c = 1, zeta is unique up to a constant, and the
residual is max_j |c_j - 1|. This is the semi-dual of entropic optimal transport between the marginals a and b, and
zeta <- zeta + tau log c is Sinkhorn's iteration. A mass of k stands for k copies, and zeta is a function of the
candidate alone, whatever its own mass. Reference: Cuturi and Peyré, "Semidual regularized optimal transport", 2018.

One pass over the scores gives c and log Z together: a tile of rows is made, normalised and summed down its columns
before the next one is made. Under torch.distributed each process passes over its own anchors, and one sum over the
processes of n_y + 1 numbers joins them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from nuclr import distributed

TILE_ELEMENTS = {"cpu": 2**21, "cuda": 2**27}  # a tile stays in a CPU's last cache, or fills a GPU


@dataclass(frozen=True)
class Problem:
    """Scores (n_x, n_y), or features x (n_x, d) and y (n_y, d), with a temperature and masses a (n_x,), b (n_y,)."""

    temperature: float
    a: Tensor
    b: Tensor
    x: Tensor | None = None
    y: Tensor | None = None
    scores: Tensor | None = None

    @cached_property
    def given(self) -> tuple[Tensor, ...]:
        """The scores, or x and y."""
        return tuple(t for t in (self.scores, self.x, self.y) if t is not None)

    @property
    def dtype(self) -> torch.dtype:
        """What scores are computed in; masses, sums and potentials are always float64."""
        return self.given[0].dtype

    @property
    def device(self) -> torch.device:
        """Where all tensors live."""
        return self.given[0].device

    def to(self, dtype: torch.dtype) -> "Problem":
        """The same problem computed in another precision."""
        x, y, scores = (None if t is None else t.to(dtype) for t in (self.x, self.y, self.scores))
        return replace(self, x=x, y=y, scores=scores)

    def part(self, rows: slice) -> "Problem":
        """Some anchors with all candidates."""
        x, scores = (None if t is None else t[rows] for t in (self.x, self.scores))
        return replace(self, a=self.a[rows], x=x, scores=scores)

    def dense(self) -> "Problem":
        """The same problem with its scores written out."""
        if self.x is None or self.y is None:
            return self
        return Problem(self.temperature, self.a, self.b, scores=self.x @ self.y.T)

    @cached_property
    def scale(self) -> float:
        """A bound on |s_ij|: what rounding errors are relative to."""
        if self.x is None or self.y is None:
            return max(float(t.abs().amax()) for t in self.given)
        return float(self.x.norm(dim=1).amax() * self.y.norm(dim=1).amax())

    def tiles(self, zeta: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """(rows, (s_ij - zeta_j) / tau) from first to last anchor; the next tile overwrites this one."""
        n_x, n_y = len(self.a), len(self.b)
        height = max(16, TILE_ELEMENTS.get(self.device.type, 2**21) // n_y)
        buffer = torch.empty(min(height, n_x), n_y, dtype=self.dtype, device=self.device)
        shift = (zeta / -self.temperature).to(self.dtype)
        for start in range(0, n_x, height):
            rows = slice(start, min(start + height, n_x))
            tile = buffer[: rows.stop - rows.start]
            if self.x is None or self.y is None:
                torch.add(shift, self.given[0][rows], alpha=1 / self.temperature, out=tile)
            else:
                torch.addmm(shift, self.x[rows], self.y.T, alpha=1 / self.temperature, out=tile)
            yield rows, tile


@dataclass(frozen=True)
class State:
    """What a pass at zeta tells: log c (n_y,), log Z of this process's anchors, the objective's value."""

    zeta: Tensor
    log_c: Tensor
    log_z: Tensor
    objective: float
    exact: bool

    @cached_property
    def residual(self) -> float:
        """max_j |c_j - 1|."""
        return float(torch.expm1(self.log_c).abs().amax())


class Kernel:
    """The pass zeta -> State, with the conditional probabilities kept in memory where they fit.

    Kept is A_ij = exp((s_ij - r_j) / tau) / Z_i(r) at a reference r. At another zeta it needs only a scaling
    v_j = exp((r_j - zeta_j) / tau), so a pass is two matrix-vector products and no exponential. Once v strays by more
    than exp(DRIFT) the reference moves to the current zeta, so that no entry that matters under- or overflows
    (Schmitzer, "Stabilized sparse scaling algorithms for entropy regularized transport problems", 2019).
    """

    DRIFT = 20.0
    SMALLEST_LOG_C = -60.0

    def __init__(self, problem: Problem, memory: int) -> None:
        rank, world, self.n_x = distributed.rank(), distributed.world_size(), len(problem.a)
        self.rows = slice(self.n_x * rank // world, self.n_x * (rank + 1) // world)
        local = problem.part(self.rows)
        size = len(local.a), len(local.b)
        bytes_needed = math.prod(size) * local.dtype.itemsize
        self.problem = local.dense() if 2 * bytes_needed <= memory else local
        fits = bytes_needed <= memory
        self.kept = torch.empty(size, dtype=local.dtype, device=local.device) if fits else None
        self.reference: State | None = None

    def __call__(self, zeta: Tensor, exact: bool = False) -> State:
        """One pass; `exact` begins with the scores and not with what was kept of them."""
        if self.reference is not None and not exact:
            drift = (self.reference.zeta - zeta) / self.problem.temperature
            if float(drift.amax() - drift.amin()) <= self.DRIFT:
                return self._scaled(zeta, drift)
        state = self._exact(zeta)
        self.reference = None if self.kept is None else state
        return state

    def _exact(self, zeta: Tensor) -> State:
        a, b = (mass.to(self.problem.dtype) for mass in (self.problem.a, self.problem.b))
        c, log_z = torch.zeros_like(zeta), torch.empty_like(self.problem.a)
        for rows, tile in self.problem.tiles(zeta):
            top = tile.amax(dim=1)
            tile.sub_(top[:, None]).exp_()
            z = tile @ b
            log_z[rows] = (z.log() + top).to(log_z)
            c += (a[rows] / z) @ tile
            if self.kept is not None:
                torch.div(tile, z[:, None], out=self.kept[rows])
        return self._joined(zeta, c, log_z, exact=True)

    def _scaled(self, zeta: Tensor, drift: Tensor) -> State:
        assert self.kept is not None and self.reference is not None
        v = drift.exp()
        z = self.kept @ (self.problem.b * v).to(self.kept)
        c = ((self.problem.a / z).to(self.kept) @ self.kept) * v
        return self._joined(zeta, c, self.reference.log_z + z.log(), exact=False)

    def _joined(self, zeta: Tensor, c: Tensor, log_z: Tensor, exact: bool) -> State:
        total = distributed.sum_over_processes(torch.cat([c, (self.problem.a @ log_z)[None]]))
        log_c = total[:-1].log()
        if not bool(log_c.amin() > self.SMALLEST_LOG_C):  # a candidate that no anchor reaches: once more, in logs
            log_c = self._log_column_sums(zeta, log_z)
        objective = self.problem.temperature * total[-1] + self.problem.b @ zeta
        return State(zeta, log_c, log_z, float(objective) / len(zeta), exact)

    def all_log_z(self, state: State) -> Tensor:
        """Log Z of all processes' anchors, (n_x,)."""
        everyone = state.log_z.new_zeros(self.n_x)
        everyone[self.rows] = state.log_z
        return distributed.sum_over_processes(everyone)

    def _log_column_sums(self, zeta: Tensor, log_z: Tensor) -> Tensor:
        local = log_weighted_column_sums(self.problem, zeta, log_z)
        return distributed.all_gather(local[None]).logsumexp(dim=0)


def log_weighted_column_sums(problem: Problem, zeta: Tensor, log_z: Tensor) -> Tensor:
    """Log of sum_i a_i exp((s_ij - zeta_j)/tau) / Z_i, (n_y,), without under- or overflow at any zeta."""
    log_c = torch.full_like(zeta, -math.inf)
    for rows, tile in problem.tiles(zeta):
        tile += (problem.a[rows].log() - log_z[rows])[:, None].to(tile)
        log_c = torch.logaddexp(log_c, tile.logsumexp(dim=0).to(log_c))
    return log_c


def make_problem(
    x: Tensor | None,
    y: Tensor | None,
    scores: Tensor | None,
    temperature: float,
    x_weight: Tensor | None = None,
    y_weight: Tensor | None = None,
) -> Problem:
    """A Problem from what a user gives, or a ValueError that names what is wrong with it."""
    if not (isinstance(temperature, int | float) and 0 < temperature < math.inf):
        raise ValueError(f"temperature={temperature}; give a finite number above 0")
    given = {name: t for name, t in (("x", x), ("y", y), ("scores", scores)) if t is not None}
    if given.keys() not in ({"x", "y"}, {"scores"}):
        raise ValueError(f"got {' and '.join(given) or 'neither features nor scores'}; give x and y, or scores alone")
    given = {name: check_matrix(name, t) for name, t in given.items()}
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in given.values()) else torch.float32
    given = {name: t.detach().to(dtype) for name, t in given.items()}
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
    return Problem(float(temperature), a, b, **given)


def check_matrix(name: str, value: Tensor) -> Tensor:
    """A matrix of finite floating-point numbers, as it is."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim != 2:
        what = f"a tensor of {value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} is {what}; give a floating-point tensor of two dimensions")
    # A sum reads the numbers once and writes nothing; only if it is not finite is each one looked at.
    if not bool(value.sum(dtype=torch.float64).isfinite()) and not bool(value.isfinite().all()):
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
