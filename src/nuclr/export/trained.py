"""A trained run as the exports see it: the model in float32 on the CPU, its temperature, and its metrics.

The training data is not opened, so a run can be exported after its data is gone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from nuclr.errors import UserError
from nuclr.evaluation.metrics import score, val_metrics
from nuclr.models import DualEncoder, Encoder, ImageFormat
from nuclr.runs import folder
from nuclr.runs.checkpoint import Checkpoint
from nuclr.runs.run import Run


@dataclass(frozen=True)
class Written:
    """What a target wrote, for the card and for the command line.

    Args:
        library: `library_name` of the Hugging Face hub.
        task: its `pipeline_tag`.
        code: lines of Python that load the model and encode a few items, run from the folder that holds the export.
        notes: sentences about this form of the model, for the card.
        lines: what the command prints.

    """

    library: str
    task: str
    code: str
    notes: Sequence[str] = ()
    lines: Sequence[str] = ()


@dataclass(frozen=True)
class Trained:
    """A finished run to export. Open one with `open_trained`.

    Args:
        run: the run.
        model: its model, in eval mode, without gradients.
        target: the value of `--to`, to name in messages.

    """

    run: Run
    model: DualEncoder
    target: str

    @property
    def modalities(self) -> list[str]:
        """What the encoders take, such as "image", in the order of `model.sides`."""
        return [encoder.modality or "tensor" for _, encoder in self.model.sides]

    @property
    def folders(self) -> dict[str, str]:
        """The side's name -> the name of its folder: its modality, or x and y if both have the same modality."""
        distinct = len(set(self.modalities)) == len(self.model.sides)
        return {name: str(encoder.modality) if distinct else name for name, encoder in self.model.sides}

    @property
    def image_and_text(self) -> tuple[Encoder, Encoder]:
        """The encoder of images and that of texts, of a model that has one of each."""
        images, texts = sorted((self.model.x, self.model.y), key=lambda encoder: encoder.modality == "text")
        return images, texts

    @property
    def squash(self) -> bool:
        """Whether whole images were resized to a square (setting `data.fit`), and not their central squares."""
        return self.run.settings.data.outside_training().fit == "squash"

    @property
    def temperature(self) -> float:
        """The divisor of the scores, configured or learnt, that belongs to the weights."""
        return self._logits[0]

    @property
    def bias(self) -> float | None:
        """The bias that the SigLIP objective learnt for a model that has one; None otherwise."""
        return self._logits[1]

    @cached_property
    def _logits(self) -> tuple[float, float | None]:
        """The temperature, and the bias if the objective learns one."""
        if not self.run.best:
            stored = self.model.joint.logits.get("logit_bias") if self.model.joint else None
            learnt = self.run.settings.objective.name == "siglip" and stored is not None
            return self.run.temperature, float(stored) if learnt and stored is not None else None
        objective = self.run.settings.objective.restore(cast("Checkpoint", self.run.saved).objective)
        return objective.current_temperature, objective.current_bias

    @property
    def results(self) -> folder.TrainedRun:
        """Content of results.json; only finished runs are exported."""
        return cast("folder.TrainedRun", self.run.results)

    @cached_property
    def metrics(self) -> Mapping[str, Any]:
        """Metrics on the held-out pairs, of the last weights or of the best checkpoint."""
        if not self.run.best:
            return self.results.val
        lines = folder.read_lines(self.run.folder / folder.METRICS, {"step"}, [])
        measured = [values for values in map(val_metrics, lines) if score(values) is not None]
        return max(measured, key=score, default={})  # type: ignore[arg-type]

    def write_inputs(self, encoder: Encoder, target: Path) -> None:
        """Write how the inputs of a side are prepared: tokenizer files, or preprocessor_config.json."""
        if isinstance(encoder.inputs, ImageFormat):
            encoder.inputs.save(target, self.squash)
        elif encoder.inputs is not None:
            encoder.inputs.save(target)

    def refuse(self, reason: str) -> UserError:
        """Return the error for a run that the target cannot hold."""
        return UserError(f"--to {self.target}: {self.run.folder}: {reason}")


def open_trained(
    path: Path,
    target: str,
    best: bool = False,
) -> Trained:
    """Open a finished run to export it.

    Args:
        path: the run folder.
        target: the value of `--to`, to name in messages.
        best: use the weights of the best checkpoint instead of the last ones.

    Raises:
        UserError: if the folder is not a run, the run is not finished, or its model cannot be loaded.

    """
    run = Run.open_finished(path, best, "cpu")
    return Trained(run, run.model.requires_grad_(False), target)
