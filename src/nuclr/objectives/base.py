"""What all objectives share: the signature, the checks of the input, and the gathered batch.

`Objective` is the base of all. `AutogradObjective` is the base of objectives without state, which are written as plain
functions of the scores and differentiated by autograd. For objectives with state, see `stateful`.
"""

import inspect
import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nuclr import distributed
from nuclr.norms import rescale_extreme_rows
from nuclr.objectives.checks import (
    Check,
    DeferredCheck,
    Features,
    Inputs,
    Integers,
    check_positive,
    short_list,
    to_tensors,
)
from nuclr.objectives.kernels import Workspace, is_excluded, score_tiles
from nuclr.transfer import to_device

NORM_TOLERANCE = 1e-2  # features normalized in bf16 have norms within 4e-3 of 1


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

    """

    local_x: Tensor
    local_y: Tensor
    x: Tensor
    y: Tensor
    views: tuple[int, int]
    index: Tensor | None
    ids: Tensor | None
    pairs: slice

    @property
    def size(self) -> int:
        """B, the number of pairs of all processes."""
        return len(self.x) // self.views[0]

    def one_view(self, of_x: int, of_y: int) -> "GatheredBatch":
        """Return the batch with only one view of every x and one of every y."""
        (m_x, m_y), (own_x, own_y) = self.views, (self.local_x, self.local_y)
        return replace(
            self,
            local_x=own_x[of_x::m_x],
            local_y=own_y[of_y::m_y],
            x=self.x[of_x::m_x],
            y=self.y[of_y::m_y],
            views=(1, 1),
        )

    def excluded(self) -> Tensor:
        """Return (b, B) bool: True if i = j or an id is shared, so that the candidate is not a negative."""
        if self.ids is not None:
            return is_excluded(self.ids, self.pairs, Workspace())
        own = torch.arange(self.pairs.start, self.pairs.stop, device=self.x.device)
        return own[:, None] == torch.arange(self.size, device=self.x.device)

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
        first, same = _count_equal(columns[0])
        if len(columns) == 2:
            other_first, other_same = _count_equal(columns[1])
            same = same + other_same - _count_equal(first * self.size + other_first)[1]
        return (self.size - same).to(self.x.dtype)


def _count_equal(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each value, where the values equal to it start in sorted order and how many there are, (B,) each."""
    ordered = values.sort().values
    first = torch.searchsorted(ordered, values)
    return first, torch.searchsorted(ordered, values, right=True) - first


