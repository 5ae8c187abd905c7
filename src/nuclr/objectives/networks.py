"""A small network that predicts what objectives otherwise store per pair: popularity, or the normalizer of an anchor.

Both are logs of kernel sums over the data: log q(y) = log sum_i exp(<x_i, y>/tau - log Z_i) for a candidate y, and
log Z(x) = log sum_j exp(<x, y_j>/tau - log q_j) for an anchor x. The network has the same form, with K prototypes in
place of the n samples of the other side,

    h(f) = log( (1/K) sum_k exp(<p_k, f>/tau_0 + b_k) ) - c.

The prototypes p_k start as the first K samples of the other side that training sees, b_k = 0, and the constant c makes
the mean of h over the first batch 0; tau_0 is the temperature at the start. p and b are then trained. A perceptron in
place of this form did not predict the popularity of new samples (rank correlation 0.4 against 0.9, on linear heads for
Flickr8k). Because the network shares what it learns between samples, it has a value for samples that it has never seen;
a table has none in a single pass over the data, where no sample is visited twice.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter

PROTOTYPES = 4096


class PrototypeNetwork(LazyModuleMixin, nn.Module):
    """The network of the module's docstring, from unit-norm features (N, d) to one number each, (N,).

    The width d is taken from the first batch. Before `add_prototypes` was called, the output is 0.

    Args:
        count: K, the number of prototypes.

    Example:
        >>> network = PrototypeNetwork(count=2)
        >>> network(torch.eye(3))
        tensor([0., 0., 0.])
        >>> network.add_prototypes(torch.eye(3), torch.eye(3), temperature=0.5)
        >>> network(torch.eye(3)).detach()
        tensor([ 0.4779,  0.4779, -0.9559])

    """

    cls_to_become = None
    scale: Tensor
    constant: Tensor

    def __init__(self, count: int = PROTOTYPES) -> None:
        super().__init__()
        self.prototypes = UninitializedParameter()
        self.bias = nn.Parameter(torch.full((count,), -math.inf))  # -inf: this prototype has not been set
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("constant", torch.zeros(()))
        self._set: int | None = 0  # number of prototypes that have been set; None after loading: not known yet

    def initialize_parameters(self, features: Tensor) -> None:
        """Allocate the prototypes for features (N, d); torch calls this before the first forward pass."""
        if self.has_uninitialized_params():
            self.prototypes.materialize((len(self.bias), features.shape[1]))
            nn.init.zeros_(self.prototypes)

    @torch.no_grad()
    def add_prototypes(
        self,
        samples: Tensor,
        features: Tensor,
        temperature: float | Tensor,
    ) -> None:
        """Set the next prototypes, until there are K.

        Args:
            samples: (N, d) of the side that the network's kernel sum is over.
            features: (M, d) of the side that it is evaluated on; they fix the constant c at the first call.
            temperature: tau_0, used at the first call.

        """
        self.initialize_parameters(samples)
        begin = self._number_set()
        if begin == len(self.bias):
            return
        end = min(begin + len(samples), len(self.bias))
        self.prototypes[begin:end] = samples[: end - begin].to(self.prototypes.dtype)
        self.bias[begin:end] = 0
        self._set = end
        if begin == 0:
            self.scale.copy_(1 / torch.as_tensor(temperature))
            self.constant.copy_(self(features).mean())

    def forward(self, features: Tensor) -> Tensor:
        """Return h of every row of `features`."""
        number = self._number_set()
        if number == 0:
            return features.new_zeros(len(features))
        scaled = features.to(self.prototypes.dtype) * self.scale
        exponents = torch.addmm(self.bias[:number], scaled, self.prototypes[:number].T)
        return exponents.logsumexp(dim=1) - math.log(number) - self.constant

    def _number_set(self) -> int:
        if self._set is None:
            self._set = int(self.bias.isfinite().sum())
        return self._set

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._set = None
