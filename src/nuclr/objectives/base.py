"""What every objective shares: one signature, the checks of its input, and the gathered batch it works on."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nuclr import distributed
from nuclr.objectives.kernels import Workspace, is_excluded


class ObjectiveOutput(NamedTuple):
    """`loss`, a scalar to call backward on; `metrics`, detached scalars, the same on every process."""

    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """The global batch of B pairs, of which this process brought the b in `rows`.

    local_x, local_y: (b, d) with gradient; x, y: (B, d), all processes' together; index: (B,) or None; ids: (B, 2), the
    x_id and y_id of each pair, or None where no pair is to be masked. Features are in the dtype of the computation.
    """

    local_x: Tensor
    local_y: Tensor
    x: Tensor
    y: Tensor
    index: Tensor | None
    ids: Tensor | None
    rows: slice

    @property
    def size(self) -> int:
        """B."""
        return len(self.x)

    def excluded(self) -> Tensor:
        """(b, B), true where the pair of an own anchor and a candidate is no negative: i = j, or a shared id."""
        if self.ids is not None:
            return is_excluded(self.ids, self.rows, Workspace())
        own = torch.arange(self.rows.start, self.rows.stop, device=self.x.device)
        return own[:, None] == torch.arange(self.size, device=self.x.device)

    def negatives(self) -> float | Tensor:
        """c_i, the number of negatives of every anchor: one number, or (B,) where pairs are masked."""
        if self.ids is None:
            return float(self.size - 1)
        (first_x, same_x), (first_y, same_y) = (_equals(column) for column in self.ids.T.contiguous())
        _, same_both = _equals(first_x * self.size + first_y)
        return (self.size - same_x - same_y + same_both).to(self.x.dtype)


def _equals(values: Tensor) -> tuple[Tensor, Tensor]:
    """Where each value's equals begin in the sorted column, and how many there are, (B,)."""
    ordered = values.sort().values
    first = torch.searchsorted(ordered, values)
    return first, torch.searchsorted(ordered, values, right=True) - first


