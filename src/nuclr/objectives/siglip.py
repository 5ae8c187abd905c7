"""SigLIP: every pair of the batch on its own, positive or negative (Zhai et al. 2023).

minimize  -(1/B) sum_ij log sigmoid(z_ij (scale s_ij + bias)),   z_ii = 1, z_ij = -1 for i != j
"""

import math

import torch
from torch import Tensor, nn

from nuclr import distributed
from nuclr.objectives.autograd import AutogradObjective, Scores


class SigLIP(AutogradObjective):
    """A logistic loss of each pair, with scale and bias learnt; a schedule sets `log_scale`, not `temperature`.

    Args:
        temperature: one over the initial scale.
        bias: the initial bias.

    """

    def __init__(self, temperature: float = 0.1, bias: float = -10.0) -> None:
        super().__init__(temperature)
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature)))
        self.bias = nn.Parameter(torch.tensor(float(bias)))

    def losses(self, scores: Scores) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Each own x's row, half to each side: the sum over pairs belongs to both alike."""
        dtype = scores.xy.dtype
        scale = distributed.replicated(self.log_scale).to(dtype).exp()
        logits = scores.xy * scale + distributed.replicated(self.bias).to(dtype)
        signs = torch.full_like(logits, -1.0).scatter_(1, scores.positives[:, None], 1.0)
        pairs = nn.functional.logsigmoid(signs * logits)
        if scores.masked is not None:
            pairs = pairs.masked_fill(scores.masked, 0.0)
        rows = -pairs.sum(dim=1) / 2
        return rows, rows, {"scale": scale.detach(), "bias": self.bias.detach().clone()}
