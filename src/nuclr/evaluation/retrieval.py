"""Retrieval: recall@k in both directions, with any number of captions an image and of images a caption.

The gallery has every distinct image and every distinct caption once. A query is right where one of its partners is
among the k best. Equal scores count as a random order of them would on average, so that a collapsed model, whose scores
are all the same, has chance level and not 100 %.
"""

import torch
from torch import Tensor

KS = (1, 5, 10)
TILE = 2**24  # scores at a time


def retrieval(x: Tensor, y: Tensor, pairs: Tensor, ks: tuple[int, ...] = KS) -> dict[str, float]:
    """Recall as fractions, by open_clip's names, with the chance level of each, and the mean of both directions.

    Args:
        x: (n_x, d), distinct images.
        y: (n_y, d), distinct captions.
        pairs: (n, 2), which image belongs to which caption, by their rows.
        ks: lengths of the lists.

    """
    found: dict[str, float] = {}
    directions = {"image_to_text": (x, y, pairs), "text_to_image": (y, x, pairs.flip(1))}
    for name, (queries, gallery, links) in directions.items():
        hits, chance = recall(queries, gallery, links, ks)
        for k, hit, level in zip(ks, hits.tolist(), chance.tolist(), strict=True):
            found[f"{name}_R@{k}"] = hit
            found[f"{name}_chance@{k}"] = level
    for k in ks:
        for kind in ("R", "chance"):
            found[f"mean_{kind}@{k}"] = sum(found[f"{name}_{kind}@{k}"] for name in directions) / 2
    return found


def recall(queries: Tensor, gallery: Tensor, links: Tensor, ks: tuple[int, ...] = KS) -> tuple[Tensor, Tensor]:
    """Recall@k, (len(ks),), and what a random ranking would reach; queries without a partner are left out.

    links: (n, 2), rows (query, partner in the gallery).
    """
    links = torch.unique(links, dim=0)  # by query, so that a tile's links lie together
    asked, count = torch.unique_consecutive(links[:, 0], return_counts=True)
    ends = count.cumsum(0)
    tile = max(1, TILE // len(gallery))
    hits = torch.zeros(len(ks), dtype=torch.float64)
    chance = torch.zeros(len(ks), dtype=torch.float64)
    for begin in range(0, len(asked), tile):
        rows = asked[begin : begin + tile]
        counts = count[begin : begin + tile]
        last = int(ends[min(begin + tile, len(asked)) - 1])
        partners = links[last - int(counts.sum()) : last, 1]
        row = torch.repeat_interleave(torch.arange(len(rows), device=links.device), counts)
        scores = queries[rows] @ gallery.T
        right = torch.zeros_like(scores, dtype=torch.bool)
        right[row, partners] = True
        best = scores.masked_fill(~right, -torch.inf).amax(dim=1, keepdim=True)
        above = ((scores > best) & ~right).sum(dim=1)
        level = scores == best
        tied, own = (level & ~right).sum(dim=1), (level & right).sum(dim=1)
        hits += torch.stack([within(k - above, tied, own).sum() for k in ks]).cpu()
        others = len(gallery) - counts
        chance += torch.stack([within(torch.full_like(counts, k), others, counts).sum() for k in ks]).cpu()
    return hits / len(asked), chance / len(asked)


def within(places: Tensor, wrong: Tensor, right: Tensor) -> Tensor:
    """Probability that one of `right` is among the first `places` of a random order of right and wrong ones, float64.

    The first i of the order are all wrong with probability prod_{j < i} (wrong - j) / (wrong + right - j).
    """
    miss = torch.ones(places.shape, dtype=torch.float64, device=places.device)
    for j in range(int(places.max().clamp(min=0))):
        left = (wrong - j).clamp(min=0).double() / (wrong + right - j).clamp(min=1)
        miss = torch.where(places > j, miss * left, miss)
    return 1 - miss
