r"""A bank of queries: which rows of a log count, and how much.

**Distinct queries.** A log repeats what is asked often, and an item that many people want is not a hub. So equal
queries count once. People also ask the same thing in other words. With a kernel k(q, q') = exp((<q, q'> - 1)/h) that is
1 for equal queries, the weight of query i is

    w_i = 1 / sum_k k(q_i, q_k),      h = half a standard deviation of the scores among the queries

so that a hundred wordings of one question weigh about as much as one question that was asked once. The sum of the
weights is the effective number of different questions.

**Does a bank fit?** Queries that are asked may be of another kind than the bank (documents instead of questions), or
about another part of the gallery. `same_kind` compares the two samples by the maximum mean discrepancy with the kernel
exp((<q, q'> - 1) / 2 standard deviations) and a permutation test (Gretton et al. 2012). It needs no labels.

**Temperature.** Scores of different models have different scales, so temperatures are chosen in units of the standard
deviation of the scores.
"""

import torch
from torch import Tensor

from nuclr.arrays import Rows, evenly_spaced

BANDWIDTH = 0.5  # of the kernel among queries, in standard deviations of their scores
SAMPLE = 2000  # queries from which the standard deviation of their scores is estimated
TILE = 2**22  # scores at a time: 16 MiB in float32
HASH_SEED = 7
TEST_BANDWIDTH = 2.0  # of the kernel that compares two samples: wide enough to see a shift of all queries
TEST_SIZE = 500  # rows of either sample at most
PERMUTATIONS = 999


def row_hashes(rows: Rows) -> Tensor:
    """Return one integer per row that is equal for rows with the same bits, (n,) int64; rows are read in blocks.

    Two different rows have the same number with a probability of about 2**-64.

    Example:
        >>> from nuclr.arrays import checked_rows
        >>> first, second, third = row_hashes(checked_rows(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])))
        >>> bool(first == third), bool(first == second)
        (True, False)

    """
    generator = torch.Generator().manual_seed(HASH_SEED)
    factors = torch.randint(-(2**62), 2**62, (rows.shape[1],), generator=generator) * 2 + 1
    hashes = []
    for _, block in rows.blocks():
        bits = (block.detach().cpu().double() + 0.0).view(torch.int64)  # adding 0.0 turns -0.0 into 0.0
        hashes.append(((bits ^ (bits >> 29)) * factors).sum(dim=1))
    return torch.cat(hashes)


def distinct_rows(rows: Rows) -> Tensor:
    """Return the rows of a matrix without repetitions, each by its first row number, in ascending order.

    Example:
        >>> from nuclr.arrays import checked_rows
        >>> distinct_rows(checked_rows(torch.tensor([[1.0], [-1.0], [1.0]]))).tolist()
        [0, 1]

    """
    _, number = torch.unique(row_hashes(rows), return_inverse=True)
    positions = torch.arange(len(number))
    first = torch.full_like(positions, len(positions)).scatter_reduce_(0, number, positions, "amin")
    return first[first < len(positions)].sort().values


def query_weights(queries: Tensor) -> Tensor:
    """Return the weights of queries, between 1/n for n equal ones and 1 for one that is far from all others.

    Args:
        queries: Features, (n, d), unit norm.

    Returns:
        (n,) float64.

    Example:
        >>> [round(weight, 1) for weight in query_weights(torch.eye(3)[[0, 0, 1]]).tolist()]
        [0.5, 0.5, 1.0]

    """
    width = BANDWIDTH * _spread(queries)
    sums = []
    for tile in torch.split(queries, max(1, TILE // len(queries))):
        kernel = tile @ queries.T
        sums.append(kernel.sub_(1).div_(width).clamp_(max=0).exp_().sum(dim=1, dtype=torch.float64))
    return 1 / torch.cat(sums).clamp(min=1)


def same_kind(bank: Tensor, queries: Tensor) -> float:
    """Return the p-value of the hypothesis that two samples of queries come from the same distribution.

    Args:
        bank: Features, (n, d), unit norm; of more than 500, evenly spaced rows are used.
        queries: Features, (m, d), unit norm; the same.

    Returns:
        Between 0.001 and 1.

    Example:
        >>> x = torch.nn.functional.normalize(torch.randn(80, 4, generator=torch.Generator().manual_seed(0)), dim=1)
        >>> same_kind(x[:40], x[40:]) > 0.05, same_kind(x[:40], -x[40:].abs()) < 0.01
        (True, True)

    """
    first = bank[evenly_spaced(len(bank), TEST_SIZE).to(bank.device)]
    second = queries[evenly_spaced(len(queries), TEST_SIZE).to(queries.device)].to(first)
    pooled = torch.cat([first, second])
    kernel = ((pooled @ pooled.T - 1) / (TEST_BANDWIDTH * _spread(pooled))).exp().double().fill_diagonal_(0)
    generator = torch.Generator().manual_seed(HASH_SEED)
    orders = [torch.arange(len(pooled))]
    orders += [torch.randperm(len(pooled), generator=generator) for _ in range(PERMUTATIONS)]
    inside = (torch.stack(orders).to(kernel.device) < len(first)).double()
    outside = 1 - inside
    n, m = len(first), len(second)
    shared = inside @ kernel
    discrepancy = (shared * inside).sum(dim=1) / (n * (n - 1)) - 2 * (shared * outside).sum(dim=1) / (n * m)
    discrepancy += ((outside @ kernel) * outside).sum(dim=1) / (m * (m - 1))
    return float((discrepancy >= discrepancy[0]).double().mean())


def _spread(queries: Tensor) -> float:
    """Return the standard deviation of the scores among different queries (not less than 1e-6)."""
    sample = queries[evenly_spaced(len(queries), SAMPLE).to(queries.device)]
    scores = sample @ sample.T
    among = ~torch.eye(len(sample), dtype=torch.bool, device=scores.device)
    return max(float(scores[among].std(correction=0)), 1e-6)


def score_std(bank: Tensor, gallery: Tensor) -> float:
    """Return the standard deviation of all scores <b, g> without computing them.

    E s^2 is the inner product of the two second-moment matrices, divided by the number of scores.

    Args:
        bank: (n_bank, d).
        gallery: (n_gallery, d).

    Returns:
        The standard deviation (not less than 1e-6).

    Example:
        >>> round(score_std(torch.eye(2), torch.eye(2)), 3)
        0.5

    """
    b = bank.double()
    g = gallery.double()
    square = float(((b.T @ b) * (g.T @ g)).sum()) / (len(b) * len(g))
    return float(max(square - float(b.mean(dim=0) @ g.mean(dim=0)) ** 2, 1e-12) ** 0.5)
