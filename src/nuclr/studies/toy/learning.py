"""Learning the model on the toy problem: s(x,y) = x^T W y with a 2 x 2 matrix W, of which the identity is the true one.

Three losses are minimized over W on the same n pairs:

- "mle": exact likelihood, mean_i tau log Z_W(x_i) - x_i^T W y_i,
- "gcl": mean_i tau log sum_j exp(s_ij/tau) - s_ii, a uniform popularity,
- "nuclr": mean_i tau log sum_j exp((s_ij - zeta_j)/tau) - s_ii + mean_j zeta_j, minimized over zeta as well.

All three are convex. The learned W is judged by its excess true risk, R(W) - R(I) = tau E_x KL(p(.|x), p_W(.|x)), and
by the zero-one loss of classifying x: the unit square is divided into four classes of y, and the class with the largest
probability under p_W(y|x) is predicted. With P the class probabilities,

    excess zero-one loss  <=  E_x sum_k |P(k|x) - P_W(k|x)|  <=  sqrt(2 (R(W) - R(I)) / tau)

by Pinsker's inequality, so a method whose excess risk vanishes is consistent.
"""

import math

import torch
from torch import Generator, Tensor
from torch.quasirandom import SobolEngine

from nuclr.popularity import Solver
from nuclr.popularity.problem import make_problem
from nuclr.studies.toy import spaces

METHODS = ("mle", "gcl", "nuclr")
CUTS = (0.5, 0.6)  # of y_1 and y_2, between the classes
RISK_NODES = 48
CLASSIFIED = 2**16  # points x of the zero-one loss
STEPS = 30


def measure_learning(
    n: int,
    temperature: float,
    stream: Generator,
) -> dict[str, dict[str, float]]:
    """Learn W by each method on n new pairs.

    Returns:
        Per method the excess risk, the excess zero-one loss, its bound, and both entries of the diagonal of W.

    """
    x = spaces.sample_x(n, stream)
    y = spaces.sample_y(x, temperature, stream)
    values = {}
    for method in METHODS:
        w = learn(method, x, y, temperature)
        risk = excess_risk(w, temperature)
        values[method] = {
            "excess_risk": risk,
            "zero_one": zero_one_loss(w, temperature),
            "bound": math.sqrt(2 * max(risk, 0.0) / temperature),
            "w_11": w[0, 0].item(),
            "w_22": w[1, 1].item(),
        }
    return values


def learn(
    method: str,
    x: Tensor,
    y: Tensor,
    temperature: float,
) -> Tensor:
    """Minimize a method's loss on n pairs.

    Args:
        method: One of `METHODS`.
        x: Anchors, (n, 2) float64.
        y: Their y, (n, 2) float64.
        temperature: tau.

    Returns:
        W, (2, 2).

    """
    w = (0.5 * torch.eye(2, dtype=torch.float64)).requires_grad_()
    mean_positive = x.T @ y / len(x)  # the mean of x_i^T W y_i is the sum of its products with W
    zeta = torch.zeros(len(y), dtype=torch.float64)
    solver = Solver(tolerance=1e-7)
    optimizer = torch.optim.LBFGS(
        [w],
        max_iter=STEPS,
        tolerance_grad=1e-9,
        tolerance_change=1e-13,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        nonlocal zeta
        optimizer.zero_grad()
        if method == "mle":
            log_z = spaces.log_partition(x @ w, temperature)
        else:
            if method == "nuclr":  # the gradient at the best zeta is that of the minimum over zeta
                problem = make_problem(
                    x @ w.detach(),
                    y,
                    temperature=temperature,
                    norms="any",
                )
                zeta = solver(problem, init=zeta).zeta
            log_z = ((x @ w @ y.T - zeta) / temperature).logsumexp(dim=1)
        value = temperature * log_z.mean() - (w * mean_positive).sum() + zeta.mean()
        value.backward()
        return value

    optimizer.step(loss)
    return w.detach()


def excess_risk(w: Tensor, temperature: float) -> float:
    """Return R(W) - R(I) by quadrature over x, with the exact partition function."""
    x, weight = spaces.half_disc_nodes(RISK_NODES)
    mean_y = spaces.expected_y(x, temperature)

    def risk(matrix: Tensor) -> Tensor:
        features = x @ matrix
        return weight @ (temperature * spaces.log_partition(features, temperature) - (features * mean_y).sum(dim=1))

    return (risk(w) - risk(torch.eye(2, dtype=w.dtype))).item()


def class_probabilities(features: Tensor, temperature: float) -> Tensor:
    """Return the probability of each class given x, (n, 4), where `features` is x W, (n, 2)."""
    a = features / temperature
    cut = torch.tensor(CUTS, dtype=a.dtype)
    below = torch.where(a == 0, cut, torch.expm1(cut * a) / torch.expm1(a))
    sides = torch.stack([below, 1 - below], dim=2)
    return (sides[:, 0, :, None] * sides[:, 1, None, :]).flatten(1)


def zero_one_loss(w: Tensor, temperature: float) -> float:
    """Return the zero-one loss of W minus that of the true model."""
    points = SobolEngine(dimension=2, scramble=True, seed=0).draw(CLASSIFIED, dtype=torch.float64)
    x = spaces.half_disc(points)
    true = class_probabilities(x, temperature)
    predicted = class_probabilities(x @ w, temperature).argmax(dim=1, keepdim=True)
    return (true.max(dim=1).values - true.gather(1, predicted).squeeze(1)).mean().item()
