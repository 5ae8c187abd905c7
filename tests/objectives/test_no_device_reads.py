"""No training step waits for an accelerator: it reads no value, and copies nothing to the host before the next step.

There is no accelerator here. The device "meta" stands in for it: its tensors have shapes and dtypes but no values, so
whatever needs a value raises.
"""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from nuclr.data import Batch
from nuclr.objectives import build, entry, names
from nuclr.objectives.base import DeferredCheck
from nuclr.training.logging import Window
from nuclr.training.step import apply_objective, clip_gradient, encode_and_backward

B, WIDTH, PAIRS = 16, 8, 100
OPTIONS = {
    "learnt": ("nuclr", {"temperatures": {"learnt": True}}),
    "individual": ("nuclr", {"temperatures": {"individual": True}}),
    "momentum": ("nuclr", {"zeta_momentum": 0.9}),
    "paper": ("nuclr", {"zeta_estimator": "paper"}),
    "proximal": ("sogclr", {"average": {"gamma_rule": "proximal"}}),
    "clip learnt": ("clip", {"learn_temperature": True}),
}
MARGIN = {"false_negative_margin": 0.1}
ITEMS = {"state": {"num_x": PAIRS, "num_y": PAIRS}}
CASES = {name: (name, {}) for name in names()} | OPTIONS
for name in ("clip", "sogclr", "isogclr", "nuclr"):
    CASES |= {f"{name} margin": (name, MARGIN), f"{name} negatives": (name, {}), f"{name} log_q": (name, {})}
    CASES |= {f"{name} items": (name, ITEMS)} if name != "clip" else {}


class NoReads(TorchDispatchMode):
    """Raise on every copy to the host that waits; tensors on "meta" raise themselves if a value is read."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        copies = function.overloadpacket.__name__ == "_to_copy" and arguments[0].is_meta
        if copies and str(options.get("device")) == "cpu":
            assert options.get("non_blocking"), "a copy to the host waits for the device"
            return torch.ones(arguments[0].shape, dtype=arguments[0].dtype)
        return function(*arguments, **options)


class NoEvent:
    """An event of an accelerator that is not there; it is never waited for in the step that records it."""

    def __init__(self, device) -> None:
        assert torch.device(device).type == "meta"

    def record(self) -> None:
        """Do nothing."""


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Linear(5, WIDTH)
        self.y = nn.Linear(7, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(self.x(x), dim=1), normalize(self.y(y), dim=1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_training_step_reads_nothing_back(case: str, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", NoEvent)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)  # "meta" has no autocast
    name, options = CASES[case]
    needs = {"num_samples": PAIRS} if entry(name).needs_num_samples else {}
    objective = build(name, **needs, **options).to("meta")
    towers = Towers().to("meta")
    optimizer = torch.optim.AdamW([*towers.parameters(), *objective.parameters()])
    ids = torch.empty(B, dtype=torch.int64, device="meta")
    arguments = {}
    if "negatives" in case:
        arguments["negatives"] = torch.empty(B, 2, WIDTH, device="meta")
    if "log_q" in case:
        arguments["log_q"] = torch.empty(B, device="meta")
    masked = masked or "items" in case  # items need their ids
    x = torch.empty(B, 5, device="meta")
    batch = Batch(numbers=ids, x=x, y=torch.empty(B, 7, device="meta"), x_id=ids, y_id=ids)
    call = partial(objective, **arguments)
    window = Window()
    finite = DeferredCheck()
    with NoReads():
        out = encode_and_backward(
            towers,
            batch.x,
            batch.y,
            lambda x, y: apply_objective(call, x, y, batch, masked),
            B,
            0,
        )
        norm = clip_gradient(list(towers.parameters()), 1.0)
        finite.check(torch.isfinite(norm + out.loss.detach()), partial(ValueError, "not finite"))
        optimizer.step()
        window.add({"loss": out.loss, "grad_norm": norm, **out.metrics})
    assert out.loss.is_meta and all(parameter.grad is not None for parameter in towers.parameters())


def test_the_test_notices_reads() -> None:
    value = torch.ones(3, device="meta").sum()
    with NoReads():
        for read in (value.item, value.cpu, lambda: bool(value > 0), lambda: float(value), lambda: value.tolist()):
            with pytest.raises((AssertionError, RuntimeError)):
                read()
        value.to("cpu", non_blocking=True)
