"""Multiple importance sampling: the partition function, the empirical risks that follow from it, draws of y given x.

The model is p(y|x) = exp(s(x,y)/tau) / Z(x) with Z(x) = integral of exp(s(x,y)/tau) over y. Given n proposals
p_k(y) = p(y|x_k), m samples y_kl from each, and weights omega_k(y) that sum to one over k,

    Z_hat(x) = sum_k (1/m) sum_l  omega_k(y_kl) exp(s(x,y_kl)/tau) / p_k(y_kl)

is unbiased (Veach and Guibas 1995). The balance heuristic omega_k = p_k / sum_k' p_k' turns it into

    Z_hat(x) = (1/m) sum_kl  exp(s(x,y_kl)/tau) / q(y_kl),      q(y) = sum_k p_k(y), the popularity of y,

in which the proposals enter only through q. Contrastive learning has m = 1: the n pairs (x_j, y_j). An approximation of
q gives the empirical risk of NUCLR, and q = n, the uniform one, gives the global contrastive loss (Wang, Lei, Ying,
Yang, "On Discriminative Probabilistic Modeling for Self-Supervised Representation Learning", 2025).

**Draws.** p(y|x) is a density that can be evaluated but not sampled from. The data supplies samples y_j whose density
is known up to a factor: q(y), the popularity. Importance weights exp(s(x,y_j)/tau) / q_j turn them into samples from
p(y|x) (sampling importance resampling, Rubin 1988):

    P(y_j | x) = exp((s(x,y_j) - zeta_j)/tau) / sum_k exp((s(x,y_k) - zeta_k)/tau),      zeta = tau log q.

Only y of the data can be drawn, so the draws follow p(y|x) as far as the data covers it. Without the popularity
(zeta = 0) generic items are drawn too often, because the data contains more of them.

All quantities are logs. Shapes: n samples, a anchors. Arguments may be tensors or numpy arrays.
"""

import math

import torch
from torch import Tensor

from nuclr.arrays import (
    Array,
    Features,
    Norms,
    Vector,
    as_features,
    as_floating,
    as_matrix,
    as_positive,
    as_vector,
    check_same_device,
    slices,
)

ENTRIES = 1 << 22  # probabilities held at a time: 32 MiB of float64
ROWS_AT_A_TIME = 512  # small temporaries are reused by the allocator, those of a whole matrix are not


