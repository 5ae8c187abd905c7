"""Metrics on held-out pairs: retrieval in both directions, and zero-shot classification if there are classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from nuclr.data import Loader
from nuclr.data.selection import Source
from nuclr.evaluation import (
    class_features,
    knn_metrics,
    metrics_of_widths,
    retrieval_metrics,
    zero_shot_metrics,
)
from nuclr.models import DualEncoder
from nuclr.runs.features import Encoding, encode_items, encode_pairs, encode_side
from nuclr.runs.settings import Evaluate

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
        widths: numbers of coordinates at which retrieval is measured as well.

    """

    sources: dict[str, Source]
    prefixes: dict[str, str]
    loaders: dict[str, Loader]
    classes: Any
    class_loader: Loader | None
    settings: Evaluate
    widths: Sequence[int] = ()

    def __call__(
        self,
        model: DualEncoder,
        device: torch.device,
        precision: str,
    ) -> dict[str, float]:
        """Return all metrics, the same on every process. The model is left in eval mode."""
        metrics: dict[str, float] = {}
        encoding = Encoding(
            self.settings.batch_size,
            device,
            precision,
            self.settings.head,
        )
        model.eval()
        for key, source in self.sources.items():
            features = encode_pairs(
                model,
                self.loaders[key],
                source.numbers,
                encoding,
            )
            measure = partial(retrieval_metrics, links=features.links, sides=features.sides)
            values = measure(features.x, features.y)
            values |= metrics_of_widths(measure, features.x, features.y, self.widths)
            metrics |= {f"{self.prefixes[key]}{name}": value for name, value in values.items()}
        if self.classes is not None and self.class_loader is not None:
            encoder = model.x if model.x.modality == "image" else model.y
            images = encode_side(
                encoder,
                self.class_loader,
                "x",
                np.arange(len(self.classes)),
                encoding,
            )
            labels = torch.from_numpy(np.asarray(self.classes.sides["y"].ids))
            if model.takes("text"):
                prompts = self.classes.prompts()
                reader = model.x if model.x.modality == "text" else model.y
                texts = encode_items(reader, [text for group in prompts for text in group], encoding)
                classes = class_features(list(texts.split([len(group) for group in prompts])))
                metrics |= zero_shot_metrics(images, classes, labels)
            else:
                metrics |= knn_metrics(images, labels)
        return metrics
