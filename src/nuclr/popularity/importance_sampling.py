"""Multiple importance sampling for the partition function, and the empirical risks that follow from it.

The model is p(y|x) = exp(s(x,y)/tau) / Z(x) with Z(x) = integral of exp(s(x,y)/tau) over y. Given n proposals
p_k(y) = p(y|x_k), m samples y_kl from each, and weights omega_k(y) that sum to one over k,

    Z_hat(x) = sum_k (1/m) sum_l  omega_k(y_kl) exp(s(x,y_kl)/tau) / p_k(y_kl)

is unbiased (Veach and Guibas 1995). The balance heuristic omega_k = p_k / sum_k' p_k' turns it into

    Z_hat(x) = (1/m) sum_kl  exp(s(x,y_kl)/tau) / q(y_kl),      q(y) = sum_k p_k(y), the popularity of y,

in which the proposals enter only through q. Contrastive learning has m = 1: the n pairs (x_j, y_j). Putting an
approximation of q into it gives the empirical risk of NUCLR, and q = n, the uniform one, the global contrastive loss
(Wang, Lei, Ying, Yang, "On Discriminative Probabilistic Modeling for Self-Supervised Representation Learning", 2025).

Everything is in logs. Shapes: n proposals, m samples each, a anchors.
"""

import math
from typing import Literal

import torch
from torch import Tensor

Heuristic = Literal["balance", "uniform", "single"]
ROWS_AT_A_TIME = 512  # temporaries stay small enough to be reused, which a whole matrix's are not


def log_weights(log_density: Tensor, heuristic: Heuristic, proposal: int = 0) -> Tensor:
    """The log omega_k(y), of the shape of `log_density` (..., n), which holds log p_k(y) along its last axis.

    "balance" weighs by p_k(y), "uniform" by 1/n, "single" trusts the one `proposal` and ignores the others.
    """
    n = log_density.shape[-1]
    if heuristic == "balance":
        return log_density - log_density.logsumexp(dim=-1, keepdim=True)
    if heuristic == "uniform":
        return torch.full_like(log_density, -math.log(n))
    if heuristic == "single":
        ignored = torch.arange(n, device=log_density.device) != proposal
        return torch.zeros_like(log_density).masked_fill(ignored, -math.inf)
    raise ValueError(f"heuristic is {heuristic!r}; allowed: 'balance', 'uniform', 'single'")


def log_partition(log_integrand: Tensor, log_density: Tensor, log_weight: Tensor) -> Tensor:
    """The estimate log Z_hat, shape (...), from m samples of each of n proposals.

    `log_integrand` is s(x, y_kl)/tau, shape (..., n, m), leading axes for anchors; `log_density` is log p_k(y_kl),
    shape (n, m), each sample under the proposal it came from; `log_weight` is log omega_k(y_kl), shape (n, m).
    """
    m = log_integrand.shape[-1]
    return (log_integrand + log_weight - log_density).flatten(-2).logsumexp(dim=-1) - math.log(m)


def moments(log_integrand: Tensor, log_density: Tensor, log_weight: Tensor, measure: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and second moment, shape (..., n) each, of one sample's contribution omega_k f / p_k under its proposal p_k.

    By quadrature: g nodes with weights `measure` (g,); `log_integrand` is log f (..., g), `log_density` log p_k and
    `log_weight` log omega_k at the nodes, (g, n). Then E Z_hat = sum_k mean_k, which is the integral of f, and
    Var Z_hat = (1/m) sum_k (second_k - mean_k^2). The balance heuristic has the smallest sum of second moments of
    all weights that sum to one, the integral of f^2/q; no such promise holds for the variance.
    """
    integrand = log_integrand.exp()
    first = (measure * integrand) @ log_weight.exp()
    second = (measure * integrand.square()) @ (2 * log_weight - log_density).exp()
    return first, second


def variance(log_integrand: Tensor, log_density: Tensor, log_weight: Tensor, measure: Tensor, m: int = 1) -> Tensor:
    """Var Z_hat with m samples per proposal, shape (...), by quadrature; arguments as in `moments`."""
    first, second = moments(log_integrand, log_density, log_weight, measure)
    return (second - first.square()).sum(dim=-1) / m


def log_partition_from_popularity(scores: Tensor, log_q: Tensor, temperature: float) -> Tensor:
    """The estimate log sum_j exp(s_ij/tau)/q_j, shape (a,): the balance heuristic, m = 1, with this popularity.

    `scores` is s_ij, shape (a, n), anchors by samples; `log_q` is true or approximate, shape (n,).
    """
    return torch.cat([(rows / temperature - log_q).logsumexp(dim=1) for rows in torch.split(scores, ROWS_AT_A_TIME)])


def empirical_risk(positives: Tensor, log_z: Tensor, temperature: float) -> Tensor:
    """-mean_i tau log p(y_i|x_i), from s_ii and log Z(x_i), shape (n,) each.

    With the exact Z this is maximum likelihood ("MLE"); its expectation is the true risk.
    """
    return (temperature * log_z - positives).mean()


def empirical_risk_from_popularity(scores: Tensor, log_q: Tensor, temperature: float) -> Tensor:
    """The empirical risk of n pairs with any popularity in the place of Z; `scores` (n, n), pairs on the diagonal.

    log_q = log n everywhere is the global contrastive loss ("GCL") up to the additive constant that makes it an
    estimate of the same risk where Y has area one.
    """
    return empirical_risk(scores.diagonal(), log_partition_from_popularity(scores, log_q, temperature), temperature)


def uniform_log_popularity(scores: Tensor) -> Tensor:
    """The popularity log q_j = log n for every sample: what a contrastive loss without popularity assumes."""
    n = scores.shape[1]
    return scores.new_full((n,), math.log(n))


def scale_to_area(log_q: Tensor, area: float = 1.0) -> Tensor:
    """Fix the constant of a popularity known up to a factor, with nothing but the area of Y.

    With the true popularity sum_j 1/q_j has the expectation sum_i integral p(y|x_i)/q(y) dy = area of Y.
    """
    return log_q + (-log_q).logsumexp(dim=0) - math.log(area)


def scale_to_maximum(log_q: Tensor, log_q_true: Tensor) -> Tensor:
    """Fix the constant by the ratio of the maxima, as the paper's toy study does; needs the true popularity."""
    return log_q + log_q_true.max() - log_q.max()


def bound_term(log_q: Tensor, log_q_true: Tensor) -> Tensor:
    """sum_j |1/q~_j - 1/q_j|: what an approximate popularity q~ costs in the generalization bound, up to constants.

    For scores in [-c, c] it bounds the change of each log Z_hat(x_i), and so of the empirical risk divided by tau:

        |log Z_hat(x; q~) - log Z_hat(x; q)|  <=  exp(2c/tau) sum_j |1/q~_j - 1/q_j| / min(sum_j 1/q~_j, sum_j 1/q_j).

    It does not vanish for a uniform q~, however many samples there are. Shapes (n,).
    """
    return ((-log_q).exp() - (-log_q_true).exp()).abs().sum()
