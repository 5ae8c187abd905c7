"""Train a recommender of two towers, and see what the popularity of items does to each loss.

    python examples/two_towers.py                                                # a small generated set
    python examples/two_towers.py --data ml-1m --temperature 0.1 0.2 --lr 0.01

Each tower is a table of embeddings, of users and of items; with features of either, replace it by a network. The
negatives of a pair are the items of the other pairs of the batch, so popular items are negatives most often. A softmax
over them learns how much a user likes an item beyond its popularity. To predict what users take next, the popularity
has to come back: during training (`log_q=`, the logQ correction), or at search, as a bias per item.

--data is a folder with train.txt, valid.txt and test.txt, in which a line is a user and its items, as whole numbers:
the format of LightGCN. The folders data/ml-1m and data/gowalla of https://github.com/geon0325/LightGCNpp have it.
Settings and the number of epochs are chosen by recall@20 on valid.txt; the table is of test.txt, with 95 % intervals of
a bootstrap over users. Items that the user has in train.txt are not ranked, as in the code of LightGCN. The figures are
in docs/recommenders.md.
"""

import argparse
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, softplus

from nuclr.objectives import Objective, build

WIDTH = 64
BATCH = 1024
CUTOFF = 20
VALID_USERS = 5000  # that choose the settings; more take longer
OBJECTIVES = ("softmax", "sogclr", "nuclr")
LOSSES = ("bpr", *(name + logq for name in OBJECTIVES for logq in ("", "+logq")))


# ---------------------------------------------------------------------------------------------------------------------
# Interactions
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Interactions:
    """Pairs of a user and an item by split: (pairs, 2) each."""

    train: Tensor
    valid: Tensor
    test: Tensor

    def __post_init__(self) -> None:
        everything = torch.cat([self.train, self.valid, self.test])
        self.users, self.items = (int(column.max()) + 1 for column in everything.T)
        self.count = torch.bincount(self.train[:, 1], minlength=self.items).clamp_min(1)


def read_pairs(path: Path) -> Tensor:
    """Return the pairs of a file of LightGCN."""
    lines = [[int(word) for word in line.split()] for line in path.read_text().splitlines() if line.strip()]
    return torch.tensor([(line[0], item) for line in lines for item in line[1:]])


