"""Read plain data from a pickle file without unpickling it.

The original Python archives of CIFAR are pickles, and loading a pickle runs whatever code its author put into it. This
reader interprets only the operations that build numbers, texts, bytes, lists, tuples, dicts and arrays of bytes; every
other operation, and every name except the three that numpy needs for such an array, is refused. Nothing is imported and
nothing is called.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from nuclr.errors import UserError

MOST_OPERATIONS = 1_000_000  # a file of CIFAR has fewer than 200,000

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_INTEGERS = {"BININT", "BININT1", "BININT2"}
_TEXTS = {"SHORT_BINUNICODE", "BINUNICODE"}
_BYTES = {"SHORT_BINBYTES", "BINBYTES"}
_STRINGS = {"SHORT_BINSTRING", "BINSTRING"}  # bytes of Python 2, which pickletools decodes as Latin-1
_PUTS, _GETS = {"BINPUT", "LONG_BINPUT"}, {"BINGET", "LONG_BINGET"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = {"PROTO", "FRAME"}
_NAMES = {
    "numpy.core.multiarray _reconstruct": "array",
    "numpy._core.multiarray _reconstruct": "array",
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
}


class _RefusedError(Exception):
    """An operation that does not build plain data."""


@dataclass(frozen=True)
class _Name:
    """One of `_NAMES`."""

    kind: str


@dataclass
class _Array:
    """An array of bytes that is being built; `value` is None until its content is known."""

    value: np.ndarray | None = None


@dataclass(frozen=True)
class _ByteType:
    """The dtype uint8."""


def read_plain_pickle(data: bytes, path: Path) -> Any:
    """Return the plain data in a pickle.

    Args:
        data: the content of the file. The result holds its numbers and texts and little more, so a bound on the size of
            the file bounds the memory.
        path: the file, for messages.

    Returns:
        None, bool, int, str, bytes, list, tuple, dict, or a uint8 array; lists and dicts hold the same.

    Raises:
        UserError: if the file is not a pickle, is truncated, or holds anything else.

    Example:
        >>> import pickle
        >>> read_plain_pickle(pickle.dumps({"labels": [3, 8]}, protocol=2), Path("test_batch"))
        {'labels': [3, 8]}
        >>> read_plain_pickle(pickle.dumps(print), Path("test_batch"))
        Traceback (most recent call last):
        nuclr.errors.UserError: test_batch: not read, because it is a pickle that holds more than plain data (the name
        builtins.print); use the original file

    """
    try:
        return _Machine().run(data)
    except _RefusedError as refused:
        reason = f"not read, because it is a pickle that holds more than plain data ({refused})"
    except (ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        lines = str(error).splitlines()
        reason = f"not a complete pickle ({lines[0][:100] if lines else type(error).__name__})"
    raise UserError(f"{path}: {reason}; use the original file")


class _Machine:
    """The stack and the memo of a pickle, for a few of its operations."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.special: dict[str, Callable[[], None]] = {
            "MARK": lambda: self.marks.append(len(self.stack)),
            "EMPTY_LIST": lambda: self.stack.append([]),
            "EMPTY_TUPLE": lambda: self.stack.append(()),
            "EMPTY_DICT": lambda: self.stack.append({}),
            "TUPLE": lambda: self.stack.append(tuple(self.since_mark())),
            "APPEND": lambda: self.extend([self.stack.pop()]),
            "APPENDS": lambda: self.extend(self.since_mark()),
            "SETITEM": lambda: self.update([self.stack.pop(-2), self.stack.pop()]),
            "SETITEMS": lambda: self.update(self.since_mark()),
            "MEMOIZE": lambda: self.memo.update({len(self.memo): self.stack[-1]}),
            "STACK_GLOBAL": lambda: self.name(f"{self.stack.pop(-2)} {self.stack.pop()}"),
            "REDUCE": self.reduce,
            "BUILD": self.build,
        }

    def run(self, data: bytes) -> Any:
        for count, (operation, argument, _) in enumerate(pickletools.genops(data)):
            if count > MOST_OPERATIONS:
                raise _RefusedError(f"more than {MOST_OPERATIONS:,} operations")
            name, value = operation.name, cast(Any, argument)
            if name == "STOP":
                break
            if name in _INTEGERS or name in _TEXTS or name in _BYTES:
                self.stack.append(value)
            elif name in _STRINGS:
                self.stack.append(str(value).encode("latin-1"))
            elif name in _PUTS:
                self.memo[int(value)] = self.stack[-1]
            elif name in _GETS:
                self.stack.append(self.memo[int(value)])
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name in _TUPLES:
                self.stack[-_TUPLES[name] :] = [tuple(self.stack[-_TUPLES[name] :])]
            elif name == "GLOBAL":
                self.name(str(value))
            elif name in self.special:
                self.special[name]()
            elif name not in _IGNORED:
                raise _RefusedError(f"the operation {name}")
        (result,) = self.stack
        return _finished(result)

    def since_mark(self) -> list[Any]:
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise _RefusedError(f"items of a {type(target).__name__}")
        target += map(_finished, values)

    def update(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or not all(isinstance(key, str | bytes | int) for key in values[::2]):
            raise _RefusedError("a dict whose keys are not texts or numbers")
        target.update(zip(values[::2], map(_finished, values[1::2]), strict=True))

    def name(self, name: str) -> None:
        if name not in _NAMES:
            raise _RefusedError(f"the name {name.replace(' ', '.', 1)[:80]}")
        self.stack.append(_Name(_NAMES[name]))

    def reduce(self) -> None:
        """Begin an array, or make the dtype uint8; their contents follow in BUILD."""
        arguments = self.stack.pop()
        called = self.stack.pop()
        if called == _Name("array") and arguments[0] == _Name("ndarray"):
            self.stack.append(_Array())
        elif called == _Name("dtype") and arguments[0] in ("u1", b"u1"):
            self.stack.append(_ByteType())
        else:
            raise _RefusedError("a call, or an array of other numbers than bytes")

    def build(self) -> None:
        """Fill the array on the stack. The state of the dtype says nothing more about bytes."""
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, _ByteType):
            return
        if not isinstance(target, _Array) or target.value is not None:
            raise _RefusedError("the state of an object")
        _, shape, kind, fortran, content = state
        if kind != _ByteType() or fortran or not isinstance(content, bytes):
            raise _RefusedError("an array in another order, or of other numbers than bytes")
        target.value = np.frombuffer(content, np.uint8).reshape(shape)


def _finished(value: Any) -> Any:
    """Return a value that is plain data; an array is replaced by its content."""
    if isinstance(value, _Array) and value.value is not None:
        return value.value
    if isinstance(value, _Array | _Name | _ByteType):
        raise _RefusedError("a part of an array")
    return value  # tuples are not searched: nested references could make them exponentially large
