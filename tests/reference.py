"""The seven objectives as float64 loops, written from the formulas, to test the package against.

The code is slow on purpose and shares nothing with the package. Symbols are the paper's: s the score of an anchor and
a candidate, tau the temperature, B the batch size, n the size of the data set. Side x has anchors x and candidates y;
side y has them exchanged.

The four objectives without state (clip, siglip, dcl, cyclip) return a scalar built in loops from float64 tensors, and
autograd differentiates the loops. The three with state (sogclr, isogclr, nuclr) are one function, `step`. It takes
`Settings` and a state, a dict of float64 arrays with the names of the buffers, and returns a `Step`. Its gradient is
not that of the value, but that of

    (1/B) sum_i sum_{j != i} sum_{k,m} w_ikjm (s_ikjm - S_i),   w held fixed,

summed over the sides. The value is the estimate of the objective. k counts the views of an anchor, m those of a
candidate, and S_i is the mean score of the views of pair i. K and
M are the numbers of views. zeta_jm is the popularity of view m: zeta[j] is a list of M numbers, or of one number that
all views of j share.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

Scores = list[list[list[list[float]]]]  # [i][k][j][m]: view k of anchor i against view m of candidate j
Zeta = list[list[float]]  # [j][m], or [j][0] for all views of j
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


def without_false_negatives(
    s: "Scores", kept: list[list[int]], margin: float, strategy: str, others: list[bool]
) -> tuple["Scores", list[list[int]]]:
    """Return the scores with -inf for dropped negatives, and `kept` with [] if that leaves i without negatives.

    others[i] says whether i has other negatives.

    They have s_ikjm > S_i + margin, or S_i + margin |S_i|.
    Other rows of `kept` stay: c_i counts dropped candidates, so that (n-1)/c_i times a sum over those that are left
    estimates the sum over those that are left of all n - 1.
    """
    positive = positive_scores(s)
    left, kept = [], list(kept)
    for i, anchor in enumerate(s):
        left.append([[list(views) for views in anchor_view] for anchor_view in anchor])
        some = others[i]
        for k, anchor_view in enumerate(anchor):
            for j, views in enumerate(anchor_view):
                for m, score in enumerate(views):
                    if j != i and score > threshold(positive[i], margin, strategy):
                        left[i][k][j][m] = -math.inf
                    elif j in kept[i]:
                        some = True
        if not some:
            kept[i] = []
    return left, kept


def threshold(positive: float, margin: float, strategy: str) -> float:
    return positive + margin * (abs(positive) if strategy == "relative" else 1.0)


def log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def logsumexp(terms: list[float]) -> float:
    top = max(terms)
    if top == -math.inf:
        return -math.inf
    return top + math.log(sum(math.exp(term - top) for term in terms))


def logaddexp(a: float, b: float) -> float:
    return logsumexp([a, b])


def clip_to(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


# ---------------------------------------------------------------------------------------------------------------------
# Stateful objectives: settings, state, result
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The options of NUCLR. SogCLR and iSogCLR have no zeta: popularity is "none", zeta_j = 0, and exp(-xi/tau) = 0."""

    num_samples: int
    temperature: float = 0.03  # of this step, also if it is learnt
    gamma: float = 0.8
    gamma_rule: str = "constant"
    alpha: float = 4.0
    learn_temperature: bool = False
    individual_temperature: bool = False
    rho: float = 8.0
    tau_lr: float = 1e-3
    tau_beta: float = 0.9
    tau_min: float = 0.005
    tau_max: float = 0.05
    popularity: str = "none"
    zeta_init: float = 0.0
    xi_init: float = 0.0
    xi_rule: str = "norm"
    use_xi: bool = True
    zeta_lr: float = 1e-3
    zeta_lr_ratio_x: float = 1.0
    zeta_momentum: float = 0.0
    zeta_estimator: str = "reference"
    zeta_step: str = "plain"  # zeta - zeta_lr v; "in tau": in units of tau, as nuclr (not nuclr-authors) has it
    zeta_velocity_init: str = "zero"
    normalizer: str = "table"
    sides: str = "both"
    false_negative_margin: float | None = None
    margin_strategy: str = "absolute"
    x_views: int = 1  # zeta_x has so many numbers per pair
    y_views: int = 1

    @property
    def both_sides(self) -> list[tuple[str, str]]:
        """The sides of the objective, as (anchors, candidates)."""
        return {"both": [("x", "y"), ("y", "x")], "x": [("x", "y")], "y": [("y", "x")]}[self.sides]

    def replace(self, **changes) -> "Settings":
        return dataclasses.replace(self, **changes)


def settings(name: str, **options) -> Settings:
    """Return the settings of sogclr, isogclr or nuclr with these options of its constructor."""
    fixed = {
        "sogclr": {"popularity": "none"},
        "isogclr": {"popularity": "none", "individual_temperature": True},
        "nuclr": {"popularity": options.get("popularity", "table")},
    }[name]
    return Settings(**(options | fixed))