class Objective(nn.Module):
    """A contrastive loss on pairs of unit-norm features.

    Call it as ``objective(x, y, index, x_id=..., y_id=...)``; see `forward`. bf16 and fp16 features are computed in
    float32, float64 in float64, and autocast has no effect.

    Under torch.distributed the batch is that of all processes together. Gradients are scaled such that DDP's mean over
    the processes is the gradient of the global loss. Every process must pass the same number of pairs.

    Args:
        temperature: tau, the divisor of the scores.
        normalize: whether to scale x and y to unit norm inside, with gradients. If False, features that do not have
            unit norm are refused.

    """

    def __init__(self, temperature: float, normalize: bool = False) -> None:
        super().__init__()
        check_positive("temperature", temperature)
        self.temperature = temperature
        self.normalize = normalize
        self._deferred = DeferredCheck()

    @property
    def needs_index(self) -> bool:
        """Whether training needs the indices of the pairs."""
        return False

    @property
    def current_temperature(self) -> float:
        """The current temperature: fixed, learnt, or the mean over pairs if every pair has its own."""
        return float(self.temperature)

    def forward(
        self,
        x: Features,
        y: Features,
        index: Integers | None = None,
        x_id: Integers | None = None,
        y_id: Integers | None = None,
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
        inputs = self._checked_inputs(x, y, index, x_id, y_id)
        device = inputs.x.device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self.compute(self._gather(inputs))
        return self.compute(self._gather(inputs))

    def compute(self, batch: GatheredBatch) -> ObjectiveOutput:
        """Compute the loss and metrics of a checked and gathered batch; subclasses implement this."""
        raise NotImplementedError

    def check_settings(self) -> None:
        """Raise a ValueError for settings that a schedule may have moved out of range."""
        check_positive("temperature", self.temperature)

    def gather_features(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features of all processes; autograd sends the gradients back to the processes they came from."""
        both = distributed.all_gather_with_gradient(torch.cat([x, y], dim=1))
        return both[:, : x.shape[1]], both[:, x.shape[1] :]

    def prefetch(self, index: Integers) -> None:
        """Announce the pairs of the next call; objectives with state may start reading it.

        Args:
            index: the object that will be passed to the next call.

        """

    def end_epoch(self) -> None:
        """Do what the objective does once per epoch, after its last step: nothing unless a subclass says so.

        All processes must call it. `nuclr train` does; a training loop of your own needs it for
        `NUCLR(xi_update="epoch")` only.
        """

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
        x, y = batch.x.detach(), batch.y.detach()  # a deferred check must not hold the graph of the step

        def describe() -> str:
            for name, features in (("x", x), ("y", y)):
                bad = (~features.isfinite()).any(dim=1).view(batch.size, -1).any(dim=1)
                rows = bad.nonzero().flatten().tolist()
                if rows:
                    return f"{name} must be finite, but holds nan or inf in rows {short_list(rows)} of the global batch"
            return _describe_norms(x, y, batch.views)

        checks = [Check(finite, describe)]
        if not self.normalize:
            checks.append(Check(_have_unit_norm(x, y), lambda: _describe_norms(x, y, batch.views)))
        self._deferred.check(checks)

    def extra_repr(self) -> str:
        """Return the constructor's arguments with their current values."""
        settings = {name: getattr(self, name, None) for name in inspect.signature(type(self)).parameters}
        return ", ".join(f"{name}={_short(value)}" for name, value in settings.items() if value is not None)

    def _gather(self, inputs: Inputs) -> GatheredBatch:
        self._deferred.raise_pending()
        dtype = torch.float64 if inputs.x.dtype == torch.float64 else torch.float32
        pairs, views = len(inputs.x), (_views(inputs.x), _views(inputs.y))
        x, y = (side.to(dtype).flatten(0, -2) for side in (inputs.x, inputs.y))
        if self.normalize:
            x, y = (nn.functional.normalize(rescale_extreme_rows(side, small=False), dim=1) for side in (x, y))
        index, x_id, y_id = (
            None if t is None else to_device(t.to(torch.int64), x.device)
            for t in (inputs.index, inputs.x_id, inputs.y_id)
        )
        given = [t.reshape(pairs, -1) for t in (x_id, y_id) if t is not None]
        ids = torch.cat(given, dim=1) if given else None
        start, all_x, all_y = 0, x, y
        if distributed.world_size() > 1:
            start = distributed.rank() * pairs
            all_x, all_y = self.gather_features(x.reshape(pairs, -1), y.reshape(pairs, -1))
            all_x, all_y = (side.reshape(-1, x.shape[1]) for side in (all_x, all_y))
            index, ids = _gather_integers(index, ids)
        return GatheredBatch(x, y, all_x, all_y, views, index, ids, slice(start, start + pairs))

    def _checked_inputs(
        self,
        x: Features,
        y: Features,
        index: Integers | None,
        x_id: Integers | None,
        y_id: Integers | None,
    ) -> Inputs:
        """Return the arguments as tensors. If one process refuses them, all processes raise."""
        if distributed.world_size() == 1:
            inputs = to_tensors(x, y, index, x_id, y_id)
            self._check_inputs(inputs)
            return inputs
        shape, columns, problem = [0] * 5, [0] * 3, None
        try:
            inputs = to_tensors(x, y, index, x_id, y_id)
            self._check_inputs(inputs)
            views = [_views(inputs.x), _views(inputs.y)]
            shape = [len(inputs.x), inputs.x.shape[-1], inputs.x.element_size(), *views]
            columns = [0 if t is None else t[0].numel() for t in (inputs.index, inputs.x_id, inputs.y_id)]
        except (TypeError, ValueError) as error:
            problem = error
        headers = distributed.exchange([int(problem is not None), *shape, *columns, int(self.training)])
        if problem is not None:
            raise problem
        for rank, header in enumerate(headers):
            if header[0]:
                raise ValueError(f"process {rank} of {len(headers)} refused its input; see its error message")
        if any(header != headers[0] for header in headers):
            sizes = "; ".join(f"process {rank}: {b} pairs of width {d}" for rank, (_, b, d, *_) in enumerate(headers))
            raise ValueError(
                "every process must pass the same number of pairs and views, width, dtype, mode (train or eval) and "
                f"arguments (index, x_id, y_id), but got {sizes}; drop the last incomplete batch"
            )
        return inputs

    def _check_inputs(self, inputs: Inputs) -> None:
        x, y = inputs.x, inputs.y
        if not (x.ndim in (2, 3) and y.ndim in (2, 3) and len(x) == len(y) and x.shape[-1] == y.shape[-1]):
            shapes = f"x is {tuple(x.shape)} and y is {tuple(y.shape)}"
            hint = "; a single vector has no negatives, so pass a batch of pairs" if x.ndim == 1 else ""
            raise ValueError(f"x and y must both be (b, d), or (b, m, d) with m views of each, but {shapes}{hint}")
        for name, side in (("x", x), ("y", y)):
            if _views(side) < 1:
                raise ValueError(f"{name} must have at least one view per pair, but is {tuple(side.shape)}")
        if not (x.is_floating_point() and x.dtype == y.dtype):
            raise ValueError(f"x and y must have one floating-point dtype, but x is {x.dtype} and y is {y.dtype}")
        if x.device != y.device:
            raise ValueError(f"x and y must be on one device, but x is on {x.device} and y on {y.device}")
        if len(x) * distributed.world_size() < 2:
            raise ValueError(f"the batch has {len(x)} pair, which leaves no negatives; at least 2 are needed")
        for name in ("index", "x_id", "y_id"):
            column = getattr(inputs, name)
            if column is None:
                continue
            several = column.ndim == 2 and name != "index"
            right_shape = column.shape[:1] == (len(x),) and (several or column.ndim == 1) and column.numel() > 0
            if column.is_floating_point() or column.dtype == torch.bool or not right_shape:
                more = f", or ({len(x)}, k)" if name != "index" else ""
                expected = f"{name} must be ({len(x)},) integers, one per pair{more}"
                raise ValueError(f"{expected}, but is {tuple(column.shape)} of {column.dtype}")
        if self.needs_index and self.training and inputs.index is None:
            raise ValueError("index is None, but training needs the indices of the pairs; only eval() takes index=None")
        self.check_settings()


def _views(features: Tensor) -> int:
    return features.shape[1] if features.ndim == 3 else 1


def _gather_integers(index: Tensor | None, ids: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Gather the index (b,) and the ids (b, k) of all processes in one message, if they are not None."""
    columns = [t for t in (None if index is None else index[:, None], ids) if t is not None]
    if not columns:
        return None, None
    gathered = distributed.all_gather(torch.cat(columns, dim=1))
    first = 0 if index is None else 1
    return gathered[:, 0] if first else None, gathered[:, first:] if ids is not None else None


def _have_unit_norm(x: Tensor, y: Tensor) -> Tensor | bool:
    """Return whether the first, middle and last rows have unit norm; a scalar tensor if they are on an accelerator."""
    rows = [side[row] for side in (x, y) for row in (0, len(side) // 2, -1)]
    norms = torch.linalg.vector_norm(torch.stack(rows), dim=1)
    if x.device.type == "cpu":
        return all(abs(norm - 1) <= NORM_TOLERANCE for norm in norms.tolist())
    return torch.all((norms - 1).abs() <= NORM_TOLERANCE)


def _describe_norms(x: Tensor, y: Tensor, views: tuple[int, int]) -> str:
    worst = (0.0, "x", 0)
    for name, features, m in (("x", x, views[0]), ("y", y, views[1])):
        errors = torch.linalg.vector_norm(features.double(), dim=1) - 1
        row = int(errors.abs().argmax())
        worst = max(worst, (float(errors[row]), name, row // m), key=lambda entry: abs(entry[0]))
    error, name, pair = worst
    return (
        f"{name} must have unit norm, but row {pair} of the global batch has norm {error + 1:.4g}; "
        f"pass F.normalize({name}, dim=-1), or build the objective with normalize=True"
    )


def _short(value: object) -> str:
    if isinstance(value, Tensor):
        return "?" if value.is_meta else f"{value.item():.6g}"
    return repr(str(value)) if isinstance(value, torch.device) else repr(value)


# ---------------------------------------------------------------------------------------------------------------------
# Objectives without state
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """Scores of this process's anchors against all candidates.

    Attributes:
        batch: the global batch.
        xy: (b, B), this process's x against all y.
        yx: (b, B), this process's y against all x.
        positives: (b,), the column of each anchor's positive.
        masked: (b, B) bool, pairs of samples that share an id and are not a positive; None if there are no ids.

    """

    batch: GatheredBatch
    xy: Tensor
    yx: Tensor
    positives: Tensor
    masked: Tensor | None


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
        outputs = [
            self._compute_one_view(batch.one_view(*views)) for views in itertools.product(range(m_x), range(m_y))
        ]
        metrics = {key: torch.stack([out.metrics[key] for out in outputs]).mean(dim=0) for key in outputs[0].metrics}
        return ObjectiveOutput(torch.stack([out.loss for out in outputs]).mean(), metrics)

    def _compute_one_view(self, batch: GatheredBatch) -> ObjectiveOutput:
        processes = distributed.world_size()
        xy = batch.local_x @ batch.y.T
        yx = xy.T if processes == 1 else batch.local_y @ batch.x.T
        positives = torch.arange(batch.pairs.start, batch.pairs.stop, device=xy.device)
        masked = None
        if batch.ids is not None:
            masked = batch.excluded().scatter_(1, positives[:, None], False)
        x, y, metrics = self.losses(Scores(batch, xy, yx, positives, masked))
        means = torch.stack([x.mean(), y.mean()])  # times 1/K, summed over K processes, is the global mean
        everywhere = distributed.sum_over_processes(means) / processes
        loss = means.sum()
        if processes > 1:
            loss = loss + (everywhere.sum() - loss).detach()
        return ObjectiveOutput(loss, {"objective_x": everywhere[0], "objective_y": everywhere[1]} | metrics)
