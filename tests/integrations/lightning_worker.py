"""Lightning runs that tests compare: in the process of the test, or as a script on several processes.

    python tests/integrations/lightning_worker.py JOBS.json

A job is a dict with the arguments of `run`. Lightning starts the other processes itself.
"""

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from nuclr.integrations.lightning import NuclrCallback

PAIRS, HELD_OUT, BATCH = 96, 40, 16
warnings.filterwarnings("ignore", module="lightning")


class Module(lightning.LightningModule):
    def __init__(self, widths: tuple[int, int], dropout: float = 0.0, micro_batch: int | None = None) -> None:
        super().__init__()
        self.x, self.y = (
            nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16)) for width in widths
        )
        self.micro_batch, self.automatic_optimization = micro_batch, micro_batch is None
        self.seen: list[list[int]] = []

    def forward(self, x, y):
        return normalize(self.x(x), dim=1), normalize(self.y(y), dim=1)

    def training_step(self, batch, _):
        x, y, index = batch
        self.seen.append(index.tolist())
        if self.micro_batch is None:
            return self.trainer.nuclr(*self(x, y), index).loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        out = self.trainer.nuclr.backward(self, (x, y), index, micro_batch=self.micro_batch)
        optimizer.step()
        self.lr_schedulers().step()
        return out.loss

    def validation_step(self, batch, _):
        x, y, index = batch
        self.log("val_loss", self.trainer.nuclr(*self(x, y), index).loss, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Kill(lightning.Callback):
    """End the process without any chance to clean up, after the checkpoint of this step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class ResumableLoader(DataLoader):
    """A loader whose position Lightning saves in checkpoints, as that of torchdata's StatefulDataLoader."""

    position = start = 0

    def __iter__(self):
        self.position, start, self.start = 0, self.start, 0
        for batch in super().__iter__():
            self.position += 1
            if self.position > start:
                yield batch

    def state_dict(self):
        return {"position": self.position % len(self)}

    def load_state_dict(self, state):
        self.start = state["position"]


def pairs(data: str | None) -> tuple[TensorDataset, TensorDataset]:
    """Return training and held-out pairs: generated ones, or the first image-caption pairs of an embedding file."""
    if data is None:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(PAIRS + HELD_OUT, 6, generator=generator)
        x, y = (
            hidden @ torch.randn(6, d, generator=generator)
            + 0.3 * torch.randn(PAIRS + HELD_OUT, d, generator=generator)
            for d in (12, 10)
        )
        train, held_out = PAIRS, HELD_OUT
    else:
        import numpy as np

        with np.load(data) as arrays:
            y = torch.from_numpy(arrays["y"]).float()
            x = torch.from_numpy(arrays["x"]).float()[torch.from_numpy(arrays["y_to_x"]).long()]
        train, held_out = 4096, 512
    # The held-out pairs have numbers too. They must not be mistaken for numbers of training pairs.
    return TensorDataset(x[:train], y[:train], torch.arange(train)), TensorDataset(
        x[-held_out:], y[-held_out:], torch.arange(held_out)
    )


def run(
    objective: str = "nuclr",
    options: dict | None = None,
    *,
    devices: int = 1,
    epochs: int = 3,
    batch: int = BATCH,
    dropout: float = 0.0,
    micro_batch: int | None = None,
    precision: str = "32-true",
    folder: str | Path | None = None,
    resume: str | Path | None = None,
    kill_after: int | None = None,
    data: str | None = None,
    validate: bool = True,
    setup: Callable[[Module], None] = lambda module: None,
    **trainer_options,
) -> dict:
    """Train, and return the weights and the state; on other processes than the first, an empty dict."""
    torch.use_deterministic_algorithms(True)
    lightning.seed_everything(0, verbose=False)
    train, held_out = pairs(data)
    options = {"num_samples": len(train), "temperature": 0.1} | (options or {})
    callback = NuclrCallback(objective, **options)
    module = Module((train.tensors[0].shape[1], train.tensors[1].shape[1]), dropout, micro_batch)
    setup(module)
    checkpoints = (
        ModelCheckpoint(folder, "{step}", auto_insert_metric_name=False, every_n_train_steps=1, save_top_k=-1)
        if folder
        else None
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=epochs,
        precision=precision,
        callbacks=[callback, *([checkpoints] if checkpoints else []), *([Kill(kill_after)] if kill_after else [])],
        enable_checkpointing=checkpoints is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **trainer_options,
    )
    sampler = DistributedSampler(train, devices, int(os.environ.get("LOCAL_RANK", 0)) if devices > 1 else 0, seed=3)
    loader = ResumableLoader(train, batch_size=batch // devices, sampler=sampler, drop_last=True)
    trainer.fit(module, loader, DataLoader(held_out, batch_size=20 // devices) if validate else None, ckpt_path=resume)
    state = callback.objective.gather_state_dict()
    if not trainer.is_global_zero:
        return {}
    return {
        "callback": callback if devices == 1 else None,
        "module": module if devices == 1 else None,
        "trainer": trainer if devices == 1 else None,
        "weights": module.state_dict(),
        "state": state,
        "seen": module.seen,
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
    }


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    for job in jobs:
        out = job.pop("out")
        result = run(**job)
        if result:
            torch.save(result, out)


if __name__ == "__main__":
    main()
