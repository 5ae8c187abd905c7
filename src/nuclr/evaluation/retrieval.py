"""Retrieval metrics in both directions between two sides, for any number of partners per item.

A query is a hit if one of its partners is among the k best candidates. Ties count with their expectation over random
orders (see `ranks`, which also gives the result of each query). Values are fractions. Their names contain the names of
the sides: `question_to_answer_R@1`; for images and texts they are open_clip's.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from nuclr.arrays import Features, Integers, Vector, as_links, as_rows, shorten
from nuclr.evaluation.metrics import WIDTH, measure, metrics_of
from nuclr.evaluation.ranks import Ranks, query_ranks

SIDES = ("image", "text")


def retrieval_metrics(
    x: Features,
    y: Features,
    links: Integers,
    bias_x: Vector | None = None,
    bias_y: Vector | None = None,
    sides: tuple[str, str] = SIDES,
) -> dict[str, float]:
    """Compute recall@k with its chance level, mean rank and median rank of both directions (see `metrics`).

    Args:
        x: Features of side x, (n_x, d).
        y: Features of side y, (n_y, d).
        links: Which x and y belong together: rows (row of x, row of y), (n, 2).
        bias_x: Subtracted from the scores when x is the gallery, (n_x,) (see `popularity.correction`).
        bias_y: Subtracted from the scores when y is the gallery, (n_y,).
        sides: Names of the sides x and y.

    Returns:
        `{direction}_R@{k}`, `{direction}_chance@{k}` for k = 1, 5, 10, `{direction}_mean_rank` and
        `{direction}_median_rank` for both directions (by default image_to_text and text_to_image), and `mean_R@{k}`,
        `mean_chance@{k}` over both; so for every registered metric of retrieval.

    Raises:
        ValueError: If a shape or type is wrong, a feature is not finite, `links` names a row that does not exist, or
            both sides have the same name.

    Example:
        >>> import numpy as np
        >>> metrics = retrieval_metrics(np.eye(4), np.eye(4), [[i, i] for i in range(4)])
        >>> metrics["mean_R@1"], metrics["mean_chance@1"]
        (1.0, 0.25)
        >>> retrieval_metrics(np.eye(4), np.eye(4), [[0, 0]], sides=("question", "answer"))["answer_to_question_R@1"]
        1.0

    """
    direction_names(sides)
    return summarize_ranks(*retrieval_ranks(x, y, links, bias_x, bias_y), sides)


def direction_names(sides: tuple[str, str] = SIDES) -> tuple[str, str]:
    """Return the names of both directions as metrics have them.

    Args:
        sides: Names of the sides x and y.

    Returns:
        Such as ("question_to_answer", "answer_to_question").

    Raises:
        ValueError: If both names are equal.

    Example:
        >>> direction_names(("image", "text"))
        ('image_to_text', 'text_to_image')

    """
    x, y = sides
    if x == y:
        raise ValueError(f"sides={sides!r}: both have the same name; give two names")
    return f"{x}_to_{y}", f"{y}_to_{x}"


def retrieval_ranks(
    x: Features,
    y: Features,
    links: Integers,
    bias_x: Vector | None = None,
    bias_y: Vector | None = None,
) -> tuple[Ranks, Ranks]:
    """Return the ranks of both directions: queries x in gallery y, and queries y in gallery x.

    Args:
        x: Features of side x, (n_x, d).
        y: Features of side y, (n_y, d).
        links: Rows (row of x, row of y), (n, 2).
        bias_x: Subtracted from the scores when x is the gallery, (n_x,).
        bias_y: Subtracted from the scores when y is the gallery, (n_y,).

    Returns:
        Ranks with one entry per row of x that has a partner, and with one entry per row of y that has one.

    Raises:
        ValueError: If a shape or type is wrong, a feature is not finite, or `links` names a row that does not exist.

    Example:
        >>> import torch
        >>> x_to_y, y_to_x = retrieval_ranks(torch.eye(2), torch.eye(2), [[0, 0], [1, 1]])
        >>> len(x_to_y), len(y_to_x)
        (2, 2)

    """
    x = as_rows("x", x, "any")
    y = as_rows("y", y, "any")
    rows = as_links("links", links, len(x), len(y))
    return query_ranks(x, y, rows, bias_y), query_ranks(y, x, rows.flip(1), bias_x)


def summarize_ranks(
    x_to_y: Ranks,
    y_to_x: Ranks,
    sides: tuple[str, str] = SIDES,
) -> dict[str, float]:
    """Average the ranks of both directions over the queries.

    Args:
        x_to_y: Ranks with x as queries.
        y_to_x: Ranks with y as queries.
        sides: Names of the sides x and y.

    Returns:
        The metrics described in `retrieval_metrics`.

    Example:
        >>> import torch
        >>> summarize_ranks(*retrieval_ranks(torch.eye(2), torch.eye(2), [[0, 0], [1, 1]]))["mean_R@1"]
        1.0

    """
    first, second = direction_names(sides)
    summary: dict[str, float] = {}
    for name, ranks in ((first, x_to_y), (second, y_to_x)):
        summary |= {f"{name}_{key}": value for key, value in measure("retrieval", ranks).items()}
    for metric in metrics_of("retrieval"):
        keys = (metric.key, metric.chance_key) if metric.both else ()
        for key in filter(None, keys):
            summary[f"mean_{key}"] = (summary[f"{first}_{key}"] + summary[f"{second}_{key}"]) / 2
    return summary


def metrics_of_widths(
    metrics: Callable[[Tensor, Tensor], dict[str, float]],
    x: Tensor,
    y: Tensor,
    widths: Sequence[int],
) -> dict[str, float]:
    """Return the metrics of shorter features: their first coordinates, scaled to unit norm.

    Args:
        metrics: From the features of both sides to their metrics.
        x: Features of side x, (n_x, d).
        y: Features of side y, (n_y, d).
        widths: Numbers of coordinates in ascending order; the last one, which is all of them, is left out.

    Returns:
        The metrics, with names such as `width=64/mean_R@1`.

    Example:
        >>> import torch
        >>> metrics_of_widths(lambda x, y: {"equal": float((x == y).all())}, torch.eye(2), torch.ones(2, 2), [1, 2])
        {'width=1/equal': 0.0}

    """
    found: dict[str, float] = {}
    for width in widths[:-1]:
        measured = metrics(shorten(x, width), shorten(y, width))
        found |= {f"{WIDTH}{width}/{name}": value for name, value in measured.items()}
    return found
