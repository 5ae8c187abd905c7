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

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from nuclr import distributed
from nuclr.errors import UserError, require
from nuclr.integrations.index import COLUMNS, IndexCollator, add_index, arrow_chunks, hash_pairs
from nuclr.integrations.state import STATE_FILE, load_state, save_state
from nuclr.objectives import Objective, ObjectiveOutput, backward_in_micro_batches, build

__all__ = ["NuclrTrainer", "NuclrTrainerMixin", "add_index", "embeddings", "set_logit_scale"]  # noqa: F822

# The mixin goes in front of a Trainer, whose package may not be installed when this module is imported.
_Trainer: Any = object

NO_INDEX = (
    "has no column 'index' with the number of each pair; write train_dataset = "
    "nuclr.integrations.transformers.add_index(train_dataset)"
)

Encode = Callable[[nn.Module, dict[str, Any]], tuple[Tensor, Tensor]]


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
    if isinstance(outputs, Mapping):
        x, y = outputs.get("image_embeds"), outputs.get("text_embeds")
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            return x, y
    returned = ", ".join(map(str, outputs)) if isinstance(outputs, Mapping) else type(outputs).__name__
    inner = getattr(model, "module", model)
    raise UserError(
        f"{type(inner).__name__} must return image_embeds and text_embeds, but returned {returned}; pass "
        "encode=, a function of (model, inputs) that returns the two embeddings (x, y) of each pair"
    )


def set_logit_scale(model: nn.Module, temperature: float) -> None:
    """Set the `logit_scale` of a CLIP model to the temperature that it is trained at.

    Models with a `logit_bias` (SigLIP) keep their values, because a temperature does not replace both.

    Args:
        model: Any model; one without this parameter is left as it is.
        temperature: tau; the scale becomes log(1 / tau).

    """
    scale, bias = getattr(model, "logit_scale", None), getattr(model, "logit_bias", None)
    if isinstance(scale, nn.Parameter) and bias is None and scale.numel() == 1:
        scale.data.fill_(-math.log(temperature))


# ---------------------------------------------------------------------------------------------------------------------
# Trainer
# ---------------------------------------------------------------------------------------------------------------------


