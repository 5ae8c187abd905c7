"""Popularity of a run's training pairs, solved on a sample of them within seconds."""

import warnings
from typing import Any

import numpy as np
import torch

from nuclr.data.builtin import BuiltinPairs
from nuclr.popularity import ConvergenceWarning, Result, solve
from nuclr.popularity.false_negatives import FalseNegatives, false_negatives
from nuclr.report.duplicates import duplicates
from nuclr.report.gallery import Label, Side
from nuclr.report.pictures import Pictures
from nuclr.report.sample import Sample

TOLERANCE = 1e-3  # a tenth of a percent of popularity: far below what a page shows
PASSES = 150
SHOWN = 12


def solve_sample(sample: Sample, temperature: float, state: dict[str, Any] | None) -> dict[str, Side]:
    """Sides "captions" and "images"; `state` is the objective's, for the training-time zeta."""
    row_x, row_y = sample.links[:, 0].numpy(), sample.links[:, 1].numpy()
    weight_x, weight_y = np.bincount(row_x), np.bincount(row_y)
    truth = None
    if isinstance(sample.pairs, BuiltinPairs):
        q = sample.pairs.truth.popularity(sample.numbers)
        truth = _mean_by(row_y, q / q.mean(), weight_y)
    found = {}
    for name, letter, anchors, candidates, anchor_weight, weight, row, number in (
        ("captions", "y", sample.x, sample.y, weight_x, weight_y, row_y, sample.y_number),
        ("images", "x", sample.y, sample.x, weight_y, weight_x, row_x, sample.x_number),
    ):
        if len(anchors) < 2 or len(candidates) < 2:
            continue
        result = _solve(anchors, candidates, temperature, anchor_weight, weight)
        popularity = result.popularity.double().numpy()
        table = (state or {}).get(f"zeta_{letter}")
        found[name] = Side(
            name=name,
            number=number,
            popularity=popularity / np.average(popularity, weights=weight),
            weight=weight,
            anchors=len(anchors),
            residual=result.residual,
            converged=result.converged,
            zeta=None if table is None else _mean_by(row, table.numpy()[sample.numbers], weight),
            truth=truth if name == "captions" else None,
        )
    return found


def _solve(anchors: Any, candidates: Any, temperature: float, anchor_weight: Any, weight: Any) -> Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the page says where it is not solved
        return solve(
            anchors,
            candidates,
            temperature=temperature,
            tolerance=TOLERANCE,
            max_iterations=PASSES,
            x_weight=torch.from_numpy(anchor_weight).float(),
            y_weight=torch.from_numpy(weight).float(),
        )


def _mean_by(row: np.ndarray, values: np.ndarray, count: np.ndarray) -> np.ndarray:
    return np.bincount(row, weights=values.astype(np.float64), minlength=len(count)) / count


def negatives_of(sample: Sample, side: Side, caption: Label, picture: Pictures) -> dict[str, Any]:
    """Likely false negatives of the sample, as plain values; with the truth for the built-in pairs."""
    found = false_negatives(sample.x, sample.y, sample.links, torch.from_numpy(side.popularity), SHOWN)
    fits = None
    if isinstance(sample.pairs, BuiltinPairs):
        truth = sample.pairs.truth
        fits = [
            bool(np.isfinite(truth.log_p(np.array([a]), np.array([b]))[0, 0]))
            for a, b in zip(sample.x_number[found.x.numpy()], sample.y_number[found.y.numpy()], strict=True)
        ]
    return {
        "share": found.share,
        "anchors": found.anchors,
        "rows": negative_rows(found, side.popularity, sample.x_number, sample.y_number, caption, picture, fits),
        "true": None if fits is None else sum(fits),
        "base": None if fits is None else _fitting(sample),
    }


def _fitting(sample: Sample) -> float:
    """Share of all negatives of the sample that fit in truth."""
    assert isinstance(sample.pairs, BuiltinPairs)
    fits = np.isfinite(sample.pairs.truth.log_p(sample.x_number, sample.y_number))
    fits[sample.links[:, 0].numpy(), sample.links[:, 1].numpy()] = False
    return float(fits.sum() / (fits.size - len(sample.links)))


def negative_rows(
    found: FalseNegatives,
    popularity: np.ndarray,
    x_number: np.ndarray,
    y_number: np.ndarray,
    caption: Label,
    picture: Pictures,
    fits: list[bool] | None,
) -> list[dict[str, Any]]:
    """One for each pair found."""
    rows = []
    columns = (found.x, found.y, found.own, found.score, found.own_score)
    for k, (x, y, own, score, own_score) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        image, text, own_text = int(x_number[x]), int(y_number[y]), int(y_number[own])
        rows.append(
            {
                "picture": picture(image),
                "image": image,
                "caption": caption(text) or f"caption {text}",
                "own": caption(own_text) or f"caption {own_text}",
                "score": score,
                "own_score": own_score,
                "popularity": float(popularity[y]),
                "fits": None if fits is None else fits[k],
            }
        )
    return rows


def duplicate_rows(captions: list[str], side: Side) -> dict[str, Any]:
    """Groups of captions that say the same, and pairs that differ in a word, with their popularity."""
    popularity, weight = side.popularity, side.weight
    found = duplicates(captions, SHOWN)

    def said(rows: tuple[int, ...] | list[int]) -> list[dict[str, Any]]:
        return [
            {"caption": captions[row], "popularity": float(popularity[row]), "copies": round(float(weight[row]))}
            for row in rows[:4]
        ]

    exact = int((weight > 1).sum())
    return {
        "repeated": exact,
        "repeated_pairs": round(float(weight[weight > 1].sum())),
        "groups": len(found.same),
        "same": [{"rows": said(rows), "more": max(0, len(rows) - 4)} for rows in found.same[:SHOWN]],
        "near": [{"rows": said(rows), "more": 0} for rows in found.near],
    }
