"""NUCLR: learn how popular every candidate is, and divide the negatives by it.

    p(y|x) = exp(s(x,y)/tau) / Z(x),    Z(x) estimated by  sum_j exp(s(x,y_j)/tau) / q_j,    q_j = sum_i p(y_j|x_i)

over the n observed y_j: multiple importance sampling with the balance heuristic (Wang, Lei, Ying, Yang, "On
Discriminative Probabilistic Modeling for Self-Supervised Representation Learning", ICLR 2025). zeta_j = tau log q_j
solves a convex problem, and each batch takes one step towards its solution. In the notation of `stateful`,
d_i = u_i + exp(-xi/tau), where xi is a bound of zeta that guards the positive pair.

The step of zeta_j, with p_ij the model's probability and p_jj that of the positive,

    n G_j = 1 - a p_jj - b (n-1)/(B-1) sum_{i != j} p_ij
    v_j <- beta v_j + (1 - beta) n G_j,    zeta_j <- zeta_j - zeta_lr v_j

has three forms. "unbiased" (a = b = 1) is the stochastic gradient of the convex problem. "paper" (a = b = n/B) is the
paper's equation to the letter; with it, all zeta drift upwards. "reference" (a = n/B, and n/B instead of
b (n-1)/(B-1)) is what the authors' code computes; its zeta does not estimate popularity, but it trained best. The
steps of "paper" and "reference" scale with n/B, so their zeta_lr depends on the data set and the batch size.

Relations: with zeta_lr = 0, zeta_init = 0 and xi_init = inf it is SogCLR.
"""

import math

import torch
from torch import Tensor

from nuclr.objectives.checks import check_choice, check_range
from nuclr.objectives.stateful import ANCHORS, CANDIDATES, StatefulObjective, Step, unless_alone

ESTIMATORS = ("reference", "unbiased", "paper")
XI_RULES = ("norm", "max")


