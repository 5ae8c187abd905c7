"""Retrieval in both directions, with any number of captions an image and of images a caption.

A query is right where one of its partners is among the k best; equal scores count as a random order of them would on
average (see `ranks`, which also gives the result of every single query). Fractions, by open_clip's names.
"""

import torch
from torch import Tensor

from nuclr.evaluation.ranks import Ranks, ranks, ranks_of_scores, within

__all__ = ["KS", "Ranks", "both", "ranks", "ranks_of_scores", "retrieval", "summary", "within"]

KS = (1, 5, 10)
DIRECTIONS = ("image_to_text", "text_to_image")


def retrieval(
    x: Tensor,
    y: Tensor,
    pairs: Tensor,
    ks: tuple[int, ...] = KS,
    bias_x: Tensor | None = None,
    bias_y: Tensor | None = None,
) -> dict[str, float]:
    """Recall@k, mean and median rank of both directions, each recall's chance level, and the mean of both directions.

    Args:
        x: (n_x, d), images.
        y: (n_y, d), captions.
        pairs: (n, 2), which image belongs to which caption, by their rows.
        ks: lengths of the lists.
        bias_x: (n_x,), subtracted from the scores where images are the gallery (see `correction`).
        bias_y: (n_y,), the same where captions are.

    """
    return summary(*both(x, y, pairs, bias_x, bias_y), ks)


def both(
    x: Tensor, y: Tensor, pairs: Tensor, bias_x: Tensor | None = None, bias_y: Tensor | None = None
) -> tuple[Ranks, Ranks]:
    """Ranks of image to text, one a row of x that has a caption, and of text to image, one a row of y."""
    return ranks(x, y, pairs, bias_y), ranks(y, x, pairs.flip(1), bias_x)


def summary(image_to_text: Ranks, text_to_image: Ranks, ks: tuple[int, ...] = KS) -> dict[str, float]:
    """The means over the queries, as `retrieval` gives them."""
    found: dict[str, float] = {}
    for name, of in zip(DIRECTIONS, (image_to_text, text_to_image), strict=True):
        for k in ks:
            found[f"{name}_R@{k}"] = float(of.hits(k).mean())
            found[f"{name}_chance@{k}"] = float(of.chance(k).mean())
        found[f"{name}_mean_rank"] = float(of.expected().mean())
        found[f"{name}_median_rank"] = float(torch.quantile(of.expected(), 0.5))
    for k in ks:
        for kind in ("R", "chance"):
            found[f"mean_{kind}@{k}"] = sum(found[f"{name}_{kind}@{k}"] for name in DIRECTIONS) / 2
    return found
