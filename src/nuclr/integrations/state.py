"""The state of an objective as one file in a trainer's checkpoint folder.

Trainers save the model and the optimizer, and do not know that the loss has state. `save_state` and `load_state` add
one safetensors file to their checkpoint folders: the objective's tables with one row per pair, and its parameters. The
file is the same for sharded and replicated state, so training may resume on another number of processes.

Its header also holds the options of the objective, and hashes of a few pairs, by which `load_state` notices that the
pairs were numbered in another order.
"""

import hashlib
import inspect
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from nuclr import distributed
from nuclr.errors import UserError, printable
from nuclr.files import user_errors, write_atomically
from nuclr.objectives import Objective

STATE_FILE = "nuclr_objective.safetensors"
"""The name of the file in a checkpoint folder."""

FORMAT = "nuclr_objective"
PLACEMENT = ("num_samples", "state_device", "state_sharding")  # options that say where the state is, and its size


def save_state(objective: Objective, folder: str | Path, pairs: Mapping[str, str] | None = None) -> None:
    """Write the state of an objective to a checkpoint folder.

    With several processes, all of them must call this. Process 0 writes; when the call returns, the file is complete.

    Args:
        objective: The objective. Sharded state is gathered.
        folder: The checkpoint folder. It is created if necessary; an earlier state file in it is replaced.
        pairs: Hashes of some pairs, from `nuclr.integrations.index.hash_pairs`, for `load_state` to compare.

    Raises:
        UserError: If the file cannot be written. All processes raise.

    Example:
        >>> import tempfile
        >>> from nuclr.objectives import SogCLR
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_state(SogCLR(num_samples=10), folder)
        ...     load_state(SogCLR(num_samples=10), folder)

    """
    path = Path(folder) / STATE_FILE
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in objective.gather_state_dict().items()}
    problem = None
    if distributed.rank() == 0:
        header = {
            "objective": type(objective).__name__,
            "sha256": _digest(state),
            "options": options_of(objective),
            "pairs": dict(pairs or {}),
        }
        # One entry of metadata, because safetensors writes several in a random order.
        content = save(state, {FORMAT: json.dumps(header)})
        try:
            with user_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with write_atomically(path) as file:
                    file.write(content)
        except UserError as error:
            problem = error
    _raise_together(problem, path)


def load_state(
    objective: Objective, folder: str | Path, pairs: Mapping[str, str] | None = None, *, resumes: bool = True
) -> None:
    """Load the state that `save_state` wrote into an objective. Nothing is unpickled.

    With several processes, all of them must call this, and all must be able to read the folder. An objective with
    sharded state keeps only its own rows.

    Args:
        objective: An objective built with the same arguments as the saved one. If it has no state at all, such as CLIP
            with a fixed temperature, a missing file is accepted.
        folder: The checkpoint folder.
        pairs: Hashes of some pairs of the training data, as in `save_state`. They must equal the saved ones of the same
            pair and column.
        resumes: Whether training continues from this state. Options that differ from the saved ones then give a
            warning.

    Raises:
        UserError: If the file is missing or damaged, holds the state of another objective, or its pairs were numbered
            in another order. All processes raise, and the objective is unchanged.

    """
    path, problem = Path(folder) / STATE_FILE, None
    header: dict[str, Any] = {}
    try:
        if path.is_file() or objective.state_dict():
            header, state = _read(path, objective)
            _check_pairs(path, header.get("pairs"), pairs or {})
            objective.load_state_dict(state)
    except UserError as error:
        problem = error
    except RuntimeError as error:  # the lines of load_state_dict after its first name the tensors
        reason = " ".join(line.strip() for line in str(error).splitlines()[1:]) or str(error)
        problem = UserError(f"{path}: does not fit the objective: {reason}")
    _raise_together(problem, path)
    if resumes:
        warn_of_changed_options(objective, header.get("options"), str(path))


def options_of(objective: Objective) -> dict[str, Any]:
    """Return the options of an objective that shape its loss, with their current values.

    Parameters and the initial value of a learnt temperature are left out: they are part of the state.

    Args:
        objective: Any objective.

    Returns:
        Option -> number, text, bool or None.

    Example:
        >>> from nuclr.objectives import CLIP
        >>> options_of(CLIP(temperature=0.07))
        {'temperature': 0.07, 'learn_temperature': False, 'normalize': False}
        >>> options_of(CLIP(temperature=0.07, learn_temperature=True))
        {'learn_temperature': True, 'normalize': False}

    """
    learnt = ("temperature",) if getattr(objective, "log_scale", None) is not None else ()
    values = {
        name: getattr(objective, name, None)
        for name in inspect.signature(type(objective)).parameters
        if name not in (*PLACEMENT, *learnt)
    }
    return {name: value for name, value in values.items() if isinstance(value, bool | int | float | str | None)}


