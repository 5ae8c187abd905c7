r"""Where does popularity pay in training? Six methods with the same number of settings on six sets of pairs.

    python benchmarks/study.py --data DATA --vectors FOLDER [--sets tldr,debian] [--methods nuclr] [--out FILE]

DATA holds `flickr8k`, `multi30k` and `search`, FOLDER the vectors of benchmarks/search_texts.py. Linear heads of width
128 are trained on fixed features (centered, unit norm): 4,000 pairs, B = 64, AdamW with a cosine schedule. Sets:

    flickr8k       images and captions; one of an image's five captions per epoch
    multi30k       English and German descriptions of an image, one of five each per epoch; wordllama vectors
    tldr           descriptions and commands; 8 % of the training pairs share their description; wordllama vectors
    tldr_masked    the same, where pairs with an equal text are not negatives of each other
    debian         synopses and descriptions of packages; wordllama vectors
    tldr_repeated  tldr, where half of the training pairs have a description that occurs several times in the whole set

The held-out pairs are two halves, each with a gallery of its own, in which equal texts are one item and every item that
is paired with the query's text is a right answer. All methods have the same number of settings (`settings_of`). The
best one on one half with seed 0 is trained with seeds 1 to 5 and evaluated on the other half, and the reverse. Recall@1
is the mean of both directions and both halves. Intervals are 95 % intervals of a paired bootstrap over queries (equal
queries and descriptions of one image together) and seeds.

Each run is one line of a JSON Lines file, which a restarted study does not repeat.
"""

import argparse
import itertools
import json
import math
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from nuclr.objectives import NUCLR, Objective, build
from nuclr.popularity import solve
from search_texts import Texts, read_lines, read_search, static_vectors

SETS = ("flickr8k", "multi30k", "tldr", "tldr_masked", "debian", "tldr_repeated")
METHODS = ("clip", "sogclr", "nuclr", "nuclr exact", "nuclr taus", "nuclr-authors")
PAIRS = 4000
HELD_OUT = 2000
WIDTH = 128
BATCH = 64
EPOCHS = 8
FROZEN_EPOCHS = EPOCHS // 6  # the default of `nuclr train`
TEMPERATURES = (0.02, 0.05, 0.1)
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
AUTHORS_STEPS = (1.4, 14.0)  # zeta_lr n/B: those of configs/flickr8k_embeddings.yaml, 1x and 10x
TUNING_SEED = 0
SEEDS = (1, 2, 3, 4, 5)
RESAMPLES = 2000


# -- data --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pairs:
    """Pairs in k versions: x (n, k, d_x) and y (n, m, d_y). Equal ids in x_id (n, k) or y_id (n, m): equal items."""

    x: Tensor
    y: Tensor
    x_id: Tensor
    y_id: Tensor

    def rows(self, kept: slice | Tensor) -> "Pairs":
        """Return some of the pairs."""
        return Pairs(self.x[kept], self.y[kept], self.x_id[kept], self.y_id[kept])


@dataclass(frozen=True)
class Data:
    """Training pairs and the two halves of the held-out pairs."""

    train: Pairs
    halves: tuple[Pairs, Pairs]
    masked: bool


def text_ids(texts: list[str]) -> Tensor:
    """Return a number per text, which equal texts share."""
    return torch.from_numpy(np.unique(np.array(texts), return_inverse=True)[1])


def read_flickr8k(data: Path) -> Pairs:
    """Return the training images, then those of dev, with five captions each."""
    images = []
    captions = []
    texts: list[str] = []
    for part, size in (("train", PAIRS), ("dev", None)):
        arrays = np.load(data / "flickr8k" / "embeddings" / f"{part}.npz")
        order = np.argsort(arrays["y_to_x"], kind="stable")
        images.append(torch.from_numpy(arrays["x"])[:size].float())
        captions.append(torch.from_numpy(arrays["y"][order]).reshape(-1, 5, arrays["y"].shape[1])[:size].float())
        lines = read_lines(data / "flickr8k" / f"{part}.jsonl")[:size]
        texts += [text for line in lines for text in line["captions"]]
    x = torch.cat(images)[:, None]
    return Pairs(x, torch.cat(captions), torch.arange(len(x))[:, None], text_ids(texts).reshape(len(x), 5))


