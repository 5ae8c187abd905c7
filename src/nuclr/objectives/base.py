"""What all objectives share: the signature, the checks of the input, and the gathered batch.

`Objective` is the base of all. `AutogradObjective` is the base of objectives without state, which are written as plain
functions of the scores and differentiated by autograd. For objectives with state, see `stateful`.
"""

import contextlib
import functools
import inspect
import itertools
import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from nuclr import distributed
from nuclr.arrays import (
    NORM_TOLERANCE,
    Array,
    Integers,
    as_integers,
    as_tensor,
    check_same_device,
    rescale_extreme_rows,
    to_device,
)
from nuclr.objectives.kernels import Workspace, is_excluded, score_tiles


@dataclass(frozen=True)
class Range:
    """The interval that an option must be in.

    Attributes:
        low: the lower end.
        high: the upper end.
        low_open: whether the lower end itself is refused.
        high_open: whether the upper end itself is refused.

    """

    low: float = 0.0
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise a ValueError that names the option if its value is outside of the interval."""
        try:
            above = self.low < value if self.low_open else self.low <= value
            below = value < self.high if self.high_open else value <= self.high
        except TypeError:  # not a number
            above = below = False
        if not (above and below):
            left = "(" if self.low_open else "["
            right = ")" if self.high_open else "]"
            raise ValueError(f"{name} must be in {left}{self.low:g}, {self.high:g}{right}, but is {value!r}")


POSITIVE = Range(low_open=True, high_open=True)
SHARE = Range(high=1.0)


def check_choice(
    name: str,
    value: str,
    allowed: tuple[str, ...],
) -> None:
    """Raise a ValueError if `value` is not one of the allowed words."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, but is {value!r}")


def show_option(value: Any) -> str:
    """Return the value of an option as `Objective.settings` shows it."""
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


Record = TypeVar("Record")


def as_record(
    name: str,
    value: Record | Mapping[str, Any],
    default: Record,
) -> Record:
    """Return a group of options that belong together as a record; in YAML, it is a section: `temperatures.rho`.

    Args:
        name: name of the option, for messages.
        value: the record, or a dict of some of its fields.
        default: a dataclass with the values of the other fields.

    Raises:
        ValueError: if the value is something else, has an unknown field, or is out of range.

    Example:
        >>> from nuclr.objectives import RunningAverage
        >>> as_record("average", {"alpha": 2.0}, RunningAverage())
        RunningAverage(gamma_rule='constant', alpha=2.0)

    """
    if isinstance(value, type(default)):
        return value
    try:
        return cast(Record, replace(default, **value))  # type: ignore[type-var, arg-type]
    except TypeError:
        known = ", ".join(vars(default))
        raise ValueError(f"{name}={value!r}: it takes a {type(default).__name__} or a dict of {known}") from None


