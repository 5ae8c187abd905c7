"""Checks of what users pass to an objective: types, settings, and values that are on an accelerator."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Features = Tensor | npt.NDArray[Any]
Integers = Tensor | npt.NDArray[Any] | Sequence[int]

# ---------------------------------------------------------------------------------------------------------------------
# Types
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """The arguments of an objective as tensors."""

    x: Tensor
    y: Tensor
    index: Tensor | None
    x_id: Tensor | None
    y_id: Tensor | None


def to_tensors(
    x: Features, y: Features, index: Integers | None, x_id: Integers | None, y_id: Integers | None
) -> Inputs:
    """Convert the arguments of an objective to tensors; tensors are returned as they are.

    Args:
        x: features, a tensor or a numpy array.
        y: features, a tensor or a numpy array.
        index: integers, a tensor, numpy array or sequence, or None.
        x_id: as `index`.
        y_id: as `index`.

    Returns:
        The tensors. Numpy arrays and sequences are copied.

    Raises:
        TypeError: if an argument has another type; the message names the argument.

    Example:
        >>> to_tensors(np.eye(2), np.eye(2), [0, 1], None, None).index
        tensor([0, 1])

    """
    integers = (_integer_tensor(*item) for item in (("index", index), ("x_id", x_id), ("y_id", y_id)))
    return Inputs(to_features("x", x), to_features("y", y), *integers)


def to_index(index: Integers) -> Tensor:
    """Convert the indices of a batch to a host tensor (b,) of int64; raise if they are something else."""
    tensor = _integer_tensor("index", index)
    if tensor is None or tensor.ndim != 1 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise ValueError("index must be (b,) integers, one per pair")
    return tensor.to("cpu", torch.int64)


def to_features(name: str, value: object) -> Tensor:
    """Convert features to a tensor; raise a TypeError that names the argument if they are something else."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        return _from_numpy(name, value)
    raise TypeError(f"{name} must be a tensor or a numpy array of features, but is {_describe_type(value)}")


def _integer_tensor(name: str, value: object) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray | Sequence) and not isinstance(value, str | bytes):
        return _from_numpy(name, value)
    raise TypeError(f"{name} must be a tensor, numpy array or list of integers, but is {_describe_type(value)}")


def _from_numpy(name: str, values: object) -> Tensor:
    try:
        # a copy, because torch takes neither read-only arrays nor negative strides
        return torch.from_numpy(np.array(values, order="C"))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} cannot be converted to a tensor: {error}") from None


def _describe_type(value: object) -> str:
    return f"{value!r}" if isinstance(value, int | float | str | bytes) else f"of type {type(value).__name__}"


# ---------------------------------------------------------------------------------------------------------------------
# Values on an accelerator
# ---------------------------------------------------------------------------------------------------------------------


class Check(NamedTuple):
    """A condition, and a function that describes what is wrong if it does not hold.

    `good` is a scalar tensor, or a bool if the value has been read already.
    """

    good: Tensor | bool
    describe: Callable[[], str]


class DeferredCheck:
    """Raise for bad values: at once on CPU, at the next call on an accelerator, which therefore never waits."""

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, torch.Event, list[Check]]] = []

    def __reduce__(self) -> tuple[type["DeferredCheck"], tuple[()]]:
        return DeferredCheck, ()  # an event cannot be copied; copies and pickles start empty

    def check(self, checks: list[Check]) -> None:
        """Raise for the first condition that does not hold, now or at the next `raise_pending`.

        Args:
            checks: conditions that are all on CPU, or all on one accelerator.

        Raises:
            ValueError: with the description of the first condition on CPU that does not hold.

        """
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
        """Raise for the conditions of the previous call.

        Raises:
            ValueError: with the description of the first condition that did not hold.

        """
        pending, self._pending = self._pending, []
        for flags, event, checks in pending:
            event.synchronize()
            self._raise(flags.tolist(), checks)

    @staticmethod
    def _raise(flags: list[Tensor | bool], checks: list[Check]) -> None:
        for good, check in zip(flags, checks, strict=True):
            if not good:
                raise ValueError(check.describe())


# ---------------------------------------------------------------------------------------------------------------------
# Settings
# ---------------------------------------------------------------------------------------------------------------------


def check_positive(name: str, value: float) -> None:
    """Raise a ValueError if `value` is not a finite positive number."""
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be a positive number, but is {value}")


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise a ValueError if `value` is not one of the allowed words."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, but is {value!r}")


def check_range(
    name: str, value: float, low: float, high: float, *, low_open: bool = False, high_open: bool = False
) -> None:
    """Raise a ValueError if `value` is outside the interval from `low` to `high`."""
    if not ((low < value if low_open else low <= value) and (value < high if high_open else value <= high)):
        interval = f"{'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"
        raise ValueError(f"{name} must be in {interval}, but is {value}")


def short_list(values: list[int]) -> str:
    """Return the first five values as text, and how many more there are."""
    return ", ".join(map(str, values[:5])) + (f" and {len(values) - 5} more" if len(values) > 5 else "")
