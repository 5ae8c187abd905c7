"""Train on a modality of your own: recordings of 256 numbers, paired with texts that describe them.

    python examples/own_modality.py DATA          # write the recordings and their descriptions
    nuclr train plugins=examples/own_modality.py data.train=DATA/train.jsonl data.val=DATA/val.jsonl \
        data.x.modality=waveform data.x.name=recording

A modality says how a cell of the data becomes an item, how items form a batch, and what a page shows of an item. An
encoder is a module from a batch to features. Both are registered when nuclr imports this file. Everything else works as
for images and texts: `nuclr evaluate`, `embed`, `popularity`, `report`, resuming, several processes.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from nuclr.data import BadSample, Modality, register_modality
from nuclr.models import register_encoder

LENGTH = 256


class Waveform(Modality):
    """Recordings: a column holds lists of numbers."""

    name = "waveform"
    decodes = False  # the numbers are in memory already

    def read(self, cell, folder) -> np.ndarray:  # noqa: ARG002 (only modalities in files need the folder)
        """Return a recording (LENGTH,) with mean 0 and deviation 1."""
        if np.shape(cell) != (LENGTH,):
            raise BadSample(f"not a list of {LENGTH} numbers")
        values = np.asarray(cell, np.float32)
        return (values - values.mean()) / (values.std() + 1e-6)

    def collate(self, items, options=None) -> Tensor:  # noqa: ARG002
        """Return a batch (b, LENGTH)."""
        return torch.from_numpy(np.stack(items))

    def show(self, item) -> np.ndarray:
        """Return the numbers, of which pages show the first ones."""
        return item

    def augment(self, batch, seed, epoch, step, rank=0, world=1) -> Tensor:
        """Shift each recording in time at random; all processes draw for the whole batch and take their part."""
        shifts = np.random.default_rng([seed, epoch, step]).integers(LENGTH, size=len(batch) * world)
        own = torch.from_numpy(shifts[rank * len(batch) : (rank + 1) * len(batch)])
        positions = (torch.arange(LENGTH) + own[:, None]) % LENGTH
        return batch.gather(1, positions.to(batch.device))


class WaveformTower(nn.Module):
    """Convolutions over time, then the mean over time."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.width = width  # the number of features, which nuclr reads
        self.layers = nn.Sequential(
            nn.Conv1d(1, 32, 9, stride=2, padding=4),
            nn.GELU(),
            nn.Conv1d(32, width, 9, stride=2, padding=4),
            nn.GELU(),
        )

    def forward(self, batch: Tensor) -> Tensor:
        """Return features (b, width) of recordings (b, LENGTH)."""
        return self.layers(batch[:, None]).mean(dim=2)


register_modality(Waveform())
register_encoder("waveform_tower", lambda: (WaveformTower(), None), "waveform")


# -- data for the example ----------------------------------------------------------------------------------------------

SHAPES = {"sine": np.sin, "square": lambda t: np.sign(np.sin(t)), "saw": lambda t: (t / np.pi) % 2 - 1}
SPEEDS = {"very slow": 2, "slow": 4, "fast": 8, "very fast": 16}
NOISES = {"clean": 0.05, "noisy": 0.5}


def write_pairs(path: Path, count: int, seed: int) -> None:
    """Write recordings of random waves and the texts that describe them."""
    rng = np.random.default_rng(seed)
    time = np.linspace(0, 2 * np.pi, LENGTH, endpoint=False)
    with path.open("w") as file:
        for _ in range(count):
            shape, speed, noise = (str(rng.choice(list(names))) for names in (SHAPES, SPEEDS, NOISES))
            wave = SHAPES[shape](SPEEDS[speed] * time + rng.uniform(0, 2 * np.pi))
            wave = wave + NOISES[noise] * rng.normal(size=LENGTH)
            row = {"recording": wave.round(3).tolist(), "text": f"a {speed}, {noise} {shape} wave"}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "waveforms")
    folder.mkdir(parents=True, exist_ok=True)
    write_pairs(folder / "train.jsonl", 1200, seed=0)
    write_pairs(folder / "val.jsonl", 200, seed=1)
    print(f"{folder}: 1,200 pairs to train on and 200 to evaluate on")
