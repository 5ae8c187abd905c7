"""Build what a run trains with: pairs, validation, model, objective, optimizer, inputs."""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from nuclr import distributed
from nuclr.data import epoch_order
from nuclr.data.selection import Source, check_compatible
from nuclr.errors import UserError
from nuclr.models import DualEncoder
from nuclr.runs import components
from nuclr.runs.features import autocast
from nuclr.runs.matryoshka import Matryoshka
from nuclr.runs.settings import Optimizer, Settings
from nuclr.training.batch_inputs import TrainingInputs
from nuclr.training.schedules import LR_FACTOR
from nuclr.training.validation import Validation

NETWORK_LR = 1e-3  # largest learning rate of the objective's networks


class Parts:
    """The parts of a run, checked against each other.

    Attributes:
        source: the training pairs.
        validation: the held-out pairs and labeled images.
        model: the dual encoder, on its device.
        encoders: the model, in `DistributedDataParallel` if there are several processes. The objective is outside,
            since it gathers features itself.
        groups: the groups of pairs that views come from, which have a row of the objective's state each; None if every
            pair has one.
        objective: the objective, or the sum of one per width.
        full: the objective of the full width.
        optimizer: of the model and of the objective's parameters.
        loader: of the training pairs.
        inputs: makes the encoders' inputs.

    Args:
        settings: of the run.
        device: of the encoders.
        loaders: shared by several runs on the same pairs.

    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        loaders: components.Loaders | None = None,
    ) -> None:
        self._settings = settings
        self._device = device
        self.source, self.validation, self.model = build_parts(settings, device, loaders)
        pairs = self.source.pairs
        self.groups = components.view_groups(settings.data, self.source)
        count = self.groups.count if self.groups else len(pairs)
        stored = self.groups.stored() if self.groups else {}
        views = {f"{side}_views": pairs_of_views.shape[1] for side, pairs_of_views in stored.items()}
        self.full = settings.objective.build(count, views).to(device)
        self.objective = Matryoshka(self.full, self.validation.widths) if self.validation.widths else self.full
        self.loader = components.make_loader(
            settings.data,
            pairs,
            self.model,
            loaders,
            smallest_crop=settings.augment.smallest_crop,
        )
        self.inputs = TrainingInputs(
            settings.augment,
            {"x": settings.data.x.views, "y": settings.data.y.views},
            pairs,
            self.model,
            settings.seed,
            self.groups,
        )
        self.optimizer = make_optimizer(self.model, self.objective, settings.optimizer)
        self.encoders = DistributedDataParallel(self.model) if distributed.world_size() > 1 else self.model

    def order(self, epoch: int) -> np.ndarray:
        """Return the pairs that an epoch visits, in order."""
        return epoch_order(
            self.source.pairs,
            self._settings.seed,
            epoch,
            self._settings.data.one_pair_per_x,
            self.source.numbers,
            self.groups.row if self.groups else None,
        )

    def encode(self, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        """Return the features of both sides, in the precision of the run."""
        with autocast(self._device, self._settings.precision):
            return cast(tuple[Tensor, Tensor], self.encoders(x, y))


def build_parts(
    settings: Settings,
    device: torch.device,
    loaders: components.Loaders | None = None,
) -> tuple[Source, Validation, DualEncoder]:
    """Return the training pairs, the validation and the model of a run, checked against each other."""
    data = settings.data
    source = components.open_train(data)
    if len(source.numbers) < 2:
        left = " that data.keep lists and that can be used" if data.keep else " that can be used" if source.bad else ""
        raise UserError(
            f"data.train={data.train}: has only one pair{left}; training contrasts pairs with each other and needs at "
            "least 2"
        )
    # Views of held-out images are not ranked: which views are similar depends on the augmentation alone.
    named = {} if data.contrasts_views else components.open_held_out(components.name_sides(data, source.pairs))
    held_out = {data.val_key(name): opened for name, opened in named.items()}
    for key, opened in held_out.items():
        check_compatible(source, opened, key)
    classes = components.open_classes(data, source.pairs)
    model = components.make_model(settings.model, source, settings.seed).to(device)
    if classes is not None and not model.takes("image"):
        kinds = " and ".join(dict.fromkeys(f"{kind}s" for kind in source.pairs.modalities))
        raise UserError(f"data.classes needs a model that takes images, but this one takes {kinds}; leave it out")
    if not settings.evaluate.head and held_out:
        components.check_tower_widths(model)
    outside = data.outside_training()
    val_loaders = {key: components.make_loader(outside, own.pairs, model, loaders) for key, own in held_out.items()}
    prefixes = {data.val_key(name): data.val_prefix(name) for name in named}
    class_loader = None if classes is None else components.make_class_loader(data, classes, model, loaders)
    validation = Validation(
        held_out,
        prefixes,
        val_loaders,
        classes,
        class_loader,
        settings.evaluate,
        components.matryoshka_widths(settings, model),
    )
    return source, validation, model


# -- the optimizer -----------------------------------------------------------------------------------------------------


def make_optimizer(
    model: nn.Module,
    objective: nn.Module,
    settings: Optimizer,
) -> AdamW:
    """Return the optimizer of a run; the schedule sets its learning rate before each step.

    Matrices and kernels of the model have weight decay. Its norms and biases have none, and neither have the parameters
    of the objective. The objective's networks are trained at most at NETWORK_LR: a learning rate that suits the model,
    such as 0.1 for a bag of words, may be far too large for them.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    networks = []
    learnt = []
    for name, parameter in objective.named_parameters():
        if "_networks." in name:
            networks.append(parameter)
        elif parameter.requires_grad:
            learnt.append(parameter)
    if not (trained or learnt):
        raise UserError(
            "nothing to train: model.x.frozen and model.y.frozen are true and both heads are none; "
            "unfreeze one side or give it a head"
        )
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2] + learnt, "weight_decay": 0.0},
        {"params": networks, "weight_decay": 0.0, LR_FACTOR: min(1.0, NETWORK_LR / settings.lr)},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )


def clipped_parameters(optimizer: AdamW) -> list[nn.Parameter]:
    """Return the parameters whose common gradient norm is limited: all but those of the objective's networks."""
    return [parameter for group in optimizer.param_groups if LR_FACTOR not in group for parameter in group["params"]]
