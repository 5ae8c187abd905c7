"""Popularity of both sides of embedded pairs: of the y with the x as anchors, and of the x with the y as anchors.

Every pair has a weight. With weights="pairs", all pairs have the same weight. With weights="x", every x has the same
total weight, divided equally among its pairs. The weight of an x is the sum of the weights of its pairs. An x without
any y is left out.
"""

import math
import time
import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nuclr.data.formats.embeddings import Embeddings, unit_rows
from nuclr.errors import UserError
from nuclr.evaluation import popularity_agreement
from nuclr.popularity import ConvergenceWarning, solve
from nuclr.popularity.kernel import free_memory
from nuclr.stacked import Stacked

Weights = Literal["pairs", "x"]
Align = Literal["none", "ridge"]

MEMORY = 2**30  # bytes of scores the solver may keep; passes over kept scores are several times faster
QUANTILES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
PENALTIES = tuple(10 ** (k / 2) for k in range(-8, 7))


@dataclass(frozen=True)
class Alignment:
    """x in the space of y, (n_x, d_y); the penalty per sample; the explained share of the targets' variance."""

    x: Tensor
    penalty: float
    explained: float


@dataclass(frozen=True)
class WeightedPairs:
    """Features in one space, and how they are paired.

    Attributes:
        x: (n_x, d), features of the x that have a y, of unit norm; Stacked features have any norm and are scaled when
            they are read.
        y: (n_y, d), the same.
        x_row: (n_x,), the row of each x in the embedding file.
        links: (n_y, 2), per pair the row of `x` and the row of `y`.
        x_weight: (n_x,), of mean one.
        y_weight: (n_y,), of mean one.
        alignment: how x was mapped to the space of y, if it was.

    """

    x: Tensor | Stacked
    y: Tensor | Stacked
    x_row: Tensor
    links: Tensor
    x_weight: Tensor
    y_weight: Tensor
    alignment: Alignment | None

    @property
    def normalize(self) -> bool:
        """Whether the features still have to be scaled to unit norm."""
        return isinstance(self.x, Stacked) or isinstance(self.y, Stacked)


@dataclass(frozen=True)
class SidePopularity:
    """Popularity of the samples of one side.

    Attributes:
        name: "x" or "y".
        row: (n,), the row of each sample in the embedding file.
        zeta: (n,), tau log popularity, of weighted mean zero.
        popularity: (n,), of weighted mean one.
        rank: (n,), 1 for the most popular.
        weight: (n,), of mean one.
        anchors: number of anchors.
        iterations: passes of the solver.
        residual: of the solution.
        converged: whether the residual is below the tolerance.
        seconds: time of the solver.
        agreement: rank correlation with N_10 of held-out anchors; NaN if it was not measured.

    """

    name: str
    row: np.ndarray
    zeta: np.ndarray
    popularity: np.ndarray
    rank: np.ndarray
    weight: np.ndarray
    anchors: int
    iterations: int
    residual: float
    converged: bool
    seconds: float
    agreement: float = math.nan

    def order(self) -> np.ndarray:
        """Return the positions of the samples from the most to the least popular."""
        return np.argsort(self.rank)

    def effective_number(self) -> float:
        """Return (sum q)^2 / sum q^2: n if all are equally popular, 1 if one sample has all popularity."""
        share = self.weight / self.weight.sum()
        return float(len(share) / (share @ self.popularity**2))

    def summary(self) -> dict[str, Any]:
        """Return this side's entry of popularity.json."""
        return {
            "candidates": len(self.zeta),
            "anchors": self.anchors,
            "iterations": self.iterations,
            "residual": self.residual,
            "converged": self.converged,
            "seconds": round(self.seconds, 2),
            "zeta_std": float(self.zeta.std()),
            "effective_number": self.effective_number(),
            "agreement": self.agreement if math.isfinite(self.agreement) else None,
            "quantiles": {str(q): float(np.quantile(self.popularity, q)) for q in QUANTILES},
        }


