"""Random samples of anchors or candidates, and the noise that they cause in sums."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """Rows drawn without replacement; a sum over all rows is estimated by the sum of weight times value over these.

    Attributes:
        index: Rows in ascending order, (m,).
        weight: 1 / probability of being drawn, (m,).
        noise: Random signs times weight * sqrt(1 - probability), (m,). The sum of noise times value is a draw from the
            distribution of the estimate's error, with the right correlation between several sums. It is the difference
            of two halves of the sample; rows that are certain to be drawn cause no noise.

    """

    index: Tensor
    weight: Tensor
    noise: Tensor

    def __len__(self) -> int:
        """Return the number of rows drawn."""
        return len(self.index)


def draw_sample(
    mass: Tensor,
    size: int,
    generator: torch.Generator,
) -> Sample:
    """Draw about `size` rows without replacement, with probabilities in proportion to their masses.

    Rows of mass 0 are never drawn. If at most `size` rows have a mass, all of them are drawn, with weight 1.

    Args:
        mass: (n,), not negative.
        size: Number of rows to draw.
        generator: Source of randomness, on the CPU.

    Returns:
        The sample, on the device of `mass`.

    Example:
        >>> sample = draw_sample(torch.ones(1000), 10, torch.Generator().manual_seed(0))
        >>> len(sample), sample.weight.sum()
        (10, tensor(1000., dtype=torch.float64))

    """
    order = torch.randperm(len(mass), generator=generator)
    probability = _inclusion(mass.to("cpu", torch.float64)[order], size)
    # Systematic sampling in random order: a row is drawn if the running sum passes a whole number.
    steps = (probability.cumsum(0) + torch.rand((), generator=generator)).floor()
    drawn = (steps.diff(prepend=steps.new_zeros(1)) > 0) | (probability >= 1)
    order = order[drawn]
    probability = probability[drawn]
    signs = (torch.arange(len(order)) % 2 * 2 - 1).to(probability)  # `order` is random, so these are random halves
    weight = 1 / probability
    noise = signs * weight * (1 - probability).clamp_min(0).sqrt()
    rank = order.argsort()
    return Sample(*(t[rank].to(mass.device) for t in (order, weight, noise)))


def _inclusion(mass: Tensor, size: int) -> Tensor:
    """Return the probability of each row to be drawn: `size` times its share of the mass, but not above 1."""
    certain = torch.zeros_like(mass, dtype=torch.bool)
    if int((mass > 0).sum()) <= size:
        return (mass > 0).to(mass)
    while True:
        rest = mass.masked_fill(certain, 0)
        probability = ((size - int(certain.sum())) * rest / rest.sum()).masked_fill(certain, 1)
        if not bool((probability > 1).any()):
            return probability
        certain |= probability >= 1