def read_multi30k(data: Path) -> Pairs:
    """Return training images, then those of val, with five English and five German descriptions each."""
    images = read_lines(data / "multi30k" / "train.jsonl")[:PAIRS] + read_lines(data / "multi30k" / "val.jsonl")
    english = [text for image in images for text in image["en"]]
    german = [text for image in images for text in image["de"]]
    shape = (len(images), 5, -1)
    return Pairs(
        torch.from_numpy(static_vectors(english)).reshape(shape),
        torch.from_numpy(static_vectors(german)).reshape(shape),
        text_ids(english).reshape(shape[:2]),
        text_ids(german).reshape(shape[:2]),
    )


def sample_links(texts: Texts, held_out: int, repeated: bool) -> np.ndarray:
    """Return a random sample of the links of a set, PAIRS for training and then the held-out ones, (links, 2).

    With `repeated`, half of the training pairs have a query that occurs several times in the whole set.
    """
    order = np.random.default_rng(0).permutation(len(texts.links))
    sample = order[: PAIRS + held_out]
    if repeated:
        others = np.setdiff1d(order, sample[PAIRS:], assume_unique=True)
        count = Counter(texts.queries)
        several = np.array([count[texts.queries[query]] > 1 for query in texts.links[others, 0]])
        sample = np.concatenate([others[several][: PAIRS // 2], others[~several][: PAIRS // 2], sample[PAIRS:]])
    return texts.links[sample]


def read_search_pairs(data: Path, vectors: Path, name: str) -> Pairs:
    """Return a random sample of the queries and documents of a set, for training and then held-out."""
    name, _, variant = name.partition("_")
    texts = read_search(data / "search" / name)
    arrays = np.load(vectors / f"{name}_static.npz")
    query, document = sample_links(texts, HELD_OUT, variant == "repeated").T
    return Pairs(
        torch.from_numpy(arrays["q"][query])[:, None],
        torch.from_numpy(arrays["d"][document])[:, None],
        text_ids([texts.queries[row] for row in query])[:, None],
        text_ids([texts.documents[row] for row in document])[:, None],
    )


def read_data(data: Path, vectors: Path, name: str) -> Data:
    """Return the pairs of a set, features centered by the mean of the training pairs."""
    if name == "flickr8k":
        pairs = read_flickr8k(data)
    elif name == "multi30k":
        pairs = read_multi30k(data)
    else:
        pairs = read_search_pairs(data, vectors, name)
    x = normalize(pairs.x - pairs.x[:PAIRS].mean(dim=(0, 1)), dim=-1)
    y = normalize(pairs.y - pairs.y[:PAIRS].mean(dim=(0, 1)), dim=-1)
    return Data(*split(Pairs(x, y, pairs.x_id, pairs.y_id)), name.endswith("_masked"))


def split(pairs: Pairs, count: int = PAIRS) -> tuple[Pairs, tuple[Pairs, Pairs]]:
    """Return the first pairs, for training, and two random halves of the others."""
    held_out = count + torch.randperm(len(pairs.x) - count, generator=torch.Generator().manual_seed(0))
    first, second = held_out.chunk(2)
    return pairs.rows(slice(count)), (pairs.rows(first), pairs.rows(second))


# -- methods -----------------------------------------------------------------------------------------------------------


def settings_of(name: str, method: str) -> list[dict]:
    """Return the settings of a method, as many as of every other: 12 on flickr8k and multi30k, 6 on the other sets.

    Three temperatures times four rates, or times two rates and two steps; on the other sets times two rates.
    """
    full = name in ("flickr8k", "multi30k")
    rates = RATES if full and method != "nuclr-authors" else RATES[1:3]
    settings = [{"temperature": tau, "rate": rate} for tau, rate in itertools.product(TEMPERATURES, rates)]
    if method != "nuclr-authors":
        return settings
    steps = AUTHORS_STEPS if full else AUTHORS_STEPS[:1]
    return [setting | {"step": step} for setting, step in itertools.product(settings, steps)]


def make_objective(method: str, setting: dict, n: int) -> Objective:
    """Return the objective of a method, with its defaults apart from the setting."""
    tau = setting["temperature"]
    if method in ("clip", "sogclr"):
        return build(method, num_samples=n, temperature=tau)
    if method == "nuclr taus":  # the default upper bound, 0.05, is below the largest initial temperature
        return build("nuclr", num_samples=n, temperature=tau, temperatures={"individual": True, "tau_max": 2 * tau})
    if method in ("nuclr", "nuclr exact"):
        return build("nuclr", num_samples=n, temperature=tau)
    # the options of configs/flickr8k_embeddings.yaml
    common = {"zeta_init": 0.0, "zeta_lr_ratio_x": 1.0, "zeta_momentum": 0.0, "zeta_velocity_init": "zero"}
    common |= {"xi_update": "step", "temperature": tau}
    return build("nuclr-authors", num_samples=n, zeta_lr=setting["step"] * BATCH / n, **common)


def set_exact_popularity(objective: NUCLR, x: Tensor, y: Tensor) -> None:
    """Set zeta of both sides to the exact solution on these features, as `schedule.zeta_refresh` does."""
    for side, anchors, candidates in (("y", x, y), ("x", y, x)):
        result = solve(
            anchors,
            candidates,
            temperature=objective.temperature,
            tolerance=0.05,
            init=objective.get_buffer(f"zeta_{side}"),
        )
        objective.set_popularity(side, torch.arange(len(candidates)), result.zeta)


# -- training and evaluation -------------------------------------------------------------------------------------------


def train(data: Data, method: str, setting: dict, seed: int) -> tuple[Tensor, Tensor]:
    """Return the trained heads, (d_x, WIDTH) and (d_y, WIDTH)."""
    torch.manual_seed(seed)
    x = data.train.x
    y = data.train.y
    n = len(x)
    heads = [torch.nn.Linear(side.shape[-1], WIDTH, bias=False) for side in (x, y)]
    if x.shape[-1] == y.shape[-1]:  # the scores start near those of the features
        heads[1].load_state_dict(heads[0].state_dict())
    objective = make_objective(method, setting, n)
    zeta_lr = getattr(objective, "zeta_lr", 0.0)
    optimizer = torch.optim.AdamW([head.weight for head in heads], lr=setting["rate"])
    steps = n // BATCH
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * steps)
    for epoch in range(EPOCHS):
        rows = torch.arange(n)
        x_version = torch.randint(x.shape[1], (n,))
        y_version = torch.randint(y.shape[1], (n,))
        epoch_x = x[rows, x_version]
        epoch_y = y[rows, y_version]
        if method == "nuclr exact" and epoch >= FROZEN_EPOCHS:
            with torch.no_grad():
                features = [normalize(head(side), dim=1) for head, side in zip(heads, (epoch_x, epoch_y), strict=True)]
                set_exact_popularity(objective, *features)
        order = torch.randperm(n)[: steps * BATCH]
        for step, index in enumerate(order.split(BATCH)):
            if zeta_lr:
                thawed = (epoch + step / steps - FROZEN_EPOCHS) / (EPOCHS - FROZEN_EPOCHS)
                moves = thawed >= 0 and method != "nuclr exact"
                objective.zeta_lr = zeta_lr * 0.5 * (1 + math.cos(math.pi * thawed)) if moves else 0.0
            ids = {}
            if data.masked:
                ids = {"x_id": data.train.x_id[index, 0], "y_id": data.train.y_id[index, 0]}
            batch_x = normalize(heads[0](epoch_x[index]), dim=1)
            batch_y = normalize(heads[1](epoch_y[index]), dim=1)
            optimizer.zero_grad()
            objective(batch_x, batch_y, index, **ids).loss.backward()
            optimizer.step()
            schedule.step()
    return heads[0].weight.detach().T, heads[1].weight.detach().T


def first_hits(half: Pairs, heads: tuple[Tensor, Tensor]) -> list[np.ndarray]:
    """Return whether the first result is right, per held-out item with its repetitions: x to y, then y to x."""
    k, m = half.x.shape[1], half.y.shape[1]
    x_ids, x_first, x_row = unique(half.x_id.flatten())
    y_ids, y_first, y_row = unique(half.y_id.flatten())
    x = normalize(half.x.flatten(0, 1)[x_first] @ heads[0], dim=1)
    y = normalize(half.y.flatten(0, 1)[y_first] @ heads[1], dim=1)
    right = torch.zeros(len(x_ids), len(y_ids), dtype=torch.bool)
    for x_version, y_version in itertools.product(range(k), range(m)):
        right[x_row.reshape(-1, k)[:, x_version], y_row.reshape(-1, m)[:, y_version]] = True
    scores = x @ y.T
    x_hit = right.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]
    y_hit = right.T.gather(1, scores.argmax(dim=0)[:, None])[:, 0]
    return [x_hit[x_row].numpy(), y_hit[y_row].numpy()]


def unique(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct ids, where each occurs first, and the row of every id among the distinct ones."""
    values, first, row = np.unique(ids.numpy(), return_index=True, return_inverse=True)
    return torch.from_numpy(values), torch.from_numpy(first), torch.from_numpy(row)


# -- the study ---------------------------------------------------------------------------------------------------------


class Study:
    """Runs with their results, kept in a file: per half and direction, one bit per query.

    A study of other methods replaces `seeds`, `epochs`, `settings_of` and `hits_of`.
    """

    seeds: tuple[int, ...] = SEEDS
    epochs = EPOCHS

    def __init__(self, file: Path) -> None:
        self.file = file
        self.results: dict[str, dict] = {}
        if file.exists():
            for line in file.read_text().splitlines():
                result = json.loads(line)
                self.results[json.dumps(result["key"])] = result

    def settings_of(self, name: str, method: str) -> list[dict]:
        """Return the settings of a method."""
        return settings_of(name, method)

    def hits_of(self, data: Data, method: str, setting: dict, seed: int) -> list[list[np.ndarray]]:
        """Train, and return the hits per half and direction."""
        heads = train(data, method, setting, seed)
        return [first_hits(half, heads) for half in data.halves]

    def key(self, name: str, method: str, setting: dict, seed: int) -> str:
        """Return what identifies a run in the file."""
        return json.dumps([name, method, setting, seed, self.epochs])

    def run(self, name: str, data: Data, method: str, setting: dict, seed: int) -> dict:
        """Return the result of a run, trained unless it is in the file."""
        known = self.key(name, method, setting, seed)
        if known not in self.results:
            start = time.process_time()
            hits = []
            recalls = []
            for directions in self.hits_of(data, method, setting, seed):
                hits.append([pack(hit) for hit in directions])
                recalls.append([round(100 * float(hit.mean()), 3) for hit in directions])
            seconds = round(time.process_time() - start, 2)
            self.results[known] = {"key": json.loads(known), "recall": recalls, "hits": hits, "seconds": seconds}
            with self.file.open("a") as lines:
                lines.write(json.dumps(self.results[known]) + "\n")
            print(f"{name:12}{method:14}{setting} seed {seed}: {recalls}, {seconds} s", flush=True)
        return self.results[known]

    def choose(self, name: str, data: Data, method: str) -> list[dict]:
        """Return the best setting on each half with the seed for tuning."""
        settings = self.settings_of(name, method)
        runs = [self.run(name, data, method, setting, TUNING_SEED) for setting in settings]
        recall = np.array([run["recall"] for run in runs]).mean(axis=2)  # (settings, halves)
        return [settings[best] for best in recall.argmax(axis=0)]

    def report(self, name: str, data: Data, method: str) -> tuple[list[dict], list[list[np.ndarray]]]:
        """Return the chosen settings, and the hits per half and direction, (seeds, queries), of the other's setting."""
        chosen = self.choose(name, data, method)
        hits = []
        for half, setting in enumerate(reversed(chosen)):
            runs = [self.run(name, data, method, setting, seed) for seed in self.seeds]
            sizes = (data.halves[half].x_id.numel(), data.halves[half].y_id.numel())
            directions = []
            for direction, size in enumerate(sizes):
                directions.append(np.stack([unpack(run["hits"][half][direction], size) for run in runs]))
            hits.append(directions)
        return chosen, hits


def pack(hits: np.ndarray) -> str:
    """Return bits as text."""
    return np.packbits(hits).tobytes().hex()


def unpack(text: str, size: int) -> np.ndarray:
    """Return the bits of `pack`."""
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8))[:size].astype(float)


