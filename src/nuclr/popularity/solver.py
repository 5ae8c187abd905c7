"""Solve the popularity problem: `solve` for users, `Solver` for programs.

float32 input is solved in float32 down to the smallest residual that float32 resolves at this temperature, and in
float64 from there on. Each zeta is evaluated with mean zero and in the precision in which it would be returned, so
the reported residual is exactly that of the returned numbers.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nuclr import distributed
from nuclr.arrays import Array, Features, Norms, Vector, as_positive, as_rows, as_vector
from nuclr.popularity import threads
from nuclr.popularity.kernel import Kernel, State, gather_rows
from nuclr.popularity.methods import METHODS, Sparse, check_method
from nuclr.popularity.problem import Problem, make_problem
from nuclr.popularity.result import Result
from nuclr.popularity.sample import Estimator, RowMap

PATIENCE = 50  # passes without a new best residual, near the limit of the arithmetic, before the solver gives up
LARGEST_RANGE = 1000.0  # of zeta / tau, beyond the range of the scores, if pairs are excluded
EXACT_SCORES = 2**32  # "auto" computes up to this many scores exactly: 65,536 x 65,536
LEAST_SAMPLE = 16


class ConvergenceWarning(RuntimeWarning):
    """The solver stopped above the tolerance."""


def solve(
    x: Features | None = None,
    y: Features | None = None,
    *,
    scores: Array | None = None,
    temperature: float,
    normalize: bool = False,
    method: str = "auto",
    tolerance: float = 1e-4,
    max_iterations: int = 10_000,
    init: Vector | None = None,
    progress: bool = False,
    x_weight: Vector | None = None,
    y_weight: Vector | None = None,
    exclude_copies: bool = False,
    memory: int = 2**32,
    sample: int = 16_384,
    row_map: RowMap | None = None,
) -> Result:
    """Solve for the popularity of candidates y among anchors x: every candidate is chosen equally often at zeta.

    Under torch.distributed all processes pass the same arguments, share the work and get the same result.

    Args:
        x: Features of the anchors, (n_x, d), unit norm.
        y: Features of the candidates, (n_y, d), unit norm. The scores <x_i, y_j> are computed tile by tile.
        scores: Any scores (n_x, n_y) instead of features; rows are anchors.
        temperature: tau.
        normalize: Scale features to unit norm. Without it, features whose norm differs from 1 by more than 1e-2 are
            refused.
        method: "sparse", "anderson" (Anderson acceleration of Sinkhorn's iteration), "sinkhorn" and "gradient" (the
            paper's) solve the problem exactly. "sparse" needs the fewest passes over the scores: between them it solves
            a model that keeps the large probabilities only. "sample" solves a sample exactly, extends the solution and
            estimates its error (`Result.error`). "auto" is "sparse" up to 2**32 scores (n_x n_y), and "sample" for
            features with more.
        tolerance: Residual max_j |(n_y/n_x) sum_i P_ij - 1| at which an exact method stops.
        max_iterations: Largest number of passes over the scores.
        init: Zeta to start from, (n_y,), for example that of a nearby temperature or of earlier features.
        progress: Show the passes and their residual on stderr.
        x_weight: Marginal of the anchors up to a factor, (n_x,); a weight of k stands for k copies. The residual is
            then max_j |sum_i a_i P_ij / b_j - 1|, with a and b the weights divided by their sums.
        y_weight: Marginal of the candidates up to a factor, (n_y,).
        exclude_copies: An anchor does not choose candidates that equal it (cosine above 1 - 1e-5), as if an item
            searched for others of its kind. Needs features and an exact method.
        memory: Bytes to spend on the matrix of probabilities. If the whole matrix fits, and takes at most half of the
            memory that is free, it is kept, which makes a pass much cheaper. Otherwise it is computed tile by tile in
            every pass, and this limits the size of a tile.
        sample: Number of anchors and of candidates in the small problem that method="sample" solves.
        row_map: How method="sample" maps a function of consecutive rows over all rows, called with the name of the map,
            the rows and the function; it may keep results of blocks in files. None: the function is called once.

    Returns:
        The result. If it did not converge, `converged` is False and a ConvergenceWarning is issued; an interrupt
        (Ctrl-C) returns the best zeta so far.

    Raises:
        ValueError: If an argument has a wrong type, shape or value; the message names it.

    Example:
        >>> queries = torch.nn.functional.normalize(torch.tensor([[1.0, 0.2], [1.0, -0.2], [0.2, 1.0]]), dim=1)
        >>> result = solve(x=queries, y=torch.eye(2), temperature=0.5)
        >>> result.converged, result.ranks.tolist()
        (True, [1, 2])

    """
    norms: Norms = "normalize" if normalize else "unit"
    is_large = False
    if x is not None and y is not None:
        x = as_rows("x", x, norms)
        y = as_rows(
            "y",
            y,
            norms,
            width=x.shape[1],
        )
        is_large = len(x) * len(y) > EXACT_SCORES
        if method == "sample" and sample >= max(len(x), len(y)):
            method = "sparse"
    estimates = method == "sample" or (method == "auto" and is_large)
    if estimates and scores is not None:
        raise ValueError('method="sample" with scores; give features x and y, of which it computes only some scores')
    if estimates and exclude_copies:
        raise ValueError('exclude_copies=True with method="sample"; use method="sparse"')
    problem = make_problem(
        x,
        y,
        scores,
        temperature=temperature,
        x_weight=x_weight,
        y_weight=y_weight,
        norms=norms,
        read_in_parts=estimates,
        exclude_copies=exclude_copies,
    )
    solver = Solver("sparse" if estimates else method, tolerance, max_iterations, progress, memory)
    if not estimates:
        return solver(problem, init)
    if sample < LEAST_SAMPLE:
        raise ValueError(f"sample={sample}; give at least {LEAST_SAMPLE}")
    result = Estimator(solver, sample, row_map=row_map)(problem, as_start(init, problem))
    if method == "auto":
        warnings.warn(
            f"{len(problem.a)} x {len(problem.b)} scores: zeta is estimated from a sample, and the error of zeta / tau "
            f'is about {result.error:.2g} (root mean square); method="sample" accepts this, method="sparse" is exact',
            ConvergenceWarning,
            stacklevel=2,
        )
    return result


@dataclass(frozen=True)
class Solver:
    """How to solve a Problem; the fields are arguments of `solve`.

    Example:
        >>> from nuclr.popularity.problem import make_problem
        >>> Solver(tolerance=1e-6)(make_problem(torch.eye(3), torch.eye(3), temperature=0.5)).converged
        True

    """

    method: str = "auto"
    tolerance: float = 1e-4
    max_iterations: int = 10_000
    progress: bool = False
    memory: int = 2**32

    def __post_init__(self) -> None:
        check_method(self.method)
        as_positive("tolerance", self.tolerance)
        if self.max_iterations < 1:
            raise ValueError(f"max_iterations={self.max_iterations}; give at least 1")

    def __call__(self, problem: Problem, init: Vector | None = None) -> Result:
        """Solve the problem, starting from zeta = init or from 0."""
        zeta = as_start(init, problem)
        history: list[float] = []
        reason = "rounding errors"
        with threads.one_per_operation(), progress_line(self.progress) as show:
            try:
                for residual, best, dtype in self._passes(problem, zeta):  # noqa: B007
                    history.append(residual)
                    show(history)
                    if len(history) >= self.max_iterations:
                        reason = f"max_iterations={self.max_iterations}"
                        break
            except KeyboardInterrupt:
                if not history:
                    raise
                reason = "an interrupt"
        converged = best.residual + rounding_limit(problem, dtype) <= self.tolerance
        if has_no_solution(problem, best.zeta):
            converged = False
            reason = "candidates that anchors may not choose, so that no zeta solves it,"
        if not converged:
            warnings.warn(
                f"residual {best.residual:.2g} after {len(history)} passes; stopped by {reason} before reaching "
                f"tolerance={self.tolerance:g}",
                ConvergenceWarning,
                stacklevel=3,
            )
        log_z = gather_rows(best.log_z, len(problem.a))
        zeta = best.zeta.to(dtype)
        return Result(
            problem,
            zeta,
            log_z,
            best.residual,
            converged,
            iterations=len(history),
            history=tuple(history),
            method="sparse" if self.method == "auto" else self.method,
        )

    def _passes(self, problem: Problem, zeta: Tensor) -> Iterator[tuple[float, State, torch.dtype]]:
        """Yield, per pass over the scores, its residual, the best state so far in this precision, and the precision."""
        for dtype in dict.fromkeys((problem.dtype, torch.float64)):
            limit = rounding_limit(problem, dtype)
            target = max(self.tolerance - limit, limit)
            kernel = Kernel(problem.to(dtype), self.memory)
            method = METHODS[self.method](kernel)
            state = best = kernel(representable(zeta, dtype))
            yield state.residual, best, dtype
            stale = 0
            while best.residual > target and stale < PATIENCE:
                zeta = representable(method.propose(state), dtype)
                proposal = kernel(zeta, collects=isinstance(method, Sparse) and method.collects(zeta))
                state = proposal if method.accepts(state, proposal) else state
                if proposal.residual < best.residual:
                    best = proposal
                    stale = 0
                elif best.residual < 1000 * limit:
                    stale += 1
                yield proposal.residual, best, dtype
            if best.residual + limit <= self.tolerance:
                return
            zeta = best.zeta
            del kernel, method  # free their memory before the next kernel allocates


def as_start(init: Vector | None, problem: Problem) -> Tensor:
    """Return the zeta to start from: init, or 0."""
    return torch.zeros_like(problem.b) if init is None else as_vector("init", init, len(problem.b)).to(problem.b)


def rounding_limit(problem: Problem, dtype: torch.dtype) -> float:
    """Return a bound on the rounding error of a residual: a few roundings of the largest exponent and of the sums."""
    return torch.finfo(dtype).eps * (4 * problem.scale / problem.temperature + 32)


def has_no_solution(problem: Problem, zeta: Tensor) -> bool:
    """Return whether anchors choose pairs that they may not choose (`problem.COPY_LOGIT`), so nothing solves it."""
    excludes = problem.exclude_copies or problem.answer_scores is not None
    return excludes and float(zeta.max() - zeta.min()) > LARGEST_RANGE * problem.temperature + 4 * problem.scale


def representable(zeta: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeta as it would be returned to the user (mean zero, rounded to `dtype`), held in float64."""
    return (zeta - zeta.mean()).to(dtype).to(torch.float64)


@contextmanager
def progress_line(shown: bool) -> Iterator[Callable[[Sequence[float]], None]]:
    """Yield a function to call with the history of residuals after each pass; it shows the last one on stderr."""
    if not shown or distributed.rank() > 0:
        yield lambda history: None  # noqa: ARG005
        return

    def show(history: Sequence[float]) -> None:
        sys.stderr.write(f"\rpopularity: pass {len(history)}, residual {history[-1]:.1e} ")
        sys.stderr.flush()

    yield show
    sys.stderr.write("\n")
