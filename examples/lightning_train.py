"""Train with NUCLR in Lightning: a plain script with InfoNCE, of which five lines have changed.

    pip install '.[lightning]'
    python examples/lightning_train.py
    python examples/lightning_train.py --devices 2 --resume lightning_logs/version_0/checkpoints/last.ckpt

The comments show the lines as they were: "was" a line that has changed, "added" a new one. The callback keeps the state
of the objective equal on all processes, saves it in Lightning's checkpoints, and leaves it alone in validation.
"""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, TensorDataset

from nuclr.integrations.lightning import NuclrCallback  # added

PAIRS, HELD_OUT, BATCH = 2_000, 500, 64


def info_nce(x: Tensor, y: Tensor, temperature: float = 0.05) -> Tensor:
    scores, own = x @ y.T / temperature, torch.arange(len(x), device=x.device)
    return cross_entropy(scores, own) + cross_entropy(scores.T, own)


class Towers(lightning.LightningModule):
    """Two encoders with normalized outputs of the same width."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = nn.Linear(32, 16), nn.Linear(24, 16)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return unit-norm features of both sides."""
        return normalize(self.x(x), dim=1), normalize(self.y(y), dim=1)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """Return the loss of a batch."""
        x, y, index = batch  # was: x, y = batch
        loss = self.trainer.nuclr(*self(x, y), index).loss  # was: loss = info_nce(*self(x, y))
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        """Log how often the right y has the highest score."""
        x, y = self(*batch)
        hits = (x @ y.T).argmax(dim=1) == torch.arange(len(x), device=x.device)
        self.log("recall@1", hits.float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--resume")
    arguments = parser.parse_args()

    lightning.seed_everything(0)
    hidden = torch.randn(PAIRS + HELD_OUT, 8)
    x, y = hidden @ torch.randn(8, 32), hidden @ torch.randn(8, 24)
    pairs = TensorDataset(x[:PAIRS], y[:PAIRS], torch.arange(PAIRS))  # was: pairs = TensorDataset(x[:PAIRS], y[:PAIRS])
    held_out = TensorDataset(x[PAIRS:], y[PAIRS:])
    callbacks = [ModelCheckpoint(save_last=True)]
    callbacks += [NuclrCallback("nuclr", num_samples=PAIRS, temperature=0.05)]  # added

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy="ddp" if arguments.devices > 1 else "auto",
        max_epochs=arguments.epochs,
        callbacks=callbacks,
        log_every_n_steps=10,
        enable_progress_bar=False,
    )
    loader = DataLoader(pairs, batch_size=BATCH // arguments.devices, shuffle=True, drop_last=True)
    trainer.fit(Towers(), loader, DataLoader(held_out, batch_size=HELD_OUT), ckpt_path=arguments.resume)
    if trainer.is_global_zero:
        print(f"recall@1 {trainer.callback_metrics['recall@1']:.2%} of held-out pairs, chance {1 / HELD_OUT:.2%}")


if __name__ == "__main__":
    main()
