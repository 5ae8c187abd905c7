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
processes of at most 2 n_y + 1 numbers joins them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from nuclr import distributed

TILE_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
TILE_HEIGHT = 128  # few enough that a sum over a tile's rows may be taken in float32; tiles are summed in float64


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

    @cached_property
    def scale(self) -> float:
        """A bound on |s_ij|: what rounding errors are relative to."""
        if self.x is None or self.y is None:
            return max(abs(float(extreme)) for extreme in self.given[0].aminmax())
        return float(self.x.norm(dim=1).amax() * self.y.norm(dim=1).amax())

    def tiles(self) -> Iterator[slice]:
        """Rows from first to last, as many at a time as stay in a CPU's cache or fill a GPU."""
        n_x, n_y = len(self.a), len(self.b)
        height = max(16, min(TILE_ELEMENTS.get(self.device.type, 2**20) // n_y, TILE_HEIGHT))
        return (slice(start, min(start + height, n_x)) for start in range(0, n_x, height))

    def logits(self, rows: slice, shift: Tensor, out: Tensor | None = None) -> Tensor:
        """s_ij / tau + shift_j of some rows; shift is -zeta / tau."""
        if self.x is None or self.y is None:
            return torch.add(shift, self.given[0][rows], alpha=1 / self.temperature, out=out)
        return torch.addmm(shift, self.x[rows], self.y.T, alpha=1 / self.temperature, out=out)


@dataclass(frozen=True)
class State:
    """What a pass at zeta tells.

    log_c (n_y,); log_z (n_x,), of this process's anchors; the objective's value; and the curvature (n_y,), the
    diagonal tau n_y d2/dzeta_j2 of the objective's Hessian relative to b_j c_j: 1 - b_j sum_i a_i A_ij^2 / c_j, with
    A_ij = exp((s_ij - zeta_j)/tau) / Z_i. It is near 0 where one anchor has a candidate almost to itself.
    """

    zeta: Tensor
    log_c: Tensor
    log_z: Tensor
    curvature: Tensor
    objective: float

    @cached_property
    def residual(self) -> float:
        """max_j |c_j - 1|."""
        return float(torch.expm1(self.log_c).abs().amax())


class Kernel:
    """The pass zeta -> State, over exp((s_ij - r_j) / tau - top_i) at a reference r, with top_i the row's largest.

    Where the matrix fits into memory it is kept. At another zeta its columns need only be scaled by
    v_j = exp((r_j - zeta_j) / tau), so a pass is two matrix-vector products and no exponential; once v strays by more
    than exp(DRIFT), the reference moves to the current zeta, so that no entry that matters under- or overflows
    (Schmitzer, "Stabilized sparse scaling algorithms for entropy regularized transport problems", 2019).
    Where it does not fit, zeta is its own reference and one tile is held at a time.
    The curvature costs another product with the squared entries; over a kept matrix it is renewed at every third pass.
    """

    DRIFT = 40.0
    SMALLEST_LOG_C = -60.0
    RENEWAL = 3

    def __init__(self, problem: Problem, memory: int) -> None:
        self.problem = problem.part(own_rows(len(problem.a)))
        self.tiles = list(self.problem.tiles())
        self.fits = len(self.problem.a) * len(self.problem.b) * problem.dtype.itemsize <= memory
        height = len(self.problem.a) if self.fits else self.tiles[0].stop
        self.matrix = torch.empty(height, len(self.problem.b), dtype=problem.dtype, device=problem.device)
        self.squares = self.matrix.new_empty(self.tiles[0].stop, len(self.problem.b))
        self.top = torch.empty_like(self.problem.a, dtype=problem.dtype)
        self.reference, self.curvature, self.age = torch.zeros_like(problem.b), torch.ones_like(problem.b), -1

    def __call__(self, zeta: Tensor) -> State:
        """One pass over the scores."""
        p = self.problem
        drift = (self.reference - zeta) / p.temperature
        fresh = self.age < 0 or not self.fits or float(drift.amax() - drift.amin()) > self.DRIFT
        self.age = 0 if fresh else self.age + 1
        if fresh:
            self.reference, drift = zeta, torch.zeros_like(zeta)
        renew = self.age % self.RENEWAL == 0
        v = drift.exp()
        bv, shift = (p.b * v).to(p.dtype), (zeta / -p.temperature).to(p.dtype)
        sums, log_z = zeta.new_zeros(2, len(zeta)), torch.empty_like(p.a)
        for rows in self.tiles:
            tile = self.matrix[rows if self.fits else slice(rows.stop - rows.start)]
            if fresh:
                self.top[rows] = p.logits(rows, shift, out=tile).amax(dim=1)
                tile.sub_(self.top[rows, None]).exp_()
            z = tile @ bv
            log_z[rows] = z.log() + self.top[rows]
            sums[0] += (p.a[rows] / z).to(tile) @ tile
            if renew:
                squares = torch.mul(tile, tile, out=self.squares[: len(tile)])
                sums[1] += (p.a[rows] / z.square()).to(tile) @ squares
        return self._state(zeta, v, sums if renew else sums[:1], log_z)

    def _state(self, zeta: Tensor, v: Tensor, sums: Tensor, log_z: Tensor) -> State:
        p = self.problem
        total = distributed.sum_over_processes(torch.cat([sums.flatten(), (p.a @ log_z)[None]]))
        log_c = (total[: len(v)] * v).log()
        if not bool(log_c.amin() > self.SMALLEST_LOG_C):  # a candidate that no anchor reaches: once more, in logs
            log_c = distributed.all_gather(log_column_sums(p, zeta, log_z)[None]).logsumexp(dim=0)
        if len(sums) > 1:
            self.curvature = (1 - p.b * v * total[len(v) : -1] / total[: len(v)]).nan_to_num(nan=1.0)
        objective = (p.temperature * total[-1] + p.b @ zeta) / len(zeta)
        return State(zeta, log_c, log_z, self.curvature, float(objective))


def own_rows(n_x: int) -> slice:
    """This process's share of the anchors."""
    rank, world = distributed.rank(), distributed.world_size()
    return slice(n_x * rank // world, n_x * (rank + 1) // world)


def gather_rows(own: Tensor, n_x: int) -> Tensor:
    """What all processes found for their anchors, (n_x,)."""
    everyone = own.new_zeros(n_x)
    everyone[own_rows(n_x)] = own
    return distributed.sum_over_processes(everyone)


def log_column_sums(problem: Problem, zeta: Tensor, log_z: Tensor) -> Tensor:
    """Log c, (n_y,), at any zeta, however far from the solution: slower than a pass, but all in logs."""
    log_c = torch.full_like(zeta, -math.inf)
    shift = (zeta / -problem.temperature).to(problem.dtype)
    for rows in problem.tiles():
        logits = problem.logits(rows, shift) + (problem.a[rows].log() - log_z[rows])[:, None].to(shift)
        log_c = torch.logaddexp(log_c, logits.logsumexp(dim=0).to(log_c))
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