def initial_state(options: Settings) -> State:
    n, state = options.num_samples, {}
    for a, c in options.both_sides:
        if options.normalizer == "table":
            state[f"log_u_{a}"] = np.full(n, -math.inf)
        else:
            state[f"offset_{a}"] = np.array(math.nan)  # set in the first training batch
        if options.individual_temperature:
            state[f"tau_{a}"] = np.full(n, options.temperature)
            state[f"tau_momentum_{a}"] = np.zeros(n)
        if options.popularity == "table":
            views = {"x": options.x_views, "y": options.y_views}[c]
            shape = (n,) if views == 1 else (n, views)
            state[f"zeta_{c}"] = np.full(shape, options.zeta_init)
            if options.zeta_momentum > 0:  # without momentum the velocity is the gradient, and is not stored
                start = 0.0 if options.zeta_velocity_init == "zero" else math.nan
                state[f"zeta_velocity_{c}"] = np.full(shape, start)
        if options.popularity != "none":
            start = abs(options.zeta_init) if options.xi_rule == "norm" else options.zeta_init
            state[f"xi_{c}"] = np.array(max(options.xi_init, start))
    return state


@dataclass
class Step:
    """The result of one call: the value of each side, gradients shaped as x and y, and the state afterwards.

    `grad_tau` is the gradient with respect to the learnt temperature. `grad_h` and `grad_k` have the gradients that
    arrive at the outputs of the popularity and normalizer networks, per side and shaped (B, views). `zeta_gradient`
    has n M G_jm per candidate side at the zeta from before the step (n G_j if the views share a zeta).
    """

    value_x: float
    value_y: float
    grad_x: np.ndarray
    grad_y: np.ndarray
    state: State
    grad_hard: np.ndarray | None = None
    grad_tau: float = 0.0
    grad_h: dict[str, np.ndarray] = field(default_factory=dict)
    grad_k: dict[str, np.ndarray] = field(default_factory=dict)
    zeta_gradient: dict[str, Zeta] = field(default_factory=dict)

    @property
    def value(self) -> float:
        return self.value_x + self.value_y


# ---------------------------------------------------------------------------------------------------------------------
# Stateful objectives: the formulas of one side
# ---------------------------------------------------------------------------------------------------------------------


def with_views(features: np.ndarray) -> np.ndarray:
    """Return features as (B, m, d); (B, d) means one view."""
    return features if features.ndim == 3 else features[:, None]


def scores(anchors: np.ndarray, candidates: np.ndarray) -> Scores:
    """Return s[i][k][j][m] = <a_ik, c_jm>, from (B, m, d) each."""
    a, c = anchors.tolist(), candidates.tolist()
    return [[[[sum(p * q for p, q in zip(u, v, strict=True)) for v in views] for views in c] for u in own] for own in a]


def positive_scores(s: Scores) -> list[float]:
    """Return S_i, the mean of s[i][k][i][m] over the views k and m."""
    result = []
    for i, anchor in enumerate(s):
        own = [score for view in anchor for score in view[i]]
        result.append(sum(own) / len(own))
    return result


def exponent(s: Scores, positive: list[float], zeta: Zeta, tau_i: list[float], tau: float, *at: int) -> float:
    """Return (s_ikjm - S_i)/tau_i - zeta_jm/tau for at = i, k, j, m."""
    i, k, j, m = at
    return (s[i][k][j][m] - positive[i]) / tau_i[i] - zeta_of(zeta, j, m) / tau


def zeta_of(zeta: Zeta, j: int, m: int) -> float:
    return zeta[j][0] if len(zeta[j]) == 1 else zeta[j][m]


def own_exponents(s: Scores, zeta: Zeta, tau_i: list[float], tau: float, i: int) -> list[list[float]]:
    """Return the exponents [m][k] of the pair's own terms in Z_i, whose mean is added to u_i.

    Views with a zeta of their own have their own scores. Views that share one count as their mean score: -zeta_i/tau.
    """
    if len(zeta[i]) == 1:
        return [[-zeta[i][0] / tau]]
    positive = positive_scores(s)
    return [
        [exponent(s, positive, zeta, tau_i, tau, i, k, i, m) for k in range(len(s[i]))] for m in range(len(zeta[i]))
    ]


def log_mean_exp(terms: list[list[float]]) -> float:
    flat = [term for row in terms for term in row]
    return logsumexp(flat) - math.log(len(flat))


def log_phi(s: Scores, kept: list[list[int]], zeta: Zeta, tau_i: list[float], tau: float, n: int) -> list[float]:
    """Return log phi_i, phi_i = (n-1)/c_i sum_{j kept} mean_{k,m} exp((s_ikjm - S_i)/tau_i - zeta_jm/tau).

    It is -inf if c_i = 0.
    """
    positive = positive_scores(s)
    result = []
    for i, negatives in enumerate(kept):
        if not negatives:
            result.append(-math.inf)
            continue
        terms = []
        for k in range(len(s[i])):
            for j in negatives:
                for m in range(len(s[i][k][j])):
                    terms.append(exponent(s, positive, zeta, tau_i, tau, i, k, j, m))
        pairs_of_views = len(terms) // len(negatives)
        result.append(math.log((n - 1) / len(negatives)) + logsumexp(terms) - math.log(pairs_of_views))
    return result


