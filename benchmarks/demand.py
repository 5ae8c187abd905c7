r"""What a popularity correction needs from a log: how many queries, asked how evenly, and what to do without a log.

    python benchmarks/demand.py --data ../shared/data [--seeds 3]

A ready-made sentence encoder (MiniLM) on captions of Flickr8k, five per image. The first caption of each of 4,000
images is an item. The second and third captions are the log, the fourth and fifth are asked; an answer is right if it
is of the same image. Only the last 3,000 training images and the 1,000 of dev are used: that equal queries count once
was chosen on the first 3,000.

- *size of the log*: so many queries, each image asked for equally often
- *no log*: the items themselves search one another
- *titles in the log*: a quarter of the queries equal an item
- *demand*: an image is asked for with probability proportional to rank^-exponent, in the log and when it is counted;
  "one third" asks for a random third of the images only

Recall@1 in percent, plain and corrected with `PopularityCorrection().fit(log, items)`, mean over the seeds of the
sampling, with the difference and its 95 % interval (normal, paired over queries and pooled over seeds).
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from nuclr.popularity import PopularityCorrection, hubness

USED = 3000  # of the training images: those after the first so many
ASKED = 4000


def captions(folder: Path) -> Tensor:
    """Return unit-norm features of the captions, (images, 5, d)."""
    parts = []
    for name in ("train", "dev"):
        with np.load(folder / f"{name}.npz") as file:
            order = np.argsort(file["y_to_x"], kind="stable")
            parts.append(torch.from_numpy(file["y"][order]).float().reshape(len(file["x"]), 5, -1))
    return normalize(torch.cat([parts[0][USED:], parts[1]]), dim=2)


def demand(kind: str, images: int, rng: np.random.Generator) -> np.ndarray:
    """Return the probability that each image is asked for."""
    rank = 1 + rng.permutation(images)
    weight = (3 * rank <= images).astype(float) if kind == "one third" else rank ** -float(kind)
    return weight / weight.sum()


def measure(bank: Tensor, items: Tensor, asked: Tensor, image: np.ndarray) -> np.ndarray:
    """Return hits of plain and corrected search, (2, queries)."""
    links = np.stack([np.arange(len(image)), image], axis=1)
    bias = PopularityCorrection().fit(bank, items).bias(items)
    found = [hubness(asked, items, 1, bias=one) for one in (None, bias)]
    return np.stack([one.hits(links).double().numpy() for one in found])


def run(y: Tensor, seed: int) -> dict[str, np.ndarray]:
    """Return hits by the name of the setting."""
    rng = np.random.default_rng(seed)
    n, items = len(y), y[:, 0]

    def sample(size: int, columns: tuple[int, int], probability: np.ndarray | None = None) -> tuple[Tensor, np.ndarray]:
        image = rng.choice(n, size, p=probability)
        return y[image, rng.integers(*columns, size)], image

    asked, image = sample(ASKED, (3, 5))
    log = y[rng.permutation(n), 1]
    found = {f"log of {size:,} queries": measure(log[:size], items, asked, image) for size in (50, 200, 1000, 4000)}
    found["no log: the items themselves"] = measure(items, items, asked, image)
    titles = torch.cat([log[:3000], items[rng.permutation(n)[:1000]]])
    found["titles in the log"] = measure(titles, items, asked, image)
    for kind in ("0.5", "0.8", "1.0", "one third"):
        probability = demand(kind, n, rng)
        bank, _ = sample(8000, (1, 3), probability)
        found[f"demand {kind}"] = measure(bank, items, *sample(ASKED, (3, 5), probability))
    return found


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with flickr8k/embeddings")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/demand.json"))
    options = parser.parse_args()
    y = captions(options.data / "flickr8k" / "embeddings")
    runs = [run(y, seed) for seed in range(options.seeds)]
    rows = {}
    print("| setting | plain | corrected | difference |\n| --- | --- | --- | --- |")
    for name in runs[0]:
        hits = 100 * np.concatenate([one[name] for one in runs], axis=1)
        (plain, corrected), change = hits.mean(axis=1), hits[1] - hits[0]
        reach = 1.96 * change.std() / len(change) ** 0.5
        low, high = change.mean() - reach, change.mean() + reach
        rows[name] = {"plain": plain, "corrected": corrected, "low": low, "high": high}
        print(f"| {name} | {plain:.1f} | {corrected:.1f} | {change.mean():+.1f} [{low:+.1f}, {high:+.1f}] |")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
