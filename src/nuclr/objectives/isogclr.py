"""iSogCLR: SogCLR with one temperature per anchor, learnt by distributionally robust optimization.

    minimize  mean_i tau_i log( (1/(n-1)) sum_{j != i} exp((s_ij - s_ii)/tau_i) ) + rho tau_i  over tau_i as well

(Qiu et al., "Not All Semantics are Created Equal", ICML 2023). With SogCLR's u_i and w_ij at tau_i,

    g_i = clip(log u_i - log(n-1) + rho - sum_{j != i} w_ij (s_ij - s_ii)/tau_i, -5, 5)
    m_i <- (1 - tau_beta) m_i + tau_beta g_i,    tau_i <- clip(tau_i - tau_lr m_i, tau_min, tau_max)

The old tau_i is used throughout the step.

Relations: with tau_lr = 0 it has SogCLR's gradients.
"""

import math

import torch
from torch import Tensor

from nuclr.objectives.base import GatheredBatch
from nuclr.objectives.checks import check_positive, check_range
from nuclr.objectives.sogclr import SogCLR
from nuclr.objectives.stateful import ANCHORS, Step, unless_alone

GRADIENT_LIMIT = 5.0


class ISogCLR(SogCLR):
    """SogCLR with a learnt temperature per anchor.

    Args:
        num_samples: as in `SogCLR`.
        temperature: the initial tau_i.
        gamma: as in `SogCLR`.
        rho: weight of the temperatures; larger values push them down.
        tau_lr: step size of tau_i.
        tau_beta: weight of the new gradient in its running mean.
        tau_min: lower bound of tau_i; the authors use 0.005.
        tau_max: upper bound of tau_i; the authors use 0.05.
        state_device: as in `SogCLR`.
        normalize: as in `Objective`.

    Example:
        >>> objective = ISogCLR(num_samples=1000, temperature=0.05)
        >>> objective.current_temperature
        0.05

    """

    needs_moments = True

    def __init__(
        self,
        num_samples: int,
        temperature: float = 0.03,
        gamma: float = 0.8,
        rho: float = 8.0,
        tau_lr: float = 1e-5,
        tau_beta: float = 0.5,
        tau_min: float = 0.001,
        tau_max: float = 1.0,
        state_device: str | torch.device | None = None,
        normalize: bool = False,
    ) -> None:
        super().__init__(num_samples, temperature, gamma, state_device, normalize)
        self.rho, self.tau_lr, self.tau_beta, self.tau_min, self.tau_max = rho, tau_lr, tau_beta, tau_min, tau_max
        self.add_tables("tau", temperature)
        self.add_tables("tau_momentum", 0.0)
        self.check_settings()

    def check_settings(self) -> None:
        """Raise a ValueError if a setting is out of range, or tau_min is above tau_max."""
        super().check_settings()
        check_positive("tau_min", self.tau_min)
        check_range("tau_min", self.tau_min, 0, self.tau_max)
        check_range("tau_lr", self.tau_lr, 0, math.inf)
        check_range("tau_beta", self.tau_beta, 0, 1)

    @property
    def current_temperature(self) -> float:
        """The mean of both sides' tau_i over the samples seen so far; `temperature` if none was seen."""
        tables = [(self.buffer(f"tau_{side}"), self.buffer(f"log_u_{side}")) for side in ANCHORS]
        seen = torch.cat([tau[~log_u.isneginf()] for tau, log_u in tables])
        return seen.double().mean().item() if len(seen) else super().current_temperature

    def read_tau(self, index: Tensor | None, batch: GatheredBatch) -> Tensor:
        """Return the temperatures of the anchors, (2, B)."""
        return self.read("tau", ANCHORS, index, batch)

    def value(self, step: Step) -> Tensor:
        """Return tau_i (log u_i - log(n - 1)) + rho tau_i."""
        return super().value(step) + self.rho * step.tau

    def update(self, step: Step, sums: Tensor) -> dict[str, Tensor]:
        """Update tau_i and its momentum, from sums = sum_j w_ij (s_ij - s_ii)/tau_i; return metrics."""
        assert step.index is not None and isinstance(step.tau, Tensor)
        log_mean = step.log_u - math.log(self.num_samples - 1)
        gradient = (log_mean + self.rho - sums).clamp(-GRADIENT_LIMIT, GRADIENT_LIMIT)
        old = self.rows("tau_momentum", ANCHORS, step.index).to(gradient)
        momentum = unless_alone(step.negatives, old + self.tau_beta * (gradient - old), old)
        tau = unless_alone(
            step.negatives, (step.tau - self.tau_lr * momentum).clamp(self.tau_min, self.tau_max), step.tau
        )
        self.write("tau_momentum", ANCHORS, step.index, momentum)
        self.write("tau", ANCHORS, step.index, tau)
        return dict(zip(("tau_x", "tau_y"), tau.mean(dim=1).unbind(), strict=True))