def running_average(old: float, phi: float, options: Settings) -> float:
    """Return log((1-gamma) u + gamma phi), or log phi on the first visit, log u = -inf.

    Proximal: gamma = alpha u' / (1 + alpha u') with u' = u/(n-1), that is, the logistic function of log(alpha u').
    """
    if old == -math.inf:
        return phi
    if options.gamma_rule == "proximal":
        ratio = math.log(options.alpha) + old - math.log(options.num_samples - 1)
        ratio = max(ratio, math.log(1e-8))  # a limit of ours, which keeps gradients finite
        log_gamma, log_rest = -logaddexp(0.0, -ratio), -logaddexp(0.0, ratio)
    else:
        log_gamma, log_rest = log(options.gamma), log(1 - options.gamma)
    return logaddexp(log_rest + old, log_gamma + phi)


def weights(
    s: Scores,
    kept: list[list[int]],
    zeta: Zeta,
    tau_i: list[float],
    tau: float,
    log_d: list[float],
    n: int,
) -> Scores:
    """Return w_ikjm = (n-1)/(c_i K M) exp((s_ikjm - S_i)/tau_i - zeta_jm/tau) / d_i, 0 if masked."""
    positive = positive_scores(s)
    w = [[[[0.0] * len(views) for views in anchor_view] for anchor_view in anchor] for anchor in s]
    for i, negatives in enumerate(kept):
        for k in range(len(s[i])):
            for j in negatives:
                count = len(negatives) * len(s[i]) * len(s[i][k][j])
                for m in range(len(s[i][k][j])):
                    power = exponent(s, positive, zeta, tau_i, tau, i, k, j, m)
                    w[i][k][j][m] = math.exp(math.log((n - 1) / count) + power - log_d[i])
    return w


