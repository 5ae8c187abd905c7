"""The seven objectives as float64 loops, written from the formulas, to test the package against.

The code is slow on purpose and shares nothing with the package. Symbols are the paper's: s_ij = <x_i, y_j>, tau the
temperature, B the batch size, n the size of the data set. Side x has anchors x and candidates y; side y has them
exchanged.

The four objectives without state (clip, siglip, dcl, cyclip) return a scalar built in loops from float64 tensors, and
autograd differentiates the loops. The three with state (sogclr, isogclr, nuclr) take a state, a dict of float64 arrays
with the names of the buffers, and return a `Step`. Its gradient is not that of the value, but that of

    (1/B) sum_i sum_{j != i} w_ij (s_ij - s_ii),   w held fixed,

summed over both sides. The value is the estimate of the objective.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Matrix = list[list[float]]
State = dict[str, np.ndarray]


# ---------------------------------------------------------------------------------------------------------------------
# Pieces
# ---------------------------------------------------------------------------------------------------------------------


def kept_pairs(batch: int, x_id: Sequence[int] | None = None, y_id: Sequence[int] | None = None) -> list[list[int]]:
    """Return the negatives of each i: every j != i with another x_id and another y_id. Row i has length c_i.

    An id is a number or a list of numbers, which are compared entry by entry: one equal entry is enough.
    """

    def shared(ids: Sequence[int] | None, i: int, j: int) -> bool:
        if ids is None:
            return False
        mine, other = np.atleast_1d(ids[i]), np.atleast_1d(ids[j])
        return any(int(a) == int(b) for a, b in zip(mine, other, strict=True))

    rows = []
    for i in range(batch):
        rows.append([j for j in range(batch) if j != i and not shared(x_id, i, j) and not shared(y_id, i, j)])
    return rows


def log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def logsumexp(terms: list[float]) -> float:
    top = max(terms)
    if top == -math.inf:
        return -math.inf
    return top + math.log(sum(math.exp(term - top) for term in terms))


def logaddexp(a: float, b: float) -> float:
    return logsumexp([a, b])


def scores(anchors: np.ndarray, candidates: np.ndarray) -> Matrix:
    return [[sum(float(a) * float(c) for a, c in zip(u, v, strict=True)) for v in candidates] for u in anchors]


def clip_to(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


# ---------------------------------------------------------------------------------------------------------------------
# Stateful objectives
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """The result of one call: the value of each side, gradients (B, d), and the state afterwards."""

    value_x: float
    value_y: float
    grad_x: np.ndarray
    grad_y: np.ndarray
    state: State

    @property
    def value(self) -> float:
        return self.value_x + self.value_y


def log_phi(s: Matrix, kept: list[list[int]], zeta: list[float], tau: list[float], n: int) -> list[float]:
    """Return log phi_i = log((n-1)/c_i) + logsumexp_{j kept} (s_ij - s_ii - zeta_j)/tau_i; -inf if c_i = 0."""
    result = []
    for i, negatives in enumerate(kept):
        if not negatives:
            result.append(-math.inf)
            continue
        terms = [(s[i][j] - s[i][i] - zeta[j]) / tau[i] for j in negatives]
        result.append(math.log((n - 1) / len(negatives)) + logsumexp(terms))
    return result


def running_average(old: float, phi: float, gamma: float) -> float:
    """Return log((1-gamma) u + gamma phi), or log phi on the first visit, log u = -inf."""
    if old == -math.inf:
        return phi
    return logaddexp(log(1 - gamma) + old, math.log(gamma) + phi)


def new_log_u(
    stored: list[float] | None, phi: list[float], kept: list[list[int]], gamma: float, training: bool
) -> list[float]:
    """Return log u per anchor: averaged in training; in eval mode the stored value, or phi if there is none."""
    result = []
    for i, negatives in enumerate(kept):
        old = -math.inf if stored is None else stored[i]
        if not negatives:
            result.append(old)
        elif training:
            result.append(running_average(old, phi[i], gamma))
        else:
            result.append(phi[i] if old == -math.inf else old)
    return result


def weights(
    s: Matrix,
    kept: list[list[int]],
    zeta: list[float],
    tau: list[float],
    log_u: list[float],
    log_positive: list[float],
    n: int,
) -> Matrix:
    """w_ij = exp(log((n-1)/c_i) + (s_ij - s_ii - zeta_j)/tau_i - logaddexp(log u_i, log_positive_i)), 0 if masked."""
    batch = len(s)
    w = [[0.0] * batch for _ in range(batch)]
    for i, negatives in enumerate(kept):
        for j in negatives:
            exponent = math.log((n - 1) / len(negatives)) + (s[i][j] - s[i][i] - zeta[j]) / tau[i]
            w[i][j] = math.exp(exponent - logaddexp(log_u[i], log_positive[i]))
    return w


def surrogate_gradient(anchors: np.ndarray, candidates: np.ndarray, w: Matrix) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of (1/B) sum_i sum_j w_ij (<a_i, c_j> - <a_i, c_i>) for anchors and for candidates."""
    batch = len(anchors)
    grad_a, grad_c = np.zeros_like(anchors), np.zeros_like(candidates)
    for i in range(batch):
        for j in range(batch):
            grad_a[i] += w[i][j] * (candidates[j] - candidates[i]) / batch
            grad_c[j] += w[i][j] * anchors[i] / batch
            grad_c[i] -= w[i][j] * anchors[i] / batch
    return grad_a, grad_c


