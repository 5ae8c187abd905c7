"""Measure three peculiarities of the published code on embeddings: the shift of NUCLR, SogCLR's 1e-10, raw SigLIP.

    python benchmarks/recipes.py [--data ../flickr8k/embeddings] [--seeds 3] [--only siglip ...] [--out recipes.json]

Linear heads of width 256 on `train.npz` (each image with its first caption), B = 64, ten epochs, temperature 0.01,
gamma 0.8, zeta frozen for two epochs and with the published recipe's step per visit (zeta_lr n/B of CC3M). Recall@1 on
all of `dev.npz`, mean of both directions, in percent. docs/reproduce.md has the result. The losses are written here,
because the package does not have the peculiarities.
"""

import argparse
import json
import math
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize

BATCH, EPOCHS, FROZEN, WIDTH, LR = 64, 10, 2, 256, 1e-3
TAU, GAMMA, THETA, ZETA_INIT, RATIO_X = 0.01, 0.8, 0.9, -0.05, 0.1
STEP_PER_VISIT = 5e-6 * 2_798_889 / 512  # zeta_lr n/B of the published script
VARIANTS = {
    "nuclr": "NUCLR, averages as logarithms",
    "nuclr-shift": "NUCLR, shifts as published",
    "sogclr": "SogCLR",
    "sogclr-epsilon": "SogCLR, 1e-10 added as published",
    "siglip": "SigLIP on unit-norm features",
    "siglip-raw": "SigLIP on raw features, decay of scale and bias, as published",
}


class Data(NamedTuple):
    """Training pairs x, y, and held-out x, y with the x of each y; all standardized."""

    x: Tensor
    y: Tensor
    dev_x: Tensor
    dev_y: Tensor
    dev_links: Tensor


def read(folder: Path) -> Data:
    train, dev = np.load(folder / "train.npz"), np.load(folder / "dev.npz")
    _, first = np.unique(train["y_to_x"], return_index=True)
    x, y, dev_x, dev_y = (
        torch.from_numpy(array.astype(np.float32)) for array in (train["x"], train["y"][first], dev["x"], dev["y"])
    )
    means, stds = (x.mean(0), y.mean(0)), (x.std(0) + 1e-6, y.std(0) + 1e-6)
    x, dev_x = ((side - means[0]) / stds[0] for side in (x, dev_x))
    y, dev_y = ((side - means[1]) / stds[1] for side in (y, dev_y))
    return Data(x, y, dev_x, dev_y, torch.from_numpy(dev["y_to_x"]))


class Side:
    """State of one side: s and shift b per anchor; zeta, velocity z and xi of the candidates."""

    def __init__(self, pairs: int, variant: str, ratio: float) -> None:
        self.pairs, self.variant, self.ratio = pairs, variant, ratio
        self.learns_zeta = variant.startswith("nuclr")
        self.s, self.b, self.z = (torch.zeros(pairs) for _ in range(3))
        self.log_s = torch.full((pairs,), -math.inf)  # the exact average, to compare with
        self.zeta = torch.full((pairs,), ZETA_INIT if self.learns_zeta else 0.0)
        self.xi = 0.0
        self.errors: list[Tensor] = []

    def weights(self, margins: Tensor, index: Tensor, eta: float) -> Tensor:
        """Return the weights of the margins (anchor, candidate) and update the state."""
        own = torch.eye(len(index), dtype=torch.bool)
        old, new = self.b[index], torch.maximum(self.b[index], margins.amax(dim=1))
        self.b[index] = new
        logits = (margins - self.zeta[index]) / TAU
        terms = torch.exp(logits - new[:, None] / TAU)
        batch = terms.masked_fill(own, 0).sum(dim=1)
        factor = torch.exp((old - new) / (1 if self.variant == "nuclr-shift" else TAU))
        before = torch.where(self.s[index] == 0, batch, self.s[index] * factor)
        s = self.s[index] = (1 - GAMMA) * before + GAMMA * batch
        log_batch = logits.masked_fill(own, -math.inf).logsumexp(dim=1)
        log_before = torch.where(self.log_s[index].isinf(), log_batch, self.log_s[index])
        log_s = torch.logaddexp(log_before + math.log(1 - GAMMA), log_batch + math.log(GAMMA))
        self.log_s[index] = log_s
        self.errors.append(s.log() + new / TAU - log_s)
        negatives = terms.masked_fill(own, 0)
        if self.variant == "sogclr":
            return logits.masked_fill(own, -math.inf).sub(log_s[:, None]).exp()
        if self.variant == "sogclr-epsilon":
            return negatives / (s + 1e-10)[:, None]
        share = (len(index) - 1) / (self.pairs - 1)
        weights = negatives / (s + share * torch.exp(-(self.xi + new) / TAU))[:, None]
        if eta > 0:
            positive = torch.exp(-(self.zeta[index] + new) / TAU) / (self.pairs - 1)
            totals = (s / (len(index) - 1) + positive).clamp(min=1e-16)
            slope = 1 - self.pairs / (self.pairs - 1) * (terms / totals[:, None]).mean(dim=0)
            started = torch.where(self.z[index] == 0, slope, self.z[index])
            self.z[index] = (1 - THETA) * started + THETA * slope
            self.zeta[index] -= self.ratio * eta * self.z[index]
        return weights

    def end_epoch(self) -> None:
        """Set xi to the largest zeta, but not below 0."""
        self.xi = max(0.0, self.zeta.max().item())