def cluster_sums(half: Pairs, hits: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return hits (directions, seeds, clusters) and sizes (directions, clusters) of the pairs with an equal first x."""
    _, _, cluster_of_pair = unique(half.x_id[:, 0])
    sums = []
    sizes = []
    for ids, values in zip((half.x_id, half.y_id), hits, strict=True):
        cluster = cluster_of_pair[:, None].expand(ids.shape).flatten().numpy()
        sizes.append(np.bincount(cluster))
        sums.append([np.bincount(cluster, weights=value) for value in values])
    return np.array(sums), np.array(sizes)


def resampled_difference(
    data: Data, hits: list[list[np.ndarray]], others: list[list[np.ndarray]]
) -> tuple[float, np.ndarray]:
    """Return the difference of recall@1 in points, and that of every resample, (RESAMPLES,)."""
    generator = np.random.default_rng(0)
    count = len(hits[0][0])
    seeds = generator.integers(count, size=(RESAMPLES, count))
    point = 0.0
    resampled = np.zeros(RESAMPLES)
    for half, mine, theirs in zip(data.halves, hits, others, strict=True):
        my_sums, sizes = cluster_sums(half, mine)
        differences = my_sums - cluster_sums(half, theirs)[0]
        clusters = sizes.shape[1]
        draws = generator.multinomial(clusters, np.full(clusters, 1 / clusters), size=RESAMPLES)
        for difference, size in zip(differences, sizes, strict=True):  # the mean of two halves and two directions
            point += difference.mean(axis=0).sum() / size.sum() / 4
            per_seed = draws @ difference.T / (draws @ size)[:, None]  # (resamples, seeds)
            resampled += np.take_along_axis(per_seed, seeds, axis=1).mean(axis=1) / 4
    return 100 * point, 100 * resampled


def interval(data: Data, hits: list[list[np.ndarray]], others: list[list[np.ndarray]]) -> tuple[float, float, float]:
    """Return the difference of recall@1 in points and its 95 % interval."""
    point, resampled = resampled_difference(data, hits, others)
    low, high = np.quantile(resampled, (0.025, 0.975))
    return point, float(low), float(high)


def show(study: Study, name: str, data: Data, methods: list[str]) -> None:
    """Train what is missing and print the table of a set."""
    reports = {method: study.report(name, data, method) for method in methods}
    print(f"\n| {name} | recall@1, halves | minus SogCLR | minus nuclr-authors | settings of the halves |")
    print("| --- | --- | --- | --- | --- |")
    for method, (chosen, hits) in reports.items():
        per_seed = np.mean([100 * side.mean(axis=1) for directions in hits for side in directions], axis=0)
        cells = [method, f"{per_seed.mean():.2f} ± {per_seed.std(ddof=1):.2f}"]
        for other in ("sogclr", "nuclr-authors"):
            if other in reports and other != method:
                point, low, high = interval(data, hits, reports[other][1])
                cells.append(f"{point:+.2f} [{low:+.2f}, {high:+.2f}]")
            else:
                cells.append("")
        cells.append("; ".join(", ".join(f"{value:g}" for value in setting.values()) for setting in chosen))
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--vectors", type=Path, required=True)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "study.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.parent.mkdir(exist_ok=True)
    study = Study(options.out)
    for name in options.sets.split(","):
        show(study, name, read_data(options.data, options.vectors, name), options.methods.split(","))


if __name__ == "__main__":
    main()
