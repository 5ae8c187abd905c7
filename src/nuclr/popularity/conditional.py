"""Draw y given x from the data: the discriminative model used generatively.

The model p(y|x) = exp(s(x,y)/tau) / Z(x) is a density that can be evaluated but not sampled from. The data supplies
samples y_j whose density is known up to a factor: q(y), the popularity. Importance weights exp(s(x,y_j)/tau) / q_j turn
them into samples from p(y|x) (sampling importance resampling, Rubin 1988):

    P(y_j | x) = exp((s(x,y_j) - zeta_j)/tau) / sum_k exp((s(x,y_k) - zeta_k)/tau),      zeta = tau log q.

Only y of the data can be drawn, so the draws follow p(y|x) as far as the data covers it. Without the popularity
(zeta = 0) generic items are drawn too often, because the data contains more of them.
"""

import torch
from torch import Tensor

from nuclr.popularity.problem import Array, Vector, as_features, as_positive, as_vector

ENTRIES = 1 << 22  # probabilities held at a time: 32 MiB of float64


def sample_conditional(
    x: Array,
    y: Array,
    zeta: Vector,
    *,
    temperature: float,
    count: int = 1,
    generator: torch.Generator | None = None,
    normalize: bool = False,
) -> Tensor:
    """Draw items y_j given each x_i, with replacement and with probabilities proportional to exp(s_ij/tau) / q_j.

    Anchors are processed a few at a time, so memory is O(n_y + n_x count) above the features. Random numbers are drawn
    on the generator's device (the CPU by default), so that up to rounding every device gives the same draws.

    Args:
        x: Features of the anchors, (n_x, d).
        y: Features of the items to draw from, (n_y, d).
        zeta: tau log popularity of the items, (n_y,), up to a constant, such as `solve(...).zeta` or the `zeta_y` of
            NUCLR's state.
        temperature: tau.
        count: Number of draws per anchor.
        generator: Source of randomness.
        normalize: Scale features to unit norm instead of refusing other norms.

    Returns:
        Rows of y, (n_x, count), on the device of x.

    Raises:
        ValueError: If an argument has a wrong type, shape or value.

    Example:
        >>> x, y = torch.eye(2), torch.eye(2)
        >>> sample_conditional(x, y, torch.zeros(2), temperature=0.01, count=3).tolist()
        [[0, 0, 0], [1, 1, 1]]

    """
    x, y = as_features("x", x, normalize), as_features("y", y, normalize)
    if x.shape[1] != y.shape[1]:
        raise ValueError(f"x has {x.shape[1]} columns and y {y.shape[1]}; features must have one size")
    if x.device != y.device:
        raise ValueError(f"x is on {x.device} and y on {y.device}; put both on one device")
    if not len(y):
        raise ValueError("y has no rows; there must be at least one item to draw")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count={count!r}; must be a whole number of at least 1")
    temperature = as_positive("temperature", temperature)
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    x, y = x.detach().to(dtype), y.detach().to(dtype)
    offset = as_vector("zeta", zeta, len(y)).to(x.device) / temperature
    source = torch.device("cpu") if generator is None else generator.device
    uniform = torch.rand(len(x), count, dtype=torch.float64, device=source, generator=generator).to(x.device)
    drawn = torch.empty(len(x), count, dtype=torch.long, device=x.device)
    step = max(1, ENTRIES // len(y))
    for start in range(0, len(x), step):
        rows = slice(start, start + step)
        logits = (x[rows] @ y.T).double() / temperature - offset
        cumulative = logits.softmax(dim=1).cumsum(dim=1)
        total = cumulative[:, -1:].contiguous()
        # The first item whose cumulative probability exceeds a uniform number; an item of probability 0 never does.
        index = torch.searchsorted(cumulative, uniform[rows] * total, right=True)
        drawn[rows] = torch.minimum(index, torch.searchsorted(cumulative, total))  # if the product rounds to the total
    return drawn