class NuclrTrainerMixin(_Trainer):
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
        encode: A function of (model, inputs) that returns the embeddings (x, y) of each pair, (b, d) or (b, m, d). By
            default, `image_embeds` and `text_embeds` of the model. It must call the model itself, which is wrapped
            under DDP, and not the model's methods.
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
        if isinstance(objective, str):
            if not hasattr(self.train_dataset, "__len__"):
                raise UserError(
                    f"objective={objective!r} needs the number of pairs, but train_dataset has no length; pass "
                    f"objective=nuclr.build({objective!r}, num_samples=...)"
                )
            objective = build(objective, num_samples=len(self.train_dataset))
        self.objective = objective.to(self.args.device)
        self.micro_batch = micro_batch
        self._encode = encode
        self._has_own_optimizer = self.optimizer is None
        self._zeroed_at = -1
        self._latest: dict[str, Tensor] = {}
        self.data_collator = IndexCollator(self.data_collator)
        self.can_return_loss = True  # evaluation has a loss although no column is a label
        if self.args.label_names is None:
            self.label_names = []

    # -- batches ------------------------------------------------------------------------------------------------------

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns = list(dict.fromkeys([*self._signature_columns, *COLUMNS]))

    def get_train_dataloader(self) -> Any:
        """Return the loader of the Trainer after checking that processes and training data fit the objective."""
        if self.args.world_size != distributed.world_size():
            raise UserError(
                f"torch.distributed has {distributed.world_size()} processes, but the Trainer uses "
                f"{self.args.world_size}, so each would train on all pairs; without an accelerator, set use_cpu=True "
                "in the training arguments"
            )
        columns = getattr(self.train_dataset, "column_names", None)
        if columns is not None and "index" not in columns and self.objective.needs_index:
            raise UserError(f"the training data {NO_INDEX} (the columns are {', '.join(columns)})")
        pairs, size = getattr(self.train_dataset, "__len__", lambda: 0)(), self._train_batch_size
        if distributed.world_size() == 1 and pairs % size == 1 and not self.args.dataloader_drop_last:
            raise UserError(
                f"the last batch of {pairs:,} pairs in batches of {size} has one pair, which leaves no negatives; set "
                "dataloader_drop_last=True"
            )
        return super().get_train_dataloader()

    def _split(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the inputs of the model, and those of the objective."""
        ignored = (*COLUMNS, "return_loss")  # with return_loss, the model would compute its own loss as well
        return {k: v for k, v in inputs.items() if k not in ignored}, {k: inputs[k] for k in COLUMNS if k in inputs}

    # -- loss ---------------------------------------------------------------------------------------------------------

    def _features(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        x, y = (self._encode or embeddings)(model, inputs)
        x, y = (side if side.dtype == torch.float64 else side.float() for side in (x, y))
        return normalize(x, dim=-1), normalize(y, dim=-1)

    def _loss(self, columns: dict[str, Any], training: bool, x: Tensor, y: Tensor) -> ObjectiveOutput:
        self.objective.train(training)
        if not training:
            # The index of a held-out pair does not belong to the state.
            if len(x) * distributed.world_size() < 2:
                return ObjectiveOutput(x.new_zeros(()), {})
            return self.objective(x, y, x_id=columns.get("x_id"), y_id=columns.get("y_id"))
        if self.objective.needs_index and "index" not in columns:
            raise UserError(f"the training data {NO_INDEX}; if it was added, set_transform() must keep it")
        out: ObjectiveOutput = self.objective(x, y, **columns)
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
        x, y = self._features(model, inputs)
        loss = self._loss(columns, model.training and torch.is_grad_enabled(), x, y).loss
        return (loss, {"x": x, "y": y}) if return_outputs else loss

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
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
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        own = [p for p in self.objective.parameters() if p.requires_grad and id(p) not in held]
        if own and not self._has_own_optimizer:
            raise UserError(
                f"the optimizer in optimizers= lacks {len(own)} parameters of {type(self.objective).__name__}; add "
                "objective.parameters() to it"
            )
        if own:
            optimizer.add_param_group({"params": own, "weight_decay": 0.0})
        return optimizer

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the model, with the objective's temperature as its `logit_scale`."""
        if self._encode is None:
            set_logit_scale(self.accelerator.unwrap_model(self.model), self.objective.current_temperature)
        super().save_model(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        save_state(self.objective, output_dir, self._hash_pairs())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            load_state(self.objective, checkpoint, self._hash_pairs())

    def _hash_pairs(self) -> dict[str, str]:
        """Return hashes of some training pairs, if the data is a `datasets.Dataset` and the objective numbers them."""
        dataset, pairs = self.train_dataset, getattr(self.objective, "num_samples", None)
        is_table = hasattr(dataset, "with_format") and hasattr(dataset, "__len__")  # a stream has no length
        if pairs is None or not is_table or "index" not in dataset.column_names:
            return {}
        chunks, rows = arrow_chunks(dataset, "index")
        return hash_pairs(dataset, np.concatenate(chunks)[rows], pairs)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        best = self.state.best_model_checkpoint
        if (Path(best) / STATE_FILE).is_file():  # there is none with save_only_model
            load_state(self.objective, best, resumes=False)


def __getattr__(name: str) -> Any:
    """Make `NuclrTrainer` on first use, because its base class is that of a package that may not be installed."""
    if name != "NuclrTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("accelerate", purpose=f"{__name__}.{name}")
    trainer = require("transformers", purpose=f"{__name__}.{name}").Trainer
    doc = f"`transformers.Trainer` with an objective.\n\n{NuclrTrainerMixin.__doc__}"
    made = type(name, (NuclrTrainerMixin, trainer), {"__doc__": doc, "__module__": __name__})
    globals()[name] = made
    return made


def __dir__() -> list[str]:
    return [*globals(), "NuclrTrainer"]
