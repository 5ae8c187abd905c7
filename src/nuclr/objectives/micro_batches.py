"""Exact micro-batches: the gradient of a large batch in the memory of a small one.

A contrastive loss needs the features of the whole batch at once, so its gradient is not a sum over chunks. But given
the gradient of the loss with respect to the features, the rest of the backward pass is:

1. Encode the batch in chunks, without gradient, and keep only the features.
2. Run the objective once on all features and back-propagate to the features.
3. Encode each chunk again, with the same random numbers, and back-propagate its part of the features' gradient.

The cost is one more forward pass of the encoders. Activations are held for one chunk at a time. The idea is that of
GradCache (Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup").
"""

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from nuclr import distributed
from nuclr.objectives.base import ObjectiveOutput

Output = TypeVar("Output", Tensor, ObjectiveOutput)


class InputsError(TypeError, ValueError):
    """Inputs that cannot be cut into micro-batches."""


def backward_in_micro_batches(
    encode: Callable[..., Tensor | Sequence[Tensor]],
    inputs: tuple[Any, ...] | Mapping[str, Any],
    objective: Callable[..., Output],
    micro_batch: int,
    *,
    pairs: int | None = None,
    scale: float | Callable[[Tensor], Tensor] = 1.0,
) -> Output:
    """Compute the loss of a batch and accumulate all gradients, encoding `micro_batch` pairs at a time.

    It takes the place of ``out = objective(*encode(*inputs)); out.loss.backward()`` and gives the same loss and the
    same gradients, those of the objective's own parameters included. If the batch fits into one micro-batch, it is
    encoded only once.

    Dropout is exact: the second pass over a chunk repeats the random numbers of the first (torch on CPU and
    accelerators, numpy's and Python's global generators). The result is that of a full batch whose chunks are encoded
    one after the other. A single large forward pass draws other random numbers for the same seed.

    `encode` must encode each sample independently of the others in its chunk, and must not change any state. Batch norm
    in training mode is refused.

    Autocast that is active around the call applies to `encode`, and never to the backward pass. If `encode` uses
    `DistributedDataParallel`, only the last chunk synchronizes gradients, and not even that inside ``no_sync()``.
    The objective stays outside DDP. Nothing waits for an accelerator.

    Args:
        encode: the model, or a function that calls it: takes the inputs of some pairs, returns their features (a tensor
            or a tuple of tensors, with the batch in the first dimension).
        inputs: the positional arguments of `encode` as a tuple, or its keyword arguments as a dict. Tensors, numpy
            arrays and lists are cut along their first dimension, also inside of dicts and tuples; None is passed on. An
            input may have several rows per pair, next to each other, such as views or captions.
        objective: takes the features of the whole batch as positional arguments, returns an `ObjectiveOutput` or a
            scalar loss.
        micro_batch: number of pairs to encode at once. The last chunk may be smaller.
        pairs: number of pairs in `inputs`. Default: the number of rows of the shortest input.
        scale: factor of the loss before the backward pass, or a function of the loss: ``1 / 4`` to accumulate four
            batches, ``scaler.scale`` for a `torch.amp.GradScaler`.

    Returns:
        What the objective returned, with a detached and unscaled loss.

    Raises:
        TypeError: if `encode` or `objective` returns something else.
        ValueError: if `encode` contains batch norm in training mode.
        InputsError: a TypeError and ValueError, if inputs cannot be cut or do not have the same number of pairs, or
            processes have different numbers of chunks.

    Example:
        >>> from nuclr.objectives import CLIP, backward_in_micro_batches
        >>> from torch.nn.functional import normalize
        >>> image_tower, text_tower, objective = nn.Linear(8, 4), nn.Linear(6, 4), CLIP()
        >>> def encode(images, texts):
        ...     return normalize(image_tower(images), dim=1), normalize(text_tower(texts), dim=1)
        >>> images, texts = torch.randn(32, 8), torch.randn(32, 6)
        >>> out = backward_in_micro_batches(encode, (images, texts), objective, micro_batch=8)
        >>> image_tower.weight.grad.shape
        torch.Size([4, 8])

    """
    chunks = _split_everywhere(inputs, micro_batch, pairs)
    if len(chunks) == 1:
        output = objective(*_encode(encode, chunks[0]))
        _backward(output, scale)
        return _detach(output)

    generators = _Generators()
    modules = _Modules(encode)
    parts, states = [], []
    with torch.no_grad(), modules.watched():
        for chunk in chunks:
            states.append(generators.states())
            parts.append(_encode(encode, chunk))
    # Weights that autocast has cast under no_grad have no graph, and must not be used in the second pass.
    torch.clear_autocast_cache()

    features = [torch.cat(column) for column in zip(*parts, strict=True)]
    for side in features:
        side.requires_grad_(side.is_floating_point())
    output = objective(*features)
    _backward(output, scale)
    output = _detach(output)  # frees the objective's graph before the encoders' graphs are built
    after = generators.states()

    rows = [[len(part) for part in column] for column in zip(*parts, strict=True)]
    del parts
    gradients = [
        [None] * len(chunks) if side.grad is None else torch.split(side.grad, lengths)
        for side, lengths in zip(features, rows, strict=True)
    ]
    for number, (chunk, state) in enumerate(zip(chunks, states, strict=True)):
        generators.restore(state)
        with contextlib.nullcontext() if number == len(chunks) - 1 else modules.no_sync():
            again = _encode(encode, chunk)
            used = [
                (side, gradient[number])
                for side, gradient in zip(again, gradients, strict=True)
                if side.requires_grad and gradient[number] is not None
            ]
            if used:  # frozen encoders have no graph
                with _no_autocast():
                    torch.autograd.backward([side for side, _ in used], [gradient for _, gradient in used])
            del again, used  # before the next chunk is encoded
    generators.restore(after)
    return output


