"""Objectives without state, written as plain functions of the scores and differentiated by autograd.

A process computes the rows of its own anchors against all candidates, (b, B), never (B, B): the sum of the processes'
losses is the global one, and gradients of gathered features go back to their owners.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nuclr import distributed
from nuclr.objectives.base import Batch, Objective, ObjectiveOutput


@dataclass(frozen=True)
class Scores:
    """Scores of own anchors against all candidates.

    xy: (b, B), own x against all y; yx: (b, B), own y against all x; positives: (b,), the column of each anchor's
    positive; masked: (b, B) or None, pairs that share an id and are not the positive.
    """

    batch: Batch
    xy: Tensor
    yx: Tensor
    positives: Tensor
    masked: Tensor | None


class AutogradObjective(Objective):
    """A mean over the global batch of each anchor's loss."""

    def losses(self, scores: Scores) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Loss of each own anchor on side x and side y, (b,) each, and metrics."""
        raise NotImplementedError

    def contrast(self, batch: Batch) -> ObjectiveOutput:
        """The mean over all processes' anchors."""
        # a single nan or inf spoils the sum of all positives' scores, wherever it stands
        positive = torch.dot(batch.x.detach().reshape(-1), batch.y.detach().reshape(-1))
        self.check_features(batch, positive.isfinite())
        processes = distributed.world_size()
        xy = batch.local_x @ batch.y.T
        yx = xy.T if processes == 1 else batch.local_y @ batch.x.T
        positives = torch.arange(batch.rows.start, batch.rows.stop, device=xy.device)
        masked = None
        if batch.ids is not None:
            masked = batch.excluded().scatter_(1, positives[:, None], False)
        x, y, metrics = self.losses(Scores(batch, xy, yx, positives, masked))
        means = torch.stack([x.mean(), y.mean()])  # times 1/K, summed over K processes, is the global mean
        everywhere = distributed.sum_over_processes(means) / processes
        loss = means.sum()
        if processes > 1:
            loss = loss + (everywhere.sum() - loss).detach()
        return ObjectiveOutput(loss, {"objective_x": everywhere[0], "objective_y": everywhere[1]} | metrics)
