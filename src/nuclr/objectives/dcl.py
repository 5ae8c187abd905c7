"""DCL: debiased contrastive learning (Chuang et al. 2020), not the "decoupled" loss with the same initials.

A share tau_plus of the negatives is assumed to be false, and its expected contribution is subtracted. Per side, with
N = B - 1,

    Ng_i = max( (sum_{j != i} e^(s_ij/tau) - tau_plus N e^(s_ii/tau)) / (1 - tau_plus),  N e^(-1/tau) )
    minimize  (1/2) sum over sides of  mean_i -log( e^(s_ii/tau) / (e^(s_ii/tau) + Ng_i) )

It is computed in logs relative to the positive, and therefore finite at any temperature.
Relations: with tau_plus = 0 it is CLIP.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from nuclr.objectives.base import AutogradObjective, Range, Scores


class DCL(AutogradObjective):
    """CLIP without the expected contribution of false negatives.

    Args:
        temperature: tau.
        tau_plus: the share of negatives that are false, in [0, 1).

    Example:
        >>> DCL(tau_plus=0.01)
        DCL(temperature=0.05, tau_plus=0.01, normalize=False)

    """

    limits: Mapping[str, Range] = {**AutogradObjective.limits, "tau_plus": Range(high=1.0, high_open=True)}

    def __init__(
        self,
        temperature: float = 0.05,
        tau_plus: float = 0.1,
        normalize: bool = False,
    ) -> None:
        super().__init__(temperature, normalize)
        self.tau_plus = tau_plus
        self.check_settings()

    def losses(self, scores: Scores) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return half of each anchor's loss; see `AutogradObjective`."""
        x = self._side(scores.xy, scores.positives, scores.masked_xy)
        y = self._side(scores.yx, scores.positives, scores.masked_yx)
        return x / 2, y / 2, {}

    def _side(
        self,
        side: Tensor,
        positives: Tensor,
        masked: Tensor | None,
    ) -> Tensor:
        positive = side.gather(1, positives[:, None])
        excluded = torch.zeros_like(side, dtype=torch.bool) if masked is None else masked.clone()
        excluded.scatter_(1, positives[:, None], True)
        count = (~excluded).sum(dim=1).to(side.dtype)
        margins = ((side - positive) / self.temperature).masked_fill(excluded, -math.inf)
        log_sum = margins.logsumexp(dim=1)
        # `debiased` is log( (e^log_sum - tau_plus N) / (1 - tau_plus) ). If that is not positive, the lower bound is
        # used, and the inner `where` keeps the nan of the other branch out of the gradient.
        log_false = (self.tau_plus * count).log()
        debiasable = log_sum > log_false
        gap = torch.where(debiasable, log_false - log_sum, -1.0)
        debiased = torch.where(debiasable, log_sum + torch.log1p(-gap.exp()) - math.log1p(-self.tau_plus), -math.inf)
        least = count.log() - (1 + positive[:, 0]) / self.temperature
        return torch.logaddexp(torch.zeros_like(least), torch.maximum(debiased, least))