# ---------------------------------------------------------------------------------------------------------------------
# Inputs
# ---------------------------------------------------------------------------------------------------------------------


def _split_everywhere(inputs: Any, micro_batch: int, pairs: int | None) -> list[Any]:
    """Return the chunks of the inputs. If one process refuses them, or has more chunks than another, all raise."""
    problem, chunks = None, []
    try:
        chunks = _split(inputs, micro_batch, pairs)
    except (TypeError, ValueError) as error:
        problem = error
    counts = [count for (count,) in distributed.exchange([len(chunks)])]
    if problem is not None:
        raise problem
    if 0 in counts:
        raise InputsError(f"process {counts.index(0)} of {len(counts)} refused its inputs; see its error message")
    if len(set(counts)) > 1:
        each = ", ".join(f"process {rank}: {count}" for rank, count in enumerate(counts))
        raise InputsError(
            f"every process must have the same number of micro-batches, but got {each}; pass the same number of pairs "
            "and the same micro_batch on every process, and drop the last incomplete batch"
        )
    return chunks


def _split(inputs: Any, micro_batch: int, pairs: int | None) -> list[Any]:
    if isinstance(micro_batch, bool) or not isinstance(micro_batch, int) or micro_batch < 1:
        raise ValueError(f"micro_batch must be a positive whole number of pairs, but is {micro_batch!r}")
    if not isinstance(inputs, tuple | Mapping):
        raise InputsError(
            "inputs must be a tuple of the positional arguments of encode, or a dict of its keyword arguments, but is "
            f"of type {type(inputs).__name__}; write (images, texts), or (images,) for one argument"
        )
    lengths = dict(_lengths("inputs", inputs))
    if not lengths:
        raise InputsError("inputs must hold at least one tensor, array or list, but hold none")
    b = min(lengths.values()) if pairs is None else pairs
    if b < 1 or any(length % b for length in lengths.values()):
        found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        needed = "the same number of rows, or multiples of it" if pairs is None else f"{pairs} rows, or multiples of it"
        raise InputsError(f"inputs must have {needed} (several rows per pair), but {found}")
    return [_cut(inputs, b, start, min(start + micro_batch, b)) for start in range(0, b, micro_batch)]


