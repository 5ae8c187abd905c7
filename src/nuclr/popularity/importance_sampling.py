"""Multiple importance sampling for the partition function, and the empirical risks that follow from it.

The model is p(y|x) = exp(s(x,y)/tau) / Z(x) with Z(x) = integral of exp(s(x,y)/tau) over y. Given n proposals
p_k(y) = p(y|x_k), m samples y_kl from each, and weights omega_k(y) that sum to one over k,

    Z_hat(x) = sum_k (1/m) sum_l  omega_k(y_kl) exp(s(x,y_kl)/tau) / p_k(y_kl)

is unbiased (Veach and Guibas 1995). The balance heuristic omega_k = p_k / sum_k' p_k' turns it into

    Z_hat(x) = (1/m) sum_kl  exp(s(x,y_kl)/tau) / q(y_kl),      q(y) = sum_k p_k(y), the popularity of y,

in which the proposals enter only through q. Contrastive learning has m = 1: the n pairs (x_j, y_j). An approximation of
q gives the empirical risk of NUCLR, and q = n, the uniform one, gives the global contrastive loss (Wang, Lei, Ying,
Yang, "On Discriminative Probabilistic Modeling for Self-Supervised Representation Learning", 2025).

All quantities are logs. Shapes: n proposals, m samples each, a anchors. Arguments may be tensors or numpy arrays.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from nuclr.popularity.problem import Array, as_matrix, as_positive, as_tensor

Heuristic = Literal["balance", "uniform", "single"]
ROWS_AT_A_TIME = 512  # small temporaries are reused by the allocator, those of a whole matrix are not


def log_weights(log_density: Array, heuristic: Heuristic, proposal: int = 0) -> Tensor:
    """Compute the log weights log omega_k(y).

    Args:
        log_density: log p_k(y), (..., n), with the proposals k along the last axis.
        heuristic: "balance" weights by p_k(y), "uniform" by 1/n, "single" uses one proposal and ignores the others.
        proposal: The proposal that "single" uses.

    Returns:
        (..., n), the shape of `log_density`.

    Raises:
        ValueError: If the heuristic is unknown or `log_density` is not a floating-point array.

    Example:
        >>> log_weights(torch.zeros(4), "balance").exp().tolist()
        [0.25, 0.25, 0.25, 0.25]

    """
    log_density = _floating("log_density", log_density)
    n = log_density.shape[-1]
    if heuristic == "balance":
        return log_density - log_density.logsumexp(dim=-1, keepdim=True)
    if heuristic == "uniform":
        return torch.full_like(log_density, -math.log(n))
    if heuristic == "single":
        ignored = torch.arange(n, device=log_density.device) != proposal
        return torch.zeros_like(log_density).masked_fill(ignored, -math.inf)
    raise ValueError(f"heuristic is {heuristic!r}; allowed: 'balance', 'uniform', 'single'")


def log_partition(log_integrand: Array, log_density: Array, log_weight: Array) -> Tensor:
    """Estimate log Z from m samples of each of n proposals.

    Args:
        log_integrand: s(x, y_kl)/tau, (..., n, m), with leading axes for anchors.
        log_density: log p_k(y_kl), (n, m), each sample under the proposal that it came from.
        log_weight: log omega_k(y_kl), (n, m).

    Returns:
        log Z_hat, (...).

    Raises:
        ValueError: If an argument is not a floating-point array or its last two axes are not (n, m).

    Example:
        >>> log_density = torch.zeros(4, 1)  # uniform on a space of area 1
        >>> log_partition(torch.ones(4, 1), log_density, torch.full((4, 1), 0.25).log()).item()
        1.0

    """
    log_integrand, log_density, log_weight = (
        _floating(name, value)
        for name, value in (("log_integrand", log_integrand), ("log_density", log_density), ("log_weight", log_weight))
    )
    shape = tuple(log_integrand.shape[-2:])
    for name, value in (("log_density", log_density), ("log_weight", log_weight)):
        if len(shape) < 2 or tuple(value.shape) != shape:
            shapes = f"{tuple(value.shape)} and log_integrand {tuple(log_integrand.shape)}"
            raise ValueError(f"{name} has shape {shapes}; they must be (n, m) and (..., n, m)")
    m = log_integrand.shape[-1]
    return (log_integrand + log_weight - log_density).flatten(-2).logsumexp(dim=-1) - math.log(m)


def moments(log_integrand: Array, log_density: Array, log_weight: Array, measure: Array) -> tuple[Tensor, Tensor]:
    """Compute mean and second moment of one sample's contribution omega_k f / p_k under its proposal p_k.

    The integrals are computed by quadrature with g nodes. E Z_hat = sum_k mean_k is the integral of f, and Var Z_hat =
    (1/m) sum_k (second_k - mean_k^2). Of all weights that sum to one, the balance heuristic has the smallest sum of
    second moments, the integral of f^2/q. This does not hold for the variance.

    Args:
        log_integrand: log f at the nodes, (..., g).
        log_density: log p_k at the nodes, (g, n).
        log_weight: log omega_k at the nodes, (g, n).
        measure: Weights of the nodes, (g,).

    Returns:
        Mean and second moment, (..., n) each.

    Raises:
        ValueError: If an argument is not a floating-point array.

    Example:
        >>> ones, nodes = torch.zeros(5, 2), torch.full((5,), 0.2)  # two uniform proposals
        >>> first, second = moments(torch.zeros(5), ones, log_weights(ones, "balance"), nodes)
        >>> round(first.sum().item(), 4), round(second.sum().item(), 4)
        (1.0, 0.5)

    """
    log_density, log_weight = _floating("log_density", log_density), _floating("log_weight", log_weight)
    measure, integrand = _floating("measure", measure), _floating("log_integrand", log_integrand).exp()
    first = (measure * integrand) @ log_weight.exp()
    second = (measure * integrand.square()) @ (2 * log_weight - log_density).exp()
    return first, second


def variance(log_integrand: Array, log_density: Array, log_weight: Array, measure: Array, m: int = 1) -> Tensor:
    """Compute Var Z_hat with m samples per proposal by quadrature.

    Args:
        log_integrand: log f at the nodes, (..., g).
        log_density: log p_k at the nodes, (g, n).
        log_weight: log omega_k at the nodes, (g, n).
        measure: Weights of the nodes, (g,).
        m: Samples per proposal.

    Returns:
        (...).

    Raises:
        ValueError: If an argument is not a floating-point array.

    Example:
        >>> ones = torch.zeros(5, 2)
        >>> abs(variance(torch.zeros(5), ones, log_weights(ones, "balance"), torch.full((5,), 0.2)).item()) < 1e-6
        True

    """
    first, second = moments(log_integrand, log_density, log_weight, measure)
    return (second - first.square()).sum(dim=-1) / m


def log_partition_from_popularity(scores: Array, log_q: Array, temperature: float) -> Tensor:
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


def empirical_risk(positives: Array, log_z: Array, temperature: float) -> Tensor:
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


def empirical_risk_from_popularity(scores: Array, log_q: Array, temperature: float) -> Tensor:
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
    log_q = _floating("log_q", log_q)
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


def bound_term(log_q: Array, log_q_true: Array) -> Tensor:
    """Compute sum_j |1/q~_j - 1/q_j|, the term of an approximate popularity q~ in the generalization bound.

    Constant factors of the bound are left out. For scores in [-c, c] the term bounds the change of each log Z_hat(x_i),
    and thus of the empirical risk divided by tau:

        |log Z_hat(x; q~) - log Z_hat(x; q)|  <=  exp(2c/tau) sum_j |1/q~_j - 1/q_j| / min(sum_j 1/q~_j, sum_j 1/q_j).

    For a uniform q~ it does not vanish as the number of samples grows.

    Args:
        log_q: Log of the approximate popularity, (n,).
        log_q_true: Log of the true popularity, (n,).

    Returns:
        A scalar.

    Raises:
        ValueError: If the arguments are not floating-point vectors of one length.

    Example:
        >>> bound_term(torch.zeros(3), torch.zeros(3)).item()
        0.0

    """
    log_q, log_q_true = _vectors("log_q", log_q, "log_q_true", log_q_true)
    return ((-log_q).exp() - (-log_q_true).exp()).abs().sum()


def error_term(scores: Array, log_q: Array, log_q_true: Array, temperature: float) -> Tensor:
    """Compute E = (1/n) sum_ij |1/q~_j - 1/q_j| exp((s_ij - 1)/tau), the error term as the paper defines it.

    It weights `bound_term` by how much each sample contributes to the partition functions. With exp(1/tau)/Z_i in front
    of its inner sum, each anchor's part bounds the relative error of Z_hat(x_i) that replacing q by q~ causes.

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
    log_q = _floating("log_q", log_q)
    if log_q.ndim > 2 or log_q.shape[-1] != len(true):
        raise ValueError(f"log_q has shape {tuple(log_q.shape)}; it must be ({len(true)},) or (m, {len(true)})")
    temperature = as_positive("temperature", temperature)
    parts = torch.split(matrix, ROWS_AT_A_TIME)
    weight = torch.stack([((rows - 1) / temperature).exp().sum(dim=0) for rows in parts]).sum(dim=0) / len(matrix)
    return ((-log_q).exp() - (-true).exp()).abs() @ weight


def _floating(name: str, value: Array) -> Tensor:
    tensor = as_tensor(name, value)
    if not tensor.is_floating_point() or not tensor.ndim:
        kind = f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
        raise ValueError(f"{name} is {kind}; give a floating-point array")
    return tensor


def _vectors(first: str, a: Array, second: str, b: Array) -> tuple[Tensor, Tensor]:
    vectors = _floating(first, a), _floating(second, b)
    if vectors[0].ndim != 1 or vectors[0].shape != vectors[1].shape:
        shapes = [tuple(vector.shape) for vector in vectors]
        raise ValueError(f"{first} has shape {shapes[0]} and {second} {shapes[1]}; give two vectors of one length")
    return vectors


def _scores_and_log_q(scores: Array, log_q: Array) -> tuple[Tensor, Tensor]:
    matrix, vector = as_matrix("scores", scores), _floating("log_q", log_q)
    if vector.shape != (matrix.shape[1],):
        raise ValueError(
            f"log_q has shape {tuple(vector.shape)}; it must be ({matrix.shape[1]},), one per column of scores"
        )
    return matrix, vector