def sample_conditional(
    x: Features,
    y: Features,
    zeta: Vector,
    *,
    temperature: float,
    count: int = 1,
    generator: torch.Generator | None = None,
    normalize: bool = False,
) -> Tensor:
    """Draw items y_j given each x_i, with replacement and with probabilities proportional to exp(s_ij/tau) / q_j.

    Anchors are processed a few at a time, so memory is O(n_y + n_x count) above the features. Random numbers are drawn
    on the generator's device (the CPU by default), so that up to rounding every device gives the same draws.

    Args:
        x: Features of the anchors, (n_x, d).
        y: Features of the items to draw from, (n_y, d).
        zeta: tau log popularity of the items, (n_y,), up to a constant, such as `solve(...).zeta` or the `zeta_y` of
            NUCLR's state.
        temperature: tau.
        count: Number of draws per anchor.
        generator: Source of randomness.
        normalize: Scale features to unit norm instead of refusing other norms.

    Returns:
        Rows of y, (n_x, count), on the device of x.

    Raises:
        ValueError: If an argument has a wrong type, shape or value.

    Example:
        >>> x, y = torch.eye(2), torch.eye(2)
        >>> sample_conditional(x, y, torch.zeros(2), temperature=0.01, count=3).tolist()
        [[0, 0, 0], [1, 1, 1]]

    """
    norms: Norms = "normalize" if normalize else "unit"
    x = as_features("x", x, norms)
    y = as_features(
        "y",
        y,
        norms,
        width=x.shape[1],
    )
    check_same_device("x", x, "y", y)
    if not len(y):
        raise ValueError("y has no rows; there must be at least one item to draw")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count={count!r}; must be a whole number of at least 1")
    temperature = as_positive("temperature", temperature)
    dtype = torch.promote_types(x.dtype, y.dtype)
    x = x.to(dtype)
    y = y.to(dtype)
    offset = as_vector("zeta", zeta, len(y)).to(x.device) / temperature
    uniform = torch.rand(
        len(x),
        count,
        dtype=torch.float64,
        device="cpu" if generator is None else generator.device,
        generator=generator,
    ).to(x.device)
    drawn = torch.empty(
        len(x),
        count,
        dtype=torch.long,
        device=x.device,
    )
    for rows in slices(len(x), max(1, ENTRIES // len(y))):
        logits = (x[rows] @ y.T).double() / temperature - offset
        cumulative = logits.softmax(dim=1).cumsum(dim=1)
        total = cumulative[:, -1:].contiguous()
        # The first item whose cumulative probability exceeds a uniform number; an item of probability 0 never does.
        index = torch.searchsorted(cumulative, uniform[rows] * total, right=True)
        drawn[rows] = torch.minimum(index, torch.searchsorted(cumulative, total))  # if the product rounds to the total
    return drawn


def log_partition_from_popularity(
    scores: Array,
    log_q: Array,
    temperature: float,
) -> Tensor:
    """Estimate log Z as log sum_j exp(s_ij/tau)/q_j: the balance heuristic with m = 1 and the given popularity.

    Args:
        scores: s_ij, (a, n), anchors by samples.
        log_q: Log of the popularity, true or approximate, (n,).
        temperature: tau.

    Returns:
        (a,).

    Raises:
        ValueError: If a shape or type is wrong, scores are not finite, or the temperature is not positive.

    Example:
        >>> log_partition_from_popularity(torch.zeros(1, 4), torch.full((4,), 4.0).log(), 0.5).item()
        0.0

    """
    scores, log_q = _scores_and_log_q(scores, log_q)
    temperature = as_positive("temperature", temperature)
    return torch.cat([(rows / temperature - log_q).logsumexp(dim=1) for rows in torch.split(scores, ROWS_AT_A_TIME)])


def empirical_risk(
    positives: Array,
    log_z: Array,
    temperature: float,
) -> Tensor:
    """Compute the empirical risk -mean_i tau log p(y_i|x_i).

    With the exact Z this is maximum likelihood ("MLE"); its expectation is the true risk.

    Args:
        positives: Scores s_ii of the pairs, (n,).
        log_z: log Z(x_i), (n,).
        temperature: tau.

    Returns:
        A scalar.

    Raises:
        ValueError: If a shape or type is wrong or the temperature is not positive.

    Example:
        >>> empirical_risk(torch.ones(3), torch.zeros(3), 0.5).item()
        -1.0

    """
    positives, log_z = _vectors("positives", positives, "log_z", log_z)
    return (as_positive("temperature", temperature) * log_z - positives).mean()


def empirical_risk_from_popularity(
    scores: Array,
    log_q: Array,
    temperature: float,
) -> Tensor:
    """Compute the empirical risk of n pairs with Z estimated from a popularity.

    log_q = log n for all samples gives the global contrastive loss ("GCL"), up to the additive constant that makes it
    an estimate of the same risk if Y has area one.

    Args:
        scores: s_ij, (n, n), with the pairs on the diagonal.
        log_q: Log of the popularity, true or approximate, (n,).
        temperature: tau.

    Returns:
        A scalar.

    Raises:
        ValueError: If a shape or type is wrong, scores are not finite, or the temperature is not positive.

    Example:
        >>> scores = torch.eye(3)
        >>> round(empirical_risk_from_popularity(scores, uniform_log_popularity(scores), 1.0).item(), 4)
        -0.5472

    """
    scores, log_q = _scores_and_log_q(scores, log_q)
    if len(scores) != scores.shape[1]:
        raise ValueError(f"scores has shape {tuple(scores.shape)}; needs (n, n) with the pairs on the diagonal")
    return empirical_risk(scores.diagonal(), log_partition_from_popularity(scores, log_q, temperature), temperature)


def uniform_log_popularity(scores: Array) -> Tensor:
    """Return log q_j = log n for every sample, the assumption of a contrastive loss without popularity.

    Args:
        scores: s_ij, (a, n).

    Returns:
        (n,).

    Raises:
        ValueError: If `scores` is not a finite floating-point matrix.

    Example:
        >>> uniform_log_popularity(torch.zeros(2, 3)).exp().round().tolist()
        [3.0, 3.0, 3.0]

    """
    scores = as_matrix("scores", scores)
    n = scores.shape[1]
    return scores.new_full((n,), math.log(n))


def scale_to_area(log_q: Array, area: float = 1.0) -> Tensor:
    """Fix the constant of a popularity that is known up to a factor, using only the area of Y.

    For the true popularity, sum_j 1/q_j has the expectation sum_i integral p(y|x_i)/q(y) dy = area of Y.

    Args:
        log_q: Log of the popularity up to a constant, (n,).
        area: Area of Y.

    Returns:
        (n,), with sum_j 1/q_j = area.

    Raises:
        ValueError: If `log_q` is not a floating-point array or the area is not positive.

    Example:
        >>> (-scale_to_area(torch.tensor([0.0, 1.0, 2.0]))).exp().sum().item()
        1.0

    """
    log_q = as_floating("log_q", log_q)
    return log_q + (-log_q).logsumexp(dim=0) - math.log(as_positive("area", area))


def scale_to_maximum(log_q: Array, log_q_true: Array) -> Tensor:
    """Fix the constant by the ratio of the maxima, as in the paper's toy study; needs the true popularity.

    Args:
        log_q: Log of the popularity up to a constant, (n,).
        log_q_true: Log of the true popularity, (n,).

    Returns:
        (n,), with the maximum of `log_q_true`.

    Raises:
        ValueError: If the arguments are not floating-point vectors of one length.

    Example:
        >>> scale_to_maximum(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 5.0])).tolist()
        [4.0, 5.0]

    """
    log_q, log_q_true = _vectors("log_q", log_q, "log_q_true", log_q_true)
    return log_q + log_q_true.max() - log_q.max()


def error_term(
    scores: Array,
    log_q: Array,
    log_q_true: Array,
    temperature: float,
) -> Tensor:
    """Compute E = (1/n) sum_ij |1/q~_j - 1/q_j| exp((s_ij - 1)/tau), the error term as the paper defines it.

    Each |1/q~_j - 1/q_j| is weighted by how much the sample contributes to the partition functions. With exp(1/tau)/Z_i
    in front of its inner sum, each anchor's part bounds the relative error of Z_hat(x_i) that replacing q by q~ causes.
    For a uniform q~ it does not vanish as the number of samples grows.

    Args:
        scores: s_ij, (n, n), anchors by samples.
        log_q: Log of the approximate popularity, (n,), or one row per approximation, (m, n).
        log_q_true: Log of the true popularity, (n,).
        temperature: tau.

    Returns:
        A scalar, or (m,) for m approximations.

    Raises:
        ValueError: If a shape or type is wrong, scores are not finite, or the temperature is not positive.

    Example:
        >>> error_term(torch.ones(2, 2), torch.tensor([0.5, 0.5]).log(), torch.zeros(2), 0.1).item()
        2.0

    """
    matrix, true = _scores_and_log_q(scores, log_q_true)
    log_q = as_floating("log_q", log_q)
    if log_q.ndim > 2 or log_q.shape[-1] != len(true):
        raise ValueError(f"log_q has shape {tuple(log_q.shape)}; it must be ({len(true)},) or (m, {len(true)})")
    temperature = as_positive("temperature", temperature)
    parts = torch.split(matrix, ROWS_AT_A_TIME)
    weight = torch.stack([((rows - 1) / temperature).exp().sum(dim=0) for rows in parts]).sum(dim=0) / len(matrix)
    return ((-log_q).exp() - (-true).exp()).abs() @ weight


def _vectors(
    first: str,
    a: Array,
    second: str,
    b: Array,
) -> tuple[Tensor, Tensor]:
    vectors = as_floating(first, a), as_floating(second, b)
    if vectors[0].ndim != 1 or vectors[0].shape != vectors[1].shape:
        shapes = [tuple(vector.shape) for vector in vectors]
        raise ValueError(f"{first} has shape {shapes[0]} and {second} {shapes[1]}; give two vectors of one length")
    return vectors


def _scores_and_log_q(scores: Array, log_q: Array) -> tuple[Tensor, Tensor]:
    matrix = as_matrix("scores", scores)
    vector = as_floating("log_q", log_q)
    if vector.shape != (matrix.shape[1],):
        raise ValueError(
            f"log_q has shape {tuple(vector.shape)}; it must be ({matrix.shape[1]},), one per column of scores"
        )
    return matrix, vector
