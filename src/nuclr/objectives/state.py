"""Storage of the state that objectives keep per pair: tables in buffers, replicated or sharded, on any device.

A table is a buffer per side with one number per pair, such as log_u_x and log_u_y. A step reads the rows of its batch,
(2, B) per table with side x in row 0, and writes them back. By default every process holds all rows and writes all of
them. With sharding, process r holds the rows [r R, (r + 1) R), R = ceil(n / K); every process contributes the rows that
it holds, and one all-reduce gives all rows to all processes.

Tables on the host serve an accelerator through pinned memory. Rows are written back without waiting for the device:
the copy is completed before the next read. `prefetch` moves the read ahead of the encoders' forward pass.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from nuclr import distributed
from nuclr.objectives.base import GatheredBatch, Objective, ObjectiveOutput
from nuclr.objectives.checks import Check, Features, Integers, short_list, to_index
from nuclr.transfer import to_device

ANCHORS = ("x", "y")  # side x has anchors x and candidates y
CANDIDATES = ("y", "x")


class Location(NamedTuple):
    """Where the rows of a batch are stored."""

    rows: Tensor  # rows of the tables, on their device
    owned: Tensor | None  # the pairs of the global batch that these rows belong to; None: all B of them


class StateRows(NamedTuple):
    """The state of a batch before the step."""

    location: Location | None  # None: without an index, nothing is stored
    tables: dict[str, Tensor]  # name -> (2, B), in the dtype of the computation


class _Prefetched(NamedTuple):
    source: object  # the argument of `prefetch`, which `forward` compares with its own
    location: Location
    tables: dict[str, Tensor]


class _PendingWrite(NamedTuple):
    location: Location
    tables: dict[str, Tensor]  # on the host, pinned; complete when the event has happened
    copied: torch.Event


class PairTables(Objective):
    """An objective with one row of state per pair.

    Tables stay float32 through half() and bfloat16(). double(), or float64 features in training, converts them to
    float64. DDP must not broadcast them: keep the objective outside DDP, or turn its buffer broadcast off
    (``forward_sync_buffers=False``; ``broadcast_buffers=False`` before torch 2.13).

    Args:
        num_samples: n, the number of pairs; indices are in [0, n).
        temperature: as in `Objective`.
        sides: "both", or the side whose tables are needed.
        state_device: device on which the tables stay when the module moves. None: they move with the module.
        state_sharding: whether each of K processes holds n/K rows instead of all.
        normalize: as in `Objective`.

    """

    def __init__(
        self,
        num_samples: int,
        temperature: float,
        sides: str,
        state_device: str | torch.device | None,
        state_sharding: bool,
        normalize: bool,
    ) -> None:
        super().__init__(temperature, normalize)
        if num_samples < 2:
            raise ValueError(f"num_samples must be at least 2, but is {num_samples}")
        self.num_samples, self.sides, self.state_sharding = num_samples, sides, state_sharding
        self.state_device = None if state_device is None else torch.device(state_device)
        self.active = [row for row, side in enumerate(ANCHORS) if sides in ("both", side)]  # rows of (2, B) tensors
        self.initial: dict[str, float] = {}  # table -> value of a row before its first update
        self._owners: dict[str, tuple[str, str]] = {}  # table -> whose rows side x and side y use
        self._shards = distributed.world_size() if state_sharding else 1
        per_process = math.ceil(num_samples / self._shards)
        first = min(per_process * (distributed.rank() if state_sharding else 0), num_samples)
        self._stored = range(first, min(first + per_process, num_samples))
        self._prefetched: _Prefetched | None = None
        self._ready: _Prefetched | None = None
        self._pending: list[_PendingWrite] = []
        self._feature_device: torch.device | None = None

    @property
    def needs_index(self) -> bool:
        """Whether training needs the indices of the pairs, because there are tables."""
        return bool(self.initial)

    def add_tables(self, name: str, value: float, owners: tuple[str, str]) -> None:
        """Register one buffer per side in use, whose rows start at `value`.

        Args:
            name: the buffers are called {name}_x and {name}_y.
            value: of a row before its first update.
            owners: ANCHORS or CANDIDATES: whose rows side x and side y use.

        """
        self.initial[name] = value
        self._owners[name] = owners
        for row in self.active:
            table = torch.full((len(self._stored),), value, dtype=torch.float32, device=self.state_device)
            self.register_buffer(f"{name}_{owners[row]}", table)

    def buffer(self, name: str) -> Tensor:
        """Return a registered buffer; `get_buffer` takes longer than the arithmetic on a small batch."""
        return cast(Tensor, self._buffers[name])

    def forward(
        self,
        x: Features,
        y: Features,
        index: Integers | None = None,
        x_id: Integers | None = None,
        y_id: Integers | None = None,
    ) -> ObjectiveOutput:
        """Compute the loss of one batch; in training mode, also update the state. See `Objective.forward`."""
        prefetched, self._prefetched = self._prefetched, None
        self._ready = prefetched if prefetched is not None and prefetched.source is index else None
        return super().forward(x, y, index, x_id, y_id)

    # -- rows of a batch -----------------------------------------------------------------------------------------------

    def prefetch(self, index: Integers) -> None:
        """Start reading the state of the next batch, so that it is there when the encoders' forward pass is done.

        It matters for state on the host and for sharded state. With several processes all of them must call it.

        Args:
            index: the object that will be passed to the next call of the objective; with another one, the state is
                read again.

        Raises:
            TypeError: if `index` is not a list, array or tensor of integers.
            ValueError: if an index is out of range or occurs twice in the global batch.

        Example:
            >>> import torch
            >>> from nuclr.objectives import SogCLR
            >>> objective, index, x = SogCLR(num_samples=10, state_device="cpu"), [3, 8], torch.eye(2)
            >>> objective.prefetch(index)
            >>> out = objective(x, x, index)  # x would be the encoders' output

        """
        if self._feature_device is None or not self.initial:
            return  # the device of the features is known after the first step
        local = to_index(index)
        if any(count != [len(local)] for count in distributed.exchange([len(local)])):
            return  # the call of the objective reports it
        everyone = distributed.all_gather_on_host(local)
        self._deferred.check(self._index_checks(everyone))
        location = self._locate(everyone)
        tables = self._load(list(self.initial), location, len(everyone), self._feature_device)
        self._prefetched = _Prefetched(index, location, tables)

    def read(self, batch: GatheredBatch, names: Iterable[str]) -> StateRows:
        """Return the batch's rows of the named tables; without an index, initial values."""
        self._feature_device = batch.x.device
        known = [name for name in names if name in self.initial]
        if batch.index is None or not self.initial:
            rows = {name: batch.x.new_full((2, batch.size), self.initial[name]) for name in known}
            return StateRows(None, rows)
        ready, self._ready = self._ready, None
        if ready is not None:
            return StateRows(ready.location, {name: ready.tables[name].to(batch.x) for name in known})
        self._deferred.check(self._index_checks(batch.index))
        # On an accelerator, a bad index is reported at the next call; until then it must not crash the device.
        index = batch.index if batch.index.device.type == "cpu" else batch.index.clamp(0, self.num_samples - 1)
        location = self._locate(index)
        tables = self._load(known, location, batch.size, batch.x.device)
        return StateRows(location, {name: table.to(batch.x) for name, table in tables.items()})

    def write(self, location: Location | None, tables: Mapping[str, Tensor]) -> None:
        """Write the rows of the global batch, (2, B) per table; each process writes the rows that it holds."""
        assert location is not None
        if location.rows.device.type == "cpu" and any(rows.device.type != "cpu" for rows in tables.values()):
            staged = {name: torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True) for name, rows in tables.items()}
            for name, rows in tables.items():
                staged[name].copy_(rows, non_blocking=True)
            copied = torch.Event(next(iter(tables.values())).device)
            copied.record()
            self._pending.append(_PendingWrite(location, staged, copied))
        else:
            self._store(location, tables)

    def flush(self) -> None:
        """Wait for rows that are on their way from an accelerator to tables on the host, and store them."""
        pending, self._pending = self._pending, []
        for write in pending:
            write.copied.synchronize()
            self._store(write.location, write.tables)

    def _store(self, location: Location, tables: Mapping[str, Tensor]) -> None:
        for name, rows in tables.items():
            for row in self.active:
                table = self.buffer(f"{name}_{self._owners[name][row]}")
                new = rows[row] if location.owned is None else rows[row, location.owned]
                table.index_copy_(0, location.rows, new.to(table))

    def _locate(self, index: Tensor) -> Location:
        device = self.buffer(self._a_table()).device
        if not self.state_sharding:
            return Location(to_device(index, device), None)
        if self._shards != distributed.world_size():
            raise ValueError(
                f"state_sharding=True split the state over {self._shards} processes, but there are "
                f"{distributed.world_size()}; build the objective after init_process_group"
            )
        # For an index on an accelerator this waits for the device; `prefetch` with a host index avoids it.
        owned = ((index >= self._stored.start) & (index < self._stored.stop)).nonzero().flatten()
        return Location(to_device(index[owned] - self._stored.start, device), to_device(owned, device))

    def _load(self, names: list[str], location: Location, size: int, device: torch.device) -> dict[str, Tensor]:
        self.flush()
        loaded = {}
        for name in names:
            sides = []
            for row, side in enumerate(self._owners[name]):
                if row not in self.active:
                    sides.append(torch.full((size,), self.initial[name], device=location.rows.device))
                    continue
                stored = self.buffer(f"{name}_{side}").index_select(0, location.rows)
                if location.owned is not None:
                    stored = stored.new_zeros(size).index_copy_(0, location.owned, stored)
                sides.append(stored)
            loaded[name] = torch.stack(sides)
        if location.owned is None:
            return {name: to_device(rows, device) for name, rows in loaded.items()}
        everything = distributed.sum_over_processes(to_device(torch.stack(list(loaded.values())), device))
        if len(self.active) == 1:  # this side's rows are not stored, but were added up
            for name, rows in zip(loaded, everything, strict=True):
                rows[1 - self.active[0]] = self.initial[name]
        return dict(zip(loaded, everything, strict=True))

    def _a_table(self) -> str:
        name = next(iter(self.initial))
        return f"{name}_{self._owners[name][self.active[0]]}"

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

    # -- the tables as a whole -----------------------------------------------------------------------------------------

    def gather_state_dict(self) -> dict[str, Tensor]:
        """Return the whole state, whatever the number of processes: `load_state_dict` takes it on any other number.

        Returns:
            On process 0, the state dict with all rows of sharded tables, on the host; on the others, an empty one. With
            several processes, all of them must call it.

        Example:
            >>> from nuclr.objectives import SogCLR
            >>> len(SogCLR(num_samples=10, state_sharding=True).gather_state_dict()["log_u_x"])
            10

        """
        whole = dict(self.state_dict())
        if self._shards > 1:
            for name in list(whole):
                if name in self._table_names():
                    whole[name] = self._gather_table(whole[name])
        return whole if distributed.rank() == 0 else {}

    def _gather_table(self, local: Tensor) -> Tensor:
        per_process = math.ceil(self.num_samples / self._shards)
        device = self._feature_device or local.device  # nccl gathers on the accelerator only
        padded = local.new_zeros(per_process, device=device)
        padded[: len(local)] = local
        first = distributed.rank() == 0
        parts = [torch.empty_like(padded) for _ in range(self._shards)] if first else None
        dist.gather(padded, parts)
        return local if parts is None else torch.cat([part.cpu() for part in parts])[: self.num_samples]

    def _table_names(self) -> set[str]:
        return {f"{name}_{self._owners[name][row]}" for name in self.initial for row in self.active}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PairTables":
        self.flush()
        self._prefetched = None
        tables = {name: table for name, table in self._buffers.items() if table is not None}
        self._buffers.clear()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, table in tables.items():
            target = fn(table.new_empty(0))  # shows the new device and dtype without moving a large table
            dtype = target.dtype if target.dtype in (torch.float32, torch.float64) else table.dtype
            moved = table.to(device=self.state_device or target.device, dtype=dtype)
            if dtype == torch.float64 != table.dtype:
                # rows that were never updated hold their initial value rounded to float32
                initial = self.initial_value(name)
                moved = moved.masked_fill_((table == table.new_tensor(initial)).to(moved.device), initial)
            self._buffers[name] = moved
        return self

    def initial_value(self, buffer: str) -> float:
        """Return the value that a buffer has before its first update; nan if it has none."""
        return self.initial.get(buffer.rpartition("_")[0], math.nan)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.flush()
        super()._save_to_state_dict(destination, prefix, keep_vars)

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
        self.flush()
        self._prefetched = None
        problems = []
        tables = self._table_names()
        for name, table in self._buffers.items():
            loaded = state_dict.get(prefix + name)
            if table is None or loaded is None:
                continue
            if name in tables and self._shards > 1 and len(loaded) == self.num_samples:
                loaded = state_dict[prefix + name] = loaded[self._stored.start : self._stored.stop]
            if loaded.shape != table.shape:
                sizes = f"holds {loaded.numel()} pairs, but this objective has num_samples={self.num_samples}"
                problems.append(f"{prefix}{name} {sizes}; build it with num_samples={loaded.numel()}")
            elif loaded.dtype in (torch.float32, torch.float64):
                self._buffers[name] = table.to(loaded.dtype)
        if problems:
            errors.extend(problems)  # load nothing: a partly loaded state is worse than the old one
            return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, extra, errors)

    # A table must not be looked at while rows are on their way to it.

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the buffers, as `torch.nn.Module.named_buffers`."""
        self.flush()
        return super().named_buffers(*args, **kwargs)

    def get_buffer(self, target: str) -> Tensor:
        """Return a buffer, as `torch.nn.Module.get_buffer`."""
        self.flush()
        return super().get_buffer(target)

    def __getattr__(self, name: str) -> Any:
        """Return a parameter, buffer or module."""
        if self.__dict__.get("_pending"):
            self.flush()
        return super().__getattr__(name)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles need."""
        self.flush()
        return self.__dict__ | {"_prefetched": None, "_ready": None, "_pending": []}
