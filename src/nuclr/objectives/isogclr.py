"""iSogCLR: SogCLR with a temperature of its own for every anchor, learnt by distributionally robust optimization.

    minimize  mean_i tau_i log( (1/(n-1)) sum_{j != i} exp((s_ij - s_ii)/tau_i) ) + rho tau_i  over tau_i as well

(Qiu et al., "Not All Semantics are Created Equal", ICML 2023). With SogCLR's u_i and w_ij at tau_i,

    g_i = clip(log u_i - log(n-1) + rho - sum_{j != i} w_ij (s_ij - s_ii)/tau_i, -5, 5)
    m_i <- (1 - tau_beta) m_i + tau_beta g_i,    tau_i <- clip(tau_i - tau_lr m_i, tau_min, tau_max)

and the old tau_i is used throughout the step. Relations: tau_lr = 0 has SogCLR's gradients.
"""

import math

import torch
from torch import Tensor

from nuclr.objectives.base import Batch, check_positive, check_range
from nuclr.objectives.sogclr import SogCLR
from nuclr.objectives.stateful import ANCHORS, Step, unless_alone

GRADIENT_LIMIT = 5.0


class ISogCLR(SogCLR):
    """SogCLR with a learnt temperature for each anchor.

    Args:
        num_samples: as in `SogCLR`.
        temperature: the initial tau_i.
        gamma: as in `SogCLR`.
        rho: weight of the temperatures; larger values push them down.
        tau_lr: step of tau_i.
        tau_beta: weight of the new gradient in its running mean.
        tau_min: lower bound of tau_i; the authors' is 0.005.
        tau_max: upper bound of tau_i; the authors' is 0.05.
        state_device: as in `SogCLR`.

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
    ) -> None:
        super().__init__(num_samples, temperature, gamma, state_device)
        self.rho, self.tau_lr, self.tau_beta, self.tau_min, self.tau_max = rho, tau_lr, tau_beta, tau_min, tau_max
        self.add_tables("tau", temperature)
        self.add_tables("tau_momentum", 0.0)
        self.check_settings()

    def check_settings(self) -> None:
        """Refuse bounds that no temperature meets, among others."""
        super().check_settings()
        check_positive("tau_min", self.tau_min)
        check_range("tau_min", self.tau_min, 0, self.tau_max)
        check_range("tau_lr", self.tau_lr, 0, math.inf)
        check_range("tau_beta", self.tau_beta, 0, 1)

    def read_tau(self, index: Tensor | None, batch: Batch) -> Tensor:
        """The anchors' own temperatures, (2, B)."""
        return self.read("tau", ANCHORS, index, batch)

    def value(self, step: Step) -> Tensor:
        """tau_i (log u_i - log(n - 1)) + rho tau_i."""
        return super().value(step) + self.rho * step.tau

    def update(self, step: Step, sums: Tensor) -> dict[str, Tensor]:
        """One step of tau_i and its momentum, from sums = sum_j w_ij (s_ij - s_ii)/tau_i."""
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
