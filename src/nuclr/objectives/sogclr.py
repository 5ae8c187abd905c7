"""SogCLR: contrast each sample with the whole data set, through one running average per sample.

    minimize  mean_i tau log( (1/(n-1)) sum_{j != i} exp((s_ij - s_ii)/tau) )

A batch gives only an estimate phi_i of the sum, and E[log phi] != log E[phi]. Therefore u_i, a running average of
phi_i, replaces it (Yuan et al., "Provable Stochastic Optimization for Global Contrastive Learning", ICML 2022). In the
notation of `stateful`, zeta = 0 and d_i = u_i. Nothing overflows: u_i >= gamma phi_i, so the weights of an anchor sum
to at most 1/gamma.

Relations: gamma = 1 is the loss of the batch without the positive in the denominator. NUCLR with zeta = 0 held fixed
and xi_init = inf is this objective.
"""

import math

import torch
from torch import Tensor

from nuclr.objectives.stateful import StatefulObjective, Step


class SogCLR(StatefulObjective):
    """The global contrastive loss, with a running average of each anchor's sum over the data set.

    Args:
        num_samples: n, the number of pairs; indices are in [0, n).
        temperature: tau.
        gamma: weight of the new batch in the running average, in (0, 1].
        state_device: device on which the tables stay when the module moves. None: they move with the module.
        normalize: as in `Objective`.

    Example:
        >>> SogCLR(num_samples=1000, gamma=0.3)
        SogCLR(num_samples=1000, temperature=0.03, gamma=0.3, normalize=False)

    """

    def __init__(
        self,
        num_samples: int,
        temperature: float = 0.03,
        gamma: float = 0.8,
        state_device: str | torch.device | None = None,
        normalize: bool = False,
    ) -> None:
        super().__init__(num_samples, temperature, gamma, state_device, normalize)

    def log_normalizer(self, step: Step) -> Tensor:
        """Return log u_i."""
        return step.log_u

    def value(self, step: Step) -> Tensor:
        """Return tau (log u_i - log(n - 1))."""
        return step.tau * (step.log_u - math.log(self.num_samples - 1))
