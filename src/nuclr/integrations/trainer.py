"""What the adapters to other trainers have in common.

`ObjectiveTrainerMixin` saves and loads objectives with every checkpoint of a Trainer of transformers or
sentence-transformers. `hash_pairs` lets a checkpoint recognize data that was numbered in another order.
"""

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from nuclr import distributed
from nuclr.errors import UserError
from nuclr.integrations.state import STATE_FILE, load_state, save_state
from nuclr.objectives import Objective, build

HASHED_PAIRS = 64
"""The number of pairs that `hash_pairs` reads."""

# The mixin goes in front of a Trainer, whose package may not be installed when this module is imported.
_Trainer: Any = object


class ObjectiveTrainerMixin(_Trainer):
    """Save and load objectives with the checkpoints of a Trainer, and check the training data before each training.

    Checkpoint folders get a file ``nuclr_objective.safetensors`` per objective. Resuming from a checkpoint without it
    is refused, because the tables of running averages would start again, and so is resuming with pairs that were
    numbered in another order. The best model is loaded with its own state.
    """

    def _objectives(self) -> Iterator[tuple[str, Objective, dict[str, str]]]:
        """Yield the subfolder of a checkpoint, the objective whose state is saved there, and hashes of its pairs."""
        raise NotImplementedError

    def _check_training(self) -> None:
        """Refuse training data that does not fit the objectives."""
        raise NotImplementedError

    def get_train_dataloader(self) -> Any:
        """Return the loader of the Trainer after checking that processes and training data fit the objectives."""
        if self.args.world_size != distributed.world_size():
            raise UserError(
                f"torch.distributed has {distributed.world_size()} processes, but the Trainer uses "
                f"{self.args.world_size}, so each would train on all pairs; set use_cpu=True in the training arguments"
            )
        self._check_training()
        return super().get_train_dataloader()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        for folder, objective, pairs in self._objectives():
            save_state(objective, Path(output_dir) / folder, pairs)
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            for folder, objective, pairs in self._objectives():
                load_state(objective, Path(checkpoint) / folder, pairs)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        for folder, objective, _ in self._objectives():
            best = Path(self.state.best_model_checkpoint) / folder
            if (best / STATE_FILE).is_file():  # there is none with save_only_model
                load_state(objective, best, resumes=False)


# -- objective and model -----------------------------------------------------------------------------------------------


def make_objective(objective: str | Objective, num_samples: int | None = None, **options: Any) -> Objective:
    """Return an objective that is given by its name and options, or already built.

    Raises:
        ValueError: If the name or an option is unknown, or options are given to an objective that is already built.

    """
    if isinstance(objective, str):
        return build(objective, num_samples=num_samples, **options)
    if options:
        raise ValueError(f"{', '.join(options)}: belong to the constructor of {type(objective).__name__}")
    return objective


def unit_norm(features: Tensor) -> Tensor:
    """Scale the last axis to unit norm, in float32 or float64."""
    return normalize(features if features.dtype == torch.float64 else features.float(), dim=-1)


def add_parameters(optimizer: torch.optim.Optimizer, objective: Objective) -> bool:
    """Let an optimizer train the parameters of an objective too, without weight decay; return whether it has any."""
    held: set[int] = set()
    for group in optimizer.param_groups:
        held.update(map(id, group["params"]))
    own = [parameter for parameter in objective.parameters() if parameter.requires_grad and id(parameter) not in held]
    if own:
        optimizer.add_param_group({"params": own, "weight_decay": 0.0})
    return bool(own)


def set_logit_scale(model: nn.Module, temperature: float) -> None:
    """Set the `logit_scale` of a CLIP model to the temperature that it is trained at.

    Models with a `logit_bias` (SigLIP) keep their values, because a temperature does not replace both.

    Args:
        model: Any model; one without this parameter is left as it is.
        temperature: tau; the scale becomes log(1 / tau).

    """
    scale = getattr(model, "logit_scale", None)
    if isinstance(scale, nn.Parameter) and getattr(model, "logit_bias", None) is None and scale.numel() == 1:
        scale.data.fill_(-math.log(temperature))


# -- data --------------------------------------------------------------------------------------------------------------


def stable_id(value: Any) -> int:
    """Return an integer for a value: integers themselves, and 64 bits of a hash for everything else.

    Example:
        >>> stable_id(7), stable_id("a cat") == stable_id("a cat"), stable_id("a cat") == stable_id("a dog")
        (7, True, False)

    """
    if isinstance(value, int | np.integer):
        return int(value)
    digest = hashlib.blake2b(str(value).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def hash_pairs(
    dataset: Any,
    index: np.ndarray,
    num_samples: int,
) -> dict[str, str]:
    """Return hashes of a few pairs, by which a checkpoint recognizes data that was numbered in another order.

    The pairs are evenly spaced over the numbers, so the rows of the data set may be in any order, and some may be
    missing. Only these rows are read.

    Args:
        dataset: A `datasets.Dataset`. Its columns of texts are hashed; without any, the result is empty.
        index: (rows,) the number of the pair in each row.
        num_samples: The number of pairs that got a number.

    Returns:
        "number column" -> hash of the text.

    Example:
        >>> from datasets import Dataset
        >>> pairs = Dataset.from_dict({"question": ["Why?", "How far?"], "answer": ["no", "a mile"]})
        >>> numbers = np.arange(2)
        >>> list(hash_pairs(pairs, numbers, 2))
        ['0 question', '1 question', '0 answer', '1 answer']
        >>> hash_pairs(pairs, numbers, 2) == hash_pairs(pairs.select([1, 0]), numbers[::-1], 2)
        True
        >>> hash_pairs(pairs, numbers, 2) == hash_pairs(pairs.select([1, 0]), numbers, 2)
        False

    """
    hashes = {}
    chosen = np.unique(np.linspace(0, num_samples - 1, HASHED_PAIRS).astype(np.int64))
    rows = np.flatnonzero(np.isin(index, chosen)).tolist()
    for column in dataset.column_names:
        if holds_text(dataset, column):
            texts = dataset.select_columns(column).with_format(None)[rows][column]
            for row, text in zip(rows, texts, strict=True):
                hashes[f"{index[row]} {column}"] = f"{stable_id(text):x}"
    return hashes


def read_column(dataset: Any, column: str) -> np.ndarray:
    """Return a column of a `datasets.Dataset` as an array: (rows,), or (rows, d) if its cells are lists of one length.

    Reading millions of rows through a shuffled data set takes minutes, and reading the table below it does not.

    Raises:
        ValueError: If the cells are lists of different lengths.

    """
    parts = []
    for chunk in filter(len, dataset.data.column(column).chunks):
        lists = hasattr(chunk, "value_lengths")
        values = np.asarray(chunk.flatten() if lists else chunk)
        parts.append(values.reshape(len(chunk), -1) if lists else values)
        if lists and len(np.unique(np.asarray(chunk.value_lengths()))) > 1:
            raise ValueError(f"{column}: lists of different lengths")
    whole = np.concatenate(parts)
    order = dataset._indices
    return whole if order is None else whole[order.column(0).to_numpy()]


def holds_text(dataset: Any, column: str) -> bool:
    """Return whether a column of a `datasets.Dataset` holds texts."""
    return getattr(dataset.features[column], "dtype", None) in ("string", "large_string")
