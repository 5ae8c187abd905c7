"""TensorBoard and Weights & Biases, where they are asked for and installed."""

from pathlib import Path
from typing import Any

from nuclr.errors import UserError
from nuclr.training.settings import Settings, to_dict


class Loggers:
    """Copies of what goes to metrics.jsonl."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.board: Any = None
        self.wandb: Any = None
        if settings.log.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError(
                    "log.tensorboard: tensorboard is not installed (pip install 'nuclr[logging]')"
                ) from None
            self.board = SummaryWriter(str(folder / "tensorboard"))
        if settings.log.wandb:
            try:
                import wandb  # type: ignore[import-not-found, unused-ignore]
            except ImportError:
                raise UserError("log.wandb: wandb is not installed (pip install wandb)") from None
            self.wandb = wandb.init(name=settings.name, dir=str(folder), config=to_dict(settings))

    def write(self, values: dict[str, Any]) -> None:
        """One line."""
        numbers = {key: value for key, value in values.items() if "/" in key}
        if self.board is not None:
            for key, value in numbers.items():
                self.board.add_scalar(key, value, values["step"])
        if self.wandb is not None:
            self.wandb.log(numbers, step=values["step"])

    def close(self) -> None:
        """Send what is waiting."""
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()