def _lengths(name: str, value: Any) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of rows of everything that can be cut."""
    if value is None:
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _lengths(f"{name}[{key!r}]", item)
    elif isinstance(value, tuple):
        for number, item in enumerate(value):
            yield from _lengths(f"{name}[{number}]", item)
    elif isinstance(value, list) or (isinstance(value, Tensor | np.ndarray) and value.ndim > 0):
        yield name, len(value)
    else:
        kind = "a scalar" if isinstance(value, Tensor | np.ndarray) else f"of type {type(value).__name__}"
        raise InputsError(
            f"{name} must be a tensor, array or list of one row per pair, or a dict or tuple of these, but is {kind}; "
            "bind options of the whole batch to encode, as in functools.partial(model, option=...)"
        )


def _cut(value: Any, b: int, start: int, stop: int) -> Any:
    """Return the rows of the pairs [start, stop) of b."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        chunk: Any = copy.copy(value)  # keeps the type, such as the BatchEncoding of a tokenizer
        for key, item in value.items():
            chunk[key] = _cut(item, b, start, stop)
        return chunk
    if isinstance(value, tuple):
        items = [_cut(item, b, start, stop) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    each = len(value) // b
    return value[start * each : stop * each]


# ---------------------------------------------------------------------------------------------------------------------
# Encoder and objective
# ---------------------------------------------------------------------------------------------------------------------


def _encode(encode: Callable[..., Any], chunk: Any) -> list[Tensor]:
    features = encode(**chunk) if isinstance(chunk, Mapping) else encode(*chunk)
    sides = [features] if isinstance(features, Tensor) else features
    if not isinstance(sides, Sequence) or not sides or not all(isinstance(side, Tensor) for side in sides):
        raise TypeError(f"encode must return a tensor or a tuple of tensors, but returned {_describe(features)}")
    if any(side.ndim == 0 for side in sides):
        raise ValueError(
            "encode must return features with the batch in the first dimension, but returned a scalar; use parameters "
            "such as a learnt temperature in the objective"
        )
    return list(sides)


def _describe(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {', '.join(type(item).__name__ for item in value) or 'nothing'}"
    return f"a value of type {type(value).__name__}"


def _backward(output: Any, scale: float | Callable[[Tensor], Tensor]) -> None:
    loss = output.loss if isinstance(output, ObjectiveOutput) else output
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"objective must return an ObjectiveOutput or a scalar tensor, but returned {_describe(output)}"
        )
    with _no_autocast():
        torch.autograd.backward(scale(loss) if callable(scale) else loss * scale)


def _detach(output: Output) -> Output:
    return output._replace(loss=output.loss.detach()) if isinstance(output, ObjectiveOutput) else output.detach()


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    # The products of a backward pass would be cast too, even those of an objective that ran in float32.
    kinds = {"cpu"} | ({_accelerator().type} if torch.accelerator.is_available() else set())
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Modules
# ---------------------------------------------------------------------------------------------------------------------


def batch_norm_in(module: nn.Module) -> str | None:
    """Return the name of the first batch norm whose output depends on the other samples of its batch, or None."""
    for name, child in module.named_modules():
        if isinstance(child, _BatchNorm) and (child.training or child.running_mean is None):
            return name or type(child).__name__
    return None


class _Modules:
    """The modules that an encoder runs: refuse batch norm, and find DDP.

    A function does not say which modules it calls, so those are seen when they run, in the first pass.
    """

    def __init__(self, encode: Callable[..., Any]) -> None:
        self._seen: set[nn.Module] = set()
        self._module = encode if isinstance(encode, nn.Module) else None
        if self._module is not None:
            self._visit(self._module)

    def _visit(self, module: nn.Module, _inputs: object = None) -> None:
        if module in self._seen:
            return
        if name := batch_norm_in(module):
            raise ValueError(
                f"encode contains batch norm in training mode ({name} of {type(module).__name__}), whose statistics "
                "would depend on the micro-batch; freeze it with module.eval() after model.train(), or use an encoder "
                "with group or layer norm"
            )
        self._seen.update(module.modules())

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Visit every module that runs, if the encoder is a function."""
        if self._module is not None:
            yield
            return
        handle: RemovableHandle = nn.modules.module.register_module_forward_pre_hook(self._visit)
        try:
            yield
        finally:
            handle.remove()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not synchronize gradients between processes in backward passes of what is encoded within."""
        with contextlib.ExitStack() as stack:
            for module in self._seen:
                if isinstance(module, DistributedDataParallel):
                    stack.enter_context(module.no_sync())
            yield


# ---------------------------------------------------------------------------------------------------------------------
# Random numbers
# ---------------------------------------------------------------------------------------------------------------------


def _accelerator() -> torch.device:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return device


class _Generators:
    """The global random number generators: torch's on CPU and on every accelerator device, numpy's and Python's.

    The states of accelerators' generators are kept by the host, so reading them does not wait for the device.
    """

    def __init__(self) -> None:
        self._devices: list[int] = []
        if torch.accelerator.is_available():
            self._module = torch.get_device_module(_accelerator())
            self._devices = list(range(torch.accelerator.device_count()))

    def states(self) -> tuple[Any, ...]:
        """Return the current states."""
        devices = [self._module.get_rng_state(device) for device in self._devices]
        return torch.get_rng_state(), devices, np.random.get_state(), random.getstate()

    def restore(self, states: tuple[Any, ...]) -> None:
        """Set all generators to earlier states."""
        cpu, devices, of_numpy, of_python = states
        torch.set_rng_state(cpu)
        for device, state in zip(self._devices, devices, strict=True):
            self._module.set_rng_state(state, device)
        np.random.set_state(of_numpy)
        random.setstate(of_python)
