"""Data and model of a run, from its settings, checked against each other."""

from typing import cast

import numpy as np
import torch

from nuclr.errors import UserError
from nuclr.models import DualEncoder
from nuclr.runs import components as parts
from nuclr.runs.settings import Settings
from nuclr.training.validation import Validation


def build(
    settings: Settings, device: torch.device, loaders: parts.Loaders | None = None
) -> tuple[parts.Source, Validation, DualEncoder]:
    """Training pairs, what is evaluated in between, and the model."""
    data = settings.data
    source, held_out = parts.open_train(data), parts.open_val(data)
    if held_out is not None:
        parts.check_compatible(source, held_out)
    classes = parts.open_classes(data, source.pairs)
    model = parts.make_model(settings.model, source, settings.seed).to(device)
    if classes is not None and (model.images is None or model.tokenizer is None):
        raise UserError("data.classes needs images and texts, but this model takes vectors; leave it out")
    val_loader = parts.make_loader(data, held_out.pairs, model, loaders) if held_out else None
    class_loader = parts.make_loader(data, classes, model, loaders) if classes is not None else None
    return source, Validation(held_out, val_loader, classes, class_loader, settings.evaluate.batch_size), model
