"""Lightning runs that tests compare: in the process of the test, or as a script on several processes.

    python -m tests.integrations.lightning_worker JOBS.json

A job is a dict with the arguments of `run`. Lightning starts the other processes itself.
"""

import json
import os
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
from tests.integrations.common import result_of

PAIRS, HELD_OUT, BATCH = 96, 40, 16
WIDTHS = (12, 10)
warnings.filterwarnings("ignore", module="lightning")


class Module(lightning.LightningModule):
    def __init__(self, micro_batch: int | None = None) -> None:
        super().__init__()
        self.x, self.y = (nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, 16)) for width in WIDTHS)
        self.micro_batch, self.automatic_optimization = micro_batch, micro_batch is None
        self.seen: list[list[int]] = []
        self.mined = False

    def forward(self, x, y):
        features = normalize(self.x(x), dim=1), normalize(self.y(y), dim=1)
        if not self.mined:
            return features
        hard = torch.stack([self.y(y.roll(shift, dims=1)) for shift in (1, 2)], dim=1)
        return *features, normalize(hard, dim=2)

    def training_step(self, batch, _):
        x, y, index = batch
        self.seen.append(index.tolist())
        if self.micro_batch is None:
            x, y, *hard = self(x, y)
            return self.trainer.nuclr(x, y, index, negatives=hard[0] if hard else None).loss
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


def pairs() -> tuple[TensorDataset, TensorDataset]:
    """Return training and held-out pairs."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(PAIRS + HELD_OUT, 6, generator=generator)
    sides = []
    for width in WIDTHS:
        noise = 0.3 * torch.randn(len(hidden), width, generator=generator)
        sides.append(hidden @ torch.randn(6, width, generator=generator) + noise)
    # The held-out pairs have numbers too. They must not be mistaken for numbers of training pairs.
    train = TensorDataset(*(side[:PAIRS] for side in sides), torch.arange(PAIRS))
    return train, TensorDataset(*(side[PAIRS:] for side in sides), torch.arange(HELD_OUT))


def run(
    objective: str = "nuclr",
    options: dict | None = None,
    *,
    devices: int = 1,
    epochs: int = 3,
    batch: int = BATCH,
    micro_batch: int | None = None,
    precision: str = "32-true",
    folder: str | Path | None = None,
    resume: str | Path | None = None,
    validate: bool = True,
    setup: Callable[[Module], None] = lambda module: None,
    **trainer_options,
) -> dict:
    """Train, and return the weights and the state; on other processes than the first, an empty dict."""
    torch.use_deterministic_algorithms(True)
    lightning.seed_everything(0, verbose=False)
    train, held_out = pairs()
    options = {"num_samples": len(train), "temperature": 0.1} | (options or {})
    callback = NuclrCallback(objective, **options)
    module = Module(micro_batch)
    setup(module)
    callbacks = [callback]
    if folder:
        every_step = {"every_n_train_steps": 1, "save_top_k": -1}
        callbacks.append(ModelCheckpoint(folder, "{step}", auto_insert_metric_name=False, **every_step))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=epochs,
        precision=precision,
        callbacks=callbacks,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **trainer_options,
    )
    sampler = DistributedSampler(train, devices, int(os.environ.get("LOCAL_RANK", 0)) if devices > 1 else 0, seed=3)
    loader = ResumableLoader(train, batch_size=batch // devices, sampler=sampler, drop_last=True)
    trainer.fit(module, loader, DataLoader(held_out, batch_size=20 // devices) if validate else None, ckpt_path=resume)
    values = result_of(module, callback.objective)
    if not trainer.is_global_zero:
        return {}
    result = {"values": values, "seen": module.seen, "loss": trainer.callback_metrics.get("val_loss")}
    if devices == 1:
        result |= {"callback": callback, "module": module, "trainer": trainer}
    return result


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text()):
        out = job.pop("out")
        result = run(**job)
        if result:
            torch.save(result, out)