class ObjectiveOutput(NamedTuple):
    """The result of one call.

    Attributes:
        loss: a scalar to call `backward` on.
        metrics: detached scalars, the same on every process.

    """

    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class GatheredBatch:
    """The global batch of B pairs, of which this process has the b pairs `pairs`.

    Features have one row per view: x has m_x rows per pair, next to each other, and y has m_y.

    Attributes:
        local_x: (b * m_x, d), the features of this process, with gradient.
        local_y: (b * m_y, d), as `local_x`.
        x: (B * m_x, d), the features of all processes, in the dtype of the computation.
        y: (B * m_y, d), as `x`.
        views: m_x and m_y, the number of views per pair.
        index: (B,), the indices of the pairs in the data set, or None.
        ids: (B, k), one or more ids per pair, or None if nothing is masked. Pairs that agree in a column are not
            negatives of each other.
        pairs: the pairs of the global batch that are this process's.
        local_hard: (b * k, d), the hard negatives of this process, those of a pair next to each other; None: no pair
            has any.
        hard: (B * k, d), as `local_hard`.
        hard_ids: (B, k), ids of the hard negatives, in the numbering of the first id of y, or None.
        items: (B,) per side, "x" and "y": the first id of each sample, if ids are given.
        log_q: (B,), log of the probability of each y in the data, or None.

    """

    local_x: Tensor
    local_y: Tensor
    x: Tensor
    y: Tensor
    views: tuple[int, int]
    index: Tensor | None
    ids: Tensor | None
    pairs: slice
    local_hard: Tensor | None = None
    hard: Tensor | None = None
    items: Mapping[str, Tensor] = field(default_factory=dict)
    log_q: Tensor | None = None
    hard_ids: Tensor | None = None

    @property
    def size(self) -> int:
        """B, the number of pairs of all processes."""
        return len(self.x) // self.views[0]

    def excluded(self, pairs: slice, others: slice) -> Tensor | None:
        """Return which of the other pairs are not negatives because they share an id; None if there are no ids.

        Args:
            pairs: the pairs of the anchors.
            others: the pairs of the candidates. The anchor's own pair is not excluded.

        Returns:
            (pairs, others) bool.

        """
        if self.ids is None:
            return None
        numbers = torch.arange(self.size, device=self.x.device)
        shared = is_excluded(self.ids, pairs, Workspace())[:, others]
        return shared.logical_and_(numbers[pairs, None] != numbers[others])

    def excluded_hard(self, pairs: slice, others: slice) -> Tensor | None:
        """Return which hard negatives of the other pairs are not candidates of an anchor; None if there are no ids.

        They are those of pairs that share an id, and those that are the anchor's y.

        Args:
            pairs: the pairs of the anchors.
            others: the pairs whose hard negatives these are.

        Returns:
            (pairs, others, k) bool, or (pairs, others, 1) if it is the same for all k.

        """
        excluded = self.excluded(pairs, others)
        if excluded is None or self.hard_ids is None:
            return None if excluded is None else excluded[:, :, None]
        return excluded[:, :, None] | (self.items["y"][pairs, None, None] == self.hard_ids[others])

    def negatives(self) -> float | Tensor:
        """Return c_i, the number of negatives per anchor: one number, or (B,) if pairs are masked."""
        if self.ids is None:
            return float(self.size - 1)
        columns = self.ids.T.contiguous()
        if len(columns) > 2:
            count = [
                (~is_excluded(self.ids, pairs, Workspace())).sum(dim=1) for pairs in score_tiles(self.pairs, self.size)
            ]
            return distributed.all_gather(torch.cat(count)).to(self.x.dtype)
        first, same = count_equal(columns[0])
        if len(columns) == 2:
            other_first, other_same = count_equal(columns[1])
            same = same + other_same - count_equal(first * self.size + other_first)[1]
        return (self.size - same).to(self.x.dtype)