def surrogate_gradient(anchors: np.ndarray, candidates: np.ndarray, w: Scores) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of (1/B) sum_ikjm w_ikjm (<a_ik, c_jm> - S_i) for anchors and for candidates."""
    batch, a_views, c_views = len(anchors), anchors.shape[1], candidates.shape[1]
    grad_a, grad_c = np.zeros_like(anchors), np.zeros_like(candidates)
    for i in range(batch):
        total = 0.0
        for k in range(a_views):
            for j in range(batch):
                for m in range(c_views):
                    total += w[i][k][j][m]
                    grad_a[i, k] += w[i][k][j][m] * candidates[j, m] / batch
                    grad_c[j, m] += w[i][k][j][m] * anchors[i, k] / batch
        for k in range(a_views):
            for m in range(c_views):
                grad_a[i, k] -= total * candidates[i, m] / (a_views * c_views * batch)
                grad_c[i, m] -= total * anchors[i, k] / (a_views * c_views * batch)
    return grad_a, grad_c


def temperature_pull(s: Scores, w: Scores, tau_i: list[float]) -> list[float]:
    """Return sum_{j,k,m} w_ikjm (s_ikjm - S_i)/tau_i per anchor."""
    positive = positive_scores(s)
    result = []
    for i, anchor in enumerate(s):
        total = 0.0
        for k, anchor_view in enumerate(anchor):
            for j, candidate_views in enumerate(anchor_view):
                for m, score in enumerate(candidate_views):
                    if w[i][k][j][m] > 0:  # a dropped score is -inf
                        total += w[i][k][j][m] * (score - positive[i]) / tau_i[i]
        result.append(total)
    return result


def temperature_gradient(
    s: Scores,
    kept: list[list[int]],
    w: Scores,
    zeta: Zeta,
    guard: list[list[list[float]]],
    tau: float,
    log_d: list[float],
    options: Settings,
) -> float:
    """Return the derivative with respect to tau of mean_i tau (log d_i - log(n-1) + rho).

    d_i = u_i + the mean of exp(guard_i), whose exponents are inverse to tau, and du_i/dtau is replaced by
    dphi_i/dtau = -(n-1)/c_i sum_j mean_{k,m} exp(..) (s_ikjm - S_i - zeta_jm)/tau^2,
    in which exp(..) (n-1)/(c_i K M) / d_i is w_ikjm.
    """
    positive = positive_scores(s)
    total = 0.0
    for i, negatives in enumerate(kept):
        if not negatives:
            continue
        derivative = 0.0  # of log d_i
        for k in range(len(s[i])):
            for j in negatives:
                for m in range(len(s[i][k][j])):
                    if w[i][k][j][m] > 0:  # a dropped score is -inf
                        derivative -= w[i][k][j][m] * (s[i][k][j][m] - positive[i] - zeta_of(zeta, j, m)) / tau**2
        powers = [power for row in guard[i] for power in row]
        for power in powers:
            if power > -math.inf:
                derivative -= math.exp(power - log_d[i]) * power / tau / len(powers)
        total += log_d[i] - math.log(options.num_samples - 1) + options.rho + tau * derivative
    return total / len(s)


def zeta_gradient(
    s: Scores,
    kept: list[list[int]],
    zeta: Zeta,
    tau_i: list[float],
    tau: float,
    log_u: list[float],
    estimator: str,
    n: int,
) -> Zeta:
    """Return n M G_jm = 1 - a p_jjm - b (n-1)/c_j sum_{i kept with j} p_ijm, or 0, which is not used, if c_j = 0.

    p_ijm = mean_k exp((s_ikjm - S_i)/tau_i - zeta_jm/tau) / Z_i, and Z_i = u_i + the mean of the pair's own terms. If
    the views of j share a zeta, p_ij is the mean over m.
    """
    log_z = [
        logaddexp(log_u[i], log_mean_exp(own_exponents(s, zeta, tau_i, tau, i))) if kept[i] else math.inf
        for i in range(len(s))
    ]
    result = []
    for j in range(len(s)):
        row = [0.0] * len(zeta[j])
        for number in range(len(zeta[j])):
            if kept[j]:
                own = own_exponents(s, zeta, tau_i, tau, j)[number]
                p_jj = sum(math.exp(power - log_z[j]) for power in own) / len(own)
                total = _probabilities_of_others(s, kept, zeta, tau_i, tau, log_z, j, number)
                row[number] = _combine(p_jj, total, len(kept[j]), len(s), estimator, n)
        result.append(row)
    return result


def _probabilities_of_others(s, kept, zeta, tau_i, tau, log_z, j, number) -> float:
    """Return the sum over i of p_ijm, or of its mean over the views m that share the zeta of j."""
    positive, total = positive_scores(s), 0.0
    for i in range(len(s)):
        if j in kept[i]:
            views = range(len(s[i][0][j])) if len(zeta[j]) == 1 else [number]
            for k in range(len(s[i])):
                for m in views:
                    power = exponent(s, positive, zeta, tau_i, tau, i, k, j, m)
                    total += math.exp(power - log_z[i]) / (len(s[i]) * len(views))
    return total


def _combine(p_jj: float, total: float, negatives: int, batch: int, estimator: str, n: int) -> float:
    on_positive = {"unbiased": 1.0, "paper": n / batch, "reference": n / batch}[estimator]
    on_sum = {
        "unbiased": (n - 1) / negatives,
        "paper": n / batch * (n - 1) / negatives,
        "reference": n / batch,  # b (n-1)/(B-1) with b = (n/B) (B-1)/(n-1); masking does not change it
    }[estimator]
    return 1.0 - on_positive * p_jj - on_sum * total


# ---------------------------------------------------------------------------------------------------------------------
# Stateful objectives: one step
# ---------------------------------------------------------------------------------------------------------------------


def rows(table: np.ndarray, index: Sequence[int]) -> list[float]:
    return [float(table[int(k)]) for k in index]


def zeta_rows(table: np.ndarray, index: Sequence[int]) -> Zeta:
    return [np.atleast_1d(table[int(k)]).tolist() for k in index]


def write(table: np.ndarray, index: Sequence[int], values: list, kept: list[list[int]]) -> None:
    """Write the rows of the batch; an anchor without negatives changes nothing."""
    for i, k in enumerate(index):
        if kept[i]:
            table[int(k)] = values[i] if table.ndim == 2 else np.ravel(values[i])[0]


def step(
    options: Settings,
    x: np.ndarray,
    y: np.ndarray,
    index: Sequence[int] | None,
    state: State,
    *,
    x_id: Sequence[int] | None = None,
    y_id: Sequence[int] | None = None,
    training: bool = True,
    h: dict[str, np.ndarray] | None = None,
    k: dict[str, np.ndarray] | None = None,
    hard: np.ndarray | None = None,
    hard_id: Sequence[Sequence[int]] | None = None,
) -> Step:
    """Take one step of sogclr, isogclr or nuclr: the model's gradient, and in training the new state.

    Everything uses zeta, xi and tau_i from before the step, and the new u. On side x, zeta and xi are those of the
    candidates, zeta_y and xi_y; u and tau_i are those of the anchors, log_u_x and tau_x. An anchor without negatives
    has value 0 and changes nothing.

    Args:
        options: the settings; `temperature` is the current one.
        x: (B, d) or (B, m, d).
        y: as x, with its own number of views.
        index: the rows of the tables; None in eval mode stands for rows that were never visited.
        state: the tables.
        x_id: ids of x.
        y_id: ids of y.
        training: whether the state is updated.
        h: side -> (B, m), the outputs of the popularity network of the candidates of this side, one per view.
        k: side -> (B, m), the outputs of the normalizer network of the anchors of this side, without the offset.
        hard: (B, k, d), the hard negatives of each x; h["hard"] has the outputs of the popularity network for them.
        hard_id: (B, k), their ids; one with the (first) id of an anchor's y is not a negative of this anchor.

    """
    state = {name: table.copy() for name, table in state.items()}
    features = {"x": with_views(x), "y": with_views(y)}
    result = Step(0.0, 0.0, np.zeros_like(features["x"]), np.zeros_like(features["y"]), {})
    result.grad_hard = None if hard is None else np.zeros_like(hard)
    kept = kept_pairs(len(x), x_id, y_id)
    for a, c in options.both_sides:
        own_hard = hard if a == "x" else None
        answers = None if hard_id is None else ([np.atleast_1d(own)[0] for own in y_id], hard_id)
        _side(options, a, c, features, index, state, kept, training, h, k, result, own_hard, answers)
    result.grad_x, result.grad_y = result.grad_x.reshape(x.shape), result.grad_y.reshape(y.shape)
    result.state = state
    return result


@dataclass
class HardTerm:
    """The term of a hard negative in phi_i: view k of anchor i against the t-th hard negative of a pair."""

    at: tuple[int, int, int, int]  # i, k, owner, t
    margin: float  # s(x_ik, h_lt) - S_i
    zeta: float
    log_term: float  # log( (1 if i owns it, else (n-1)/c_i) / K exp((s - S_i)/tau_i - zeta/tau) )


def hard_terms(options, anchors, hard, positive, tau_i, zeta, seen, answers) -> list[list[HardTerm]]:
    """Return the terms of each anchor: its own hard negatives and those of the pairs that are its negatives."""
    n, tau, terms = options.num_samples, options.temperature, []
    for i in range(len(anchors)):
        terms.append([])
        for k, view in enumerate(anchors[i]):
            for owner in [i, *seen[i]] if seen[i] else []:
                for t, candidate in enumerate(hard[owner]):
                    score = sum(p * q for p, q in zip(view.tolist(), candidate.tolist(), strict=True))
                    if answers is not None and answers[1][owner][t] == answers[0][i]:
                        continue
                    margin = options.false_negative_margin
                    if margin is not None and score > threshold(positive[i], margin, options.margin_strategy):
                        continue
                    factor = (1.0 if owner == i else (n - 1) / len(seen[i])) / len(anchors[i])
                    power = (score - positive[i]) / tau_i[i] - zeta[owner][t] / tau
                    log_term = math.log(factor) + power
                    terms[i].append(HardTerm((i, k, owner, t), score - positive[i], zeta[owner][t], log_term))
    return terms


def hard_gradients(terms, log_d, tau_i, anchors, candidates, hard, tau) -> tuple:
    """Return the gradients of (1/B) sum_ih w_ih (s_ih - S_i), sum_h w_ih (s_ih - S_i)/tau_i, and d log d_i/dtau."""
    batch, a_views, c_views = len(anchors), anchors.shape[1], candidates.shape[1]
    grad_a, grad_c, grad_h = np.zeros_like(anchors), np.zeros_like(candidates), np.zeros_like(hard)
    pull, derivative = [0.0] * batch, [0.0] * batch
    for term in (term for own in terms for term in own):
        i, k, owner, t = term.at
        w = math.exp(term.log_term - log_d[i])
        grad_a[i, k] += w * hard[owner, t] / batch
        grad_h[owner, t] += w * anchors[i, k] / batch
        for p in range(a_views):
            for q in range(c_views):
                grad_a[i, p] -= w * candidates[i, q] / (a_views * c_views * batch)
                grad_c[i, q] -= w * anchors[i, p] / (a_views * c_views * batch)
        pull[i] += w * term.margin / tau_i[i]
        derivative[i] -= w * (term.margin - term.zeta) / tau**2
    return grad_a, grad_c, grad_h, pull, derivative


def _side(options, a, c, features, index, state, kept, training, h, k, result, hard, answers) -> None:
    n, batch, tau = options.num_samples, len(kept), options.temperature
    s = scores(features[a], features[c])
    positive = positive_scores(s)

    # tau_i of the anchors, zeta_j and xi of the candidates
    tau_i, xi = [tau] * batch, math.inf
    per_view = {"x": options.x_views, "y": options.y_views}[c] > 1
    zeta = [[options.zeta_init] * (features[c].shape[1] if per_view else 1) for _ in range(batch)]
    if options.individual_temperature and index is not None:
        tau_i = rows(state[f"tau_{a}"], index)
    if options.popularity == "none":
        zeta = [[0.0]] * batch
    elif options.popularity == "network":
        zeta = [[options.zeta_init + tau * output for output in views] for views in h[c].tolist()]
    elif index is not None:
        zeta = zeta_rows(state[f"zeta_{c}"], index)
    if options.popularity != "none":
        xi = float(state[f"xi_{c}"])

    # negatives
    seen = kept  # with a margin, an anchor may have seen candidates and have no negative left: phi_i = 0
    extra: list[list[HardTerm]] = [[]] * batch
    if hard is not None:
        zeta_h = np.full(hard.shape[:2], 0.0 if options.popularity == "none" else options.zeta_init)
        if options.popularity == "network":
            zeta_h = zeta_h + tau * h["hard"]
        extra = hard_terms(options, features[a], hard, positive, tau_i, zeta_h.tolist(), seen, answers)
    if options.false_negative_margin is not None:
        others = [bool(terms) for terms in extra]
        s, kept = without_false_negatives(s, kept, options.false_negative_margin, options.margin_strategy, others)

    # u_i
    phi = log_phi(s, kept, zeta, tau_i, tau, n)
    phi = [logsumexp([phi[i], *(term.log_term for term in extra[i])]) for i in range(batch)]
    if options.normalizer == "network":
        output = [sum(views) / len(views) for views in k[a].tolist()]
        if training and math.isnan(state[f"offset_{a}"]):
            targets = [phi[i] + positive[i] / tau_i[i] for i in range(batch) if kept[i]]
            state[f"offset_{a}"] = np.array(sum(targets) / len(targets))
        offset = float(state[f"offset_{a}"])
        old = [output[i] + offset - positive[i] / tau_i[i] for i in range(batch)]
    else:
        old = [-math.inf] * batch if index is None else rows(state[f"log_u_{a}"], index)
    log_u = list(old)
    for i in range(batch):
        if seen[i] and (training or old[i] == -math.inf):
            log_u[i] = running_average(old[i], phi[i], options)

    # the model's gradient: d_i = u_i + exp(-xi/tau), or u_i + the pair's own terms
    own = [own_exponents(s, zeta, tau_i, tau, i) for i in range(batch)]
    guard = [[[-xi / tau]] if options.use_xi or options.popularity == "none" else own[i] for i in range(batch)]
    log_d = [logaddexp(log_u[i], log_mean_exp(guard[i])) for i in range(batch)]
    w = weights(s, kept, zeta, tau_i, tau, log_d, n)
    grad_a, grad_c = surrogate_gradient(features[a], features[c], w)
    gradients = {"x": result.grad_x, "y": result.grad_y}
    gradients[a] += grad_a
    gradients[c] += grad_c
    hard_pull = hard_derivative = [0.0] * batch
    if hard is not None:
        parts = hard_gradients(extra, log_d, tau_i, features[a], features[c], hard, tau)
        gradients[a] += parts[0]
        gradients[c] += parts[1]
        result.grad_hard += parts[2]
        hard_pull, hard_derivative = parts[3:]

    # the value
    total = 0.0
    for i in range(batch):
        if not kept[i]:
            continue
        if options.learn_temperature or options.individual_temperature:
            total += tau_i[i] * (log_d[i] - math.log(n - 1) + options.rho)
        elif options.popularity == "none":
            total += tau * (log_d[i] - math.log(n - 1))
        else:
            total += tau * logaddexp(log_u[i], log_mean_exp(own[i]))
    setattr(result, f"value_{a}", total / batch)
    if options.learn_temperature:
        result.grad_tau += temperature_gradient(s, kept, w, zeta, guard, tau, log_d, options)
        result.grad_tau += tau * sum(hard_derivative) / batch

    if not training:
        return

    # u_i: the table, or the network that minimises phi_i exp(-k_i) + k_i
    if options.normalizer == "table":
        write(state[f"log_u_{a}"], index, log_u, seen)
    else:
        result.grad_k[a] = np.zeros_like(k[a])
        for i in range(batch):
            if seen[i]:
                pull = max(1 - math.exp(min(phi[i] - old[i], 5.0)), -math.exp(4.0))
                result.grad_k[a][i] += pull / batch / len(k[a][i])

    # tau_i
    if options.individual_temperature:
        pull = [one + other for one, other in zip(temperature_pull(s, w, tau_i), hard_pull, strict=True)]
        momentum, new_tau = rows(state[f"tau_momentum_{a}"], index), list(tau_i)
        for i in range(batch):
            if kept[i]:
                g = clip_to(log_d[i] - math.log(n - 1) + options.rho - pull[i], -5.0, 5.0)
                momentum[i] = (1 - options.tau_beta) * momentum[i] + options.tau_beta * g
                new_tau[i] = clip_to(tau_i[i] - options.tau_lr * momentum[i], options.tau_min, options.tau_max)
        write(state[f"tau_momentum_{a}"], index, momentum, kept)
        write(state[f"tau_{a}"], index, new_tau, kept)

    # zeta_j and xi
    if options.popularity == "none" or options.zeta_lr == 0:
        return
    estimator = "unbiased" if options.popularity == "network" else options.zeta_estimator
    result.zeta_gradient[c] = zeta_gradient(s, kept, zeta, tau_i, tau, log_u, estimator, n)
    if options.popularity == "network":
        result.grad_h[c] = np.zeros_like(h[c])
        for j in range(batch):
            result.grad_h[c][j] += np.array(result.zeta_gradient[c][j]) / batch * tau / len(h[c][j])
    else:
        zeta = _move_zeta(options, c, s, kept, zeta, tau_i, log_u, index, state)
    for j in range(batch):
        if kept[j]:
            xi = max(xi, *(abs(value) if options.xi_rule == "norm" else value for value in zeta[j]))
    state[f"xi_{c}"] = np.array(xi)


def _move_zeta(options, c, s, kept, zeta, tau_i, log_u, index, state) -> Zeta:
    """Take the step of zeta, write its tables, and return the new zeta."""
    n, tau, beta = options.num_samples, options.temperature, options.zeta_momentum
    lr = options.zeta_lr * options.zeta_lr_ratio_x if c == "x" else options.zeta_lr
    if options.zeta_step == "in tau":
        return _move_zeta_in_tau(options, c, s, kept, zeta, tau_i, log_u, index, state)
    velocity = rows(state[f"zeta_velocity_{c}"], index) if beta > 0 else [0.0] * len(zeta)
    g = zeta_gradient(s, kept, zeta, tau_i, tau, log_u, options.zeta_estimator, n)
    moved = list(zeta)
    for j in range(len(zeta)):
        if not kept[j]:
            continue
        if math.isnan(velocity[j]):  # zeta_velocity_init="gradient", first update
            velocity[j] = g[j][0]
        else:
            velocity[j] = beta * velocity[j] + (1 - beta) * g[j][0]
        moved[j] = [zeta[j][0] - lr * velocity[j]]
    zeta = moved
    write(state[f"zeta_{c}"], index, zeta, kept)
    if beta > 0:
        write(state[f"zeta_velocity_{c}"], index, velocity, kept)
    return zeta


def _move_zeta_in_tau(options, c, s, kept, zeta, tau_i, log_u, index, state) -> Zeta:
    """Take the step of nuclr: that of "unbiased" is bounded and has mean 0 over the batch; "paper" is B G_j."""
    n, batch, tau, beta = options.num_samples, len(zeta), options.temperature, options.zeta_momentum
    velocity = [[0.0] * len(row) for row in zeta]
    if beta > 0:
        velocity = zeta_rows(state[f"zeta_velocity_{c}"], index)
    g = zeta_gradient(s, kept, zeta, tau_i, tau, log_u, options.zeta_estimator, n)
    scale = 1.0 if options.zeta_estimator == "unbiased" else batch / n  # g is n M G_jm
    counted = [(j, m) for j in range(batch) for m in range(len(zeta[j])) if kept[j]]
    moves = {}
    for j, m in counted:
        velocity[j][m] = beta * velocity[j][m] + (1 - beta) * scale * g[j][m]
        moves[j, m] = -options.zeta_lr * velocity[j][m]
    if options.zeta_estimator == "unbiased" and counted:
        moves = {at: clip_to(move, -1.0, 1.0) for at, move in moves.items()}
        mean = sum(moves.values()) / len(moves)
        moves = {at: move - mean for at, move in moves.items()}
    moved = [list(row) for row in zeta]
    for j, m in counted:
        moved[j][m] = zeta[j][m] + tau * moves[j, m]
    write(state[f"zeta_{c}"], index, moved, kept)
    if beta > 0:
        write(state[f"zeta_velocity_{c}"], index, velocity, kept)
    return moved


# ---------------------------------------------------------------------------------------------------------------------
# Stateless objectives: x, y (B, d) torch float64; autograd differentiates the loops
# ---------------------------------------------------------------------------------------------------------------------


def score_scalars(anchors: Tensor, candidates: Tensor) -> list[list[Tensor]]:
    return [[(u * v).sum() for v in candidates] for u in anchors]


def transposed(s: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[s[i][j] for i in range(len(s))] for j in range(len(s))]


def left_of(side: list[list[Tensor]], i: int, negatives: list[int], margin: float | None, strategy: str) -> list[int]:
    """Return the negatives j of anchor i without those with s_ij > s_ii + margin (or margin |s_ii|)."""
    if margin is None:
        return negatives
    return [j for j in negatives if side[i][j].item() <= threshold(side[i][i].item(), margin, strategy)]


def hard_of(x: Tensor, hard: Tensor | None, s, i: int, kept: list[int], margin: float | None, strategy: str) -> list:
    """Return the scores of x_i and the hard negatives, its own and those of the pairs `kept`, without dropped ones.

    `hard` may be a tuple of them, the ids of y and those of the hard negatives, which drop a copy of y_i.
    """
    if hard is None:
        return []
    hard, y_id, hard_id = hard if isinstance(hard, tuple) else (hard, None, None)
    found = []
    for owner in [i, *kept]:
        for t, candidate in enumerate(hard[owner]):
            if y_id is None or hard_id[owner][t] != y_id[i]:
                found.append((x[i] * candidate).sum())
    if margin is None:
        return found
    return [score for score in found if score.item() <= threshold(s[i][i].item(), margin, strategy)]


def clip(
    x: Tensor,
    y: Tensor,
    *,
    temperature: float | Tensor,
    x_id: Sequence[int] | None = None,
    y_id: Sequence[int] | None = None,
    false_negative_margin: float | None = None,
    margin_strategy: str = "absolute",
    hard: Tensor | None = None,
) -> Tensor:
    """Half the sum over sides of mean_i (logsumexp over i and its negatives of s_ij/tau - s_ii/tau)."""
    batch, kept = len(x), kept_pairs(len(x), x_id, y_id)
    s = score_scalars(x, y)
    total = torch.zeros((), dtype=torch.float64)
    for side in (s, transposed(s)):
        for i in range(batch):
            negatives = left_of(side, i, kept[i], false_negative_margin, margin_strategy)
            logits = [side[i][j] / temperature for j in [i, *negatives]]
            if side is s:
                extra = hard_of(x, hard, s, i, kept[i], false_negative_margin, margin_strategy)
                logits += [score / temperature for score in extra]
            logits = torch.stack(logits)
            total = total + (torch.logsumexp(logits, 0) - side[i][i] / temperature) / batch
    return total / 2


def clip_learnable(
    x: Tensor,
    y: Tensor,
    log_scale: Tensor,
    x_id: Sequence[int] | None = None,
    y_id: Sequence[int] | None = None,
    false_negative_margin: float | None = None,
    margin_strategy: str = "absolute",
    hard: Tensor | None = None,
) -> Tensor:
    """CLIP at 1/tau = min(exp(log_scale), 100)."""
    scale = log_scale.exp() if log_scale.exp().item() <= 100 else 100.0
    margin = {"false_negative_margin": false_negative_margin, "margin_strategy": margin_strategy}
    return clip(x, y, temperature=1 / scale, x_id=x_id, y_id=y_id, hard=hard, **margin)


def siglip(
    x: Tensor,
    y: Tensor,
    log_scale: Tensor,
    bias: Tensor,
    x_id: Sequence[int] | None = None,
    y_id: Sequence[int] | None = None,
    false_negative_margin: float | None = None,
    margin_strategy: str = "absolute",
    hard: Tensor | None = None,
) -> Tensor:
    """-(1/B) sum_ij logsigmoid(+-(exp(log_scale) s_ij + bias)), + on the diagonal; masked pairs are dropped.

    Half of a term belongs to anchor x_i and half to anchor y_j; a margin may drop one of the halves.
    """
    batch, kept = len(x), kept_pairs(len(x), x_id, y_id)
    s = score_scalars(x, y)
    total = torch.zeros((), dtype=torch.float64)
    for side in (s, transposed(s)):
        for i in range(batch):
            for j in [i, *left_of(side, i, kept[i], false_negative_margin, margin_strategy)]:
                logit = log_scale.exp() * side[i][j] + bias
                total = total - torch.nn.functional.logsigmoid(logit if i == j else -logit) / batch / 2
    for i in range(batch):
        for score in hard_of(x, hard, s, i, kept[i], false_negative_margin, margin_strategy):
            total = total - torch.nn.functional.logsigmoid(-(log_scale.exp() * score + bias)) / batch
    return total


def dcl(
    x: Tensor,
    y: Tensor,
    *,
    temperature: float,
    tau_plus: float = 0.1,
    x_id: Sequence[int] | None = None,
    y_id: Sequence[int] | None = None,
    false_negative_margin: float | None = None,
    margin_strategy: str = "absolute",
    hard: Tensor | None = None,
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
            kept_i = left_of(side, i, kept[i], false_negative_margin, margin_strategy)
            scores_i = [side[i][j] for j in kept_i]
            if side is s:
                scores_i += hard_of(x, hard, s, i, kept[i], false_negative_margin, margin_strategy)
            count = len(scores_i)
            if count == 0:
                continue
            log_floor = torch.tensor(math.log(count) - 1 / temperature, dtype=torch.float64)
            top = max([side[i][i].item()] + [score.item() for score in scores_i])
            negatives = sum(torch.exp((score - top) / temperature) for score in scores_i)
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
    false_negative_margin: float | None = None,
    margin_strategy: str = "absolute",
    hard: Tensor | None = None,
) -> Tensor:
    """CLIP with masking, plus a quarter of each consistency term over all pairs of samples."""
    batch = len(x)
    s, s_xx, s_yy = score_scalars(x, y), score_scalars(x, x), score_scalars(y, y)
    total = clip(
        x,
        y,
        temperature=temperature,
        x_id=x_id,
        y_id=y_id,
        false_negative_margin=false_negative_margin,
        margin_strategy=margin_strategy,
        hard=hard,
    )
    for i in range(batch):
        for j in range(batch):
            total = total + 0.25 * (s[i][j] - s[j][i]) ** 2 / batch
            total = total + 0.25 * (s_xx[i][j] - s_yy[i][j]) ** 2 / batch
    return total