def rows(table: np.ndarray, index: Sequence[int] | None) -> list[float] | None:
    return None if index is None else [float(table[int(k)]) for k in index]


def write(table: np.ndarray, index: Sequence[int], values: list[float], kept: list[list[int]]) -> None:
    """Write the rows of the batch; an anchor without negatives changes nothing."""
    for i, k in enumerate(index):
        if kept[i]:
            table[int(k)] = values[i]


def sogclr_state(n: int) -> State:
    return {"log_u_x": np.full(n, -math.inf), "log_u_y": np.full(n, -math.inf)}


def sogclr(
    x: np.ndarray,
    y: np.ndarray,
    index: Sequence[int] | None,
    state: State,
    *,
    temperature: float,
    gamma: float,
    x_id: Sequence[int] | None = None,
    y_id: Sequence[int] | None = None,
    training: bool = True,
) -> Step:
    """w_ij = phi's terms over u_i; the value of a side is mean_i tau (log u_i - log(n-1))."""
    state = {name: table.copy() for name, table in state.items()}
    n, batch = len(state["log_u_x"]), len(x)
    kept = kept_pairs(batch, x_id, y_id)
    zeta, tau, no_positive = [0.0] * batch, [temperature] * batch, [-math.inf] * batch

    value, grad = {}, {"x": np.zeros_like(x), "y": np.zeros_like(y)}
    for a, c, anchors, candidates in (("x", "y", x, y), ("y", "x", y, x)):
        s = scores(anchors, candidates)
        phi = log_phi(s, kept, zeta, tau, n)
        log_u = new_log_u(rows(state[f"log_u_{a}"], index), phi, kept, gamma, training)
        grad_a, grad_c = surrogate_gradient(anchors, candidates, weights(s, kept, zeta, tau, log_u, no_positive, n))
        grad[a] += grad_a
        grad[c] += grad_c
        value[a] = sum(tau[i] * (log_u[i] - math.log(n - 1)) for i in range(batch) if kept[i]) / batch
        if training:
            write(state[f"log_u_{a}"], index, log_u, kept)
    return Step(value["x"], value["y"], grad["x"], grad["y"], state)


def isogclr_state(n: int, temperature: float) -> State:
    return sogclr_state(n) | {
        "tau_x": np.full(n, temperature),
        "tau_y": np.full(n, temperature),
        "tau_momentum_x": np.zeros(n),
        "tau_momentum_y": np.zeros(n),
    }


