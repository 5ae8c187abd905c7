"""Objectives in the Trainer of Hugging Face transformers.

`NuclrTrainer` is `transformers.Trainer` with an objective in place of the model's own loss:

    train_dataset = add_index(train_dataset)
    trainer = NuclrTrainer(model, args, train_dataset=train_dataset, objective="nuclr")
    trainer.train()

For another subclass of the Trainer, write ``class MyTrainer(NuclrTrainerMixin, OtherTrainer)``.

Do not pass an objective as `compute_loss_func` with the index as `labels`. The Trainer takes the labels for tokens and
expects the loss to be a sum over them, divided by their number in all accumulated batches and all processes. It
therefore multiplies the loss by the number of processes and does not divide it by `gradient_accumulation_steps`, so
gradients are too large by both factors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nuclr import distributed
from nuclr.errors import UserError, require
from nuclr.integrations.trainer import (
    ObjectiveTrainerMixin,
    add_parameters,
    hash_pairs,
    make_objective,
    read_column,
    set_logit_scale,
    stable_id,
    unit_norm,
)
from nuclr.objectives import Objective, ObjectiveOutput, backward_in_micro_batches

require("accelerate", purpose=__name__)
_Trainer: Any = require("transformers", purpose=__name__).Trainer

__all__ = ["NuclrTrainer", "NuclrTrainerMixin", "add_index", "embeddings"]

COLUMNS = ("index", "x_id", "y_id")
"""The columns that go to the objective and not to the model."""

Encode = Callable[[nn.Module, dict[str, Any]], tuple[Tensor, ...]]

# ---------------------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------------------


def add_index(
    dataset: Any,
    x_id: str | None = None,
    y_id: str | None = None,
) -> Any:
    """Add the columns that an objective needs: the index of each pair, and ids of its two samples.

    The index is the position in the data set. It must be the same in every run that shares a checkpoint, so add it
    after filtering and before shuffling.

    Args:
        dataset: A `datasets.Dataset`. The samples of other data sets need these columns of their own.
        x_id: A column that identifies the sample on side x, such as the file name of an image with several captions.
            Pairs with equal values are not negatives of each other. Integers are used as they are; other values are
            hashed as text.
        y_id: As `x_id` for side y, such as the caption itself.

    Returns:
        The data set with the columns "index" and, if asked for, "x_id" and "y_id".

    Raises:
        UserError: If the data set is a stream or of another package, or lacks a named column.

    Example:
        >>> from datasets import Dataset
        >>> add_index(Dataset.from_dict({"caption": ["a cat", "a dog"]}))[1]
        {'caption': 'a dog', 'index': 1}

    """
    named = {name: column for name, column in (("x_id", x_id), ("y_id", y_id)) if column is not None}
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "add_column"):
        raise UserError(
            f"{type(dataset).__name__} is a stream, or not a datasets.Dataset; let its samples have an 'index', the "
            "stable number of each, for example by map()"
        )
    for name, column in named.items():
        if column not in dataset.column_names:
            columns = ", ".join(dataset.column_names)
            raise UserError(f"{name}={column!r} is not a column of the data set; it has {columns}")
    for name, column in named.items():
        dataset = dataset.add_column(name, np.array([stable_id(value) for value in dataset[column]], dtype=np.int64))
    return dataset.add_column("index", np.arange(len(dataset)))


class IndexCollator:
    """A collator that hands the model's inputs to another collator and adds the index and the ids to the batch.

    Args:
        collate: The collator of the other columns; it does not see the index.

    Example:
        >>> collate = IndexCollator(lambda samples: {"width": torch.tensor([sample["width"] for sample in samples])})
        >>> collate([{"width": 3, "index": 8}, {"width": 4, "index": 2}])
        {'width': tensor([3, 4]), 'index': tensor([8, 2])}

    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Collate a list of samples."""
        names = [name for name in COLUMNS if any(name in sample for sample in samples)]
        batch = self.collate([{key: sample[key] for key in sample if key not in names} for sample in samples])
        for name in names:
            batch[name] = torch.as_tensor(np.asarray([np.asarray(sample[name]) for sample in samples]))
        return batch


# ---------------------------------------------------------------------------------------------------------------------
# Model
# ---------------------------------------------------------------------------------------------------------------------


def embeddings(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return `image_embeds` and `text_embeds` of a model such as CLIPModel or SiglipModel.

    Args:
        model: The model, possibly wrapped in DDP.
        inputs: Its keyword arguments.

    Returns:
        The two embeddings, (b, d) each.

    Raises:
        UserError: If the model does not return both.

    """
    outputs = model(**inputs)
    names = ", ".join(map(str, outputs)) if isinstance(outputs, Mapping) else type(outputs).__name__
    if not isinstance(outputs, Mapping) or not {"image_embeds", "text_embeds"} <= outputs.keys():
        raise UserError(
            f"{type(getattr(model, 'module', model)).__name__} must return image_embeds and text_embeds, but returned "
            f"{names}; pass encode=, a function of (model, inputs) that returns the embeddings (x, y) of each pair"
        )
    return outputs["image_embeds"], outputs["text_embeds"]


