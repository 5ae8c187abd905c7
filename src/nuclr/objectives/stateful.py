"""SogCLR's family: running averages per sample, and a gradient in closed form.

One side, B the global batch, c_i the negatives of anchor i in it (B - 1 without masking), n the data set:

    log phi_i = log((n-1)/c_i) + logsumexp_{j != i} (s_ij - s_ii - zeta_j) / tau_i
    u_i      <- (1 - gamma) u_i + gamma phi_i, in logs; phi_i at the first visit
    w_ij      = exp(log((n-1)/c_i) + (s_ij - s_ii - zeta_j) / tau_i - log d_i)

The model's gradient is that of (1/B) sum_i sum_{j != i} w_ij (s_ij - s_ii) with w held fixed, summed over the sides.
It is linear in the scores, so the forward pass computes it; backward only scales it. What differs between the three
objectives is zeta, tau_i, the normalizer d_i, and what else they update.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from nuclr import distributed
from nuclr.objectives.base import Batch, Check, Objective, ObjectiveOutput, check_range, short_list
from nuclr.objectives.kernels import Pairs, Workspace, contrast, running_log_mean

ANCHORS = ("x", "y")  # tensors of both sides, (2, B), have side x in row 0: its anchors are x, its candidates are y
CANDIDATES = ("y", "x")


@dataclass(frozen=True)
class Step:
    """What one step knows of the anchors of the global batch on both sides."""

    index: Tensor | None  # (B,), where the tables are
    tau: float | Tensor  # (2, B) where it differs
    log_u: Tensor  # (2, B), the new one
    zeta: Tensor  # (2, B), of each anchor's own candidate
    log_own: Tensor  # (2, B), -zeta/tau: the positive's own term of the partition function, in logs
    negatives: float | Tensor  # c_i, (B,) where it differs

    @cached_property
    def log_total(self) -> Tensor:
        """log(u_i + exp(-zeta_i/tau)), (2, B): the estimated partition function, the positive included."""
        return torch.logaddexp(self.log_u, self.log_own)


def unless_alone(negatives: float | Tensor, then: Tensor, otherwise: float | Tensor) -> Tensor:
    """`then`, but `otherwise` for anchors without negatives: they contribute nothing and change nothing."""
    return then if isinstance(negatives, float) else torch.where(negatives > 0, then, otherwise)


class StatefulObjective(Objective):
    """An objective with one row of state a pair, in buffers, the same on all processes.

    Tables stay float32 through half() and bfloat16(); double() or float64 features in training turn them to float64.
    They need no broadcast by DDP: keep the objective outside DDP, or turn its buffer broadcast off
    (``forward_sync_buffers=False``; ``broadcast_buffers=False`` before torch 2.13). Arguments: see `SogCLR`.
    """

    needs_index = True
    needs_moments = False

    def __init__(
        self, num_samples: int, temperature: float, gamma: float, state_device: str | torch.device | None
    ) -> None:
        super().__init__(temperature)
        if num_samples < 2:
            raise ValueError(f"num_samples must be at least 2, but is {num_samples}")
        check_range("gamma", gamma, 0, 1, low_open=True)
        self.num_samples, self.gamma = num_samples, gamma
        self.state_device = None if state_device is None else torch.device(state_device)
        self._workspace = Workspace()
        self.fresh: dict[str, float] = {}  # what a row holds before its first visit
        self.add_tables("log_u", -math.inf)

    def add_tables(self, name: str, value: float) -> None:
        """Register one buffer a side, one number a pair."""
        self.fresh[name] = value
        for side in ANCHORS:
            table = torch.full((self.num_samples,), value, dtype=torch.float32, device=self.state_device)
            self.register_buffer(f"{name}_{side}", table)

    def check_settings(self) -> None:
        """Refuse a temperature or gamma out of range."""
        super().check_settings()
        check_range("gamma", self.gamma, 0, 1, low_open=True)

    # -- what the three objectives fill in -----------------------------------------------------------------------------

    def log_normalizer(self, step: Step) -> Tensor:
        """Log d_i, (2, B)."""
        raise NotImplementedError

    def value(self, step: Step) -> Tensor:
        """Each anchor's estimate of the objective, (2, B)."""
        raise NotImplementedError

    def log_partition(self, step: Step) -> Tensor | None:  # noqa: ARG002
        """Each anchor's log partition function, (2, B), to learn how probability falls on the candidates."""
        return None

    def update(self, step: Step, sums: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        """Move the rest of the state; sums: (2, B), the masses or moments of `Gradients`. Returns metrics."""
        return {}

    # -- one step ------------------------------------------------------------------------------------------------------

    def contrast(self, batch: Batch) -> ObjectiveOutput:
        """The closed form of the module's docstring on both sides, and one update of the state in training."""
        if self.training and batch.x.dtype == torch.float64 != self.buffer("log_u_x").dtype:
            self.double()
        wanted = torch.is_grad_enabled() and (batch.local_x.requires_grad or batch.local_y.requires_grad)
        with torch.no_grad():
            values, metrics, gradient = self._step(batch, wanted)
        if wanted:
            loss = cast(Tensor, _ClosedForm.apply(batch.local_x, batch.local_y, values, *gradient))  # type: ignore[no-untyped-call]
        else:
            loss = values.sum()
        return ObjectiveOutput(loss, metrics)

    def _step(self, batch: Batch, wanted: bool) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor, ...]]:
        index = self._checked(batch.index)
        zeta, tau = self.read("zeta", CANDIDATES, index, batch), self.read_tau(index, batch)
        log_own = zeta / -tau
        pairs = Pairs(batch.x, batch.y, log_own, tau, batch.ids, batch.rows)
        # in eval an old average may lie far below this batch's
        passes = contrast(pairs, self._workspace, bounded=self.training or index is None)
        self.check_features(batch, passes.finite)

        negatives = batch.negatives()
        log_scale = log_ratio(self.num_samples - 1, negatives)
        log_phi = distributed.all_gather(passes.log_sums, dim=1) + log_scale
        log_u = self.read("log_u", ANCHORS, index, batch)
        if self.training:
            log_u = unless_alone(negatives, running_log_mean(log_u, log_phi, self.gamma), log_u)
            self.write("log_u", ANCHORS, index, log_u)
        else:
            log_u = torch.where(log_u.isneginf(), log_phi, log_u)
        step = Step(index, tau, log_u, zeta, log_own, negatives)
        values = unless_alone(negatives, self.value(step), 0.0).mean(dim=1)
        metrics = dict(zip(("objective_x", "objective_y"), values.unbind(), strict=True))

        log_d = self.log_normalizer(step)
        log_total = self.log_partition(step) if self.training else None
        moments = self.needs_moments and self.training
        gradient: tuple[Tensor, ...] = ()
        if wanted or moments or log_total is not None:
            largest = torch.finfo(log_d.dtype).max
            log_weight = unless_alone(negatives, log_scale - log_d, -largest)
            log_total = None if log_total is None else unless_alone(negatives, log_total, largest)
            sums = passes.gradients(log_weight, log_total, moments)
            gradient = sums.x, sums.y
            if sums.extra is not None:
                metrics |= self.update(step, distributed.all_gather(sums.extra, dim=1))
        return values, metrics, gradient

    # -- state ---------------------------------------------------------------------------------------------------------

    def read(self, name: str, sides: tuple[str, str], index: Tensor | None, batch: Batch) -> Tensor:
        """The batch's rows of two tables, (2, B), in the dtype of the computation; unknown pairs have fresh ones."""
        if index is None or name not in self.fresh:
            return batch.x.new_full((2, batch.size), self.fresh.get(name, 0.0))
        return self.rows(name, sides, index).to(batch.x)

    def rows(self, name: str, sides: tuple[str, str], index: Tensor) -> Tensor:
        """Rows of two tables, (2, B), as they are stored."""
        return torch.stack([self.buffer(f"{name}_{side}").index_select(0, index) for side in sides])

    def read_tau(self, index: Tensor | None, batch: Batch) -> float | Tensor:  # noqa: ARG002
        """The anchors' temperature: one number, or (2, B)."""
        return float(self.temperature)

    def write(self, name: str, sides: tuple[str, str], index: Tensor | None, rows: Tensor) -> None:
        """Put the global batch's rows, (2, B), into two tables; every process writes all of them."""
        assert index is not None
        tables = [self.buffer(f"{name}_{side}") for side in sides]
        for table, row in zip(tables, rows.to(tables[0]).unbind(), strict=True):
            table.index_copy_(0, index, row)

    def buffer(self, name: str) -> Tensor:
        """A registered buffer; `get_buffer` costs more than the arithmetic on a small batch."""
        return cast(Tensor, self._buffers[name])

    def _checked(self, index: Tensor | None) -> Tensor | None:
        """The index where the tables are, in range and without a number given twice."""
        if index is None:
            return None
        self._deferred.check(self._index_checks(index))
        # On an accelerator a bad index is only reported at the next call; until then it must not bring the device down.
        index = index if index.device.type == "cpu" else index.clamp(0, self.num_samples - 1)
        return index.to(self.buffer("log_u_x").device)

    def gather_features(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """All processes' features, without gradient: it is computed where the features are."""
        both = distributed.all_gather(torch.cat([x, y], dim=1))
        return both[:, : x.shape[1]].contiguous(), both[:, x.shape[1] :].contiguous()

    def _index_checks(self, index: Tensor) -> list[Check]:
        inside: Tensor | bool
        once: Tensor | bool
        if index.device.type == "cpu":  # one look at the numbers costs less than ten kinds of small operations
            numbers = index.tolist()
            inside, once = min(numbers) >= 0 and max(numbers) < self.num_samples, len(set(numbers)) == len(numbers)
        else:
            ordered = index.sort().values
            inside = (ordered[0] >= 0) & (ordered[-1] < self.num_samples)
            once = (ordered[1:] != ordered[:-1]).all()

        def describe_outside() -> str:
            bad = index[(index < 0) | (index >= self.num_samples)].tolist()
            return f"index must be in [0, {self.num_samples}), but holds {short_list(bad)}"

        def describe_repeated() -> str:
            counts = Counter(index.tolist())
            twice = short_list(sorted(number for number, count in counts.items() if count > 1))
            return f"index must not repeat a pair within the global batch, but holds {twice} more than once"

        return [Check(inside, describe_outside), Check(once, describe_repeated)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StatefulObjective":
        tables = {name: table for name, table in self._buffers.items() if table is not None}
        self._buffers.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, table in tables.items():
            wanted = fn(table.new_empty(0))  # tells where to and to what, without moving a large table
            dtype = wanted.dtype if wanted.dtype in (torch.float32, torch.float64) else table.dtype
            self._buffers[name] = table.to(device=self.state_device or wanted.device, dtype=dtype)
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: Any,
        extra: Any,
        errors: Any,
    ) -> None:
        problems = []
        for name, table in self._buffers.items():
            given = state_dict.get(prefix + name)
            if table is None or given is None:
                continue
            if given.shape != table.shape:
                told = f"{prefix}{name} holds {given.numel()} pairs, but this objective has num_samples={table.numel()}"
                problems.append(f"{told}; build it with num_samples={given.numel()}")
            elif given.dtype in (torch.float32, torch.float64):
                self._buffers[name] = table.to(given.dtype)
        if problems:
            errors.extend(problems)  # and load nothing: half a state is worse than the one before
            return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, extra, errors)


def log_ratio(pairs: int, negatives: float | Tensor) -> float | Tensor:
    """log(pairs / negatives); finite for an anchor that has none."""
    if isinstance(negatives, float):
        return math.log(pairs / negatives)
    return math.log(pairs) - negatives.clamp_min(1).log()


class _ClosedForm(torch.autograd.Function):
    """The sum of values; its gradient with respect to the features is known already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, values: Tensor, grad_x: Tensor, grad_y: Tensor) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(grad_x, grad_y)
        return values.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_x, grad_y = ctx.saved_tensors
        scale = grads[0]
        if _is_one(scale):  # as in `loss.backward()`; autograd copies where it must
            return grad_x, grad_y, None, None, None
        return scale * grad_x, scale * grad_y, None, None, None


def _is_one(scale: Tensor) -> bool:
    """Whether it is known, without waiting for a device, to be the number one and no function of anything."""
    if scale.requires_grad or scale.device.type != "cpu":
        return False
    try:
        return scale.item() == 1
    except RuntimeError:  # a batch of gradients at once, under vmap, has no one value
        return False