def generate_pairs(users: int = 400, items: int = 300, pairs: int = 24_000) -> Interactions:
    """Return interactions of users and items that have tastes, where some items are far more popular than others."""
    generator = torch.Generator().manual_seed(0)
    taste = torch.randn(users, 4, generator=generator) @ torch.randn(4, items, generator=generator)
    popularity = 2 * torch.randn(items, generator=generator)
    chosen = torch.multinomial((taste + popularity).softmax(1), pairs // users, generator=generator)
    drawn = torch.stack([torch.arange(users).repeat_interleave(chosen.shape[1]), chosen.flatten()], dim=1)
    drawn = drawn[torch.randperm(len(drawn), generator=generator)]
    return Interactions(*drawn.split([len(drawn) * 7 // 10, len(drawn) // 10, len(drawn) // 5]))


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


class Towers(nn.Module):
    """Two tables of embeddings. Only the rows of the batch get gradients and are moved."""

    def __init__(self, data: Interactions, unit_norm: bool = True) -> None:
        super().__init__()
        self.unit_norm = unit_norm
        self.user = nn.Embedding(data.users, WIDTH, sparse=True)
        self.item = nn.Embedding(data.items, WIDTH, sparse=True)
        for table in (self.user, self.item):
            nn.init.normal_(table.weight, std=0.1)

    @torch.no_grad()
    def all_features(self) -> tuple[Tensor, Tensor]:
        """Return the embeddings of all users and of all items."""
        return tuple(self.encode(table, torch.arange(len(table.weight))) for table in (self.user, self.item))

    def encode(self, table: nn.Embedding, rows: Tensor) -> Tensor:
        """Return the embeddings of some users or items."""
        return normalize(table(rows), dim=1) if self.unit_norm else table(rows)


def make_objective(name: str, data: Interactions, temperature: float) -> Objective:
    """Return one of OBJECTIVES: the softmax over the batch, or an objective with a row of state per user and item."""
    if name == "softmax":
        return build("clip", temperature=temperature)
    items = {"num_x": data.users, "num_y": data.items}
    return build(name, num_samples=len(data.train), temperature=temperature, sides="x", state=items)


def train(
    loss_name: str,
    data: Interactions,
    temperature: float,
    lr: float,
    epochs: int,
) -> Iterator[tuple[Towers, dict[str, Tensor]]]:
    """Train with one loss. After each epoch, yield the towers and the biases of items to rank with, by name."""
    torch.manual_seed(0)
    name, _, corrected = loss_name.partition("+")
    objective = None if name == "bpr" else make_objective(name, data, temperature)
    towers = Towers(data, unit_norm=objective is not None)
    optimizer = torch.optim.SparseAdam(towers.parameters(), lr=lr)
    log_count = data.count.log()
    log_q = log_count - math.log(len(data.train))  # q is the share of the pairs that have the item
    for _ in range(epochs):
        for pairs in torch.randperm(len(data.train)).split(BATCH)[:-1]:
            user, item = data.train[pairs].T
            x = towers.encode(towers.user, user)
            y = towers.encode(towers.item, item)
            if objective is None:
                other = towers.encode(towers.item, torch.randint(data.items, (BATCH,)))
                loss = softplus((x * (other - y)).sum(1)).mean() + 5e-5 * (x**2 + y**2 + other**2).sum() / BATCH
            else:
                # The ids are the rows of the tables. Pairs that share one are not negatives of each other.
                given = log_q[item] if corrected else None
                loss = objective(x, y, x_id=user, y_id=item, log_q=given).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        biases = {"": torch.zeros(data.items)}
        if objective is not None:
            # log p(item | user) is score / tau plus what training had divided by: the count of the item, and zeta.
            learnt = getattr(objective, "zeta_y", torch.zeros(data.items))
            put_back = -learnt if corrected else temperature * log_count - learnt
            if put_back.any():
                biases[", put back"] = put_back
        yield towers, biases


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(
    user: Tensor,
    item: Tensor,
    bias: Tensor,
    data: Interactions,
    wanted: Tensor,
) -> np.ndarray:
    """Return recall@20 and NDCG@20 per user that has wanted items, (users, 2), as LightGCN computes them."""
    gain = 1 / torch.arange(2, CUTOFF + 2).log2()
    ideal = gain.cumsum(0)
    results = []
    for users in wanted[:, 0].unique().split(512):
        row = torch.full((data.users,), -1)
        row[users] = torch.arange(len(users))

        def cells(pairs: Tensor, row: Tensor = row) -> tuple[Tensor, Tensor]:
            pairs = pairs[row[pairs[:, 0]] >= 0]
            return row[pairs[:, 0]], pairs[:, 1]

        scores = user[users] @ item.T + bias
        scores[cells(data.train)] = -torch.inf
        right = torch.zeros(scores.shape, dtype=torch.bool)
        right[cells(wanted)] = True
        hits = right.gather(1, scores.topk(CUTOFF).indices)
        count = right.sum(1)
        ndcg = (hits * gain).sum(1) / ideal[count.clamp(max=CUTOFF) - 1]
        results.append(torch.stack([hits.sum(1) / count, ndcg], dim=1))
    return torch.cat(results).numpy()


def interval(values: np.ndarray) -> str:
    """Return the mean in percent with the 95 % interval of a bootstrap over users."""
    random = np.random.default_rng(0)
    means = [values[random.integers(len(values), size=len(values))].mean() for _ in range(1000)]
    low, high = np.percentile(means, [2.5, 97.5])
    return f"{100 * values.mean():.1f} [{100 * low:.1f}, {100 * high:.1f}]"


@dataclass
class Best:
    """The tables, and the bias of items, that were best on valid.txt."""

    recall: float
    setting: str
    user: Tensor
    item: Tensor
    bias: Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with train.txt, valid.txt and test.txt")
    parser.add_argument("--loss", nargs="+", choices=LOSSES, default=LOSSES)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.2])
    parser.add_argument("--lr", type=float, nargs="+", default=[0.01])
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    if args.data is None:
        data = generate_pairs()
    elif not (args.data / "train.txt").is_file():
        parser.error(f"--data: {args.data} has no train.txt; --help says where to get such a folder")
    else:
        data = Interactions(*(read_pairs(args.data / f"{split}.txt") for split in ("train", "valid", "test")))
    print(f"{data.users} users, {data.items} items, {len(data.train)} pairs to train on", flush=True)
    chosen = data.valid[:, 0].unique()
    chosen = chosen[:: max(1, len(chosen) // VALID_USERS)]
    valid = data.valid[torch.isin(data.valid[:, 0], chosen)]
    for name in args.loss:
        best: dict[str, Best] = {}
        start = time.process_time()
        for temperature, lr in itertools.product(args.temperature, args.lr):
            for epoch, (towers, biases) in enumerate(train(name, data, temperature, lr, args.epochs), 1):
                user, item = towers.all_features()
                for ranking, bias in biases.items():
                    recall = evaluate(user, item, bias, data, valid)[:, 0].mean()
                    if ranking not in best or recall > best[ranking].recall:
                        setting = f"temperature {temperature:g}, lr {lr:g}, epoch {epoch}"
                        best[ranking] = Best(recall, setting, user, item, bias)
        seconds = time.process_time() - start
        for ranking, found in best.items():
            test = evaluate(found.user, found.item, found.bias, data, data.test)
            print(
                f"{name + ranking:28} recall@20 {interval(test[:, 0])}  NDCG@20 {interval(test[:, 1])}  "
                f"valid {100 * found.recall:.1f} ({found.setting}), {seconds:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