def warn_of_changed_options(objective: Objective, saved: Any, where: str) -> None:
    """Warn if training resumes with other options than those of the checkpoint.

    It is not an error, because a schedule may have changed them on purpose. Process 0 warns.

    Args:
        objective: The objective that training resumes with.
        saved: Its options when the checkpoint was saved, from `options_of`.
        where: The checkpoint, for the message.

    """
    if distributed.rank() != 0 or not isinstance(saved, dict):
        return
    current = options_of(objective)
    changed = [name for name in current if name in saved and saved[name] != current[name]]
    if changed:
        old, new = (
            ", ".join(f"{name}={printable(repr(values[name])[:100])}" for name in changed)
            for values in (saved, current)
        )
        warnings.warn(
            f"{where}: saved with {old}, but training resumes with {new}. The running averages were computed with the "
            "old values; unless a schedule of yours changes them, pass the old values",
            stacklevel=3,
        )


def _read(path: Path, objective: Objective) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header and the tensors of a state file after comparing them with the objective."""
    if not path.is_file():
        raise UserError(
            f"{path}: no such file; the checkpoint was saved without the state of {type(objective).__name__}, so "
            "training cannot resume from it"
        )
    try:
        with safe_open(path, framework="pt") as file:
            header = _header(file.metadata())
            saved = header.get("objective")
            if saved != type(objective).__name__:
                named = printable(str(saved)[:100])
                raise UserError(f"{path}: holds the state of {named}, but the objective is {type(objective).__name__}")
            # Shapes are compared before memory is taken.
            _check_shapes(path, {name: file.get_slice(name).get_shape() for name in file.keys()}, objective)  # noqa: SIM118
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not a complete state of an objective ({error}); use another checkpoint") from None
    if _digest(state) != header.get("sha256"):
        raise UserError(f"{path}: damaged, the checksum does not match; use another checkpoint")
    return header, state


def _check_pairs(path: Path, saved: Any, current: Mapping[str, str]) -> None:
    """Refuse a state whose rows belong to other pairs."""
    both = [key for key in current if isinstance(saved, dict) and key in saved]
    changed = [key.partition(" ")[0] for key in both if saved[key] != current[key]]
    if changed:
        raise UserError(
            f"{path}: {len(changed)} of {len(both)} compared texts, such as one of pair {changed[0]}, are not those "
            "that it was saved with, so the rows of its tables belong to other pairs; add the index to the same rows "
            "in the same order as then (before shuffling), or start without resuming"
        )


def _header(metadata: dict[str, str] | None) -> dict[str, Any]:
    header = json.loads((metadata or {}).get(FORMAT, "null"))
    if not isinstance(header, dict):
        raise ValueError("it was not written by nuclr.integrations.save_state")
    return header


def _check_shapes(path: Path, shapes: dict[str, list[int]], objective: Objective) -> None:
    expected = objective.state_dict()
    missing, extra = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    if missing or extra:
        parts = [f"{what} {', '.join(names)}" for what, names in (("lacks", missing), ("also holds", extra)) if names]
        raise UserError(
            f"{path}: {' and '.join(parts)}; build {type(objective).__name__} with the options that it was saved with"
        )
    pairs = getattr(objective, "num_samples", None)
    for name, tensor in expected.items():
        # A sharded table in the file has all rows.
        if shapes[name] not in (list(tensor.shape), [pairs]):
            if pairs is not None and len(shapes[name]) == 1:
                size = shapes[name][0]
                raise UserError(
                    f"{path}: {name} holds {size:,} pairs, but num_samples={pairs:,}; resume with the data set of the "
                    f"checkpoint, or build the objective with num_samples={size}"
                )
            raise UserError(f"{path}: {name} has shape {shapes[name]}, but the objective needs {list(tensor.shape)}")


def _digest(state: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _raise_together(problem: UserError | None, path: Path) -> None:
    """Raise `problem`; on processes that have none, raise if another process has one, which does not continue."""
    failed = [rank for rank, (flag,) in enumerate(distributed.exchange([int(problem is not None)])) if flag]
    if problem is not None:
        raise problem
    if failed:
        raise UserError(f"{path}: process {failed[0]} failed; see its message")
