"""SogCLR and iSogCLR: contrast each sample with the whole data set, through one running average per sample.

SogCLR:

    minimize  mean_i tau log( (1/(n-1)) sum_{j != i} exp((s_ij - s_ii)/tau) )

A batch gives only an estimate phi_i of the sum, and E[log phi] != log E[phi]. Therefore u_i, a running average of
phi_i, replaces it (Yuan et al., "Provable Stochastic Optimization for Global Contrastive Learning", ICML 2022). In the
notation of `stateful`, zeta = 0 and d_i = u_i. Nothing overflows: u_i >= gamma phi_i, so the weights of an anchor sum
to at most 1/gamma.

Relations: gamma = 1 is the loss of the batch without the positive in the denominator. NUCLR with zeta = 0 held fixed
and xi_init = inf is this objective.

iSogCLR has one temperature per anchor, learnt by distributionally robust optimization (Qiu et al., "Not All Semantics
are Created Equal", ICML 2023):

    minimize  mean_i tau_i log( (1/(n-1)) sum_{j != i} exp((s_ij - s_ii)/tau_i) ) + rho tau_i  over tau_i as well

`stateful` has the step of tau_i. The old tau_i is used throughout the step. The defaults are those of the authors'
command lines.

Relations: with tau_lr = 0 it has SogCLR's gradients. NUCLR with individual temperatures, zeta = 0 held fixed and
xi_init = inf is this objective.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from nuclr.objectives.base import as_record
from nuclr.objectives.state import StatePlacement
from nuclr.objectives.stateful import RunningAverage, StatefulObjective, Step, Temperatures

INDIVIDUAL = Temperatures(individual=True)


class SogCLR(StatefulObjective):
    """The global contrastive loss, with a running average of each anchor's sum over the data set.

    Its arguments are those of `StatefulObjective`.

    Example:
        >>> import torch
        >>> objective = SogCLR(num_samples=1000, gamma=0.3)
        >>> objective(torch.eye(3), torch.eye(3), index=[5, 999, 0]).loss < 0
        tensor(True)

    """

    def log_normalizer(self, step: Step) -> Tensor:
        """Return log u_i."""
        return step.log_u

    def value(self, step: Step) -> Tensor:
        """Return tau (log u_i - log(n - 1))."""
        return step.temperature * (step.log_u - math.log(self.num_samples - 1))


class ISogCLR(SogCLR):
    """SogCLR with a learnt temperature per anchor.

    Its arguments are those of `StatefulObjective` without `normalizer`. `temperature` is the initial tau_i, and
    `temperatures.individual` is always True.

    Example:
        >>> objective = ISogCLR(num_samples=1000, temperature=0.05, temperatures={"rho": 6.0})
        >>> objective.current_temperature
        0.05

    """

    def __init__(
        self,
        num_samples: int,
        temperature: float = 0.03,
        gamma: float = 0.8,
        sides: str = "both",
        normalize: bool = False,
        state: StatePlacement | Mapping[str, Any] = StatePlacement(),
        temperatures: Temperatures | Mapping[str, Any] = INDIVIDUAL,
        average: RunningAverage | Mapping[str, Any] = RunningAverage(),
    ) -> None:
        own = replace(as_record("temperatures", temperatures, INDIVIDUAL), individual=True)
        super().__init__(
            num_samples,
            temperature,
            gamma,
            sides,
            normalize=normalize,
            state=state,
            temperatures=own,
            average=average,
        )
