"""The state of an objective as one file in a trainer's checkpoint folder.

Trainers save the model and the optimizer, and do not know that the loss has state. `save_state` and `load_state` add
one safetensors file to their checkpoint folders: the objective's tables with one row per pair, and its parameters. The
file is the same for sharded and replicated state, so training may resume on another number of processes.

Its header also holds the options of the objective, and hashes of a few pairs, by which `load_state` notices that the
pairs were numbered in another order.
"""

import contextlib
import hashlib
import inspect
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from nuclr import distributed
from nuclr.errors import UserError, first_line, printable
from nuclr.files import parse_json, user_errors, write_atomically
from nuclr.objectives import Objective
from nuclr.objectives.base import show_option
from nuclr.objectives.registry import COMMON
from nuclr.objectives.state import PairTables

STATE_FILE = "nuclr_objective.safetensors"
"""The name of the file in a checkpoint folder."""

FORMAT = "nuclr_objective"
PLACEMENT = ("num_samples", "state")  # options that say where the state is, and its size


def save_state(
    objective: Objective,
    folder: str | Path,
    pairs: Mapping[str, str] | None = None,
) -> None:
    """Write the state of an objective to a checkpoint folder.

    With several processes, all of them must call this. Process 0 writes; when the call returns, the file is complete.

    Args:
        objective: The objective. Sharded state is gathered.
        folder: The checkpoint folder. It is created if necessary; an earlier state file in it is replaced.
        pairs: Hashes of some pairs, from `nuclr.integrations.trainer.hash_pairs`, for `load_state` to compare.

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
    header = snapshot(objective)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in header.pop("state").items()}
    with _failing_together(path):
        if distributed.rank() == 0:
            header |= {"sha256": _digest(state), "pairs": dict(pairs or {})}
            with user_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with write_atomically(path) as file:
                    # One entry of metadata, because safetensors writes several in a random order.
                    file.write(save(state, {FORMAT: json.dumps(header)}))


def load_state(
    objective: Objective,
    folder: str | Path,
    pairs: Mapping[str, str] | None = None,
    *,
    resumes: bool = True,
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
    path = Path(folder) / STATE_FILE
    with _failing_together(path):
        if path.is_file() or objective.state_dict():
            saved = _read(path)
            _check_pairs(path, saved["pairs"], pairs or {})
            restore(objective, saved, str(path), resumes)


def snapshot(objective: Objective) -> dict[str, Any]:
    """Return the name of an objective, its options and its whole state. All processes must call this."""
    return {
        "objective": type(objective).__name__,
        "options": objective.settings(),
        "state": objective.gather_state_dict(),
    }


def restore(
    objective: Objective,
    saved: Mapping[str, Any],
    where: str,
    resumes: bool,
) -> None:
    """Load the state of a snapshot into an objective.

    Args:
        objective: The objective.
        saved: As `snapshot` returns it.
        where: Where it comes from, for messages.
        resumes: Whether to warn if the options differ from the saved ones.

    Raises:
        UserError: If it is the state of another objective, or of another number of pairs; nothing is changed then.

    """
    name = type(objective).__name__
    if saved["objective"] != name:
        stored = printable(str(saved["objective"])[:100])
        raise UserError(f"{where}: holds the state of {stored}, but the objective is {name}")
    misfits = sorted(saved["state"].keys() ^ objective.state_dict().keys())
    if misfits:
        raise UserError(f"{where}: {misfits[0]} does not fit; build {name} with the options that it was saved with")
    for buffer, table in saved["state"].items():
        rows = objective.full_rows(buffer) if isinstance(objective, PairTables) else None
        stored_rows = len(table) if table.ndim else 0
        if rows is not None and stored_rows != rows:
            raise UserError(
                f"{where}: {buffer} has {stored_rows} rows, but {name} needs {rows}, because of "
                f"num_samples={objective.num_samples} or state.num_{buffer[-1]}; resume with the same data"
            )
    try:
        objective.load_state_dict(saved["state"])
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{where}: {first_line(error)}") from None
    changed = []
    current = objective.settings()
    parameters = inspect.signature(type(objective)).parameters.items()
    for option, default in ({option: parameter.default for option, parameter in parameters} | COMMON).items():
        # an option that is not shown has its default
        before = str(saved["options"].get(option, show_option(default)))
        now = current.get(option, show_option(default))
        if option not in PLACEMENT and before != now:
            changed.append(f"{option}={printable(before[:100])} (now {now})")
    if resumes and changed and distributed.rank() == 0:
        # It is not refused, because a schedule may have changed options on purpose.
        warnings.warn(
            f"{where}: saved with {', '.join(changed)}. The running averages were computed with the old values; unless "
            "a schedule of yours changes them, pass the old values",
            stacklevel=3,
        )


def _read(path: Path) -> dict[str, Any]:
    """Return what `save_state` wrote: a snapshot, and hashes of pairs."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; training cannot resume from a checkpoint that was saved without it")
    try:
        with safe_open(path, framework="pt") as file:
            saved: dict[str, Any] = parse_json((file.metadata() or {})[FORMAT])
            saved["state"] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        intact = _digest(saved["state"]) == saved["sha256"] and "objective" in saved
        intact = intact and isinstance(saved["options"], dict) and isinstance(saved["pairs"], dict)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a complete state of an objective ({error}); use another checkpoint") from None
    if not intact:
        raise UserError(f"{path}: damaged, its checksum or its header is wrong; use another checkpoint")
    return saved


def _check_pairs(
    path: Path,
    saved: Mapping[str, str],
    current: Mapping[str, str],
) -> None:
    """Refuse a state whose rows belong to other pairs."""
    both = saved.keys() & current.keys()
    changed = sorted(key.partition(" ")[0] for key in both if saved[key] != current[key])
    if changed:
        raise UserError(
            f"{path}: {len(changed)} of {len(both)} compared texts, such as one of pair {changed[0]}, are not those "
            "that it was saved with, so the rows of its tables belong to other pairs; add the index to the same rows "
            "in the same order as then (before shuffling), or start without resuming"
        )


def _digest(state: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextlib.contextmanager
def _failing_together(path: Path) -> Iterator[None]:
    """Raise a UserError of one process on all of them: the others must not continue without it."""
    problem = None
    try:
        yield
    except UserError as error:
        problem = error
    failed = [rank for rank, (flag,) in enumerate(distributed.exchange([int(problem is not None)])) if flag]
    if problem is not None:
        raise problem
    if failed:
        raise UserError(f"{path}: process {failed[0]} failed; see its message")