def isogclr(
    x: np.ndarray,
    y: np.ndarray,
    index: Sequence[int] | None,
    state: State,
    *,
    temperature: float,
    gamma: float,
    rho: float = 8.0,
    tau_lr: float = 1e-5,
    tau_beta: float = 0.5,
    tau_min: float = 0.001,
    tau_max: float = 1.0,
    x_id: Sequence[int] | None = None,
    y_id: Sequence[int] | None = None,
    training: bool = True,
) -> Step:
    """SogCLR with one tau_i per anchor, which then takes a step; the value includes rho tau_i."""
    state = {name: table.copy() for name, table in state.items()}
    n, batch = len(state["log_u_x"]), len(x)
    kept = kept_pairs(batch, x_id, y_id)
    zeta, no_positive = [0.0] * batch, [-math.inf] * batch

    value, grad = {}, {"x": np.zeros_like(x), "y": np.zeros_like(y)}
    for a, c, anchors, candidates in (("x", "y", x, y), ("y", "x", y, x)):
        s = scores(anchors, candidates)
        tau = rows(state[f"tau_{a}"], index) or [temperature] * batch
        phi = log_phi(s, kept, zeta, tau, n)
        log_u = new_log_u(rows(state[f"log_u_{a}"], index), phi, kept, gamma, training)
        w = weights(s, kept, zeta, tau, log_u, no_positive, n)
        grad_a, grad_c = surrogate_gradient(anchors, candidates, w)
        grad[a] += grad_a
        grad[c] += grad_c
        value[a] = sum(tau[i] * (log_u[i] - math.log(n - 1) + rho) for i in range(batch) if kept[i]) / batch
        if training:
            momentum = rows(state[f"tau_momentum_{a}"], index)
            new_tau = list(tau)
            for i in range(batch):
                if kept[i]:
                    pull = sum(w[i][j] * (s[i][j] - s[i][i]) / tau[i] for j in kept[i])
                    g = clip_to(log_u[i] - math.log(n - 1) + rho - pull, -5.0, 5.0)
                    momentum[i] = (1 - tau_beta) * momentum[i] + tau_beta * g
                    new_tau[i] = clip_to(tau[i] - tau_lr * momentum[i], tau_min, tau_max)
            write(state[f"log_u_{a}"], index, log_u, kept)
            write(state[f"tau_momentum_{a}"], index, momentum, kept)
            write(state[f"tau_{a}"], index, new_tau, kept)
    return Step(value["x"], value["y"], grad["x"], grad["y"], state)


def nuclr_state(n: int, zeta_init: float = 0.0, xi_init: float = 0.0, xi_rule: str = "norm") -> State:
    start = max(xi_init, abs(zeta_init) if xi_rule == "norm" else zeta_init)
    return sogclr_state(n) | {
        "zeta_x": np.full(n, zeta_init),
        "zeta_y": np.full(n, zeta_init),
        "zeta_velocity_x": np.zeros(n),
        "zeta_velocity_y": np.zeros(n),
        "xi_x": np.array(start),
        "xi_y": np.array(start),
    }


def zeta_gradient(
    s: Matrix,
    kept: list[list[int]],
    zeta: list[float],
    tau: float,
    log_u: list[float],
    estimator: str,
    n: int,
) -> list[float]:
    """Return n G_j = 1 - a p_jj - b (n-1)/c_j sum_{i kept with j} p_ij, or 0, which is not used, if c_j = 0."""
    batch = len(s)
    result = []
    for j in range(batch):
        if not kept[j]:
            result.append(0.0)
            continue
        p_jj = math.exp(-zeta[j] / tau - logaddexp(log_u[j], -zeta[j] / tau))
        total = 0.0
        for i in range(batch):
            if j in kept[i]:
                total += math.exp((s[i][j] - s[i][i] - zeta[j]) / tau - logaddexp(log_u[i], -zeta[i] / tau))
        on_positive = {"unbiased": 1.0, "paper": n / batch, "reference": n / batch}[estimator]
        on_sum = {
            "unbiased": (n - 1) / len(kept[j]),
            "paper": n / batch * (n - 1) / len(kept[j]),
            "reference": n / batch,  # b (n-1)/(B-1) with b = (n/B) (B-1)/(n-1); masking does not change it
        }[estimator]
        result.append(1.0 - on_positive * p_jj - on_sum * total)
    return result