def weigh_pairs(embeddings: Embeddings, weights: Weights, align: Align) -> WeightedPairs:
    """Weight the pairs and bring x and y into one space; rows are scaled to unit norm.

    Stacked embeddings are not read, unless x has to be mapped to y.

    Raises:
        UserError: x and y have different widths and `align` is "none", or all pairs share one x.

    """
    if align == "none" and isinstance(embeddings.x, Stacked) and isinstance(embeddings.y, Stacked):
        return _pair_rows(embeddings.x, embeddings.y)
    all_x, all_y = _in_memory(embeddings.x), _in_memory(embeddings.y)
    y = unit_rows(all_y, "y")
    x_row, x_of_pair, counts = torch.unique(embeddings.y_to_x, return_inverse=True, return_counts=True)
    y_weight = torch.ones(len(y), dtype=torch.float64) if weights == "pairs" else 1 / counts.double()[x_of_pair]
    x_weight = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, x_of_pair, y_weight)
    if len(x_row) < 2:
        raise UserError(f"all pairs have the same x, row {int(x_row[0])}; popularity needs at least two")
    alignment = None
    if align == "ridge":
        mean_y = torch.zeros(len(x_row), y.shape[1], dtype=torch.float64)
        mean_y.index_add_(0, x_of_pair, y.double() / counts.double()[x_of_pair, None])
        alignment = align_ridge(all_x[x_row], mean_y, x_weight)
        x = unit_rows(alignment.x, "x mapped to y")
    else:
        _check_widths(all_x, y)
        x = unit_rows(all_x, "x")[x_row]
    return WeightedPairs(
        x=x.to(y),
        y=y,
        x_row=x_row,
        links=torch.stack([x_of_pair, torch.arange(len(y))], dim=1),
        x_weight=x_weight / x_weight.mean(),
        y_weight=y_weight / y_weight.mean(),
        alignment=alignment,
    )


def _pair_rows(x: Stacked, y: Stacked) -> WeightedPairs:
    """Return the pairs (x_j, y_j) of equal weight."""
    _check_widths(x, y)
    if len(y) < 2:
        raise UserError("popularity needs at least two pairs; there is one")
    rows, weight = torch.arange(len(y)), torch.ones(len(y), dtype=torch.float64)
    return WeightedPairs(x, y, rows, torch.stack([rows, rows], dim=1), weight, weight, None)


def _check_widths(x: Tensor | Stacked, y: Tensor | Stacked) -> None:
    if x.shape[1] != y.shape[1]:
        raise UserError(
            f"x has width {x.shape[1]} and y has width {y.shape[1]}: embed both with one model, or add\n"
            "--align ridge, which maps x to y by a ridge regression fitted on the pairs of this file"
        )


def _in_memory(features: Tensor | Stacked) -> Tensor:
    """Read all rows, at least in float32."""
    if isinstance(features, Tensor):
        return features
    size, free = 4 * math.prod(features.shape), free_memory(torch.device("cpu"))
    if size > 0.2 * free:  # several copies are needed
        raise UserError(
            f"--align ridge and --device need all embeddings in memory: {size / 2**30:.1f} GiB per side, and "
            f"{free / 2**30:.1f} GiB are free; use --align none and --device cpu, which read them in parts"
        )
    return torch.from_numpy(np.asarray(features, np.result_type(features.dtype, np.float32)))


def solve_sides(
    pairs: WeightedPairs, temperature: float, device: str = "cpu", views: bool = False, **options: Any
) -> dict[str, SidePopularity]:
    """Return the popularity of sides "y" and "x", for views of the same items only of "y".

    `options` are passed to `nuclr.popularity.solve`.
    """
    x, y = (_on_device(features, device) for features in (pairs.x, pairs.y))
    y_row, options = torch.arange(len(y)), options | {"normalize": pairs.normalize}
    sides = {"y": _solve("y", (x, pairs.x_weight), (y, pairs.y_weight), y_row, temperature, options)}
    if not views:
        sides["x"] = _solve("x", (y, pairs.y_weight), (x, pairs.x_weight), pairs.x_row, temperature, options)
        found = {
            "y": popularity_agreement(x, y, temperature, normalize=pairs.normalize),
            "x": popularity_agreement(y, x, temperature, normalize=pairs.normalize),
        }
        sides = {name: replace(side, agreement=found[name]) for name, side in sides.items()}
    return sides


