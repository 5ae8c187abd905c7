"""Train with NUCLR on a stream of tars: webdataset reads and shuffles, and a dict of keys gives every pair its number.

    pip install '.[train]' webdataset
    python examples/webdataset_stream.py

A few lines turn a webdataset pipeline into one for objectives with state: they number the keys of all samples, and one
looks up the keys of a batch. The numbers do not depend on the order in which tars are read.
"""

import io
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
import webdataset
from torch import Tensor, nn
from torch.nn.functional import normalize

from nuclr.objectives import build

TARS, PER_TAR, BATCH, EPOCHS = 4, 256, 64, 6


class Towers(nn.Module):
    """Two encoders with normalized outputs of the same width."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = nn.Linear(32, 16), nn.Linear(24, 16)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return unit-norm features of both sides."""
        return normalize(self.x(x), dim=1), normalize(self.y(y), dim=1)


def write_tars(folder: Path) -> None:
    """Write pairs of vectors as a stand-in for images and captions."""
    generator = np.random.default_rng(0)
    to_x, to_y = generator.normal(size=(8, 32)), generator.normal(size=(8, 24))
    for tar in range(TARS):
        with webdataset.TarWriter(str(folder / f"{tar:05d}.tar")) as writer:
            for number in range(PER_TAR):
                hidden = generator.normal(size=8)
                key = f"{tar:05d}{number:04d}"
                writer.write({"__key__": key, "x.npy": as_npy(hidden @ to_x), "y.npy": as_npy(hidden @ to_y)})


def as_npy(vector: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, vector.astype(np.float32))
    return file.getvalue()


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tars(folder)
        tars = [str(path) for path in sorted(folder.glob("*.tar"))]
        keys = set()
        for tar in tars:
            with tarfile.open(tar) as archive:
                keys |= {name.partition(".")[0] for name in archive.getnames()}
        number = {key: position for position, key in enumerate(sorted(keys))}

        pipeline = (
            webdataset.WebDataset(tars, shardshuffle=TARS, seed=0)
            .shuffle(500)
            .decode()
            .to_tuple("__key__", "x.npy", "y.npy")
            .batched(BATCH, partial=False)
        )
        loader = webdataset.WebLoader(pipeline, batch_size=None, num_workers=2)

        towers, objective = Towers(), build("nuclr", num_samples=len(number), temperature=0.05)
        optimizer = torch.optim.AdamW([*towers.parameters(), *objective.parameters()], lr=1e-2)
        for epoch in range(EPOCHS):
            for names, x, y in loader:
                index = torch.tensor([number[name] for name in names])
                out = objective(*towers(torch.as_tensor(x), torch.as_tensor(y)), index)
                optimizer.zero_grad()
                out.loss.backward()
                optimizer.step()
            seen = objective.log_u_x.isfinite().float().mean()
            print(f"epoch {epoch}: estimate of the objective {out.loss.item():.4f}, {seen:.0%} of the pairs seen")

        with torch.no_grad():
            x, y = (torch.cat(side) for side in zip(*(towers(x, y) for _, x, y in loader), strict=True))
        hits = ((x @ y.T).argmax(dim=1) == torch.arange(len(x))).float().mean()
        print(f"recall@1 {hits:.2%}, chance {1 / len(x):.2%}")


if __name__ == "__main__":
    main()
