"""How good the model is on held-out pairs: retrieval both ways, and zero-shot classification if there are classes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nuclr.data import Loader
from nuclr.evaluation import class_features, retrieval_metrics, zero_shot_metrics
from nuclr.models import DualEncoder
from nuclr.runs.components import Source
from nuclr.runs.features import encode_texts, encode_x, encode_y

PROTOCOL = "every distinct image and caption of the split; ties by expected rank; fractions, not percent"


@dataclass(frozen=True)
class Validation:
    """What is needed to validate: pairs with their loader, labeled images with theirs; either may be missing."""

    source: Source | None
    loader: Loader | None
    classes: Any
    class_loader: Loader | None
    batch_size: int

    def __call__(self, model: DualEncoder, device: torch.device, precision: str) -> dict[str, float]:
        """All numbers, the same on every process. Leaves the model in eval mode."""
        found: dict[str, float] = {}
        options = (self.batch_size, device, precision)
        if self.source is not None and self.loader is not None:
            pairs, numbers = self.source.pairs, self.source.numbers
            _, first_x, x_row = np.unique(pairs.x_id[numbers], return_index=True, return_inverse=True)
            _, first_y, y_row = np.unique(pairs.y_id[numbers], return_index=True, return_inverse=True)
            x = encode_x(model, self.loader, numbers[first_x], *options)
            y = encode_y(model, pairs, numbers[first_y], *options)
            found |= retrieval_metrics(x, y, torch.from_numpy(np.stack([x_row, y_row], axis=1)))
        if self.classes is not None and self.class_loader is not None:
            prompts = self.classes.prompts()
            texts = encode_texts(model, [text for group in prompts for text in group], *options)
            x = encode_x(model, self.class_loader, np.arange(len(self.classes)), *options)
            labels = torch.from_numpy(np.asarray(self.classes.y_id))
            found |= zero_shot_metrics(x, class_features(list(texts.split([len(group) for group in prompts]))), labels)
        return found