class Objective(nn.Module):
    """A contrastive loss of paired, unit-norm features.

    Call it as ``objective(x, y, index, x_id=..., y_id=...)`` with x, y (b, d), index (b,) the pairs' numbers, and ids
    (b,) of the samples behind x and y: negatives that share an id with the anchor's pair are left out. bf16 and fp16
    features are computed in float32, float64 in float64, outside autocast.

    Under torch.distributed the batch is that of all processes together, and gradients are scaled so that DDP's mean
    over the processes is that of the global loss. Every process must call with the same number of pairs.
    """

    needs_index = False

    def __init__(self, temperature: float) -> None:
        super().__init__()
        check_positive("temperature", temperature)
        self.temperature = temperature
        self._deferred = DeferredCheck()

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        index: Tensor | None = None,
        x_id: Tensor | None = None,
        y_id: Tensor | None = None,
    ) -> ObjectiveOutput:
        """The loss of one batch; in training mode also one update of the state."""
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return self.contrast(self._gather(x, y, index, x_id, y_id))
        return self.contrast(self._gather(x, y, index, x_id, y_id))

    def contrast(self, batch: Batch) -> ObjectiveOutput:
        """The objective itself, on a checked and gathered batch."""
        raise NotImplementedError

    def check_settings(self) -> None:
        """Refuse settings that a schedule may have put out of range, with a ValueError."""
        check_positive("temperature", self.temperature)

    def gather_features(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """All processes' features; those of autograd objectives return gradients to their owners."""
        both = distributed.all_gather_with_gradient(torch.cat([x, y], dim=1))
        return both[:, : x.shape[1]], both[:, x.shape[1] :]

    def _gather(self, x: Tensor, y: Tensor, index: Tensor | None, x_id: Tensor | None, y_id: Tensor | None) -> Batch:
        self._check_together(x, y, index, x_id, y_id)
        self._deferred.raise_pending()
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        x, y = x.to(dtype), y.to(dtype)
        given = [None if t is None else t.to(x.device, torch.int64) for t in (index, x_id, y_id)]
        start, all_x, all_y, (all_index, all_x_id, all_y_id) = 0, x, y, given
        if distributed.world_size() > 1:
            start = distributed.rank() * len(x)
            all_x, all_y = self.gather_features(x, y)
            all_index, all_x_id, all_y_id = _gather_columns(given)
        ids = None
        if all_x_id is not None or all_y_id is not None:
            own = torch.arange(len(all_x), device=x.device)  # without ids every sample differs
            ids = torch.stack([own if t is None else t for t in (all_x_id, all_y_id)], dim=1)
        return Batch(x, y, all_x, all_y, all_index, ids, slice(start, start + len(x)))

    def check_features(self, batch: Batch, finite: Tensor | bool) -> None:
        """Refuse features that were found not to be finite."""
        both = {"x": batch.x.detach(), "y": batch.y.detach()}  # an accelerator's check outlives the step

        def describe() -> str:
            for name, features in both.items():
                rows = (~features.isfinite()).any(dim=1).nonzero().flatten().tolist()
                if rows:
                    return f"{name} must be finite, but holds nan or inf in rows {short_list(rows)} of the global batch"
            largest = max(features.abs().max() for features in both.values())
            return f"x and y must have unit norm, but hold values as large as {largest:.3g}"

        self._deferred.check([Check(finite, describe)])

    def _check_together(self, x: Tensor, y: Tensor, *integers: Tensor | None) -> None:
        """Refuse shapes and settings that are wrong here or on another process, on all processes at once."""
        problem = self._local_problem(x, y, *integers)
        if distributed.world_size() == 1:
            if problem is not None:
                raise ValueError(problem)
            return
        shape = [len(x), x.shape[1], x.element_size()] if problem is None else [0, 0, 0]
        present = [int(t is not None) for t in integers]
        headers = distributed.exchange([int(problem is not None), *shape, *present, int(self.training)])
        if problem is not None:
            raise ValueError(problem)
        for rank, header in enumerate(headers):
            if header[0]:
                raise ValueError(f"process {rank} of {len(headers)} was given input that it refused; see its message")
        if any(header != headers[0] for header in headers):
            told = "; ".join(f"process {rank}: {b} pairs of width {d}" for rank, (_, b, d, *_) in enumerate(headers))
            raise ValueError(
                "every process must bring the same number of pairs, width, dtype, mode (train or eval) and arguments "
                f"(index, x_id, y_id), but got {told}; drop the last incomplete batch"
            )

    def _local_problem(self, x: Tensor, y: Tensor, *integers: Tensor | None) -> str | None:
        if x.ndim != 2 or x.shape != y.shape:
            return f"x and y must both be (b, d), one row a pair, but x is {tuple(x.shape)} and y is {tuple(y.shape)}"
        if not (x.is_floating_point() and x.dtype == y.dtype):
            return f"x and y must be floating-point and of one dtype, but x is {x.dtype} and y is {y.dtype}"
        if len(x) * distributed.world_size() < 2:
            return f"the batch has {len(x)} pair, which leaves no negatives; at least 2 are needed"
        for name, given in zip(("index", "x_id", "y_id"), integers, strict=True):
            if given is None:
                continue
            if given.is_floating_point() or given.dtype == torch.bool or given.shape != (len(x),):
                expected = f"{name} must be ({len(x)},) integers, one a pair"
                return f"{expected}, but is {tuple(given.shape)} of {given.dtype}"
        if self.needs_index and self.training and integers[0] is None:
            return "index is None, but training needs the pairs' numbers; only eval() takes index=None"
        try:
            self.check_settings()
        except ValueError as error:
            return str(error)
        return None


def _gather_columns(columns: list[Tensor | None]) -> list[Tensor | None]:
    """All processes' values of those columns that are given, in one message."""
    present = [column for column in columns if column is not None]
    if not present:
        return columns
    gathered = iter(distributed.all_gather(torch.stack(present, dim=1)).unbind(dim=1))
    return [None if column is None else next(gathered) for column in columns]


class Check(NamedTuple):
    """What is true where values are good, a scalar, or a bool where the host has looked; the message for the rest."""

    good: Tensor | bool
    describe: Callable[[], str]


def short_list(values: list[int]) -> str:
    """The first few of a list."""
    return ", ".join(map(str, values[:5])) + (f" and {len(values) - 5} more" if len(values) > 5 else "")


class DeferredCheck:
    """Raise for bad values: at once on a CPU; at the next call on an accelerator, which so never waits for the host."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, torch.Event, list[Check]]] = []

    def __reduce__(self) -> tuple[type["DeferredCheck"], tuple[()]]:
        return DeferredCheck, ()  # an event cannot be copied; copies and pickles start empty

    def check(self, checks: list[Check]) -> None:
        """Raise for the first that fails, now or at the next `raise_pending`."""
        good = [check.good for check in checks]
        waiting = [flag for flag in good if isinstance(flag, Tensor) and flag.device.type != "cpu"]
        if not waiting:
            self._raise(good, checks)
            return
        flags = torch.stack(waiting)
        copied = flags.to("cpu", non_blocking=True)
        event = torch.Event(flags.device)
        event.record()
        self._pending.append((copied, event, checks))

    def raise_pending(self) -> None:
        """Raise for the values of the call before."""
        pending, self._pending = self._pending, []
        for flags, event, checks in pending:
            event.synchronize()
            self._raise(flags.tolist(), checks)

    @staticmethod
    def _raise(flags: list[Tensor | bool], checks: list[Check]) -> None:
        for good, check in zip(flags, checks, strict=True):
            if not good:
                raise ValueError(check.describe())


def check_positive(name: str, value: float) -> None:
    """Refuse what is not a finite positive number."""
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be a positive number, but is {value}")


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse what is not among the allowed words."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, but is {value!r}")


def check_range(
    name: str, value: float, low: float, high: float, *, low_open: bool = False, high_open: bool = False
) -> None:
    """Refuse a number outside an interval."""
    if not ((low < value if low_open else low <= value) and (value < high if high_open else value <= high)):
        interval = f"{'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"
        raise ValueError(f"{name} must be in {interval}, but is {value}")
