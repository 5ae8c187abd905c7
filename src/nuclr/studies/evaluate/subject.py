"""What is evaluated: a trained run, or encoders that are none."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nuclr.data import Loader
from nuclr.data.pairs import Pairs
from nuclr.errors import UserError
from nuclr.models import DualEncoder
from nuclr.models.towers import VectorTower
from nuclr.runs import embed, folder
from nuclr.runs.settings import Data


@dataclass(frozen=True)
class Subject:
    """A model on its device, and the data that it was trained on (None: encoders that are no run)."""

    path: Path
    model: DualEncoder
    data: Data | None
    batch_size: int
    device: torch.device

    @property
    def options(self) -> tuple[int, torch.device, str]:
        """How features are computed: batch, device, precision."""
        return self.batch_size, self.device, "float32"

    def loader(self, pairs: Pairs) -> Loader:
        """Reads pictures as they were read in training, unaugmented."""
        size = self.model.images.size if self.model.images is not None else 224
        data = self.data or Data()
        return Loader(pairs, size, data.fit, data.workers, memory=0)

    def check_kinds(self, name: str, pairs: Pairs) -> None:
        """Refuse pairs that the model does not take: pictures for vectors, vectors of another width."""
        model = self.model
        for side, kind, prepared in (("x", pairs.x_kind, model.images), ("y", pairs.y_kind, model.tokenizer)):
            if (kind == "vector") != (prepared is None):
                wanted = "vectors" if prepared is None else {"x": "images", "y": "texts"}[side]
                raise UserError(f"{name}: holds {kind}s on side {side}, but {self.path} takes {wanted}")
        if pairs.x_kind == "vector":
            self.check_width(name, "x", len(pairs.x(0)))  # type: ignore[arg-type]
        if pairs.y_kind == "vector":
            self.check_width(name, "y", len(pairs.y(0)))

    def check_width(self, name: str, side: str, width: int) -> None:
        """Refuse vectors of another width than the model's."""
        tower = getattr(self.model, side).tower
        if isinstance(tower, VectorTower) and width != len(tower.mean):
            raise UserError(f"{name}: {side} has {width} coordinates, but {self.path} takes {len(tower.mean)}")

    def describe(self) -> dict[str, Any]:
        """For the file: how inputs become features."""
        images = self.model.images
        fit = self.data.fit if self.data is not None else "crop"
        return {
            "path": str(self.path),
            "kind": "run" if self.data is not None else "encoders",
            "width": self.model.width,
            "images": None
            if images is None
            else {"size": images.size, "mean": list(images.mean), "std": list(images.std), "fit": fit},
            "precision": "float32",
        }


def open_subject(path: Path, best: bool, batch_size: int | None, device: torch.device) -> Subject:
    """Open a run, or a folder of encoders (nuclr's, a CLIP or SigLIP)."""
    if folder.is_run(path):
        run = embed.open_run(path, best)
        size = batch_size or int(run.config["evaluate"]["batch_size"])
        return Subject(path, run.model.to(device).eval(), Data(**run.config["data"]), size, device)
    if best:
        raise UserError(f"--best needs a run, and {path} is none")
    if path.is_dir() and not (path / "config.json").is_file():
        raise UserError(
            f"{path}: neither a run (no {folder.CONFIG}) nor encoders (no config.json); name what nuclr train wrote"
        )
    return Subject(path, embed.open_encoders(str(path)).to(device).eval(), None, batch_size or 256, device)
