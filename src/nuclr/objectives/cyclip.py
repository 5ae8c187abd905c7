"""CyCLIP: CLIP with two cyclic consistency terms (Goel et al. 2022), computed on scores, not on logits.

    minimize  CLIP + (cross/B) sum_ij (s_ij - s_ji)^2 + (within/B) sum_ij (<x_i,x_j> - <y_i,y_j>)^2

Relations: with both weights 0 it is CLIP.
"""

from torch import Tensor

from nuclr.objectives.base import Scores
from nuclr.objectives.clip import CLIP


class CyCLIP(CLIP):
    """CLIP plus two consistency terms.

    Args:
        temperature: as in `CLIP`.
        learn_temperature: as in `CLIP`.
        cross: weight of the consistency between the sides.
        within: weight of the consistency within the sides.
        normalize: as in `Objective`.

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
        self.cross, self.within = cross, within

    def losses(self, scores: Scores) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return CLIP's losses, each with half of the anchor's consistency terms; see `AutogradObjective`."""
        x, y, metrics = super().losses(scores)
        batch = scores.batch
        cross = (scores.xy - scores.yx).square().sum(dim=1)
        within = (batch.local_x @ batch.x.T - batch.local_y @ batch.y.T).square().sum(dim=1)
        consistency = self.cross * cross + self.within * within
        return x + consistency / 2, y + consistency / 2, metrics | {"consistency": consistency.detach().mean()}