def nuclr(
    x: np.ndarray,
    y: np.ndarray,
    index: Sequence[int] | None,
    state: State,
    *,
    temperature: float,
    gamma: float,
    zeta_init: float = 0.0,
    xi_rule: str = "norm",
    use_xi: bool = True,
    zeta_lr: float = 1e-3,
    zeta_lr_ratio_x: float = 1.0,
    zeta_momentum: float = 0.0,
    zeta_estimator: str = "reference",
    x_id: Sequence[int] | None = None,
    y_id: Sequence[int] | None = None,
    training: bool = True,
) -> Step:
    """Both steps use zeta_t, xi_t and the new u. On side x, zeta and xi are those of the candidates, zeta_y and xi_y.

    Without an index, zeta_init is used, the value of rows that were never visited.
    """
    state = {name: table.copy() for name, table in state.items()}
    n, batch, tau = len(state["log_u_x"]), len(x), temperature
    kept = kept_pairs(batch, x_id, y_id)

    value, grad = {}, {"x": np.zeros_like(x), "y": np.zeros_like(y)}
    for a, c, anchors, candidates in (("x", "y", x, y), ("y", "x", y, x)):
        s = scores(anchors, candidates)
        zeta = rows(state[f"zeta_{c}"], index) or [zeta_init] * batch
        xi = float(state[f"xi_{c}"])
        phi = log_phi(s, kept, zeta, [tau] * batch, n)
        log_u = new_log_u(rows(state[f"log_u_{a}"], index), phi, kept, gamma, training)

        log_positive = [-xi / tau if use_xi else -zeta[i] / tau for i in range(batch)]
        w = weights(s, kept, zeta, [tau] * batch, log_u, log_positive, n)
        grad_a, grad_c = surrogate_gradient(anchors, candidates, w)
        grad[a] += grad_a
        grad[c] += grad_c
        value[a] = sum(tau * logaddexp(log_u[i], -zeta[i] / tau) for i in range(batch) if kept[i]) / batch

        if training:
            write(state[f"log_u_{a}"], index, log_u, kept)
        if training and zeta_lr > 0:
            g = zeta_gradient(s, kept, zeta, tau, log_u, zeta_estimator, n)
            velocity = rows(state[f"zeta_velocity_{c}"], index)
            step = zeta_lr * zeta_lr_ratio_x if c == "x" else zeta_lr
            new_zeta = list(zeta)
            for j in range(batch):
                if kept[j]:
                    velocity[j] = zeta_momentum * velocity[j] + (1 - zeta_momentum) * g[j]
                    new_zeta[j] = zeta[j] - step * velocity[j]
                    xi = max(xi, abs(new_zeta[j]) if xi_rule == "norm" else new_zeta[j])
            write(state[f"zeta_velocity_{c}"], index, velocity, kept)
            write(state[f"zeta_{c}"], index, new_zeta, kept)
            state[f"xi_{c}"] = np.array(xi)
    return Step(value["x"], value["y"], grad["x"], grad["y"], state)


# ---------------------------------------------------------------------------------------------------------------------
# Stateless objectives: x, y (B, d) torch float64; autograd differentiates the loops
# ---------------------------------------------------------------------------------------------------------------------


def score_scalars(anchors: Tensor, candidates: Tensor) -> list[list[Tensor]]:
    return [[(u * v).sum() for v in candidates] for u in anchors]


def transposed(s: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[s[i][j] for i in range(len(s))] for j in range(len(s))]


def clip(
    x: Tensor,
    y: Tensor,
    *,
    temperature: float | Tensor,
    x_id: Sequence[int] | None = None,
    y_id: Sequence[int] | None = None,
) -> Tensor:
    """Half the sum over sides of mean_i (logsumexp over i and its negatives of s_ij/tau - s_ii/tau)."""
    batch, kept = len(x), kept_pairs(len(x), x_id, y_id)
    s = score_scalars(x, y)
    total = torch.zeros((), dtype=torch.float64)
    for side in (s, transposed(s)):
        for i in range(batch):
            logits = torch.stack([side[i][j] / temperature for j in [i, *kept[i]]])
            total = total + (torch.logsumexp(logits, 0) - side[i][i] / temperature) / batch
    return total / 2


