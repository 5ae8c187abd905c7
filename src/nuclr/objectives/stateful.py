"""The SogCLR family: running averages per sample, and a gradient in closed form.

For one side, with B the size of the global batch, c_i the number of negatives of anchor i in it (B - 1 without
masking), and n the size of the data set:

    log phi_i = log((n-1)/c_i) + logsumexp_{j != i} (s_ij - s_ii - zeta_j) / tau_i
    u_i      <- (1 - gamma) u_i + gamma phi_i, in logs; phi_i at the first visit
    w_ij      = exp(log((n-1)/c_i) + (s_ij - s_ii - zeta_j) / tau_i - log d_i)

The model's gradient is that of (1/B) sum_i sum_{j != i} w_ij (s_ij - s_ii) with w held fixed, summed over the sides.
It is linear in the scores, so the forward pass computes it, and backward only scales it. The three objectives differ
in zeta, tau_i, the normalizer d_i, and in what else they update.
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
from nuclr.objectives.base import GatheredBatch, Objective, ObjectiveOutput
from nuclr.objectives.checks import Check, check_range, short_list
from nuclr.objectives.kernels import KernelBatch, Workspace, make_kernel, running_log_mean

ANCHORS = ("x", "y")  # in (2, B) tensors, row 0 is side x: its anchors are x, its candidates are y
CANDIDATES = ("y", "x")


@dataclass(frozen=True)
class Step:
    """The values of one step, per anchor of the global batch and side."""

    index: Tensor | None  # (B,), on the device of the tables
    tau: float | Tensor  # one number, or (2, B)
    log_u: Tensor  # (2, B), after the update
    zeta: Tensor  # (2, B), of each anchor's positive
    log_own: Tensor  # (2, B), -zeta/tau: log of the positive's term in the partition function
    negatives: float | Tensor  # c_i: one number, or (B,)

    @cached_property
    def log_total(self) -> Tensor:
        """log(u_i + exp(-zeta_i/tau)), (2, B): log of the estimated partition function, including the positive."""
        return torch.logaddexp(self.log_u, self.log_own)


def unless_alone(negatives: float | Tensor, then: Tensor, otherwise: float | Tensor) -> Tensor:
    """Return `then`, or `otherwise` for anchors without negatives, which contribute nothing and change nothing."""
    return then if isinstance(negatives, float) else torch.where(negatives > 0, then, otherwise)


class StatefulObjective(Objective):
    """An objective with one row of state per pair, in buffers that are equal on all processes.

    The tables stay float32 through half() and bfloat16(). double(), or float64 features in training, converts them to
    float64. DDP must not broadcast them: keep the objective outside DDP, or turn its buffer broadcast off
    (``forward_sync_buffers=False``; ``broadcast_buffers=False`` before torch 2.13).

    Args:
        num_samples: as in `SogCLR`.
        temperature: as in `SogCLR`.
        gamma: as in `SogCLR`.
        state_device: as in `SogCLR`.
        normalize: as in `Objective`.

    """

    needs_index = True
    needs_moments = False

    def __init__(
        self,
        num_samples: int,
        temperature: float,
        gamma: float,
        state_device: str | torch.device | None = None,
        normalize: bool = False,
    ) -> None:
        super().__init__(temperature, normalize)
        if num_samples < 2:
            raise ValueError(f"num_samples must be at least 2, but is {num_samples}")
        check_range("gamma", gamma, 0, 1, low_open=True)
        self.num_samples, self.gamma = num_samples, gamma
        self.state_device = None if state_device is None else torch.device(state_device)
        self._workspace = Workspace()
        self.initial: dict[str, float] = {}  # table -> value of a row before its first update
        self.add_tables("log_u", -math.inf)

    def add_tables(self, name: str, value: float) -> None:
        """Register one buffer per side, with one number per pair, which starts at `value`."""
        self.initial[name] = value
        for side in ANCHORS:
            table = torch.full((self.num_samples,), value, dtype=torch.float32, device=self.state_device)
            self.register_buffer(f"{name}_{side}", table)

    def check_settings(self) -> None:
        """Raise a ValueError if the temperature or gamma is out of range."""
        super().check_settings()
        check_range("gamma", self.gamma, 0, 1, low_open=True)

    # -- what subclasses implement -------------------------------------------------------------------------------------

    def log_normalizer(self, step: Step) -> Tensor:
        """Return log d_i, (2, B)."""
        raise NotImplementedError

    def value(self, step: Step) -> Tensor:
        """Return the estimate of the objective per anchor, (2, B)."""
        raise NotImplementedError

    def log_partition(self, step: Step) -> Tensor | None:  # noqa: ARG002
        """Return the log partition function per anchor, (2, B), if `update` needs the masses of the candidates."""
        return None

    def update(self, step: Step, sums: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        """Update the rest of the state from `sums`, (2, B), the masses or moments of `Gradients`; return metrics."""
        return {}

    # -- one step ------------------------------------------------------------------------------------------------------

    def compute(self, batch: GatheredBatch) -> ObjectiveOutput:
        """Compute the closed form of the module's docstring on both sides; in training, update the state."""
        if self.training and batch.x.dtype == torch.float64 != self.buffer("log_u_x").dtype:
            self.double()
        needs_gradient = torch.is_grad_enabled() and (batch.local_x.requires_grad or batch.local_y.requires_grad)
        with torch.no_grad():
            values, metrics, gradient = self._step(batch, needs_gradient)
        if needs_gradient:
            loss = cast(Tensor, _ClosedForm.apply(batch.local_x, batch.local_y, values, *gradient))  # type: ignore[no-untyped-call]
        else:
            loss = values.sum()
        return ObjectiveOutput(loss, metrics)

    def _step(self, batch: GatheredBatch, needs_gradient: bool) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor, ...]]:
        """Return the value per side, the metrics and the gradients of this process's x and y."""
        index = self._checked_index(batch.index)
        zeta, tau = self.read("zeta", CANDIDATES, index, batch), self.read_tau(index, batch)
        log_own = zeta / -tau
        kernel_batch = KernelBatch(batch.x, batch.y, log_own, tau, batch.ids, batch.rows)
        # in eval mode, the stored average may be far below that of this batch, and weights are not bounded
        kernel = make_kernel(kernel_batch, self._workspace, bounded=self.training or index is None)
        self.check_features(batch, kernel.finite)

        negatives = batch.negatives()
        log_scale = log_ratio(self.num_samples - 1, negatives)
        log_phi = distributed.all_gather(kernel.log_sums, dim=1) + log_scale
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
        if needs_gradient or moments or log_total is not None:
            largest = torch.finfo(log_d.dtype).max
            log_weight = unless_alone(negatives, log_scale - log_d, -largest)
            log_total = None if log_total is None else unless_alone(negatives, log_total, largest)
            sums = kernel.gradients(log_weight, log_total, moments)
            gradient = sums.x, sums.y
            if sums.extra is not None:
                metrics |= self.update(step, distributed.all_gather(sums.extra, dim=1))
        return values, metrics, gradient

    # -- state ---------------------------------------------------------------------------------------------------------

    def read(self, name: str, sides: tuple[str, str], index: Tensor | None, batch: GatheredBatch) -> Tensor:
        """Return the batch's rows of two tables, (2, B), in the dtype of the computation.

        Without an index, or if there is no such table, these are initial values.
        """
        if index is None or name not in self.initial:
            return batch.x.new_full((2, batch.size), self.initial.get(name, 0.0))
        return self.rows(name, sides, index).to(batch.x)

    def rows(self, name: str, sides: tuple[str, str], index: Tensor) -> Tensor:
        """Return rows of two tables, (2, B), as they are stored."""
        return torch.stack([self.buffer(f"{name}_{side}").index_select(0, index) for side in sides])

    def read_tau(self, index: Tensor | None, batch: GatheredBatch) -> float | Tensor:  # noqa: ARG002
        """Return the temperature of the anchors: one number, or (2, B)."""
        return float(self.temperature)

    def write(self, name: str, sides: tuple[str, str], index: Tensor | None, rows: Tensor) -> None:
        """Write the rows of the global batch, (2, B), to two tables; every process writes all of them."""
        assert index is not None
        tables = [self.buffer(f"{name}_{side}") for side in sides]
        for table, row in zip(tables, rows.to(tables[0]).unbind(), strict=True):
            table.index_copy_(0, index, row)

    def buffer(self, name: str) -> Tensor:
        """Return a registered buffer; `get_buffer` takes longer than the arithmetic on a small batch."""
        return cast(Tensor, self._buffers[name])

    def _checked_index(self, index: Tensor | None) -> Tensor | None:
        """Return the index on the device of the tables; raise if it is out of range or repeats a pair."""
        if index is None:
            return None
        self._deferred.check(self._index_checks(index))
        # On an accelerator, a bad index is reported at the next call; until then it must not crash the device.
        index = index if index.device.type == "cpu" else index.clamp(0, self.num_samples - 1)
        return index.to(self.buffer("log_u_x").device)

    def gather_features(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features of all processes, without gradient: each process computes that of its own features."""
        both = distributed.all_gather(torch.cat([x, y], dim=1))
        return both[:, : x.shape[1]].contiguous(), both[:, x.shape[1] :].contiguous()

    def _index_checks(self, index: Tensor) -> list[Check]:
        inside: Tensor | bool
        once: Tensor | bool
        if index.device.type == "cpu":  # reading the values is faster than ten small tensor operations
            values = index.tolist()
            inside, once = min(values) >= 0 and max(values) < self.num_samples, len(set(values)) == len(values)
        else:
            ordered = index.sort().values
            inside = (ordered[0] >= 0) & (ordered[-1] < self.num_samples)
            once = (ordered[1:] != ordered[:-1]).all()

        def describe_outside() -> str:
            bad = index[(index < 0) | (index >= self.num_samples)].tolist()
            return f"index must be in [0, {self.num_samples}), but holds {short_list(bad)}"

        def describe_repeated() -> str:
            counts = Counter(index.tolist())
            repeated = short_list(sorted(value for value, count in counts.items() if count > 1))
            return f"index must not repeat a pair within the global batch, but holds {repeated} more than once"

        return [Check(inside, describe_outside), Check(once, describe_repeated)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StatefulObjective":
        tables = {name: table for name, table in self._buffers.items() if table is not None}
        self._buffers.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, table in tables.items():
            target = fn(table.new_empty(0))  # shows the new device and dtype without moving a large table
            dtype = target.dtype if target.dtype in (torch.float32, torch.float64) else table.dtype
            self._buffers[name] = table.to(device=self.state_device or target.device, dtype=dtype)
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
            loaded = state_dict.get(prefix + name)
            if table is None or loaded is None:
                continue
            if loaded.shape != table.shape:
                sizes = f"holds {loaded.numel()} pairs, but this objective has num_samples={table.numel()}"
                problems.append(f"{prefix}{name} {sizes}; build it with num_samples={loaded.numel()}")
            elif loaded.dtype in (torch.float32, torch.float64):
                self._buffers[name] = table.to(loaded.dtype)
        if problems:
            errors.extend(problems)  # load nothing: a partly loaded state is worse than the old one
            return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, extra, errors)


def log_ratio(pairs: int, negatives: float | Tensor) -> float | Tensor:
    """Return log(pairs / negatives), which is finite for an anchor without negatives."""
    if isinstance(negatives, float):
        return math.log(pairs / negatives)
    return math.log(pairs) - negatives.clamp_min(1).log()


class _ClosedForm(torch.autograd.Function):
    """The sum of values, whose gradients with respect to the features are already known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, values: Tensor, grad_x: Tensor, grad_y: Tensor) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(grad_x, grad_y)
        return values.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_x, grad_y = ctx.saved_tensors
        scale = grads[0]
        if _is_one(scale):  # as in `loss.backward()`; autograd copies if it has to
            return grad_x, grad_y, None, None, None
        return scale * grad_x, scale * grad_y, None, None, None


def _is_one(scale: Tensor) -> bool:
    """Return True if the upstream gradient is the constant 1 and can be read without a device sync."""
    if scale.requires_grad or scale.device.type != "cpu":
        return False
    try:
        return scale.item() == 1
    except RuntimeError:  # a batch of gradients under vmap has several values
        return False
