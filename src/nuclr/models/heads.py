"""Heads: a tower's features (b, d) -> (b, width), the space that both sides share."""

from torch import nn

from nuclr.errors import UserError

HEADS = ("linear", "mlp", "none")


class Head(nn.Sequential):
    """`kind`: "linear"; "mlp", one hidden layer of 2 `width` with GELU; "none", for towers that give `width`."""

    def __init__(self, kind: str, in_width: int, width: int) -> None:
        layers: dict[str, tuple[nn.Module, ...]] = {
            "linear": (nn.Linear(in_width, width),),
            "mlp": (nn.Linear(in_width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)),
            "none": (),
        }
        super().__init__(*layers[kind])
        self.kind, self.in_width, self.width = kind, in_width, width


def make_head(kind: str, in_width: int, width: int, key: str) -> Head:
    """Make a head after checking `kind`; `key` is the settings key in messages."""
    if kind not in HEADS:
        raise UserError(f"{key}: {kind!r} is not allowed; allowed: {', '.join(HEADS)}")
    if kind == "none" and in_width != width:
        raise UserError(
            f"{key}: 'none' keeps the tower's {in_width} features, but model.width is {width}; use 'linear'"
        )
    return Head(kind, in_width, width)