def count_equal(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each value, where the values equal to it start in sorted order and how many there are, (B,) each."""
    ordered = values.sort().values
    first = torch.searchsorted(ordered, values)
    return first, torch.searchsorted(ordered, values, right=True) - first


# ---------------------------------------------------------------------------------------------------------------------
# Checks of values that may be on an accelerator
# ---------------------------------------------------------------------------------------------------------------------


class DeferredCheck:
    """Raise for bad values: at once on CPU, at the next call on an accelerator, which therefore never waits."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, torch.Event, Callable[[], Exception]]] = []

    def __reduce__(self) -> tuple[type["DeferredCheck"], tuple[()]]:
        return DeferredCheck, ()  # an event cannot be copied; copies and pickles start empty

    def check(self, good: Tensor | bool, error: Callable[[], Exception]) -> None:
        """Raise an error if a condition does not hold: now if it can be read on CPU, else at `raise_pending`.

        Args:
            good: the condition; a scalar tensor, or a bool if the value has been read already.
            error: returns the error to raise.

        """
        if not isinstance(good, Tensor) or good.device.type == "cpu":
            if not good:
                raise error()
            return
        copied = good.to("cpu", non_blocking=True)
        event = torch.Event(good.device)
        event.record()
        self._pending.append((copied, event, error))

    def raise_pending(self) -> None:
        """Raise the error of the first condition of the previous call that did not hold."""
        pending = self._pending
        self._pending = []
        for good, event, error in pending:
            event.synchronize()
            if not good:
                raise error()


# ---------------------------------------------------------------------------------------------------------------------
# Objectives
# ---------------------------------------------------------------------------------------------------------------------


class Objective(nn.Module):
    """A contrastive loss on pairs of unit-norm features.

    Call it as ``objective(x, y, index, x_id=..., y_id=..., negatives=...)``; see `forward`. bf16 and fp16 features are
    computed in float32, float64 in float64, and autocast has no effect.

    Under torch.distributed the batch is that of all processes together. Gradients are scaled such that DDP's mean over
    the processes is the gradient of the global loss. Every process must pass the same number of pairs.

    Args:
        temperature: tau, the divisor of the scores.
        normalize: whether to scale x and y to unit norm inside, with gradients. If False, features that do not have
            unit norm are refused.

    Attributes:
        false_negative_margin: drop a candidate j from the negatives of anchor i if s_ij > s_ii + this margin, since it
            is probably a right answer as well; at least 0. None drops nothing. `build` sets it.
        margin_strategy: "absolute", or "relative" for s_ij > s_ii + margin |s_ii|. `build` sets it.

    """

    false_negative_margin: float | None = None
    margin_strategy: str = "absolute"
    limits: Mapping[str, Range] = {"temperature": POSITIVE}
    """The plain attributes that a schedule may change, and their limits, which are checked at each call."""
    scheduled: Mapping[str, str] = {}
    """Attributes that change during a run of `nuclr train`: "weight" of new values, or "step size"."""
    table_sides: tuple[str, ...] = ()
    """Sides whose popularity is stored in a table, which `set_popularity` writes."""
    takes_log_q: bool = False
    """Whether there is a normalizer that `log_q` corrects."""
    needs_index: bool = False
    """Whether training needs the indices of the pairs."""
    keeps_tables: bool = False
    """Whether there is state per pair or per item."""

    def __init__(self, temperature: float, normalize: bool = False) -> None:
        super().__init__()
        POSITIVE.check("temperature", temperature)
        self.temperature = temperature
        self.normalize = normalize
        self._deferred = DeferredCheck()
        self._same_settings = False  # on all processes: not compared yet

    @property
    def current_temperature(self) -> float:
        """The current temperature: fixed, learnt, or the mean over pairs if every pair has its own."""
        return float(self.temperature)

    @property
    def current_bias(self) -> float | None:
        """The learnt bias of the scores; None if the objective has none."""
        return None

    def forward(
        self,
        x: Array,
        y: Array,
        index: Integers | None = None,
        x_id: Integers | None = None,
        y_id: Integers | None = None,
        negatives: Array | None = None,
        log_q: Array | None = None,
        negative_id: Integers | None = None,
    ) -> ObjectiveOutput:
        """Compute the loss of one batch; in training mode, also update the state.

        Args:
            x: features with unit norm, a tensor or a numpy array (without gradient): (b, d), or (b, m, d) with m
                views of each sample.
            y: as `x`, with its own number of views; row i of x and row i of y are a pair.
            index: (b,) indices of the pairs in the data set: a tensor, numpy array or list. Objectives with state need
                it in training mode.
            x_id: ids of the samples behind x, integers: (b,), or (b, k) if a sample has several, such as its own and
                that of its group. Pairs that agree in a column are not negatives of each other.
            y_id: as `x_id` for y.
            negatives: (b, k, d) hard negatives of each x with unit norm, such as mined documents: further candidates of
                all x of the batch, without state. See `hard_negatives` for how they count.
            log_q: (b,) log of the probability of each y in the data, such as log(count / n). It corrects for items that
                occur in many pairs: -log(n q) is added to the logits of candidates y ("logQ"). The other side is left
                as it is.
            negative_id: (b, k) ids of the hard negatives, in the numbering of the first id of y: a hard negative is not
                one of the x to which it is the right answer. Without ids, that is not known.

        Returns:
            `loss` and `metrics`. The gradient of `loss` is the algorithm's; its value is the estimate of the
            objective over the global batch.

        Raises:
            TypeError: if an argument has the wrong type.
            ValueError: if shapes, dtypes or values are not as described. With several processes all of them raise. On
                an accelerator, bad values are reported by the next call.

        Example:
            >>> import numpy as np
            >>> from nuclr.objectives import CLIP
            >>> x = np.eye(3, dtype=np.float32)
            >>> round(CLIP(temperature=0.5)(x, x).loss.item(), 4)
            0.2395

        """
        columns = {"index": index, "x_id": x_id, "y_id": y_id, "negative_id": negative_id}
        inputs, ids = self._checked_inputs(x, y, columns, negatives, log_q)
        device = inputs["x"].device.type
        autocast = torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if autocast else contextlib.nullcontext():
            return self.compute(self._gather(inputs, ids))

    def compute(self, batch: GatheredBatch) -> ObjectiveOutput:
        """Compute the loss and metrics of a checked and gathered batch; subclasses implement this."""
        raise NotImplementedError

    def check_settings(self) -> None:
        """Raise a ValueError for settings that a schedule may have moved out of range."""
        for name, limit in self.limits.items():
            limit.check(name, getattr(self, name))
        check_choice("margin_strategy", self.margin_strategy, ("absolute", "relative"))
        if self.false_negative_margin is not None:
            Range(high_open=True).check("false_negative_margin", self.false_negative_margin)

    def margins(self, positives: Tensor) -> Tensor:
        """Return by how much a negative may exceed each positive score, in the same shape."""
        scale = positives.abs() if self.margin_strategy == "relative" else torch.ones_like(positives)
        return (self.false_negative_margin or 0.0) * scale

    def gather_features(self, features: Tensor) -> Tensor:
        """Return the features of all processes; autograd sends the gradients back to the processes they came from."""
        return distributed.all_gather_with_gradient(features)

    def end_epoch(self) -> None:
        """Do what the objective does once per epoch, after its last step: nothing unless a subclass says so.

        All processes must call it. `nuclr train` does; a training loop of your own needs it for
        `nuclr-authors` only.
        """

    def summarize(self, rows: Tensor) -> dict[str, float]:  # noqa: ARG002
        """Return numbers that describe the state, for logs: none unless a subclass says so.

        Args:
            rows: the rows of state that are in use, on the host.

        """
        return {}

    def set_popularity(
        self,
        side: str,
        rows: Tensor,
        zeta: Tensor,
    ) -> None:
        """Replace the popularity that is stored for candidates; objectives with `table_sides` implement this.

        Args:
            side: one of `table_sides`.
            rows: (m,) rows of state. A row that occurs several times gets the mean of its values.
            zeta: (m,), tau times the log of the popularity, up to a constant.

        """
        raise NotImplementedError

    def initial_value(self, name: str) -> float:  # noqa: ARG002
        """Return the value that an entry of the state has before its first update; 0 if it is not known."""
        return 0.0

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        *args: Any,
    ) -> None:
        for key, value in state_dict.items():
            if key.startswith(prefix) and isinstance(value, Tensor) and not is_lazy(value):
                initial = torch.tensor(self.initial_value(key.removeprefix(prefix)))
                unset = value.isnan() if initial.isnan() else value == initial
                if value.is_complex() or not bool((value.isfinite() | unset).all()):
                    raise ValueError(f"{key} of the state holds a nan, an infinity or complex numbers; load another")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def gather_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict on process 0 and an empty one on the others; objectives may gather sharded state.

        Returns:
            A state dict that `load_state_dict` takes on any number of processes. All processes must call this.

        """
        return dict(self.state_dict()) if distributed.rank() == 0 else {}

    def check_features(self, batch: GatheredBatch, finite: Tensor | bool) -> None:
        """Raise a ValueError if features are not finite, or do not have unit norm.

        The norm is checked in the first, middle and last row only, because a forgotten normalization shows in all.

        Args:
            batch: the global batch.
            finite: whether all features are finite; a scalar.

        """
        # a deferred check must not hold the graph of the step
        checked = {"x": batch.x.detach(), "y": batch.y.detach()}
        if batch.hard is not None:
            checked["negatives"] = batch.hard.detach()
            finite = checked["negatives"].sum().isfinite() & torch.as_tensor(finite)
        error = functools.partial(_bad_features, checked, batch.size)
        self._deferred.check(finite, error)
        if self.normalize:
            return
        rows = torch.stack([side[row] for side in checked.values() for row in (0, len(side) // 2, -1)])
        norms = torch.linalg.vector_norm(rows, dim=1)
        if batch.x.device.type == "cpu":  # reading the values is faster than three small tensor operations
            values = norms.tolist()
            self._deferred.check(min(values) >= 1 - NORM_TOLERANCE and max(values) <= 1 + NORM_TOLERANCE, error)
        else:
            self._deferred.check(torch.all((norms - 1).abs() <= NORM_TOLERANCE), error)

    def settings(self) -> dict[str, str]:
        """Return the constructor's arguments with their current values as text, without records of default values.

        Example:
            >>> from nuclr.objectives import CLIP
            >>> CLIP(temperature=0.07).settings()
            {'temperature': '0.07', 'learn_temperature': 'False', 'normalize': 'False'}

        """
        shown = {}
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = getattr(self, name, None)
            if isinstance(value, Tensor):
                value = math.nan if value.is_meta else value.item()
            if value is not None and not (is_dataclass(value) and value == parameter.default):
                shown[name] = show_option(value)
        if self.false_negative_margin is not None:
            shown["false_negative_margin"] = show_option(float(self.false_negative_margin))
            shown["margin_strategy"] = repr(self.margin_strategy)
        return shown

    def extra_repr(self) -> str:
        """Return the settings in one line."""
        return ", ".join(f"{name}={value}" for name, value in self.settings().items())

    def _gather(self, inputs: Mapping[str, Tensor], ids: Mapping[str, Tensor]) -> GatheredBatch:
        self._deferred.raise_pending()
        pairs = len(inputs["x"])
        dtype = torch.float64 if inputs["x"].dtype == torch.float64 else torch.float32
        local = {name: features.to(dtype).flatten(0, -2) for name, features in inputs.items()}
        if self.normalize:
            for name in local.keys() - {"log_q"}:
                local[name] = nn.functional.normalize(rescale_extreme_rows(local[name], small=False), dim=1)
        everywhere = local
        start = 0
        if distributed.world_size() > 1:
            start = distributed.rank() * pairs
            parts = _gather_as_one(
                {name: features.reshape(pairs, -1) for name, features in local.items()},
                self.gather_features,
            )
            everywhere = {name: part.reshape(-1, local[name].shape[1]).contiguous() for name, part in parts.items()}
            ids = _gather_as_one(ids, distributed.all_gather)
        if "log_q" in inputs:
            message = "log_q must be finite: the log of each y's probability, such as log(count / n), with count > 0"
            self._deferred.check(everywhere["log_q"].isfinite().all(), functools.partial(ValueError, message))
        given = [ids[name] for name in ("x_id", "y_id") if name in ids]
        return GatheredBatch(
            local["x"],
            local["y"],
            everywhere["x"],
            everywhere["y"],
            (_views(inputs["x"]), _views(inputs["y"])),
            ids["index"][:, 0] if "index" in ids else None,
            torch.cat(given, dim=1) if given else None,
            slice(start, start + pairs),
            local.get("negatives"),
            everywhere.get("negatives"),
            {name[0]: ids[name][:, 0] for name in ("x_id", "y_id") if name in ids},
            everywhere["log_q"][:, 0] if "log_q" in inputs else None,
            ids.get("negative_id"),
        )

    def _checked_inputs(
        self,
        x: Array,
        y: Array,
        columns: Mapping[str, Integers | None],
        negatives: Array | None,
        log_q: Array | None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the arguments as `_check_inputs` does. If one process refuses them, all processes raise."""
        if distributed.world_size() == 1:
            return self._check_inputs(x, y, columns, negatives, log_q)
        header = [0] * 13
        problem = None
        try:
            inputs, ids = self._check_inputs(x, y, columns, negatives, log_q)
            x, y = inputs["x"], inputs["y"]
            header = [
                len(x),
                x.shape[-1],
                x.element_size(),
                x[0].numel(),
                y[0].numel(),
                inputs["negatives"].shape[1] if "negatives" in inputs else 0,
                int(log_q is not None),
                sum(column.shape[1] for column in ids.values()),
                *(int(value is not None) for value in columns.values()),
                int(torch.is_grad_enabled() and (x.requires_grad or y.requires_grad)),
            ]
        except (TypeError, ValueError) as error:
            problem = error
        headers = distributed.exchange([*header, int(self.training)])
        if problem is not None:
            raise problem
        if any(other != headers[0] for other in headers):
            got = "; ".join(f"process {rank}: {b} pairs of width {d}" for rank, (b, d, *_) in enumerate(headers))
            raise ValueError(
                "every process must pass the same number of pairs and views, width, dtype, requires_grad, mode (train "
                f"or eval) and arguments (index, x_id, y_id, negatives, log_q, negative_id), but got {got} (0: it "
                "refused its input, see its error message); drop the last incomplete batch"
            )
        if not self._same_settings:
            self._compare_settings()
        return inputs, ids

    def _compare_settings(self) -> None:
        """Raise an error, on all processes, if they have different settings; numbers of devices may differ."""
        text = f"{type(self).__name__}({self.extra_repr()})"
        own = zlib.crc32(re.sub(r"(cuda|xpu|hpu):\d+", r"\1", text).encode())
        numbers = distributed.exchange([own])
        if any(number != numbers[0] for number in numbers):
            raise ValueError(f"every process must have the same settings, but process {distributed.rank()} has {text}")
        self._same_settings = True

    def _check_inputs(
        self,
        x: Array,
        y: Array,
        columns: Mapping[str, Integers | None],
        negatives: Array | None,
        log_q: Array | None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the arguments of this process as tensors, without those that are None, after checking them.

        Returns:
            x, y, negatives and log_q, (b, 1); and the index and the ids, (b, k) each.

        """
        x = as_tensor("x", x)
        y = as_tensor("y", y)
        right_shapes = x.ndim in (2, 3) and y.ndim in (2, 3) and len(x) == len(y) and x.shape[-1] == y.shape[-1]
        if not right_shapes or _views(x) < 1 or _views(y) < 1:
            shapes = f"x is {tuple(x.shape)} and y is {tuple(y.shape)}"
            raise ValueError(f"x and y must both be (b, d), or (b, m, d) with m views of each, but {shapes}")
        if not (x.is_floating_point() and x.dtype == y.dtype):
            raise ValueError(f"x and y must have one floating-point dtype, but x is {x.dtype} and y is {y.dtype}")
        check_same_device("x", x, "y", y)
        if negatives is not None:
            negatives = as_tensor("negatives", negatives)
            shape = tuple(negatives.shape)
            if negatives.ndim != 3 or shape != (len(x), max(shape[1], 1), x.shape[-1]) or negatives.dtype != x.dtype:
                raise ValueError(
                    f"negatives must be (b, k, d) = ({len(x)}, k, {x.shape[-1]}) of {x.dtype}, with k hard negatives "
                    f"per pair, but is {shape} of {negatives.dtype}"
                )
            check_same_device("x", x, "negatives", negatives)
        if len(x) * distributed.world_size() < 2:
            raise ValueError(f"the batch has {len(x)} pair, which leaves no negatives; at least 2 are needed")
        if log_q is not None:
            if not self.takes_log_q:
                raise ValueError(
                    f"log_q is given, but {type(self).__name__} has no normalizer to correct; leave it out"
                )
            log_q = to_device(as_tensor("log_q", log_q, lists=True), x.device)
            if log_q.shape != (len(x),) or not log_q.is_floating_point():
                raise ValueError(f"log_q must be ({len(x)},) floats, but is {tuple(log_q.shape)} of {log_q.dtype}")
        ids = {}
        for name, value in columns.items():
            if value is not None:
                column = as_tensor(name, value, lists=True)
                several = name != "index" and column.ndim == 2 and column.shape[1] > 0
                column = as_integers(name, column, len(x), *[None] * several)
                ids[name] = to_device(column, x.device).reshape(len(x), -1)
        if self.needs_index and self.training and "index" not in ids:
            raise ValueError("index is None, but training needs the indices of the pairs; only eval() takes index=None")
        if "negative_id" in ids:
            shape = tuple(ids["negative_id"].shape)
            if negatives is None or "y_id" not in ids or shape != tuple(negatives.shape[:2]):
                raise ValueError(
                    f"negative_id is {shape}, but must be (b, k) ids in the numbering of y_id, one for each of the "
                    "negatives; it needs negatives and y_id"
                )
        self.check_settings()
        inputs = {"x": x, "y": y, "negatives": negatives, "log_q": None if log_q is None else log_q[:, None]}
        return {name: values for name, values in inputs.items() if values is not None}, ids


def _gather_as_one(
    tensors: Mapping[str, Tensor],
    gather: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Return tensors (b, ...) of all processes, which are sent as one message."""
    if not tensors:
        return {}
    joined = gather(torch.cat(list(tensors.values()), dim=1))
    parts = torch.split(joined, [part.shape[1] for part in tensors.values()], dim=1)
    return dict(zip(tensors, parts, strict=True))


def _views(features: Tensor) -> int:
    return features.shape[1] if features.ndim == 3 else 1


def _bad_features(named: Mapping[str, Tensor], pairs: int) -> ValueError:
    """Return an error that names the row whose norm is furthest from 1, or not finite.

    Args:
        named: name of the argument -> its features, one or more rows per pair.
        pairs: number of pairs.

    """
    most = -1.0
    for candidate, features in named.items():
        norms = torch.linalg.vector_norm(features.double(), dim=1)
        distance, position = (norms - 1).abs().nan_to_num(nan=math.inf).max(dim=0)
        if distance.item() > most:
            most = distance.item()
            name = candidate
            row = int(position) * pairs // len(features)
            norm = norms[position].item()
    if not math.isfinite(norm):
        return ValueError(f"{name} must be finite, but row {row} of the global batch holds nan or inf")
    return ValueError(
        f"{name} must have unit norm, but row {row} of the global batch has norm {norm:.4g}; "
        f"pass F.normalize({name}, dim=-1), or build the objective with normalize=True"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Objectives without state
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """Scores of this process's anchors against all candidates.

    Attributes:
        batch: the global batch.
        xy: (b, B + B k), this process's x against all y and then, if there are any, against all hard negatives.
        yx: (b, B), this process's y against all x.
        positives: (b,), the column of each anchor's positive.
        masked_xy: bool, entries of `xy` that are neither positives nor negatives, because the pairs share an id
            or the score exceeds that of the positive by `false_negative_margin`; None if nothing is masked.
        masked_yx: as `masked_xy` for `yx`.

    """

    batch: GatheredBatch
    xy: Tensor
    yx: Tensor
    positives: Tensor
    masked_xy: Tensor | None
    masked_yx: Tensor | None


class AutogradObjective(Objective):
    """An objective without state: the mean over the global batch of a loss per anchor.

    A process computes the rows of its own anchors against all candidates, (b, B), never (B, B). The losses of all
    processes add up to the global loss, and gradients of gathered features go back to the processes they came from.
    """

    def losses(self, scores: Scores) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the losses of this process's anchors; subclasses implement this.

        Args:
            scores: scores of this process's anchors.

        Returns:
            The loss per anchor on side x and on side y, (b,) each, and metrics.

        """
        raise NotImplementedError

    def compute(self, batch: GatheredBatch) -> ObjectiveOutput:
        """Compute the mean over the anchors of all processes, and over the pairs of a view of x and a view of y."""
        # one nan or inf anywhere makes the sum of all entries nan or inf
        total = batch.x.detach().sum() + batch.y.detach().sum()
        self.check_features(batch, total.isfinite())
        if batch.views == (1, 1):
            return self._compute_one_view(batch)
        m_x, m_y = batch.views
        outputs = []
        for k, m in itertools.product(range(m_x), range(m_y)):
            one_view = replace(
                batch,
                local_x=batch.local_x[k::m_x],
                local_y=batch.local_y[m::m_y],
                x=batch.x[k::m_x],
                y=batch.y[m::m_y],
                views=(1, 1),
            )
            outputs.append(self._compute_one_view(one_view))
        metrics = {key: torch.stack([out.metrics[key] for out in outputs]).mean(dim=0) for key in outputs[0].metrics}
        return ObjectiveOutput(torch.stack([out.loss for out in outputs]).mean(), metrics)

    def _compute_one_view(self, batch: GatheredBatch) -> ObjectiveOutput:
        processes = distributed.world_size()
        xy = batch.local_x @ batch.y.T
        yx = xy.T if processes == 1 else batch.local_y @ batch.x.T
        positives = torch.arange(batch.pairs.start, batch.pairs.stop, device=xy.device)
        everyone = slice(0, batch.size)
        masked = batch.excluded(batch.pairs, everyone)
        masked_yx = self._mask_false_negatives(yx, positives, masked)
        if batch.hard is not None:
            xy = torch.cat([xy, batch.local_x @ batch.hard.T], dim=1)
            if masked is not None:
                excluded = cast(Tensor, batch.excluded_hard(batch.pairs, everyone))
                excluded = excluded.expand(-1, -1, len(batch.hard) // batch.size)
                masked = torch.cat([masked, excluded.flatten(1)], dim=1)
        masked_xy = self._mask_false_negatives(xy, positives, masked)
        x, y, metrics = self.losses(Scores(batch, xy, yx, positives, masked_xy, masked_yx))
        means = torch.stack([x.mean(), y.mean()])  # times 1/K, summed over K processes, is the global mean
        everywhere = distributed.sum_over_processes(means) / processes
        loss = means.sum()
        if processes > 1:
            loss = everywhere.sum() + (loss - loss.detach())
        return ObjectiveOutput(loss, {"objective_x": everywhere[0], "objective_y": everywhere[1]} | metrics)

    def _mask_false_negatives(
        self,
        side: Tensor,
        positives: Tensor,
        masked: Tensor | None,
    ) -> Tensor | None:
        """Return `masked` and the candidates that `false_negative_margin` drops, for the scores of a side."""
        if self.false_negative_margin is None:
            return masked
        scores = side.detach()
        positive = scores.gather(1, positives[:, None])
        dropped = scores - positive > self.margins(positive)
        return dropped if masked is None else dropped.logical_or_(masked)
