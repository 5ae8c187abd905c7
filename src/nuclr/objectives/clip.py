"""CLIP: two cross-entropies over the batch (Radford et al. 2021; InfoNCE, van den Oord et al. 2018).

minimize  (1/2) sum over sides of  mean_i -log( exp(s_ii/tau) / sum_j exp(s_ij/tau) )
"""

import math

import torch
from torch import Tensor, nn

from nuclr import distributed
from nuclr.objectives.base import AutogradObjective, Scores

LARGEST_SCALE = 100.0


class CLIP(AutogradObjective):
    """The cross-entropy of each anchor over the batch.

    Args:
        temperature: tau; its initial value if it is learnt.
        learn_temperature: whether to learn `log_scale` = -log tau, with scale <= 100. A schedule then sets `log_scale`
            instead of `temperature`.
        normalize: as in `Objective`.

    Example:
        >>> CLIP(temperature=0.07, learn_temperature=True)
        CLIP(temperature=0.07, learn_temperature=True, normalize=False)

    """

    def __init__(self, temperature: float = 0.05, learn_temperature: bool = False, normalize: bool = False) -> None:
        super().__init__(temperature, normalize)
        self.learn_temperature = learn_temperature
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature))) if learn_temperature else None

    @property
    def current_temperature(self) -> float:
        """1/scale if the temperature is learnt, else `temperature`."""
        if self.log_scale is None:
            return super().current_temperature
        return 1 / min(math.exp(self.log_scale.item()), LARGEST_SCALE)

    def scale(self, scores: Scores) -> Tensor | float:
        """Return 1/tau."""
        if self.log_scale is None:
            return 1 / self.temperature
        with torch.no_grad():  # on the parameter: a clamp in the graph would set its gradient to 0 above the limit
            self.log_scale.clamp_(max=math.log(LARGEST_SCALE))
        return distributed.replicated(self.log_scale).to(scores.xy.dtype).exp()

    def losses(self, scores: Scores) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return half of each anchor's cross-entropy; see `AutogradObjective`."""
        scale = self.scale(scores)
        x, y = (self._cross_entropy(side * scale, scores) for side in (scores.xy, scores.yx))
        metrics = {} if self.log_scale is None else {"scale": torch.as_tensor(scale).detach()}
        return x / 2, y / 2, metrics

    @staticmethod
    def _cross_entropy(logits: Tensor, scores: Scores) -> Tensor:
        if scores.masked is not None:
            logits = logits.masked_fill(scores.masked, -math.inf)
        return nn.functional.cross_entropy(logits, scores.positives, reduction="none")