def _on_device(features: Tensor | Stacked, device: str) -> Tensor | Stacked:
    """Return features where they are solved. On the CPU, rows in files are read as they are needed."""
    try:
        if isinstance(features, Stacked) and torch.device(device).type == "cpu":
            return features
        return _in_memory(features).to(device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device}: {str(error).splitlines()[0]}") from None


def _solve(
    name: str,
    anchors: tuple[Tensor | Stacked, Tensor],
    candidates: tuple[Tensor | Stacked, Tensor],
    row: Tensor,
    temperature: float,
    options: dict[str, Any],
) -> SidePopularity:
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the command reports `converged` itself
        result = solve(
            x=anchors[0],
            y=candidates[0],
            temperature=temperature,
            x_weight=anchors[1],
            y_weight=candidates[1],
            memory=MEMORY,
            **options,
        )
    weight = candidates[1].numpy()
    zeta = result.zeta.double().cpu().numpy()
    zeta = zeta - np.average(zeta, weights=weight)
    popularity = np.exp((zeta - zeta.max()) / temperature)
    rank = np.empty(len(zeta), dtype=np.int64)
    rank[np.argsort(-zeta, kind="stable")] = np.arange(1, len(zeta) + 1)
    return SidePopularity(
        name=name,
        row=row.numpy(),
        zeta=zeta,
        popularity=popularity / np.average(popularity, weights=weight),
        rank=rank,
        weight=weight,
        anchors=len(anchors[0]),
        iterations=result.iterations,
        residual=result.residual,
        converged=result.converged,
        seconds=time.perf_counter() - start,
    )


def align_ridge(x: Tensor, targets: Tensor, weight: Tensor) -> Alignment:
    """Map x into the space of y by a ridge regression, leaving out each x for its own prediction.

    Fitted values would make every pair look right, so each row is predicted by the fit on all other rows. This costs
    nothing extra for a linear smoother (Allen's PRESS): with fitted values t_hat and leverages h, the prediction
    without row i is t_i - (t_i - t_hat_i)/(1 - h_i). The penalty is the one in `PENALTIES` with the smallest
    leave-one-out error. Columns of x are centered and scaled to unit variance first.

    Args:
        x: (n, d_x), one row per x.
        targets: (n, d_y), the mean of the y of each x; this gives the same fit as one row per pair.
        weight: (n,), positive.

    """
    x, targets = x.double(), targets.double()
    weight = weight.double() * (len(x) / weight.double().sum())
    mean = weight @ x / len(x)
    scale = (weight @ (x - mean).square() / len(x)).sqrt()
    x = ((x - mean) / scale)[:, scale > 0]
    center = weight @ targets / len(x)
    residual = targets - center

    weighted = weight[:, None] * x
    eigenvalues, basis = torch.linalg.eigh(weighted.T @ x / len(x))
    eigenvalues = eigenvalues.clamp(min=0)  # negative only through rounding
    x = x @ basis
    moments = basis.T @ (weighted.T @ residual) / len(x)

    best: tuple[float, float, Tensor] | None = None
    for penalty in PENALTIES:
        shrunk = 1 / (eigenvalues + penalty)
        leverage = weight / len(x) * (x.square() @ shrunk + 1)
        left_out = (residual - x @ (shrunk[:, None] * moments)) / (1 - leverage)[:, None]
        error = (weight @ left_out.square()).sum().item()
        if best is None or error < best[0]:
            best = (error, penalty, left_out)
    assert best is not None
    error, penalty, left_out = best
    explained = 1 - error / (weight @ residual.square()).sum().item()
    return Alignment(x=targets - left_out, penalty=penalty, explained=explained)
