"""TensorBoard and Weights & Biases, where they are asked for and installed."""

import importlib
import uuid
from pathlib import Path
from typing import Any

from nuclr.errors import UserError
from nuclr.runs.settings import Log, Settings, to_dict


def check_installed(log: Log) -> None:
    """Refuse, before a run begins, what cannot be imported."""
    for package, wanted in (("tensorboard", log.tensorboard), ("wandb", log.wandb)):
        if not wanted:
            continue
        try:
            importlib.import_module("torch.utils.tensorboard" if package == "tensorboard" else package)
        except ImportError as error:
            why = "is not installed" if (error.name or package) == package else f"cannot be imported ({error})"
            how = f"pip install 'nuclr[logging]', or set log.{package}=false"
            raise UserError(f"log.{package}: {package} {why}; {how}") from None


class Loggers:
    """Copies of what goes to metrics.jsonl, from after `step` on; leaving its `with` block sends what is waiting.

    A run that goes on from `step` logs again what it had logged after it, the same to the last bit: TensorBoard forgets
    the first copy; W&B, where it is the same run still, keeps it.
    """

    def __init__(self, settings: Settings, folder: Path, step: int) -> None:
        self.board: Any = None
        self.wandb: Any = None
        if settings.log.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        if settings.log.wandb:
            import wandb

            path = folder / "wandb_id"
            if not (path.is_file() and path.read_text()):  # it is empty where a run was killed while writing it
                path.write_text(uuid.uuid4().hex[:16])
            self.wandb = wandb.init(
                project="nuclr",
                name=settings.name,
                id=path.read_text(),
                resume="allow",
                dir=str(folder),
                config=to_dict(settings),
            )

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
