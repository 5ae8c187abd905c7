"""Planted hubs: are they found before they enter an index, and do they succeed after the correction?

    python benchmarks/search_texts.py --data DATA --vectors FOLDER --sets acl,debian --encoders static,minilm  # once
    python benchmarks/planted.py --vectors FOLDER [--sets acl,debian] [--encoders static,minilm] [--splits 5]
        [--hubscan PYTHON CONFIG] [--wikipedia CLEAN PLANTED] [--out runs/planted]

Writes `OUT/planted.md` and `OUT/planted.json`; splits that are in OUT are not measured again. A split draws the
documents of a clean gallery, other clean documents, and three disjoint sets of queries: the bank, the attacker's, and
those that are tested. Attacks, of at most 60 documents each:

- global 4, 6, 8: clean documents, moved along the mean of the attacker's queries until their mean score is 4, 6 or 8
  standard deviations above the mean of the gallery; left out where no vector is that far
- topics 30, 100: the centroids of 30 or 100 clusters of the attacker's queries
- half topics: the same 30 centroids plus a clean document each, so that a hub looks like a document
- documents 30: the centroids of 30 clusters of the gallery

"Before they enter" scores each document against the clean gallery. Recall is the share of planted documents above the
99.6 % quantile of other clean documents: 0.4 % alerts. "In the index" scores all documents of an index that holds the
planted ones already, as a scanner does; "twice" compares them with the index without its most suspicious 5 %.
`mean cosine` is the mean score with the bank, `N_10` the number of the bank's queries that find the document among
their first ten (ties in the order of the mean score).

Success is the share of the tested queries that find a planted document among their first ten, all of them together.

HubScan (github.com/Habler-code/AdversarialHubness) runs under PYTHON, an interpreter that imports `hubscan`, with the
settings of its benchmark (CONFIG: its benchmarks/configs/concept_modality.yaml) on its own queries (documents and
centroids of documents) and on the bank; on two attacks of the first split only, because it takes minutes per index.
CLEAN and PLANTED are folders of its Wikipedia benchmark before and after its plant_hubs.py; CLEAN/query_vectors.npy
holds the vectors of its query_texts.json. As in its benchmark, lexical hubs do not count for vector search.

Depths and the quantile of `planted` were chosen on acl (static, trained); acl, debian and flickr8k were looked at.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from nuclr.popularity import PopularityCorrection
from peers import PEERS, Task, published
from search import load
from search_report import table

GALLERY = 8000
OTHERS = 4000
QUERIES = 3000
HUBS = 60
FOUND = 10
ALERTS = 0.004
SCANNED = ("global 4", "topics 30")  # by HubScan
LEFT_OUT = 0.05  # of an index, before it is compared with the rest
LEVELS = (0.05, 0.01, 0.004)
DEVIATIONS = (4, 6, 8)
SCAN = """
import builtins, sys, typing
builtins.Any = typing.Any  # revision 0333ebd uses it without importing it
import numpy
from hubscan import Config, Scanner
config, folder, metadata, queries = sys.argv[1:]
config = Config.from_yaml(config)
config.input.mode = "embeddings_only"
config.input.embeddings_path = folder + "/embeddings.npy"
config.input.metadata_path = metadata or None
config.scan.query_texts_path = None
config.output.out_dir = folder
if queries:
    config.scan.query_sampling = "real_queries"
    config.scan.query_embeddings_path = queries
scanner = Scanner(config)
scanner.load_data()
numpy.save(folder + "/scores.npy", scanner.scan()["combined_scores"])
"""


@dataclass(frozen=True)
class Split:
    """A clean gallery, other clean documents, and three disjoint sets of queries."""

    gallery: Tensor
    others: Tensor
    bank: Tensor
    attacker: Tensor
    tested: Tensor


def draw_split(folder: Path, name: str, encoder: str, generator: torch.Generator) -> Split:
    """Return a random split of a set."""
    vectors = load(folder, name, encoder)
    rows = []
    for side in (1, 0):
        linked = torch.from_numpy(np.unique(vectors.links[:, side]))
        rows.append(linked[torch.randperm(len(linked), generator=generator)])
    documents, queries = rows
    size = min(GALLERY, int(0.6 * len(documents)))
    asked = min(QUERIES, len(queries) // 3)
    return Split(
        vectors.documents[documents[:size]],
        vectors.documents[documents[size : size + OTHERS]],
        *(vectors.queries[part] for part in queries[: 3 * asked].split(asked)),
    )


# -- attacks -----------------------------------------------------------------------------------------------------------


def attacks(split: Split, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Yield the planted documents of each attack."""
    direction = split.attacker.mean(dim=0)
    level = split.gallery @ direction
    for deviations in DEVIATIONS:
        goal = float(level.mean() + deviations * level.std())
        if goal < float(direction.norm()):
            yield f"global {deviations}", moved(sample(split.others, HUBS, generator), direction, goal)
    topics = centroids(split.attacker, 30, generator)
    yield "topics 30", topics
    yield "half topics", normalize(topics + sample(split.others, len(topics), generator), dim=1)
    yield "topics 100", sample(centroids(split.attacker, 100, generator), HUBS, generator)
    yield "documents 30", centroids(split.gallery, 30, generator)