def zeta_step(epoch: int, pairs: int) -> float:
    if epoch < FROZEN:
        return 0.0
    step = STEP_PER_VISIT * BATCH / pairs * (1 + math.cos(math.pi * (epoch - FROZEN) / (EPOCHS - 1 - FROZEN))) / 2
    return step if epoch < EPOCHS // 2 else step / 10 if epoch < EPOCHS * 3 // 4 else step / 100


def train(variant: str, seed: int, data: Data) -> dict[str, float]:
    """Return recall@1, and for NUCLR how far the averages are from the exact ones after the first epoch."""
    torch.manual_seed(seed)
    heads = nn.Linear(data.x.shape[1], WIDTH), nn.Linear(data.y.shape[1], WIDTH)
    log_scale, bias = nn.Parameter(torch.tensor(math.log(10.0))), nn.Parameter(torch.tensor(-10.0))
    decay = 0.02 if variant == "siglip-raw" else 0.0
    groups = [{"params": [*heads[0].parameters(), *heads[1].parameters()], "weight_decay": 0.02}]
    optimizer = torch.optim.AdamW([*groups, {"params": [log_scale, bias], "weight_decay": decay}], lr=LR)
    pairs, signs = len(data.x), 2 * torch.eye(BATCH) - 1
    sides = Side(pairs, variant, 1.0), Side(pairs, variant, RATIO_X)  # anchors x, candidates y; and the reverse
    steps, done = pairs // BATCH, 0
    for epoch in range(EPOCHS):
        order = torch.randperm(pairs)
        for index in order[: steps * BATCH].split(BATCH):
            for group in optimizer.param_groups:
                group["lr"] = LR * (1 + math.cos(math.pi * done / (steps * EPOCHS))) / 2
            done += 1
            x, y = heads[0](data.x[index]), heads[1](data.y[index])
            if variant != "siglip-raw":
                x, y = normalize(x, dim=1), normalize(y, dim=1)
            scores = x @ y.T
            if variant.startswith("siglip"):
                loss = -logsigmoid(signs * (scores * log_scale.exp() + bias)).sum() / BATCH
            else:
                loss = torch.zeros(())
                for side, own in zip(sides, (scores, scores.T), strict=True):
                    margins = own - own.diagonal()[:, None]
                    loss = (
                        loss + (side.weights(margins.detach(), index, zeta_step(epoch, pairs)) * margins).sum() / BATCH
                    )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for side in sides:
            side.end_epoch()
    with torch.no_grad():
        scores = normalize(heads[0](data.dev_x), dim=1) @ normalize(heads[1](data.dev_y), dim=1).T
    to_x = (scores.argmax(dim=0) == data.dev_links).float().mean()
    to_y = (data.dev_links[scores.argmax(dim=1)] == torch.arange(len(scores))).float().mean()
    result = {"recall@1": 50 * (to_x + to_y).item()}
    if variant.startswith("nuclr"):
        errors = torch.cat([torch.cat(side.errors[steps:]) for side in sides])
        result |= {"averages off by 1 %": (errors.abs() > 0.01).float().mean().item()}
        result |= {"99th percentile of the factor": errors.quantile(0.99).exp().item()}
        result |= {"largest factor": errors.max().exp().item(), "largest zeta": sides[0].zeta.max().item()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../flickr8k/embeddings"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data, results = read(arguments.data), {}
    for variant in arguments.only:
        runs = results[variant] = [train(variant, seed, data) for seed in range(arguments.seeds)]
        recalls = [run["recall@1"] for run in runs]
        spread = f" ± {stdev(recalls):.2f}" if len(recalls) > 1 else ""
        others = ", ".join(f"{key} {value:.4g}" for key, value in runs[0].items() if key != "recall@1")
        print(
            f"{VARIANTS[variant]}: {mean(recalls):.2f}{spread}" + (f"; first seed: {others}" if others else ""),
            flush=True,
        )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
