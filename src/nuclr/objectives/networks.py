"""Small networks that predict what objectives otherwise store per pair: popularity, or the normalizer of an anchor.

A network shares what it learns between samples, so it has a value for samples that it has never seen. That is what a
table cannot do in a single pass over the data, where no sample is visited twice.
"""

import math
from typing import cast

import torch
from torch import Tensor, nn

HIDDEN = 512


class FeatureNetwork(nn.Module):
    """A perceptron with two hidden layers, from unit-norm features (N, d) to one number each, (N,), initially 0.

    The width d is taken from the first batch. The initial weights do not depend on torch's global random state, so that
    they are the same on all processes.

    Args:
        hidden: width of the hidden layers.

    Example:
        >>> FeatureNetwork()(torch.eye(3))
        tensor([0., 0., 0.], grad_fn=<SqueezeBackward1>)

    """

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.first = _FirstLayer(hidden)
        self.second = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, 1)
        _initialize(self.second, seed=1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return one number per row of `features`."""
        # entries of a unit vector have the size 1/sqrt(d); the layers expect 1
        scaled = features.to(self.last.weight.dtype) * math.sqrt(features.shape[1])
        hidden = nn.functional.gelu(self.first(scaled))
        hidden = hidden + nn.functional.gelu(self.second(hidden))
        return cast(Tensor, self.last(hidden)).squeeze(1)


class _FirstLayer(nn.LazyLinear):
    """A linear layer whose input width is that of the first batch."""

    cls_to_become = nn.Linear

    def reset_parameters(self) -> None:
        if not self.has_uninitialized_params() and self.in_features != 0:
            _initialize(self, seed=0)


def _initialize(layer: nn.Linear, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(layer.weight.shape, generator=generator, dtype=torch.float64) / math.sqrt(layer.in_features)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.zero_()
