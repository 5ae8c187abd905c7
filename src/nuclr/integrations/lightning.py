"""Lightning: a callback that carries an objective, so that `training_step` can call `self.trainer.nuclr(x, y, index)`.

The objective must not be a submodule of the LightningModule. DistributedDataParallel broadcasts all buffers of its
module in every step, which are the tables with one row per pair here, and `load_from_checkpoint` would expect them. The
callback keeps the objective outside, and does what Lightning does for submodules: it moves the objective to the device,
saves it in checkpoints and restores it, and hands its parameters (a learnt temperature, networks) to the optimizer.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from nuclr import distributed
from nuclr.arrays import Array, Integers
from nuclr.errors import UserError, require
from nuclr.integrations.state import restore, snapshot
from nuclr.integrations.trainer import make_objective
from nuclr.objectives import Objective, ObjectiveOutput, backward_in_micro_batches
from nuclr.objectives.base import as_record
from nuclr.objectives.state import StatePlacement

Callback: Any = require("lightning.pytorch", purpose="nuclr.integrations.lightning").Callback

# torch's DistributedDataParallel reads this attribute; its _set_params_and_buffers_to_ignore_for_model writes it.
_DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"


class NuclrCallback(Callback):
    """Carry an objective through training, validation and checkpoints of a Lightning Trainer.

    In `training_step`, ``self.trainer.nuclr(x, y, index).loss`` is the loss. In training it updates the state of the
    objective. In validation, in tests and in the sanity check, the state stays as it is and `index` is ignored, because
    it numbers other pairs.

    Parameters of the objective are trained by the optimizer that `configure_optimizers` makes of ``self.parameters()``.
    If it makes groups of its own, add ``self.trainer.nuclr.parameters()`` to one of them; if they are in no optimizer,
    `fit` is refused.

    With `accumulate_grad_batches`, every batch is contrasted only with itself: the gradient is a mean over batches, and
    there are no more negatives than without. `backward` gives the gradient of a large batch in the memory of a small
    one.

    Args:
        objective: The name of an objective, such as "nuclr" or "sogclr", or an objective.
        attribute: The attribute of the Trainer by which the LightningModule finds this callback. Two objectives need
            two callbacks with different attributes.
        **options: Arguments of the objective, such as `num_samples` and `temperature`; see `nuclr.objectives.build`.

    Attributes:
        objective: The objective. With sharded state it is built when the processes have been started.

    Raises:
        ValueError: If the name or an option is unknown, or a value is out of range.

    Example:
        >>> from nuclr.integrations.lightning import NuclrCallback
        >>> callback = NuclrCallback("nuclr", num_samples=1000, temperature=0.05)
        >>> trainer = lightning.Trainer(callbacks=[callback])  # doctest: +SKIP
        >>> callback.objective.num_samples
        1000

    """

    objective: Objective

    def __init__(self, objective: str | Objective = "nuclr", *, attribute: str = "nuclr", **options: Any) -> None:
        self._build = functools.partial(make_objective, objective, **options)
        if not as_record("state", options.get("state", {}), StatePlacement()).sharding:
            self.objective = self._build()
        self._attribute = attribute
        self._part = f"_{attribute}_parameters"  # the submodule that holds the objective's parameters during fit
        self._trainer: Any = None

    @property
    def state_key(self) -> str:
        """The key of the objective's state in checkpoints."""
        return str(self._generate_state_key(attribute=self._attribute))

    # -- in training_step ----------------------------------------------------------------------------------------------

    def __call__(
        self,
        x: Array,
        y: Array,
        index: Integers | None = None,
        x_id: Integers | None = None,
        y_id: Integers | None = None,
        negatives: Array | None = None,
    ) -> ObjectiveOutput:
        """Compute the loss of one batch; in training, also update the state. See `Objective.forward`.

        Args:
            x: Array with unit norm, (b, d), or (b, m, d) with m views of each sample.
            y: As `x`; row i of x and row i of y are a pair.
            index: (b,) numbers of the pairs in the training set. Objectives with state need it in training.
            x_id: Ids of the samples behind x. Pairs that share an id are not negatives of each other.
            y_id: As `x_id` for y.
            negatives: (b, k, d) hard negatives of each x, with unit norm.

        Returns:
            `loss`, and `metrics` to log.

        Raises:
            ValueError: If shapes, dtypes or values are not as described; with several processes, on all of them.
            UserError: If the callback does not belong to a running Trainer.

        """
        if self._trainer is None:
            raise UserError("the objective has no Trainer; write Trainer(callbacks=[...]) with this NuclrCallback")
        training = self._trainer.training
        self.objective.train(training)
        output: ObjectiveOutput = self.objective(
            x,
            y,
            index if training else None,
            x_id,
            y_id,
            negatives,
        )
        return output

    def backward(
        self,
        encode: Callable[..., Tensor | Sequence[Tensor]],
        inputs: tuple[Any, ...] | Mapping[str, Any],
        index: Integers | None = None,
        *,
        micro_batch: int,
        x_id: Integers | None = None,
        y_id: Integers | None = None,
        pairs: int | None = None,
        scale: float = 1.0,
    ) -> ObjectiveOutput:
        """Compute the loss of a large batch and its exact gradients, encoding `micro_batch` pairs at a time.

        It takes the place of calling the objective and ``self.manual_backward``, and needs manual optimization. The
        gradients are those of the whole batch, dropout included, and are averaged over the processes; see
        `nuclr.objectives.backward_in_micro_batches`.

        Args:
            encode: Takes the inputs of some pairs, returns their features x, y and, if there are any, hard negatives.
                Usually a method of the module.
            inputs: The positional arguments of `encode` as a tuple, or its keyword arguments as a dict.
            index: (b,) numbers of the pairs of the whole batch.
            micro_batch: Number of pairs to encode at once.
            x_id: As in `__call__`.
            y_id: As in `__call__`.
            pairs: Number of pairs in `inputs`. Default: the number of rows of the shortest input.
            scale: Factor of the loss before the backward pass, such as 1/4 to accumulate four batches.

        Returns:
            The detached and unscaled loss, and `metrics` to log.

        Raises:
            UserError: If the module uses automatic optimization.
            ValueError: As in `__call__` and `backward_in_micro_batches`.

        """
        module = None if self._trainer is None else self._trainer.lightning_module
        if module is None or module.automatic_optimization:
            raise UserError(
                f"trainer.{self._attribute}.backward needs manual optimization, because Lightning would erase the "
                "gradients: set self.automatic_optimization = False, and call zero_grad() and step() of "
                "self.optimizers() around it"
            )
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)  # of fp16 mixed precision

        def scaled(loss: Tensor) -> Tensor:
            return (loss if scaler is None else scaler.scale(loss)) * scale

        def contrast(x: Tensor, y: Tensor, negatives: Tensor | None = None) -> ObjectiveOutput:
            return self(x, y, index, x_id, y_id, negatives)

        output = backward_in_micro_batches(
            encode,
            inputs,
            contrast,
            micro_batch,
            pairs=pairs,
            scale=scaled,
        )
        # Lightning synchronizes gradients only in its own backward pass.
        _average_gradients(module)
        return output

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the objective, for a `configure_optimizers` that makes groups of parameters."""
        return self.objective.parameters()

    # -- hooks of Lightning --------------------------------------------------------------------------------------------

    def setup(
        self,
        trainer: Any,
        pl_module: Any,
        stage: str,
    ) -> None:
        """Attach the objective to the Trainer. The processes have been started, but the module is not yet wrapped."""
        if getattr(trainer, self._attribute, self) is not self:
            raise UserError(
                f"Trainer has an attribute {self._attribute!r} already; name another, as in "
                "NuclrCallback(..., attribute='second')"
            )
        if not hasattr(self, "objective"):
            self.objective = self._build()
        for name, module in pl_module.named_modules():
            if module is self.objective:
                raise UserError(
                    f"the objective is a submodule of the LightningModule (self.{name}), so DDP would broadcast its "
                    f"tables in every step; remove it there, and call self.trainer.{self._attribute}(x, y, index)"
                )
        self.objective.to(trainer.strategy.root_device)
        self._trainer = trainer
        setattr(trainer, self._attribute, self)
        pl_module._modules.pop(self._part, None)  # of a run that ended with an error
        if stage == "fit" and any(parameter.requires_grad for parameter in self.objective.parameters()):
            part = _Parameters(self.objective)
            pl_module.add_module(self._part, part)
            # An objective's gradients are the same on all processes, and networks have no shape before the first batch.
            ignored = {*getattr(pl_module, _DDP_IGNORES, ()), *(f"{self._part}.{name}" for name in part.names)}
            setattr(pl_module, _DDP_IGNORES, sorted(ignored))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Give the LightningModule back without the objective's parameters."""
        pl_module._modules.pop(self._part, None)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Check that an optimizer has the parameters of the objective."""
        in_optimizers: set[int] = set()
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                in_optimizers.update(map(id, group["params"]))
        named = self.objective.named_parameters()
        missing = [name for name, value in named if value.requires_grad and id(value) not in in_optimizers]
        if missing:
            raise UserError(
                f"parameters of the objective are in no optimizer ({', '.join(missing)}); in configure_optimizers, use "
                f"self.parameters(), or add self.trainer.{self._attribute}.parameters() to a group"
            )

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Add the state to the checkpoint. All processes call this; process 0 gets all rows of all tables."""
        saved = snapshot(self.objective)
        if saved["state"]:
            checkpoint[self.state_key] = saved

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Restore the state from the checkpoint; warn if training resumes with other options than it was saved with.

        Raises:
            UserError: If training resumes and the checkpoint has no state, or that of another objective.

        """
        saved = checkpoint.get(self.state_key)
        resumes = trainer.state.fn == "fit"
        if saved is not None:
            restore(
                self.objective,
                saved,
                "the checkpoint",
                resumes,
            )
        elif resumes and self.objective.state_dict():
            raise UserError(
                f"the checkpoint has no state of {type(self.objective).__name__}: it was saved without this "
                "NuclrCallback, so training cannot resume from it; to start from its weights, load them into the "
                "LightningModule and call fit without ckpt_path"
            )


class _Parameters(nn.Module):
    """The parameters of an objective, without its tables and outside of state dicts.

    As a part of the LightningModule, they are moved to the device and found by ``self.parameters()``. The callback
    saves them.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.names = []
        for name, parameter in objective.named_parameters():
            self.names.append(name.replace(".", "_"))
            self.register_parameter(self.names[-1], parameter)

    def _save_to_state_dict(
        self,
        destination: Any,
        prefix: str,
        keep_vars: bool,
    ) -> None:
        pass

    def _load_from_state_dict(self, *args: Any) -> None:
        pass


def _average_gradients(module: nn.Module) -> None:
    """Replace all gradients by their means over the processes."""
    processes = distributed.world_size()
    if processes == 1:
        return
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        work.wait()
    for gradient in gradients:
        gradient.div_(processes)
