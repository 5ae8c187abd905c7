"""SigLIP: a binary classification of every x_i, y_j of the batch as a pair or not (Zhai et al. 2023).

minimize  -(1/B) sum_ij log sigmoid(z_ij (scale s_ij + bias)),   z_ii = 1, z_ij = -1 for i != j
"""

import math

import torch
from torch import Tensor, nn

from nuclr import distributed
from nuclr.objectives.base import AutogradObjective, Scores


class SigLIP(AutogradObjective):
    """A logistic loss with learnt scale and bias.

    Args:
        temperature: 1 / the initial scale.
        bias: the initial bias.
        learn_temperature: whether to learn `log_scale` = -log tau. A schedule then sets `log_scale` instead of
            `temperature`.

    Example:
        >>> SigLIP()
        SigLIP(temperature=0.1, bias=-10, learn_temperature=True, normalize=False)

    """

    def __init__(
        self,
        temperature: float = 0.1,
        bias: float = -10.0,
        learn_temperature: bool = True,
        normalize: bool = False,
    ) -> None:
        super().__init__(temperature, normalize)
        self.learn_temperature = learn_temperature
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature))) if learn_temperature else None
        self.bias = nn.Parameter(torch.tensor(float(bias)))

    @property
    def current_temperature(self) -> float:
        """1 / the learnt scale, or `temperature`."""
        if self.log_scale is None:
            return super().current_temperature
        return math.exp(-self.log_scale.item())

    @property
    def current_bias(self) -> float:
        """The learnt bias."""
        return self.bias.item()

    def losses(self, scores: Scores) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return half of the loss of each anchor's row.

        The sides share the sum over all i and j, unless `false_negative_margin` drops different entries on each. Hard
        negatives are in the rows of x only, where they count in full.
        """
        dtype = scores.xy.dtype
        if self.log_scale is None:
            scale = scores.xy.new_tensor(1 / self.temperature)
        else:
            scale = distributed.replicated(self.log_scale).to(dtype).exp()
        bias = distributed.replicated(self.bias).to(dtype)
        pairs = scores.batch.size
        x = self._rows(scores.xy * scale + bias, scores.positives, scores.masked_xy, pairs)
        y = x
        if self.false_negative_margin is not None or scores.batch.hard is not None:
            y = self._rows(scores.yx * scale + bias, scores.positives, scores.masked_yx, pairs)
        return x, y, {"scale": scale.detach(), "bias": self.bias.detach().clone()}

    @staticmethod
    def _rows(
        logits: Tensor,
        positives: Tensor,
        masked: Tensor | None,
        pairs: int,
    ) -> Tensor:
        signs = torch.full_like(logits, -1.0).scatter_(1, positives[:, None], 1.0)
        log_likelihoods = nn.functional.logsigmoid(signs * logits)
        if masked is not None:
            log_likelihoods = log_likelihoods.masked_fill(masked, 0.0)
        return -log_likelihoods.sum(dim=1) / 2 - log_likelihoods[:, pairs:].sum(dim=1) / 2
