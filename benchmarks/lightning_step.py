"""The time of a step in Lightning's DDP: the objective in a callback, or as a submodule whose tables DDP broadcasts.

    python benchmarks/lightning_step.py [--rows 3000000] [--steps 20] [--rounds 3]

Two processes on CPU (gloo), small towers, batches of 2 x 64 pairs, NUCLR. Both variants run alternately in the same
processes. Reported is the median over all steps of the first process, without the first three of each round.
"""

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, TensorDataset

from nuclr.integrations.lightning import NuclrCallback
from nuclr.objectives import build

BATCH, WARM_UP = 64, 3


class Towers(lightning.LightningModule):
    """Two linear encoders; `rows` makes the objective a submodule."""

    def __init__(self, rows: int | None) -> None:
        super().__init__()
        self.x, self.y = nn.Linear(64, 32), nn.Linear(64, 32)
        self.objective = None if rows is None else build("nuclr", num_samples=rows)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """Return the loss."""
        x, y, index = batch
        objective = self.objective or self.trainer.nuclr
        return objective(normalize(self.x(x), dim=1), normalize(self.y(y), dim=1), index).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(lightning.Callback):
    """Record the time of every step."""

    def __init__(self) -> None:
        self.started, self.steps = 0.0, list[float]()

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop the clock."""
        self.steps.append(time.perf_counter() - self.started)


def measure(rows: int, steps: int, submodule: bool) -> tuple[list[float], bool]:
    torch.manual_seed(0)
    pairs = 2 * BATCH * (steps + WARM_UP)
    data = TensorDataset(torch.randn(pairs, 64), torch.randn(pairs, 64), torch.randperm(rows)[:pairs])
    clock = Clock()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        callbacks=[clock] if submodule else [clock, NuclrCallback("nuclr", num_samples=rows)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Towers(rows if submodule else None), DataLoader(data, batch_size=BATCH))
    return clock.steps[WARM_UP:], trainer.is_global_zero


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    times: dict[str, list[float]] = {"callback": [], "submodule": []}
    for _ in range(options.rounds):
        for name in times:
            seconds, first = measure(options.rows, options.steps, name == "submodule")
            times[name] += seconds
    if not first:
        return
    medians = {name: 1000 * statistics.median(seconds) for name, seconds in times.items()}
    print(f"{options.rows:,} rows, 2 processes: milliseconds per step")
    for name, value in medians.items():
        print(f"{name:12}{value:8.1f}{value / medians['callback']:8.2f}x")
    path = Path(__file__).parent / "results" / "lightning_step.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"rows": options.rows, "milliseconds": medians}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