def clip_learnable(
    x: Tensor,
    y: Tensor,
    log_scale: Tensor,
    x_id: Sequence[int] | None = None,
    y_id: Sequence[int] | None = None,
) -> Tensor:
    """CLIP at 1/tau = min(exp(log_scale), 100)."""
    scale = log_scale.exp() if log_scale.exp().item() <= 100 else 100.0
    return clip(x, y, temperature=1 / scale, x_id=x_id, y_id=y_id)


def siglip(
    x: Tensor,
    y: Tensor,
    log_scale: Tensor,
    bias: Tensor,
    x_id: Sequence[int] | None = None,
    y_id: Sequence[int] | None = None,
) -> Tensor:
    """-(1/B) sum_ij logsigmoid(+-(exp(log_scale) s_ij + bias)), + on the diagonal; masked pairs are dropped."""
    batch, kept = len(x), kept_pairs(len(x), x_id, y_id)
    s = score_scalars(x, y)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(batch):
        for j in [i, *kept[i]]:
            logit = log_scale.exp() * s[i][j] + bias
            total = total - torch.nn.functional.logsigmoid(logit if i == j else -logit) / batch
    return total


def dcl(
    x: Tensor,
    y: Tensor,
    *,
    temperature: float,
    tau_plus: float = 0.1,
    x_id: Sequence[int] | None = None,
    y_id: Sequence[int] | None = None,
) -> Tensor:
    """-log(e^{s_ii/tau} / (e^{s_ii/tau} + Ng_i)), with Ng_i the debiased sum over negatives, N = c_i of them.

    Ng_i = max((sum_j e^{s_ij/tau} - tau_plus N e^{s_ii/tau}) / (1 - tau_plus), N e^{-1/tau}). The two sums are
    computed relative to e^{top/tau}, with top the largest score of the row, to avoid overflow at small temperatures.
    """
    batch, kept = len(x), kept_pairs(len(x), x_id, y_id)
    s = score_scalars(x, y)
    total = 0 * s[0][0]  # differentiable even if no row has a negative
    for side in (s, transposed(s)):
        for i in range(batch):
            count = len(kept[i])
            if count == 0:
                continue
            log_floor = torch.tensor(math.log(count) - 1 / temperature, dtype=torch.float64)
            top = max([side[i][i].item()] + [side[i][j].item() for j in kept[i]])
            negatives = sum(torch.exp((side[i][j] - top) / temperature) for j in kept[i])
            positive = torch.exp((side[i][i] - top) / temperature)
            debiased = (negatives - tau_plus * count * positive) / (1 - tau_plus)
            if debiased.item() > 0:
                log_debiased = debiased.log() + top / temperature
                log_ng = log_debiased if log_debiased.item() > log_floor.item() else log_floor
            else:
                log_ng = log_floor
            log_positive = side[i][i] / temperature
            total = total + (torch.logaddexp(log_positive, log_ng) - log_positive) / batch
    return total / 2


def cyclip(
    x: Tensor,
    y: Tensor,
    *,
    temperature: float,
    x_id: Sequence[int] | None = None,
    y_id: Sequence[int] | None = None,
) -> Tensor:
    """CLIP with masking, plus a quarter of each consistency term over all pairs of samples."""
    batch = len(x)
    s, s_xx, s_yy = score_scalars(x, y), score_scalars(x, x), score_scalars(y, y)
    total = clip(x, y, temperature=temperature, x_id=x_id, y_id=y_id)
    for i in range(batch):
        for j in range(batch):
            total = total + 0.25 * (s[i][j] - s[j][i]) ** 2 / batch
            total = total + 0.25 * (s_xx[i][j] - s_yy[i][j]) ** 2 / batch
    return total