# ---------------------------------------------------------------------------------------------------------------------
# Trainer
# ---------------------------------------------------------------------------------------------------------------------


class NuclrTrainerMixin(ObjectiveTrainerMixin):
    """The changes to a `transformers.Trainer` that trains with an objective of this package.

    The loss of a batch is `objective` on the normalized embeddings of both towers. Under DDP the batch is that of all
    processes, and weights are those of one process with the whole batch. The state of the objective is part of the
    Trainer's checkpoints. Evaluation reports the loss and leaves the state alone; `compute_metrics` gets the normalized
    features (x, y) as predictions.

    With `gradient_accumulation_steps`, the loss is the mean over the accumulated batches, each with its own negatives.
    For a larger batch in the same memory, raise `per_device_train_batch_size` and set `micro_batch`.

    Args:
        *args: Arguments of the Trainer.
        objective: An objective, or a name such as "nuclr" for one with default options and the size of `train_dataset`.
            Its learnt parameters, if any, are added to the optimizer.
        encode: A function of (model, inputs) that returns the embeddings (x, y) of each pair, (b, d) or (b, m, d), or
            (x, y, negatives) with hard negatives of x, (b, k, d). By default, `image_embeds` and `text_embeds` of the
            model. It must call the model itself, which is wrapped under DDP, and not the model's methods.
        micro_batch: The number of pairs to encode at once, fewer than `per_device_train_batch_size`. The gradient is
            that of the whole batch, at the cost of a second forward pass; see
            `nuclr.objectives.backward_in_micro_batches`.
        **kwargs: Arguments of the Trainer.

    Raises:
        UserError: If `compute_loss_func` is given, or `micro_batch` is not possible.

    """

    # The loss is a mean over the batch, so the Trainer divides it by the number of accumulated batches.
    loss_is_scaled_for_ga = False

    data_collator: Any
    label_names: list[str]
    _signature_columns: list[str]

    def __init__(
        self,
        *args: Any,
        objective: Objective | str,
        encode: Encode | None = None,
        micro_batch: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.compute_loss_func is not None:
            raise UserError("compute_loss_func and objective are two losses; leave out compute_loss_func")
        if micro_batch is not None and (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            raise UserError("micro_batch works on one process and with DDP, not with DeepSpeed or FSDP; leave it out")
        pairs = len(self.train_dataset) if hasattr(self.train_dataset, "__len__") else None
        self.objective = make_objective(objective, pairs).to(self.args.device)
        self.micro_batch = micro_batch
        self._encode = encode
        self._zeroed_at = -1
        self._latest: dict[str, Tensor] = {}
        self._pairs: dict[str, str] = {}  # hashes of some pairs
        self.data_collator = IndexCollator(self.data_collator)
        self.can_return_loss = True  # evaluation has a loss although no column is a label
        if self.args.label_names is None:
            self.label_names = []

    # -- batches ------------------------------------------------------------------------------------------------------

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns = list(dict.fromkeys([*self._signature_columns, *COLUMNS]))

    def _check_training(self) -> None:
        """Remember hashes of some pairs, by which a checkpoint recognizes data in another order."""
        pairs = getattr(self.objective, "num_samples", None)
        if "index" in getattr(self.train_dataset, "column_names", ()) and pairs is not None:
            self._pairs = hash_pairs(self.train_dataset, read_column(self.train_dataset, "index"), pairs)

    def _split(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the inputs of the model, and those of the objective."""
        ignored = (*COLUMNS, "return_loss")  # with return_loss, the model would compute its own loss as well
        own = {name: value for name, value in inputs.items() if name not in ignored}
        columns = {name: inputs[name] for name in COLUMNS if name in inputs}
        return own, columns

    # -- loss ---------------------------------------------------------------------------------------------------------

    def _features(self, model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
        return [unit_norm(side) for side in (self._encode or embeddings)(model, inputs)]

    def _loss(
        self,
        columns: dict[str, Any],
        training: bool,
        x: Tensor,
        y: Tensor,
        negatives: Tensor | None = None,
    ) -> ObjectiveOutput:
        self.objective.train(training)
        if not training:
            columns.pop("index", None)  # the index of a held-out pair does not belong to the state
        elif self.objective.needs_index and "index" not in columns:
            raise UserError(
                "the training data has no column 'index' with the number of each pair; write train_dataset = "
                "nuclr.integrations.transformers.add_index(train_dataset); set_transform() must keep it"
            )
        if len(x) * distributed.world_size() == 1:  # no negatives
            hard = 0 if negatives is None else negatives.sum()
            return ObjectiveOutput(0 * (x.sum() + y.sum() + hard), {})
        out: ObjectiveOutput = self.objective(x, y, **columns, negatives=negatives)
        if training:
            self._latest = out.metrics
        return out

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss of a batch and, if asked for, the normalized features under "x" and "y"."""
        del num_items_in_batch  # a count of labels
        inputs, columns = self._split(inputs)
        features = self._features(model, inputs)
        loss = self._loss(columns, model.training and torch.is_grad_enabled(), *features).loss
        return (loss, {"x": features[0], "y": features[1]}) if return_outputs else loss

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Compute the loss of a batch and accumulate the gradients."""
        if self._zeroed_at != self.state.global_step:  # the Trainer resets only the gradients of the model
            self.objective.zero_grad()
            self._zeroed_at = self.state.global_step
        if self.micro_batch is None:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):  # optimizers without a schedule
            self.optimizer.train()
        inputs, columns = self._split(self._prepare_inputs(inputs))
        with self.compute_loss_context_manager():
            out = backward_in_micro_batches(
                partial(self._features, model),
                (inputs,),
                partial(self._loss, columns, True),
                self.micro_batch,
                scale=self._scaled,
            )
        return out.loss / self.current_gradient_accumulation_steps

    def _scaled(self, loss: Tensor) -> Tensor:
        loss = loss / self.current_gradient_accumulation_steps
        scaler = self.accelerator.scaler
        return loss if scaler is None else scaler.scale(loss)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the metrics of the objective next to the training loss."""
        if "loss" in logs:
            logs |= {name: float(value) for name, value in self._latest.items() if value.numel() == 1}
        super().log(logs, *args, **kwargs)

    # -- optimizer and checkpoints ------------------------------------------------------------------------------------

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer of the model and of the objective's own parameters."""
        self._zeroed_at = -1
        if self._encode is None:
            model = self.accelerator.unwrap_model(self.model)
            for parameter in (getattr(model, "logit_scale", None), getattr(model, "logit_bias", None)):
                if isinstance(parameter, nn.Parameter):
                    parameter.requires_grad_(False)  # DDP fails if a parameter takes no part in the loss
        optimizer = super().create_optimizer(*args, **kwargs)
        add_parameters(optimizer, self.objective)
        return optimizer

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the model, with the objective's temperature as its `logit_scale`."""
        if self._encode is None:
            set_logit_scale(self.accelerator.unwrap_model(self.model), self.objective.current_temperature)
        super().save_model(*args, **kwargs)

    def _objectives(self) -> Iterator[tuple[str, Objective, dict[str, str]]]:
        yield "", self.objective, self._pairs


class NuclrTrainer(NuclrTrainerMixin, _Trainer):
    """`transformers.Trainer` with an objective, see `NuclrTrainerMixin`."""
