"""Popularity of both sides of an embedding file: of the y with the x as anchors, and of the x with the y as anchors.

The samples are the file's pairs, each with a weight: all the same ("pairs"), or such that every x has the same total,
shared equally by its y ("x"). The weight of an x is the sum over its pairs. An x without any y belongs to no pair and
is left out.
"""

import time
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nuclr.data.formats.embeddings import Embeddings, unit_rows
from nuclr.errors import UserError
from nuclr.popularity import ConvergenceWarning, solve
from nuclr.studies.popularity.align import Alignment, ridge

Weights = Literal["pairs", "x"]
Align = Literal["none", "ridge"]

MEMORY = 2**30  # bytes the solver may keep: 6,000 x with five y each fit, and a pass is then many times as fast
QUANTILES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class Pairs:
    """Unit-norm features in one space, and the pairs that join them.

    `x_number` (n_x,) gives the number in the file of each x that has a y, `x` (n_x, d) its features and `x_weight`
    (n_x,) its weight; `y` (n_y, d), `y_weight` (n_y,), `x_of_y` (n_y,) into the rows of `x`. Weights have mean one.
    """

    x: Tensor
    y: Tensor
    x_number: Tensor
    x_of_y: Tensor
    x_weight: Tensor
    y_weight: Tensor
    alignment: Alignment | None


@dataclass(frozen=True)
class Side:
    """Popularity of one side's samples.

    `number` (n,) in the file; `zeta` (n,), tau log popularity, of weighted mean zero; `popularity` (n,), of weighted
    mean one; `rank` (n,), 1 for the most popular; `weight` (n,), of mean one; and how the solver fared.
    """

    name: str
    number: np.ndarray
    zeta: np.ndarray
    popularity: np.ndarray
    rank: np.ndarray
    weight: np.ndarray
    anchors: int
    iterations: int
    residual: float
    converged: bool
    seconds: float

    def order(self) -> np.ndarray:
        """Rows from the most to the least popular."""
        return np.argsort(self.rank)

    def effective_number(self) -> float:
        """(sum q)^2 / sum q^2: n where all are equally popular, 1 where one takes it all."""
        share = self.weight / self.weight.sum()
        return float(len(share) / (share @ self.popularity**2))

    def summary(self) -> dict[str, Any]:
        """What popularity.json tells of this side."""
        return {
            "candidates": len(self.zeta),
            "anchors": self.anchors,
            "iterations": self.iterations,
            "residual": self.residual,
            "converged": self.converged,
            "seconds": round(self.seconds, 2),
            "zeta_std": float(self.zeta.std()),
            "effective_number": self.effective_number(),
            "quantiles": {str(q): float(np.quantile(self.popularity, q)) for q in QUANTILES},
        }


def make_pairs(file: Embeddings, weights: Weights, align: Align) -> Pairs:
    """Weigh the pairs and bring x and y into one space: their own if they share it, else through `align`."""
    y = unit_rows(file.y, "y")
    x_number, x_of_y, counts = torch.unique(file.y_to_x, return_inverse=True, return_counts=True)
    y_weight = torch.ones(len(y), dtype=torch.float64) if weights == "pairs" else 1 / counts.double()[x_of_y]
    x_weight = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, x_of_y, y_weight)
    if len(x_number) < 2:
        raise UserError(f"all pairs have one x, number {int(x_number[0])}; popularity needs at least two")
    alignment = None
    if align == "ridge":
        mean_y = torch.zeros(len(x_number), y.shape[1], dtype=torch.float64)
        mean_y.index_add_(0, x_of_y, y.double() / counts.double()[x_of_y, None])
        alignment = ridge(file.x[x_number], mean_y, x_weight)
        x = unit_rows(alignment.x, "x mapped to y")
    elif file.x.shape[1] == y.shape[1]:
        x = unit_rows(file.x, "x")[x_number]
    else:
        raise UserError(
            f"x is {file.x.shape[1]} wide and y {y.shape[1]}, so they have no scores: embed both with one model,\n"
            "or add --align ridge, which maps x to y by a ridge regression fitted on the pairs of this file"
        )
    return Pairs(
        x=x.to(y),
        y=y,
        x_number=x_number,
        x_of_y=x_of_y,
        x_weight=x_weight / x_weight.mean(),
        y_weight=y_weight / y_weight.mean(),
        alignment=alignment,
    )


def solve_sides(pairs: Pairs, temperature: float, device: str = "cpu", **options: Any) -> dict[str, Side]:
    """Sides "y" and "x"; `options` go to `nuclr.popularity.solver`."""
    try:
        x, y = pairs.x.to(device), pairs.y.to(device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device}: {str(error).splitlines()[0]}") from None
    y_number = torch.arange(len(y))
    return {
        "y": _solve("y", (x, pairs.x_weight), (y, pairs.y_weight), y_number, temperature, options),
        "x": _solve("x", (y, pairs.y_weight), (x, pairs.x_weight), pairs.x_number, temperature, options),
    }


def _solve(
    name: str,
    anchors: tuple[Tensor, Tensor],
    candidates: tuple[Tensor, Tensor],
    number: Tensor,
    temperature: float,
    options: dict[str, Any],
) -> Side:
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # `converged` says it, and the command tells the user
        result = solve(
            x=anchors[0],
            y=candidates[0],
            temperature=temperature,
            x_weight=anchors[1].to(anchors[0].device),
            y_weight=candidates[1].to(candidates[0].device),
            memory=MEMORY,
            **options,
        )
    weight = candidates[1].numpy()
    zeta = result.zeta.double().cpu().numpy()
    zeta = zeta - np.average(zeta, weights=weight)
    top = zeta.max()
    popularity = np.exp((zeta - top) / temperature)
    rank = np.empty(len(zeta), dtype=np.int64)
    rank[np.argsort(-zeta, kind="stable")] = np.arange(1, len(zeta) + 1)
    return Side(
        name=name,
        number=number.numpy(),
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
