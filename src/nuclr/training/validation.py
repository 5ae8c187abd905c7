"""Metrics on held-out pairs: retrieval in both directions, and zero-shot classification if there are classes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nuclr.data import Loader
from nuclr.errors import UserError
from nuclr.evaluation import class_features, knn_metrics, retrieval_metrics, zero_shot_metrics
from nuclr.models import DualEncoder
from nuclr.runs import components
from nuclr.runs.components import Loaders, Source
from nuclr.runs.features import Encoding, encode_pairs, encode_side, encode_texts, side_that_takes
from nuclr.runs.settings import Evaluate, Settings
from nuclr.training.backward import check_micro_batch

PROTOCOL = "every distinct item of both sides; ties by expected rank; fractions, not percent"
LABELS_PROTOCOL = (
    "20 nearest neighbors; in each class the first, third, ... images are labeled, the others are classified; "
    "fractions, not percent"
)


@dataclass(frozen=True)
class Validation:
    """Sets of held-out pairs with their loaders, and labeled images with theirs; any of them may be missing.

    Attributes:
        sources: the sets of held-out pairs, by the settings that name them: "data.val", or "data.val.coco".
        prefixes: what the names of each set's metrics begin with.
        loaders: of each set.
        classes: labeled images.
        class_loader: their loader.
        settings: of the evaluation.

    """

    sources: dict[str, Source]
    prefixes: dict[str, str]
    loaders: dict[str, Loader]
    classes: Any
    class_loader: Loader | None
    settings: Evaluate

    @property
    def source(self) -> Source | None:
        """The first set of held-out pairs, if there is one."""
        return next(iter(self.sources.values()), None)

    def __call__(self, model: DualEncoder, device: torch.device, precision: str) -> dict[str, float]:
        """Return all metrics, the same on every process. The model is left in eval mode."""
        metrics: dict[str, float] = {}
        encoding = Encoding(self.settings.batch_size, device, precision, self.settings.head)
        model.eval()
        for key, source in self.sources.items():
            features = encode_pairs(model, self.loaders[key], source.numbers, encoding)
            values = retrieval_metrics(features.x, features.y, features.links, sides=features.sides)
            metrics |= {f"{self.prefixes[key]}{name}": value for name, value in values.items()}
        if self.classes is not None and self.class_loader is not None:
            encoder = getattr(model, side_that_takes(model, "image"))
            images = encode_side(encoder, self.class_loader, "x", np.arange(len(self.classes)), encoding)
            labels = torch.from_numpy(np.asarray(self.classes.y_id))
            if model.takes("text"):
                prompts = self.classes.prompts()
                texts = encode_texts(model, [text for group in prompts for text in group], *encoding)
                classes = class_features(list(texts.split([len(group) for group in prompts])))
                metrics |= zero_shot_metrics(images, classes, labels)
            else:
                metrics |= knn_metrics(images, labels)
        return metrics


def build_parts(
    settings: Settings, device: torch.device, loaders: Loaders | None = None
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
        components.check_compatible(source, opened, key)
    classes = components.open_classes(data, source.pairs)
    model = components.make_model(settings.model, source, settings.seed).to(device)
    check_micro_batch(settings, model)
    if classes is not None and not model.takes("image"):
        kinds = " and ".join(dict.fromkeys(f"{kind}s" for kind in (source.pairs.x_kind, source.pairs.y_kind)))
        raise UserError(f"data.classes needs a model that takes images, but this one takes {kinds}; leave it out")
    if not settings.evaluate.head and held_out:
        components.check_tower_widths(model)
    val_loaders = {
        key: components.make_loader(data.outside_training(), own.pairs, model, loaders) for key, own in held_out.items()
    }
    prefixes = {data.val_key(name): data.val_prefix(name) for name in named}
    class_loader = None
    if classes is not None:
        class_loader = components.make_class_loader(data, classes, model, loaders)
    validation = Validation(held_out, prefixes, val_loaders, classes, class_loader, settings.evaluate)
    return source, validation, model
