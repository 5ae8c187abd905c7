"""Matryoshka: an objective of features that can be shortened (Kusupati et al. 2022).

    loss = sum over widths w of objective_w(x_w, y_w),    x_w = x[:w] / |x[:w]|

Each width has an objective with state of its own, because the running averages and popularities of short features are
not those of long ones. All of them take one step per batch.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from nuclr.arrays import shorten
from nuclr.objectives import Objective, ObjectiveOutput

NARROWER = "narrower."  # begins the names of the state of shorter features, such as "narrower.64.log_u_x"


class Matryoshka(nn.Module):
    """The sum of one objective per width.

    Args:
        full: the objective of the full width. What a schedule changes in it changes in all of them.
        widths: numbers of coordinates in ascending order; the last one is the full width.

    Example:
        >>> import torch
        >>> from nuclr.objectives import SogCLR
        >>> objective = Matryoshka(SogCLR(num_samples=10), [2, 4])
        >>> x = torch.full((3, 4), 0.5)
        >>> out = objective(x, x, index=range(3))
        >>> list(objective.gather_state_dict())
        ['log_u_x', 'log_u_y', 'narrower.2.log_u_x', 'narrower.2.log_u_y']

    """

    def __init__(self, full: Objective, widths: Sequence[int]) -> None:
        super().__init__()
        self.full = full
        self.widths = widths
        self.narrower = nn.ModuleDict({str(width): copy.deepcopy(full) for width in widths[:-1]})

    def forward(self, x: Tensor, y: Tensor, *columns: Any, **ids: Any) -> ObjectiveOutput:
        """Compute the losses of all widths; in training mode, also update their states. See `Objective.forward`."""
        losses: dict[str, Tensor] = {}
        for width, (objective, short_x, short_y) in zip(self.widths, per_width(self, x, y), strict=True):
            for name in self.full.scheduled:
                setattr(objective, name, getattr(self.full, name))
            output = objective(short_x, short_y, *columns, **ids)
            losses[f"width={width}/loss"] = output.loss
        return ObjectiveOutput(
            cast(Tensor, sum(losses.values())), output.metrics | {name: loss.detach() for name, loss in losses.items()}
        )

    def end_epoch(self) -> None:
        """Do what each objective does once per epoch."""
        for objective in (self.full, *self.narrower.values()):
            cast(Objective, objective).end_epoch()

    def gather_state_dict(self) -> dict[str, Tensor]:
        """Return the whole state on process 0; that of the full width has the names that it has without the others."""
        state = self.full.gather_state_dict()
        for width, objective in self.narrower.items():
            for name, tensor in cast(Objective, objective).gather_state_dict().items():
                state[f"{NARROWER}{width}.{name}"] = tensor
        return state

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *options: Any, **more: Any) -> Any:
        """Load what `gather_state_dict` returned."""
        named = {name if name.startswith(NARROWER) else f"full.{name}": state_dict[name] for name in state_dict}
        return super().load_state_dict(named, *options, **more)


def per_width(
    objective: nn.Module,
    x: Tensor,
    y: Tensor,
) -> Iterator[tuple[Objective, Tensor, Tensor]]:
    """Yield the objective and the features of each width, in ascending order; of any other objective, itself."""
    if isinstance(objective, Matryoshka):
        for width, narrower in objective.narrower.items():
            yield cast(Objective, narrower), shorten(x, int(width)), shorten(y, int(width))
        objective = objective.full
    yield cast(Objective, objective), x, y
