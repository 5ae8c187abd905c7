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
        temperature: tau; its initial value if it is learnt.
        gamma: weight of the new batch in the running average, in (0, 1].
        gamma_rule: "constant", or "proximal" for the weight alpha u' / (1 + alpha u'), u' = u/(n-1), of the old
            average u (SCENT): the averages of easy samples then change slowly.
        alpha: of `gamma_rule="proximal"`; larger values follow the new batch faster.
        learn_temperature: whether to learn one temperature, in the parameter `log_scale` = -log tau, with tau between
            0.001 and 1 (FastCLIP-v3).
        rho: weight of a learnt temperature; larger values push it down.
        sides: "both", "x" (x are the anchors, y the candidates) or "y".
        normalizer: "table" stores u_i per pair. "network" predicts it from the anchor's features: no table, and with
            one pass over the data the average is still one over many samples. gamma may then be 0, which uses the
            prediction alone.
        state_device: device on which the tables stay when the module moves. None: they move with the module.
        state_sharding: whether each of K processes holds n/K rows of the tables instead of all; see
            `gather_state_dict` for checkpoints. The objective must then stay outside DDP, which broadcasts buffers when
            it is constructed.
        normalize: as in `Objective`.

    Example:
        >>> import torch
        >>> objective = SogCLR(num_samples=1000, gamma=0.3)
        >>> objective(torch.eye(3), torch.eye(3), index=[5, 999, 0]).loss < 0
        tensor(True)

    """

    def __init__(
        self,
        num_samples: int,
        temperature: float = 0.03,
        gamma: float = 0.8,
        gamma_rule: str = "constant",
        alpha: float = 4.0,
        learn_temperature: bool = False,
        rho: float = 8.0,
        sides: str = "both",
        normalizer: str = "table",
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
            learn_temperature=learn_temperature,
            rho=rho,
            sides=sides,
            normalizer=normalizer,
            state_device=state_device,
            state_sharding=state_sharding,
            normalize=normalize,
        )

    def log_normalizer(self, step: Step) -> Tensor:
        """Return log u_i."""
        return step.log_u

    def value(self, step: Step) -> Tensor:
        """Return tau (log u_i - log(n - 1))."""
        return step.temperature * (step.log_u - math.log(self.num_samples - 1))
