"""Storage of the state that objectives keep per pair: tables in buffers, replicated or sharded, on any device.

A table is a buffer per side with one number per pair, such as log_u_x and log_u_y. A step reads the rows of its batch,
(2, B) per table with side x in row 0, and writes them back. By default every process holds all rows and writes all of
them. With sharding, process r holds the rows [r R, (r + 1) R), R = ceil(n / K); every process contributes the rows that
it holds, and one all-reduce gives all rows to all processes.

Items. With `StatePlacement.num_x`, the tables of side x have one row per item x, which the first x_id names, and all
pairs that contain the item share it; num_y is the same for y. If an item occurs several times in a batch, its new row
is the mean over its pairs. They differ in the score of the positive, so log u of an item is that of its whole sum,
log u_i + s_ii/tau_i in the notation of `stateful`, and the mean is that of its exponential. If every item occurs once,
tables per item and per pair give the same results as long as the scores of positives and the temperature are the same
at each visit, and with gamma = 1 in any case. Otherwise they differ in what is kept from old visits: the whole sum, or
the sum relative to the positive.

A table may have one number per stored view, (n, m). Its rows of a batch are (M, 2, B), as `kernels` stacks views.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from nuclr import distributed
from nuclr.arrays import to_device
from nuclr.objectives.base import GatheredBatch, Objective, count_equal
from nuclr.objectives.kernels import stack_views

ANCHORS = ("x", "y")  # side x has anchors x and candidates y
CANDIDATES = ("y", "x")


@dataclass(frozen=True)
class StatePlacement:
    """Where the tables of an objective are, and how many numbers a pair has in the tables of popularity.

    Attributes:
        device: device on which the tables stay when the module moves. None: they move with the module.
        sharding: whether each of K processes holds n/K rows of the tables instead of all; see `gather_state_dict` for
            checkpoints. The objective must then stay outside DDP, which broadcasts buffers when it is constructed.
        x_views: number of stored views of each x that have a popularity of their own. They must come together and in
            the same order at every visit. 1: all views of a pair share one popularity, an approximation for random
            views, which have no number that stays.
        y_views: as `x_views` for y, such as 5 for the five captions of an image.
        num_x: number of distinct x, if pairs share them: the tables of side x have one row per item, and `x_id` in [0,
            num_x) is its row. None: one row per pair.
        num_y: as `num_x` for y. With both, no index is needed. In eval mode, rows are read only if an index is given,
            since the ids of other data name other items.

    """

    device: str | None = None
    sharding: bool = False
    x_views: int = 1
    y_views: int = 1
    num_x: int | None = None
    num_y: int | None = None

    def __post_init__(self) -> None:
        for side, count in self.items.items():
            if count is not None and not _is_count(count):
                raise ValueError(f"state.num_{side} must be the whole number of distinct {side}, but is {count!r}")
        if not all(map(_is_count, self.views)):
            raise ValueError(f"state.x_views and state.y_views must be integers of at least 1, but are {self.views}")
        if not isinstance(self.sharding, bool):
            raise ValueError(f"state.sharding must be True or False, but is {self.sharding!r}")

    @property
    def views(self) -> tuple[int, int]:
        """m_x and m_y."""
        return self.x_views, self.y_views

    @property
    def items(self) -> dict[str, int | None]:
        """num_x and num_y by side."""
        return {"x": self.num_x, "y": self.num_y}


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


class StateRows(NamedTuple):
    """The state of a batch before the step, and where it is stored."""

    tables: dict[str, Tensor]  # name -> (2, B) or per view (M, 2, B), in the dtype of the computation
    # by side, rows of its tables, on their device; empty: without an index, nothing is stored
    stored: Mapping[str, Tensor] = {}
    # by side, the pairs of the global batch that these rows belong to; empty: all B of them
    owned: Mapping[str, Tensor] = {}
    numbers: Mapping[str, Tensor] = {}  # by side, (B,), the rows of the whole tables


class PairTables(Objective):
    """An objective with one row of state per pair.

    Tables stay float32 through half() and bfloat16(). double(), or float64 features in training, converts them to
    float64. DDP must not broadcast them: keep the objective outside DDP, or turn its buffer broadcast off
    (``forward_sync_buffers=False``; ``broadcast_buffers=False`` before torch 2.13).

    Args:
        num_samples: n, the number of pairs; indices are in [0, n).
        temperature: tau.
        sides: "both", or the side whose tables are needed.
        state: where the tables are.
        normalize: see `Objective`.

    """

    def __init__(
        self,
        num_samples: int,
        temperature: float,
        sides: str,
        state: StatePlacement,
        normalize: bool,
    ) -> None:
        super().__init__(temperature, normalize)
        if not hasattr(num_samples, "__index__") or num_samples < 2:
            raise ValueError(f"num_samples must be a whole number of at least 2, but is {num_samples!r}")
        self.num_samples = num_samples
        self.sides = sides
        self.state = state
        self.active = [row for row, side in enumerate(ANCHORS) if sides in ("both", side)]  # rows of (2, B) tensors
        self.initial: dict[str, float] = {}  # table -> value of a row before its first update
        self._owners: dict[str, tuple[str, str]] = {}  # table -> whose rows side x and side y use
        self._view_tables: set[str] = set()  # tables with a number per view on one side at least
        self._shards = distributed.world_size() if state.sharding else 1
        self.by_item = [side for side, count in state.items.items() if count is not None]
        self._rows = {side: count or num_samples for side, count in state.items.items()}
        self._stored = {}  # by side, the rows that this process holds
        for side, rows in self._rows.items():
            count = math.ceil(rows / self._shards)
            start = distributed.rank() * count if state.sharding else 0
            self._stored[side] = range(min(start, rows), min(start + count, rows))
        self._feature_device: torch.device | None = None

    def add_tables(
        self,
        name: str,
        value: float,
        owners: tuple[str, str],
        per_view: bool = False,
    ) -> None:
        """Register one buffer per side in use, whose rows start at `value`.

        Args:
            name: the buffers are called {name}_x and {name}_y.
            value: of a row before its first update.
            owners: ANCHORS or CANDIDATES: whose rows side x and side y use.
            per_view: whether a side with m > 1 stored views has m numbers per row.

        """
        self.keeps_tables = True
        self.initial[name] = value
        self._owners[name] = owners
        if per_view and self.state.views != (1, 1):
            self._view_tables.add(name)
        for row in self.active:
            self.needs_index = self.needs_index or owners[row] not in self.by_item
            views = self.state.views[ANCHORS.index(owners[row])] if per_view else 1
            held = len(self._stored[owners[row]])
            rows = torch.full(
                (held, views) if views > 1 else (held,),
                value,
                dtype=torch.float32,
                device=self.state.device,
            )
            self.register_buffer(f"{name}_{owners[row]}", rows)

    def buffer(self, name: str) -> Tensor:
        """Return a registered buffer; `get_buffer` takes longer than the arithmetic on a small batch."""
        return cast(Tensor, self._buffers[name])

    def table(self, name: str, row: int) -> Tensor:
        """Return the buffer with the rows that side x (row 0) or side y (row 1) uses."""
        return cast(Tensor, self._buffers[f"{name}_{self._owners[name][row]}"])

    def full_rows(self, buffer: str) -> int | None:
        """Return the number of rows of a table over all processes; None if the buffer is not a table."""
        table, _, side = buffer.rpartition("_")
        return self._rows[side] if table in self.initial else None

    # -- rows of a batch -----------------------------------------------------------------------------------------------

    def read(self, batch: GatheredBatch) -> StateRows:
        """Return the batch's rows of all tables; without an index, initial values."""
        names = list(self.initial)
        self._feature_device = batch.x.device
        numbers = self._row_numbers(batch) if self.initial else None
        if numbers is None:
            return StateRows({name: self._initial_rows(name, batch) for name in names})
        self._check_views(batch)
        device = self.table(names[0], self.active[0]).device  # all tables are on one device
        stored: dict[str, Tensor] = {}
        owned: dict[str, Tensor] = {}
        for side, rows in numbers.items():
            if side == "y" and rows is numbers["x"]:  # an index is that of both sides
                stored["y"] = stored["x"]
                owned |= {"y": owned["x"]} if owned else {}
                continue
            if self.state.sharding:
                # for an index on an accelerator, this waits for the device
                own = self._find_owned(rows, side)
                rows = rows[own] - self._stored[side].start
                owned[side] = to_device(own, device)
            stored[side] = to_device(rows, device)
        loaded = []
        for name in names:
            for row in self.active:
                owner = self._owners[name][row]
                rows = self.table(name, row).index_select(0, stored[owner])
                if owned:
                    rows = rows.new_zeros(batch.size, *rows.shape[1:]).index_copy_(0, owned[owner], rows)
                loaded.append(rows)
        if self._view_tables:
            return StateRows(self._split(loaded, names, batch, bool(owned)), stored, owned, numbers)
        tables = to_device(torch.stack(loaded), batch.x.device).view(len(names), len(self.active), batch.size)
        if owned:
            tables = distributed.sum_over_processes(tables)
        if len(self.active) == 1:  # the side that is not in use has initial values
            known = tables
            initial = tables.new_tensor([self.initial[name] for name in names])
            tables = initial[:, None, None].repeat(1, 2, batch.size)
            tables[:, self.active] = known
        return StateRows(dict(zip(names, tables.to(batch.x), strict=True)), stored, owned, numbers)

    def _row_numbers(self, batch: GatheredBatch) -> dict[str, Tensor] | None:
        """Return the rows of the batch, (B,) per side with tables, after checking them; None if they are not known."""
        if batch.index is None and not self.training:
            return None
        numbers: dict[str, Tensor] = {}
        if self.needs_index and batch.index is not None:
            self._check_index(batch.index)
            numbers = dict.fromkeys(ANCHORS, self._clamped(batch.index, self.num_samples))
        for side in self.by_item:
            if side not in batch.items:
                raise ValueError(f"{side}_id is None, but state.num_{side} makes it the row of the tables; pass it")
            self._check_items(side, batch.items[side])
            numbers[side] = self._clamped(batch.items[side], self._rows[side])
        return numbers

    @staticmethod
    def _clamped(rows: Tensor, count: int) -> Tensor:
        # On an accelerator, a bad row is reported at the next call; until then it must not crash the device.
        return rows if rows.device.type == "cpu" else rows.clamp(0, count - 1)

    def _initial_rows(self, name: str, batch: GatheredBatch) -> Tensor:
        """Return the rows of a table that was never updated."""
        m_x, m_y = batch.views
        new = batch.x.new_full
        if name not in self._view_tables:
            return new((2, batch.size), self.initial[name])
        return stack_views(new((batch.size, m_y), self.initial[name]), new((batch.size, m_x), self.initial[name]))

    def _split(
        self,
        loaded: list[Tensor],
        names: list[str],
        batch: GatheredBatch,
        shared: bool,
    ) -> dict[str, Tensor]:
        """Return the rows of each table from those of its sides, (B,) or (B, m), which are sent as one tensor."""
        widths = [rows[0].numel() for rows in loaded]
        flat = to_device(torch.cat([rows.view(batch.size, -1) for rows in loaded], dim=1), batch.x.device)
        if shared:
            flat = distributed.sum_over_processes(flat)
        parts = iter(torch.split(flat.to(batch.x), widths, dim=1))
        tables = {}
        for name in names:
            tables[name] = self._initial_rows(name, batch).contiguous()
            for row in self.active:
                part = next(parts).T
                if name in self._view_tables:
                    # a row with one number has it for all views
                    tables[name][: batch.views[ANCHORS.index(self._owners[name][row])], row] = part
                else:
                    tables[name][row] = part[0]
        return tables

    def write(self, old: StateRows, tables: Mapping[str, Tensor]) -> None:
        """Write new rows where `old` was read; each process writes the rows that it holds."""
        for name, rows in tables.items():
            for row in self.active:
                table = self.table(name, row)
                owner = self._owners[name][row]
                new = rows[row] if rows.ndim == 2 else rows[:, row]
                if owner in self.by_item:
                    new = mean_of_items(new, old.numbers[owner], logs=name == "log_u")
                if new.ndim == 2:
                    new = new[: table[0].numel()].T.reshape(-1, *table.shape[1:])
                if owner in old.owned:
                    new = new[old.owned[owner].to(new.device)]
                table.index_copy_(0, old.stored[owner], new.to(table))

    def _check_views(self, batch: GatheredBatch) -> None:
        for side, stored, views in zip(ANCHORS, self.state.views, batch.views, strict=True):
            if stored not in (1, views):
                raise ValueError(
                    f"state.{side}_views is {stored}, but {side} has {views} view(s) per sample; pass all {stored}, or "
                    f"leave state.{side}_views out, so that the views of a sample share one popularity"
                )

    def _find_owned(self, index: Tensor, side: str) -> Tensor:
        """Return the positions of the indices whose rows this process holds."""
        if self._shards != distributed.world_size():
            raise ValueError(
                f"state.sharding=True split the state over {self._shards} processes, but there are "
                f"{distributed.world_size()}; build the objective after init_process_group"
            )
        held = self._stored[side]
        return ((index >= held.start) & (index < held.stop)).nonzero().flatten()

    def _check_items(self, side: str, rows: Tensor) -> None:
        def error() -> ValueError:
            outside = rows[(rows < 0) | (rows >= self._rows[side])][:5].tolist()
            return ValueError(
                f"{side}_id must be in [0, {self._rows[side]}), because state.num_{side}={self._rows[side]} makes it "
                f"the row of the tables, but holds {', '.join(map(str, outside))}"
            )

        self._deferred.check(((rows >= 0) & (rows < self._rows[side])).all(), error)

    def _check_index(self, index: Tensor) -> None:
        good: Tensor | bool
        if index.device.type == "cpu":  # reading the values is faster than ten small tensor operations
            values = index.tolist()
            good = min(values) >= 0 and max(values) < self.num_samples and len(set(values)) == len(values)
        else:
            ordered = index.sort().values
            good = (ordered[0] >= 0) & (ordered[-1] < self.num_samples) & (ordered[1:] != ordered[:-1]).all()

        def error() -> ValueError:
            counts = Counter(index.tolist())
            outside = sorted(value for value in counts if not 0 <= value < self.num_samples)
            repeated = sorted(value for value, count in counts.items() if count > 1)
            problem = "outside of this range" if outside else "more than once in the global batch"
            return ValueError(
                f"index must hold different numbers in [0, {self.num_samples}), but holds "
                f"{', '.join(map(str, (outside or repeated)[:5]))} {problem}"
            )

        self._deferred.check(good, error)

    # -- the tables as a whole -----------------------------------------------------------------------------------------

    def gather_state_dict(self) -> dict[str, Tensor]:
        """Return the whole state, whatever the number of processes: `load_state_dict` takes it on any other number.

        Returns:
            On process 0, the state dict with all rows of sharded tables, on the host; on the others, an empty one. With
            several processes, all of them must call it.

        Example:
            >>> from nuclr.objectives import SogCLR
            >>> len(SogCLR(num_samples=10, state={"sharding": True}).gather_state_dict()["log_u_x"])
            10

        """
        whole: dict[str, Tensor] = {}
        first = distributed.rank() == 0
        for name, local in self.state_dict().items():
            rows = self.full_rows(name)
            if self._shards == 1 or rows is None:
                whole[name] = local
                continue
            device = self._feature_device or local.device  # nccl gathers on the accelerator only
            padded = local.new_zeros(math.ceil(rows / self._shards), *local.shape[1:], device=device)
            padded[: len(local)] = local
            parts = [torch.empty_like(padded) for _ in range(self._shards)] if first else None
            dist.gather(padded, parts)
            if parts is not None:
                whole[name] = torch.cat([part.cpu() for part in parts])[:rows]
        return whole if first else {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PairTables":
        tables = {name: table for name, table in self._buffers.items() if table is not None}
        self._buffers.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, table in tables.items():
            target = fn(table.new_empty(0))  # shows the new device and dtype without moving a large table
            dtype = target.dtype if target.dtype in (torch.float32, torch.float64) else table.dtype
            moved = table.to(device=self.state.device or target.device, dtype=dtype)
            if dtype == torch.float64 != table.dtype:
                # rows that were never updated hold their initial value rounded to float32
                initial = self.initial_value(name)
                moved = moved.masked_fill_((table == table.new_tensor(initial)).to(moved.device), initial)
            self._buffers[name] = moved
        return self

    def initial_value(self, name: str) -> float:
        """Return the value that an entry of the state has before its first update; nan for a buffer without one."""
        if "." in name or name in self._parameters:
            return -math.inf if name.endswith(".bias") else 0.0  # of a network's prototypes
        return self.initial.get(name.rpartition("_")[0], math.nan)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        *args: Any,
    ) -> None:
        for name, table in self._buffers.items():
            loaded = state_dict.get(prefix + name)
            if table is None or not isinstance(loaded, Tensor) or loaded.ndim != table.ndim:
                continue
            rows = self.full_rows(name)
            if self._shards > 1 and rows is not None and len(loaded) == rows:
                held = self._stored[name.rpartition("_")[2]]
                loaded = state_dict[prefix + name] = loaded[held.start : held.stop]
            if loaded.dtype in (torch.float32, torch.float64):
                self._buffers[name] = table.to(loaded.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)


def mean_of_items(values: Tensor, items: Tensor, logs: bool) -> Tensor:
    """Return, for each pair, the mean over all pairs of the batch with the same item; unknown values do not count.

    Args:
        values: (B,) or (m, B). nan is unknown; with `logs`, -inf is.
        items: (B,), the items of the pairs.
        logs: whether to return the log of the mean of the exponentials.

    Example:
        >>> mean_of_items(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([7, 5, 7]), logs=False)
        tensor([2.5000, 2.0000, 2.5000])

    """
    place = count_equal(items.contiguous())[0].to(values.device).expand_as(values)
    known = ~(values.isneginf() if logs else values.isnan())
    largest = torch.zeros_like(values)
    if logs:
        largest = torch.full_like(values, -math.inf).scatter_reduce(-1, place, values, "amax").gather(-1, place)
        largest = largest.masked_fill(largest.isneginf(), 0.0)
        values = (values - largest).exp()
    sums = torch.zeros_like(values).scatter_add(-1, place, values.where(known, 0.0))
    counts = torch.zeros_like(values).scatter_add(-1, place, known.to(values))
    means = (sums / counts).gather(-1, place)
    return means.log().add(largest).nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf) if logs else means
