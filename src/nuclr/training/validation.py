"""Metrics on held-out pairs: retrieval in both directions, and zero-shot classification if there are classes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nuclr.data import Loader
from nuclr.errors import UserError
from nuclr.evaluation import class_features, retrieval_metrics, zero_shot_metrics
from nuclr.models import DualEncoder
from nuclr.runs import components
from nuclr.runs.components import Loaders, Source
from nuclr.runs.features import Encoding, encode_pairs, encode_texts, encode_x
from nuclr.runs.settings import Settings

PROTOCOL = "every distinct image and caption of the split; ties by expected rank; fractions, not percent"


@dataclass(frozen=True)
class Validation:
    """Held-out pairs with their loader, and labeled images with theirs; either may be missing."""

    source: Source | None
    loader: Loader | None
    classes: Any
    class_loader: Loader | None
    batch_size: int

    def __call__(self, model: DualEncoder, device: torch.device, precision: str) -> dict[str, float]:
        """Return all metrics, the same on every process. The model is left in eval mode."""
        metrics: dict[str, float] = {}
        encoding = Encoding(self.batch_size, device, precision)
        if self.source is not None and self.loader is not None:
            features = encode_pairs(model, self.loader, self.source.numbers, encoding)
            metrics |= retrieval_metrics(features.x, features.y, features.links)
        if self.classes is not None and self.class_loader is not None:
            prompts = self.classes.prompts()
            texts = encode_texts(model, [text for group in prompts for text in group], *encoding)
            x = encode_x(model, self.class_loader, np.arange(len(self.classes)), *encoding)
            labels = torch.from_numpy(np.asarray(self.classes.y_id))
            classes = class_features(list(texts.split([len(group) for group in prompts])))
            metrics |= zero_shot_metrics(x, classes, labels)
        return metrics


def build_parts(
    settings: Settings, device: torch.device, loaders: Loaders | None = None
) -> tuple[Source, Validation, DualEncoder]:
    """Return the training pairs, the validation and the model of a run, checked against each other."""
    data = settings.data
    source, held_out = components.open_train(data), components.open_val(data)
    if held_out is not None:
        components.check_compatible(source, held_out)
    classes = components.open_classes(data, source.pairs)
    model = components.make_model(settings.model, source, settings.seed).to(device)
    if classes is not None and not (model.takes("image") and model.takes("text")):
        raise UserError("data.classes needs a model of images and texts, but this one takes vectors; leave it out")
    val_loader = components.make_loader(data, held_out.pairs, model, loaders) if held_out else None
    class_loader = components.make_loader(data, classes, model, loaders) if classes is not None else None
    return source, Validation(held_out, val_loader, classes, class_loader, settings.evaluate.batch_size), model
