"""A trained run as the exports see it: the model in float32 on the CPU, its temperature, and its metrics.

The training data is not opened, so a run can be exported after its data is gone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nuclr.errors import UserError
from nuclr.evaluation.metric_names import score, val_metrics
from nuclr.files import parse_json, read_text
from nuclr.models import DualEncoder, Encoder, ImageFormat, Tokenizer
from nuclr.models.image_format import write_image_format
from nuclr.models.towers import BagOfWords, ImageTower, TextTower, VectorTower
from nuclr.objectives import SigLIP
from nuclr.runs import checkpoint, components, folder
from nuclr.runs.run import Run

"""The first of these metrics that a run has chose its best checkpoint."""


@dataclass(frozen=True)
class Trained:
    """A finished run to export. Open one with `open_trained`.

    Args:
        run: the run.
        model: its model, in eval mode, without gradients.

    """

    run: Run
    model: DualEncoder

    @property
    def sides(self) -> list[tuple[str, Encoder]]:
        """The encoders with the names of their sides; a shared one once, as "x"."""
        return [("x", self.model.x)] if self.model.shared else [("x", self.model.x), ("y", self.model.y)]

    @property
    def folders(self) -> dict[str, str]:
        """The side's name -> the name of its folder: its modality, or x and y if both have the same modality."""
        kinds = [encoder.modality for _, encoder in self.sides]
        distinct = len(set(kinds)) == len(kinds)
        return {name: str(encoder.modality) if distinct else name for name, encoder in self.sides}

    @property
    def squash(self) -> bool:
        """Whether whole images were resized to a square (setting `data.fit`), and not their central squares."""
        return self.run.settings.data.outside_training().fit == "squash"

    @cached_property
    def _logits(self) -> tuple[float, float | None]:
        """The temperature, and the bias if the objective learns one."""
        if not self.run.best:
            stored = self.model.joint.logits.get("logit_bias") if self.model.joint else None
            learnt = self.run.settings.objective.name == "siglip" and stored is not None
            return self.run.temperature, float(stored) if learnt and stored is not None else None
        state = checkpoint.load(self.run.folder / folder.CHECKPOINTS / checkpoint.BEST)["objective"]
        rows = next((len(table) for name, table in state.items() if name.startswith("log_u")), 2)
        objective = components.make_objective(self.run.settings.objective, rows)
        objective.load_state_dict(state)
        return objective.current_temperature, float(objective.bias) if isinstance(objective, SigLIP) else None

    @property
    def temperature(self) -> float:
        """The divisor of the scores, configured or learnt, that belongs to the weights."""
        return self._logits[0]

    @property
    def bias(self) -> float | None:
        """The bias that the SigLIP objective learnt for a model that has one; None otherwise."""
        return self._logits[1]

    @cached_property
    def metrics(self) -> Mapping[str, Any]:
        """Metrics on the held-out pairs, of the last weights or of the best checkpoint."""
        results = self.run.results or {}
        if not self.run.best:
            return results.get("val") or {}
        best: dict[str, Any] = {}
        for line in read_text(self.run.folder / folder.METRICS).splitlines():
            values = val_metrics(parse_json(line))
            reached, highest = score(values), score(best)
            if reached is not None and (highest is None or reached > highest):
                best = values
        return best


def open_trained(path: Path, best: bool = False) -> Trained:
    """Open a finished run to export it.

    Args:
        path: the run folder.
        best: use the weights of the best checkpoint instead of the last ones.

    Raises:
        UserError: if the folder is not a run, the run is not finished, or its model cannot be loaded.

    """
    run = Run.open_finished(path, best, "cpu")
    return Trained(run, run.model.requires_grad_(False))


def describe_encoder(encoder: Encoder) -> str:
    """Return what an encoder is, in a few words for messages and cards: "distilbert, first token"."""
    tower = encoder.tower
    if isinstance(tower, ImageTower):
        return f"{tower.backbone.config.model_type}, {tower.size} x {tower.size} pixels"
    if isinstance(tower, TextTower):
        pooling = {"first": "first token", "mean": "mean over tokens"}[tower.pooling]
        own = tower.backbone.config.model_type in ("clip_text_model", "siglip_text_model")
        return f"{tower.backbone.config.model_type}, {'its own pooling' if own else pooling}"
    if isinstance(tower, BagOfWords):
        return f"bag of words, {tower.embedding.num_embeddings} tokens"
    if isinstance(tower, VectorTower):
        return f"vectors of {len(tower.mean)} coordinates, standardized"
    return type(getattr(tower, "module", tower)).__name__


def write_inputs(trained: Trained, encoder: Encoder, target: Path) -> None:
    """Write how the inputs of a side are prepared: tokenizer files, or preprocessor_config.json."""
    if isinstance(encoder.inputs, Tokenizer):
        encoder.inputs.save(target)
    elif isinstance(encoder.inputs, ImageFormat):
        write_image_format(encoder.inputs, target, trained.squash)


def text_sides(trained: Trained, target: str) -> list[tuple[str, Encoder]]:
    """Return the sides that take texts; refuse a model without one.

    Raises:
        UserError: if no side takes texts.

    """
    sides = [(name, encoder) for name, encoder in trained.sides if encoder.modality == "text"]
    if not sides:
        takes = " and ".join(f"{encoder.modality or 'tensor'}s" for _, encoder in trained.sides)
        raise UserError(
            f"--to {target}: {trained.run.folder} has no text side (its model takes {takes}); use --to onnx instead"
        )
    return sides
