"""CLIP and CyCLIP: two cross-entropies over the batch, and two consistency terms.

CLIP (Radford et al. 2021; InfoNCE, van den Oord et al. 2018):

    minimize  (1/2) sum over sides of  mean_i -log( exp(s_ii/tau) / sum_j exp(s_ij/tau) )

CyCLIP (Goel et al. 2022) adds cyclic consistency, computed on scores, not on logits:

    minimize  CLIP + (cross/B) sum_ij (s_ij - s_ji)^2 + (within/B) sum_ij (<x_i,x_j> - <y_i,y_j>)^2

Relations: with both weights 0, CyCLIP is CLIP.
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

    Example:
        >>> CLIP(temperature=0.07, learn_temperature=True)
        CLIP(temperature=0.07, learn_temperature=True, normalize=False)

    """

    takes_log_q = True

    def __init__(
        self,
        temperature: float = 0.05,
        learn_temperature: bool = False,
        normalize: bool = False,
    ) -> None:
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
        logits = scores.xy * scale
        log_q = scores.batch.log_q
        if log_q is not None:  # q as shares of the batch, times B: with a uniform q, all candidates count once
            given = log_q - log_q.logsumexp(0) + math.log(scores.batch.size)
            logits = logits - nn.functional.pad(given, (0, logits.shape[1] - len(given)))
        x = self._cross_entropy(logits, scores.positives, scores.masked_xy)
        y = self._cross_entropy(scores.yx * scale, scores.positives, scores.masked_yx)
        metrics = {} if self.log_scale is None else {"scale": torch.as_tensor(scale).detach()}
        return x / 2, y / 2, metrics

    @staticmethod
    def _cross_entropy(
        logits: Tensor,
        positives: Tensor,
        masked: Tensor | None,
    ) -> Tensor:
        if masked is not None:
            logits = logits.masked_fill(masked, -math.inf)
        return nn.functional.cross_entropy(logits, positives, reduction="none")


class CyCLIP(CLIP):
    """CLIP plus two consistency terms. `CLIP` describes the other arguments.

    Args:
        cross: weight of the consistency between the sides.
        within: weight of the consistency within the sides.

    Example:
        >>> CyCLIP(within=0.05)
        CyCLIP(temperature=0.05, learn_temperature=False, cross=0.25, within=0.05, normalize=False)

    """

    def __init__(
        self,
        temperature: float = 0.05,
        learn_temperature: bool = False,
        cross: float = 0.25,
        within: float = 0.25,
        normalize: bool = False,
    ) -> None:
        super().__init__(temperature, learn_temperature, normalize)
        self.cross = cross
        self.within = within

    def losses(self, scores: Scores) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return CLIP's losses, each with half of the anchor's consistency terms; see `AutogradObjective`."""
        x, y, metrics = super().losses(scores)
        batch = scores.batch
        cross = (scores.xy[:, : batch.size] - scores.yx).square().sum(dim=1)
        within = (batch.local_x @ batch.x.T - batch.local_y @ batch.y.T).square().sum(dim=1)
        consistency = self.cross * cross + self.within * within
        return x + consistency / 2, y + consistency / 2, metrics | {"consistency": consistency.detach().mean()}
