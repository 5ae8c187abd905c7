"""TensorBoard and Weights & Biases, where they are asked for and installed."""

import importlib
from pathlib import Path
from typing import Any

from nuclr.errors import UserError
from nuclr.training.settings import Log, Settings, to_dict


def check_installed(log: Log) -> None:
    """Refuse, before a run begins, what cannot be imported."""
    for package, wanted, how in (
        ("tensorboard", log.tensorboard, "pip install 'nuclr[logging]'"),
        ("wandb", log.wandb, "pip install wandb"),
    ):
        if not wanted:
            continue
        try:
            importlib.import_module("torch.utils.tensorboard" if package == "tensorboard" else package)
        except ImportError as error:
            why = "is not installed" if (error.name or package) == package else f"cannot be imported ({error})"
            raise UserError(f"log.{package}: {package} {why}; {how}, or set log.{package}=false") from None


class Loggers:
    """Copies of what goes to metrics.jsonl, from after `step` on; leaving its `with` block sends what is waiting.

    TensorBoard forgets what a run that goes on from `step` had logged after it; in W&B it begins another run.
    """

    def __init__(self, settings: Settings, folder: Path, step: int) -> None:
        self.board: Any = None
        self.wandb: Any = None
        if settings.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        if settings.log.wandb:
            import wandb  # type: ignore[import-not-found, unused-ignore]

            self.wandb = wandb.init(project="nuclr", name=settings.name, dir=str(folder), config=to_dict(settings))

    def write(self, values: dict[str, Any]) -> None:
        """One line."""
        numbers = {key: value for key, value in values.items() if "/" in key}
        if self.board is not None:
            for key, value in numbers.items():
                self.board.add_scalar(key, value, values["step"])
        if self.wandb is not None:
            self.wandb.log(numbers, step=values["step"])

    def __enter__(self) -> "Loggers":
        return self

    def __exit__(self, *_: object) -> None:
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()
