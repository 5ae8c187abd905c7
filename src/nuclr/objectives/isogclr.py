"""iSogCLR: SogCLR with one temperature per anchor, learnt by distributionally robust optimization.

    minimize  mean_i tau_i log( (1/(n-1)) sum_{j != i} exp((s_ij - s_ii)/tau_i) ) + rho tau_i  over tau_i as well

(Qiu et al., "Not All Semantics are Created Equal", ICML 2023). `stateful` has the step of tau_i. The old tau_i is used
throughout the step. The defaults are those of the authors' command lines.

Relations: with tau_lr = 0 it has SogCLR's gradients. NUCLR with individual temperatures, zeta = 0 held fixed and
xi_init = inf is this objective.
"""

import torch
from torch import Tensor

from nuclr.objectives.stateful import StatefulObjective, Step


class ISogCLR(StatefulObjective):
    """SogCLR with a learnt temperature per anchor.

    Args:
        num_samples: as in `SogCLR`.
        temperature: the initial tau_i.
        gamma: as in `SogCLR`.
        rho: weight of the temperatures; larger values push them down.
        tau_lr: step size of tau_i.
        tau_beta: weight of the new gradient in its running mean.
        tau_min: lower bound of tau_i after its first step.
        tau_max: upper bound of tau_i after its first step.
        gamma_rule: as in `SogCLR`.
        alpha: as in `SogCLR`.
        sides: as in `SogCLR`.
        state_device: as in `SogCLR`.
        state_sharding: as in `SogCLR`.
        normalize: as in `Objective`.

    Example:
        >>> objective = ISogCLR(num_samples=1000, temperature=0.05)
        >>> objective.current_temperature
        0.05

    """

    def __init__(
        self,
        num_samples: int,
        temperature: float = 0.03,
        gamma: float = 0.8,
        rho: float = 8.0,
        tau_lr: float = 1e-3,
        tau_beta: float = 0.9,
        tau_min: float = 0.005,
        tau_max: float = 0.05,
        gamma_rule: str = "constant",
        alpha: float = 4.0,
        sides: str = "both",
        state_device: str | torch.device | None = None,
        state_sharding: bool = False,
        normalize: bool = False,
    ) -> None:
        super().__init__(
            num_samples,
            temperature,
            gamma,
            gamma_rule,
            alpha,
            individual_temperature=True,
            rho=rho,
            tau_lr=tau_lr,
            tau_beta=tau_beta,
            tau_min=tau_min,
            tau_max=tau_max,
            sides=sides,
            state_device=state_device,
            state_sharding=state_sharding,
            normalize=normalize,
        )

    def log_normalizer(self, step: Step) -> Tensor:
        """Return log u_i."""
        return step.log_u
