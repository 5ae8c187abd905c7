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
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from nuclr import distributed
from nuclr.objectives.base import ObjectiveOutput

Output = TypeVar("Output", Tensor, ObjectiveOutput)


class InputsError(TypeError, ValueError):
    """Inputs that cannot be cut into micro-batches, or an encoder for which it would change the result."""


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
        TypeError: if `encode` returns something else.
        InputsError: a TypeError and ValueError, if `encode` contains batch norm in training mode, inputs cannot be cut
            or do not have the same number of pairs, or processes have different numbers of chunks.

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
        return _backward(objective(*_encode(encode, chunks[0])), scale)

    parts = []
    states = []
    with torch.no_grad(), _watched_modules() as modules:
        for chunk in chunks:
            states.append(_random_states())
            parts.append(_encode(encode, chunk))
    # Weights that autocast has cast under no_grad have no graph, and must not be used in the second pass.
    torch.clear_autocast_cache()

    features = [torch.cat(column) for column in zip(*parts, strict=True)]
    for side in features:
        side.requires_grad_(side.is_floating_point())
    output = _backward(objective(*features), scale)
    after = _random_states()

    row = [0] * len(features)  # of each side, the first one of the chunk
    del parts
    for number, (chunk, state) in enumerate(zip(chunks, states, strict=True)):
        _restore(state)
        with contextlib.ExitStack() as stack:
            for module in modules:
                # only the last chunk synchronizes gradients between processes
                if isinstance(module, DistributedDataParallel) and number < len(chunks) - 1:
                    stack.enter_context(module.no_sync())
            tensors = []
            gradients = []
            for k, side in enumerate(_encode(encode, chunk)):
                gradient = features[k].grad
                if side.requires_grad and gradient is not None:  # frozen encoders have no graph
                    tensors.append(side)
                    gradients.append(gradient[row[k] : row[k] + len(side)])
                row[k] += len(side)
            if tensors:
                with _no_autocast():
                    torch.autograd.backward(tensors, gradients)
            del side, tensors, gradients  # before the next chunk is encoded
    _restore(after)
    return output


# ---------------------------------------------------------------------------------------------------------------------
# Inputs
# ---------------------------------------------------------------------------------------------------------------------


def _split_everywhere(
    inputs: Any,
    micro_batch: int,
    pairs: int | None,
) -> list[Any]:
    """Return the chunks of the inputs. If one process refuses them, or has more chunks than another, all raise."""
    problem = None
    chunks: list[Any] = []
    try:
        chunks = _split(inputs, micro_batch, pairs)
    except ValueError as error:
        problem = error
    counts = [count for (count,) in distributed.exchange([len(chunks)])]
    if problem is not None:
        raise problem
    if len(set(counts)) > 1:
        each = ", ".join(f"process {rank}: {count}" for rank, count in enumerate(counts))
        raise InputsError(
            f"every process must have the same number of micro-batches, but got {each} (0: it refused its inputs); "
            "pass the same number of pairs and the same micro_batch, and drop the last incomplete batch"
        )
    return chunks


def _split(
    inputs: Any,
    micro_batch: int,
    pairs: int | None,
) -> list[Any]:
    if micro_batch < 1:
        raise ValueError(f"micro_batch must be a positive number of pairs, but is {micro_batch!r}")
    if not isinstance(inputs, tuple | Mapping):
        raise InputsError(
            "inputs must be a tuple of the positional arguments of encode, or a dict of its keyword arguments, but is "
            f"of type {type(inputs).__name__}; write (images, texts), or (images,) for one argument"
        )
    lengths: list[int] = []
    _map_leaves(inputs, lambda rows: lengths.append(len(rows)))
    b = min(lengths, default=0) if pairs is None else pairs
    if b < 1 or any(length % b for length in lengths):
        expected = pairs or "the same number of"
        raise InputsError(f"inputs must have {expected} rows, or a multiple (several per pair), but have {lengths}")

    def cut(start: int, rows: Any) -> Any:
        each = len(rows) // b
        return rows[start * each : (start + micro_batch) * each]

    return [_map_leaves(inputs, partial(cut, start)) for start in range(0, b, micro_batch)]


def _map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to all tensors, arrays and lists; dicts and tuples keep their type, and None stays."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        mapped: Any = copy.copy(value)  # keeps the type, such as the BatchEncoding of a tokenizer
        for key, item in value.items():
            mapped[key] = _map_leaves(item, function)
        return mapped
    if isinstance(value, tuple):
        items = [_map_leaves(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list) or (isinstance(value, Tensor | np.ndarray) and value.ndim > 0):
        return function(value)
    raise InputsError(
        "inputs must be tensors, arrays or lists of one row per pair, or dicts or tuples of these, but hold a "
        f"{type(value).__name__} without rows; bind options of the whole batch to encode with functools.partial"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Encoder and objective
# ---------------------------------------------------------------------------------------------------------------------


def _encode(encode: Callable[..., Any], chunk: Any) -> list[Tensor]:
    features = encode(**chunk) if isinstance(chunk, Mapping) else encode(*chunk)
    sides = list(features) if isinstance(features, tuple | list) else [features]
    if not sides or not all(isinstance(side, Tensor) and side.ndim > 0 for side in sides):
        kinds = ", ".join(type(side).__name__ for side in sides)
        raise TypeError(f"encode must return a tensor or a tuple of tensors, of one row per sample, but gave {kinds}")
    return sides


def _backward(output: Output, scale: float | Callable[[Tensor], Tensor]) -> Output:
    """Back-propagate, and return the output with a detached loss, which does not hold the graph."""
    loss = output.loss if isinstance(output, ObjectiveOutput) else output
    with _no_autocast():
        torch.autograd.backward(scale(loss) if callable(scale) else loss * scale)
    return output._replace(loss=loss.detach()) if isinstance(output, ObjectiveOutput) else loss.detach()


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    # The products of a backward pass would be cast too, even those of an objective that ran in float32.
    accelerator = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    with torch.autocast("cpu", enabled=False), torch.autocast(accelerator.type, enabled=False):
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Modules
# ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _watched_modules() -> Iterator[set[nn.Module]]:
    """Collect the modules that run, since a function does not say which ones it calls; refuse batch norm."""
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, _inputs: object) -> None:
        if module in seen:
            return
        for name, child in module.named_modules():
            if isinstance(child, _BatchNorm) and (child.training or child.running_mean is None):
                raise InputsError(
                    f"encode contains batch norm in training mode ({name or type(child).__name__} of "
                    f"{type(module).__name__}), whose statistics would depend on the micro-batch; freeze it with eval()"
                )
        seen.update(module.modules())

    handle = nn.modules.module.register_module_forward_pre_hook(visit)
    try:
        yield seen
    finally:
        handle.remove()


# ---------------------------------------------------------------------------------------------------------------------
# Random numbers
# ---------------------------------------------------------------------------------------------------------------------


def _random_states() -> list[tuple[Callable[[Any], None], Any]]:
    """Return the states of torch's, numpy's and Python's global generators, each with the function that sets it."""
    states: list[tuple[Callable[[Any], None], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (np.random.set_state, np.random.get_state()),
        (random.setstate, random.getstate()),
    ]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        # the host keeps the states of accelerators' generators, so reading them does not wait for the device
        module = torch.get_device_module(accelerator)
        for device in range(torch.accelerator.device_count()):
            states.append((partial(module.set_rng_state, device=device), module.get_rng_state(device)))
    return states


def _restore(states: list[tuple[Callable[[Any], None], Any]]) -> None:
    for set_state, state in states:
        set_state(state)