class NUCLR(StatefulObjective):
    """SogCLR with each negative divided by its learnt popularity.

    Args:
        num_samples: as in `SogCLR`.
        temperature: as in `SogCLR`.
        gamma: as in `SogCLR`.
        zeta_init: initial zeta of every candidate.
        xi_init: smallest value of the guard xi; inf removes the positive term.
        xi_rule: "norm": xi follows the largest |zeta|, as in the paper; "max": it follows the largest zeta, as in the
            published code.
        use_xi: False uses the pair's own zeta instead of xi.
        zeta_lr: step size of zeta; 0 freezes zeta, its velocity and xi.
        zeta_lr_ratio_x: zeta_x uses zeta_lr times this ratio.
        zeta_momentum: beta, the weight of the old velocity.
        zeta_estimator: "reference", "unbiased" or "paper".
        state_device: as in `SogCLR`.
        normalize: as in `Objective`.

    Example:
        >>> import torch
        >>> objective = NUCLR(num_samples=10, temperature=0.1, normalize=True)
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]], requires_grad=True)
        >>> objective(x, x.detach(), index=[4, 0, 7]).loss.backward()
        >>> objective.log_u_x.isfinite().nonzero().flatten()
        tensor([0, 4, 7])

    """

    def __init__(
        self,
        num_samples: int,
        temperature: float = 0.03,
        gamma: float = 0.8,
        zeta_init: float = 0.0,
        xi_init: float = 0.0,
        xi_rule: str = "norm",
        use_xi: bool = True,
        zeta_lr: float = 1e-3,
        zeta_lr_ratio_x: float = 1.0,
        zeta_momentum: float = 0.0,
        zeta_estimator: str = "reference",
        state_device: str | torch.device | None = None,
        normalize: bool = False,
    ) -> None:
        super().__init__(num_samples, temperature, gamma, state_device, normalize)
        self.zeta_init, self.xi_init = zeta_init, xi_init
        self.xi_rule, self.use_xi = xi_rule, use_xi
        self.zeta_lr, self.zeta_lr_ratio_x, self.zeta_momentum = zeta_lr, zeta_lr_ratio_x, zeta_momentum
        self.zeta_estimator = zeta_estimator
        self.check_settings()
        if not math.isfinite(zeta_init) or math.isnan(xi_init):
            raise ValueError(f"zeta_init must be finite and xi_init a number, but they are {zeta_init} and {xi_init}")
        self.add_tables("zeta", zeta_init)
        self.add_tables("zeta_velocity", 0.0)
        for side in ANCHORS:
            xi = max(xi_init, abs(zeta_init) if xi_rule == "norm" else zeta_init)
            self.register_buffer(f"xi_{side}", torch.tensor(xi, dtype=torch.float32, device=self.state_device))

    def check_settings(self) -> None:
        """Raise a ValueError if a setting is unknown or out of range."""
        super().check_settings()
        check_choice("xi_rule", self.xi_rule, XI_RULES)
        check_choice("zeta_estimator", self.zeta_estimator, ESTIMATORS)
        check_range("zeta_lr", self.zeta_lr, 0, math.inf, high_open=True)
        check_range("zeta_lr_ratio_x", self.zeta_lr_ratio_x, 0, math.inf, high_open=True)
        check_range("zeta_momentum", self.zeta_momentum, 0, 1, high_open=True)

    def log_normalizer(self, step: Step) -> Tensor:
        """Return log(u_i + exp(-xi/tau)), with the pair's own zeta instead of xi if `use_xi` is False."""
        if not self.use_xi:
            return step.log_total
        return torch.logaddexp(step.log_u, self._xi().to(step.log_u) / -step.tau)

    def value(self, step: Step) -> Tensor:
        """Return tau log(u_i + exp(-zeta_i/tau)), from the whole estimated partition function."""
        return step.tau * step.log_total

    def log_partition(self, step: Step) -> Tensor | None:
        """Return log(u_i + exp(-zeta_i/tau)), or None if zeta is frozen."""
        return step.log_total if self.zeta_lr > 0 else None

    def update(self, step: Step, sums: Tensor) -> dict[str, Tensor]:
        """Update zeta, its velocity and xi, from sums = the probability mass on each candidate; return metrics."""
        assert step.index is not None
        velocity = self._scaled_gradient(step, sums)
        if self.zeta_momentum > 0 or not isinstance(step.negatives, float):
            old = self.rows("zeta_velocity", CANDIDATES, step.index).to(sums)
            velocity = unless_alone(step.negatives, self.zeta_momentum * old + (1 - self.zeta_momentum) * velocity, old)
        zeta = step.zeta.sub(velocity, alpha=self.zeta_lr)
        if self.zeta_lr_ratio_x != 1:  # row 1 is x, the candidates of side y
            zeta[1] = step.zeta[1] - self.zeta_lr * self.zeta_lr_ratio_x * velocity[1]
        zeta = unless_alone(step.negatives, zeta, step.zeta)
        self.write("zeta_velocity", CANDIDATES, step.index, velocity)
        self.write("zeta", CANDIDATES, step.index, zeta)

        bounded = zeta.abs() if self.xi_rule == "norm" else zeta
        reached = unless_alone(step.negatives, bounded, -math.inf).amax(dim=1)
        guards = [self.buffer(f"xi_{side}") for side in CANDIDATES]
        for xi, largest in zip(guards, reached.to(guards[0]).unbind(), strict=True):
            torch.maximum(xi, largest, out=xi)
        return dict(zip(("zeta_y", "zeta_x"), zeta.mean(dim=1).unbind(), strict=True))

    def _xi(self) -> Tensor:
        """Return xi of both sides, (2, 1)."""
        return torch.stack([self.buffer(f"xi_{side}") for side in CANDIDATES])[:, None]

    def _scaled_gradient(self, step: Step, mass: Tensor) -> Tensor:
        """Return n G_j, (2, B)."""
        own = torch.exp(step.log_own - step.log_total)
        if self.zeta_estimator != "reference":
            # an anchor without negatives gives no mass, and its row is not stored
            mass = (self.num_samples - 1) / step.negatives * mass
        share = 1.0 if self.zeta_estimator == "unbiased" else self.num_samples / mass.shape[1]
        return torch.rsub(own + mass, 1, alpha=share)