def sample(vectors: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return random rows."""
    return vectors[torch.randperm(len(vectors), generator=generator)[:count]]


def moved(documents: Tensor, direction: Tensor, goal: float) -> Tensor:
    """Return documents moved along a direction until their inner product with it is `goal`."""
    low = torch.zeros(len(documents), 1)
    high = torch.full_like(low, 1e3)
    for _ in range(50):
        step = (low + high) / 2
        reached = normalize(documents + step * direction, dim=1) @ direction >= goal
        high = torch.where(reached[:, None], step, high)
        low = torch.where(reached[:, None], low, step)
    return normalize(documents + high * direction, dim=1)


def centroids(vectors: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return the centroids of clusters (spherical k-means), unit norm."""
    centers = sample(vectors, count, generator).clone()
    for _ in range(15):
        sums = torch.zeros_like(centers).index_add_(0, (vectors @ centers.T).argmax(dim=1), vectors)
        used = sums.norm(dim=1) > 0
        centers[used] = normalize(sums[used], dim=1)
    return centers


# -- detectors ---------------------------------------------------------------------------------------------------------


class Detectors:
    """Scores of documents that are compared with a gallery; its own documents count as members."""

    def __init__(self, bank: Tensor, gallery: Tensor) -> None:
        self.bank = bank
        # `suspicious` does not depend on the temperature, and at a high one `fit` is fast
        self.correction = PopularityCorrection(temperature=1.0).fit(bank, gallery)
        self.last = (bank @ gallery.T).topk(FOUND, dim=1).values[:, -1:]

    def scores(self, documents: Tensor) -> dict[str, np.ndarray]:
        """Return the scores by detector."""
        scores = self.bank @ documents.T
        mean = scores.mean(dim=0)
        counts = (scores >= self.last - 1e-6).float().mean(dim=0)
        return {
            "suspicious": self.correction.suspicious(documents).score.numpy(),
            "mean cosine": mean.numpy(),
            "N_10": (counts + 1e-5 * mean).numpy(),
        }


def scores_inside(bank: Tensor, index: Tensor) -> dict[str, np.ndarray]:
    """Return the scores of the documents of an index that holds planted ones; "twice" leaves suspicious ones out."""
    scores = Detectors(bank, index).scores(index)
    rest = scores["suspicious"] <= np.quantile(scores["suspicious"], 1 - LEFT_OUT)
    again = Detectors(bank, index[torch.from_numpy(rest)]).scores(index)
    return {**scores, "suspicious, twice": again["suspicious"]}


def hubscan(
    options: argparse.Namespace, bank: Tensor, index: np.ndarray, metadata: Path | None
) -> dict[str, np.ndarray]:
    """Return the risk scores of HubScan for all documents of an index."""
    if options.hubscan is None:
        return {}
    python, config = options.hubscan
    scores = {}
    for name, queries in (("HubScan", ""), ("HubScan, our bank", "bank.npy")):
        with tempfile.TemporaryDirectory() as folder:
            np.save(f"{folder}/embeddings.npy", index)
            np.save(f"{folder}/bank.npy", bank.numpy())
            asked = queries and f"{folder}/{queries}"
            command = [python, "-c", SCAN, config, folder, str(metadata or ""), asked]
            subprocess.run(command, check=True, capture_output=True)
            scores[name] = np.load(f"{folder}/scores.npy")
    return scores


def recall(planted: np.ndarray, clean: np.ndarray) -> float:
    """Return the share of planted documents above all but 0.4 % of the clean ones."""
    return float((planted > np.quantile(clean, 1 - ALERTS)).mean())


# -- measures ----------------------------------------------------------------------------------------------------------


def success(split: Split, fix: PopularityCorrection, planted: Tensor) -> dict[str, float]:
    """Return the share of tested queries that find a planted document, plain and corrected on the clean gallery."""
    gallery = torch.cat([split.gallery, planted])
    task = Task(split.tested, gallery, split.bank)
    bias = fix.bias(gallery)
    scores = {
        "plain": task.scores,
        "default": task.scores - bias,
        "strength 1": task.scores - bias / fix.strength_,
    }
    for name in ("NNN", "CSLS"):
        scores[name] = PEERS[name](task, **published(task)[name])
    shares = {}
    for name, values in scores.items():
        found = values.topk(FOUND, dim=1).indices >= len(split.gallery)
        shares[name] = float(found.any(dim=1).float().mean())
    return shares


def measure_split(options: argparse.Namespace, name: str, encoder: str, seed: int) -> dict[str, float]:
    """Return all measures of a split, by names "part|attack|method"."""
    generator = torch.Generator().manual_seed(seed)
    split = draw_split(options.vectors, name, encoder, generator)
    measures = {}
    fix = PopularityCorrection().fit(split.bank, split.gallery)
    p_values = {"new": fix.suspicious(split.others).p_value, "copies": fix.suspicious(split.gallery[:OTHERS]).p_value}
    for kind, values in p_values.items():
        for level in LEVELS:
            measures[f"alarms|p <= {level}|{kind}"] = float((values <= level).double().mean())
    detectors = Detectors(split.bank, split.gallery)
    clean = detectors.scores(split.others)
    for attack, planted in attacks(split, generator):
        for method, scores in detectors.scores(planted).items():
            measures[f"before|{attack}|{method}"] = recall(scores, clean[method])
        index = torch.cat([split.gallery, split.others, planted])
        inside = scores_inside(split.bank, index)
        if seed == 0 and attack in SCANNED:
            inside |= hubscan(options, split.bank, index.numpy(), None)
        for method, scores in inside.items():
            measures[f"inside|{attack}|{method}"] = recall(scores[-len(planted) :], scores[: -len(planted)])
        for method, share in success(split, fix, planted).items():
            measures[f"success|{attack}|{method}"] = share
    return measures


def measure_wikipedia(options: argparse.Namespace) -> dict[str, float]:
    """Return the recall on HubScan's Wikipedia benchmark, by strategy and method."""
    before, after = map(Path, options.wikipedia)
    clean, index = (normalize(torch.from_numpy(np.load(path / "embeddings.npy")).float()) for path in (before, after))
    bank = normalize(torch.from_numpy(np.load(before / "query_vectors.npy")).float())
    truth = json.loads((after / "ground_truth.json").read_text(encoding="utf-8"))
    rows: dict[str, list[int]] = {}
    for row, strategy in zip(truth["hub_positions"], truth["strategies"], strict=True):
        rows.setdefault(strategy, []).append(row)
    every = sorted(truth["hub_positions"])
    rows["all but lexical"] = [row for strategy in rows if strategy != "lexical_hub" for row in rows[strategy]]
    inside = scores_inside(bank, index)
    inside |= hubscan(options, bank, index.numpy(), after / "metadata.json")
    detectors = Detectors(bank, clean)
    own = detectors.scores(clean)
    new = detectors.scores(index)
    measures = {}
    for strategy, members in rows.items():
        for method, scores in inside.items():
            measures[f"inside|{strategy}|{method}"] = recall(scores[members], np.delete(scores, every))
        for method, scores in new.items():
            measures[f"before|{strategy}|{method}"] = recall(scores[members], own[method])
    return measures


# -- report ------------------------------------------------------------------------------------------------------------


def tables(title: str, measures: dict[str, float]) -> str:
    """Return a Markdown table per part: methods by attacks, in percent."""
    heads = {
        "before": "recall at 0.4 % alerts, before they enter",
        "inside": "recall at 0.4 % alerts, in the index",
        "success": "share of first tens with a planted document",
        "alarms": "share of clean documents",
    }
    text = f"## {title}\n\n"
    for part, head in heads.items():
        keys = [key.split("|")[1:] for key in measures if key.startswith(part)]
        columns = list(dict.fromkeys(attack for attack, _ in keys))
        body = []
        for method in dict.fromkeys(method for _, method in keys):
            values = [measures.get(f"{part}|{column}|{method}") for column in columns]
            body.append([method, *("" if value is None else f"{100 * value:.1f}" for value in values)])
        if body:
            text += table([head, *columns], body) + "\n"
    return text


def main() -> None:
    """Measure all splits and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=Path, required=True)
    parser.add_argument("--sets", default="acl,debian")
    parser.add_argument("--encoders", default="static,minilm")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--hubscan", nargs=2, metavar=("PYTHON", "CONFIG"))
    parser.add_argument("--wikipedia", nargs=2, metavar=("CLEAN", "PLANTED"))
    parser.add_argument("--out", type=Path, default=Path("runs/planted"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in options.sets.split(","):
        for encoder in options.encoders.split(","):
            parts = []
            for seed in range(options.splits):
                file = options.out / f"{name}-{encoder}-{seed}.json"
                if not file.exists():
                    measures = measure_split(options, name, encoder, seed)
                    file.write_text(json.dumps(measures, indent=2), encoding="utf-8")
                parts.append(json.loads(file.read_text(encoding="utf-8")))
            keys = dict.fromkeys(key for part in parts for key in part)
            results[f"{name}, {encoder}"] = {
                key: float(np.mean([part[key] for part in parts if key in part])) for key in keys
            }
    if options.wikipedia is not None:
        results["HubScan's Wikipedia benchmark"] = measure_wikipedia(options)
    (options.out / "planted.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    text = "\n".join(tables(title, measures) for title, measures in results.items())
    (options.out / "planted.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
