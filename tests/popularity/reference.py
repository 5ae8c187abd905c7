"""The popularity problem in a few dense float64 lines, and POT as an independent solver to compare with."""

import math

import numpy as np
import torch
from torch import Tensor


def unit(n: int, d: int, seed: int) -> Tensor:
    features = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(features, dim=1)


def paired(n_x: int, n_y: int, d: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return unit-norm features in which y_j is near to x_{j mod n_x}, as in a trained model."""
    x = unit(n_x, d, seed)
    y = torch.nn.functional.normalize(x[torch.arange(n_y) % n_x] + 0.7 * unit(n_y, d, seed + 1), dim=1)
    return x, y


def clustered(n_x: int, n_y: int, d: int = 24, clusters: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return float32 features in clusters of unequal sizes, with the same centers on both sides."""
    generator = torch.Generator().manual_seed(seed)
    centers = unit(clusters, d, seed).float()
    sizes = torch.arange(1.0, clusters + 1)

    def side(n: int) -> Tensor:
        members = torch.multinomial(sizes, n, replacement=True, generator=generator)
        noise = torch.randn(n, d, generator=generator) / math.sqrt(d)
        return torch.nn.functional.normalize(centers[members] + 0.8 * noise, dim=1)

    return side(n_x), side(n_y)


def column_sums(scores: Tensor, zeta: Tensor, tau: float) -> Tensor:
    """(n_y/n_x) sum_i softmax_j((s_ij - zeta_j)/tau)."""
    n_x, n_y = scores.shape
    return torch.softmax((scores.double() - zeta.double()) / tau, dim=1).sum(dim=0) * (n_y / n_x)


def residual(scores: Tensor, zeta: Tensor, tau: float) -> float:
    return float((column_sums(scores, zeta, tau) - 1).abs().max())


def pot_zeta(scores: Tensor, tau: float, a: Tensor | None = None, b: Tensor | None = None) -> Tensor:
    """POT's Sinkhorn in logs on the cost -s. Its plan is a_i b_j exp((s_ij - zeta_j)/tau) / Z_i up to rounding."""
    import ot  # slow to import, and not needed by the workers of the two-process test

    n_x, n_y = scores.shape
    a = torch.full((n_x,), 1 / n_x).double() if a is None else a.double() / a.sum()
    b = torch.full((n_y,), 1 / n_y).double() if b is None else b.double() / b.sum()
    _, log = ot.sinkhorn(
        a.numpy(), b.numpy(), -scores.double().numpy(), tau, method="sinkhorn_log",
        stopThr=1e-10, numItermax=5_000, warn=False, log=True,
    )  # fmt: skip
    log_v = log["log_v"] if "log_v" in log else np.log(log["v"])
    zeta = tau * (b.log() - torch.from_numpy(log_v))
    return zeta - zeta.mean()


def gauged(zeta: Tensor) -> Tensor:
    return zeta.double() - zeta.double().mean()


def popularity_of(zeta: Tensor, tau: float) -> Tensor:
    q = [math.exp(float(z) / tau) for z in zeta]
    return torch.tensor(q, dtype=torch.float64) / (sum(q) / len(q))
