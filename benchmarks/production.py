r"""A corrected search in production: what changes for scores, filters, items that come and go, refits and drift.

    python benchmarks/production.py --data ../shared/data --vectors VECTORS [--only check,refit]

Sets and encoders of `benchmarks/search.py` (static embeddings; VECTORS is where it keeps them), and captions of
Flickr8k with a sentence encoder. If not said otherwise: a gallery of 3,000 documents, a log of 2,000 queries whose
answers are not in it, 1,000 other queries; recall@1 in percent, mean over three splits.

- *scores*: mean score of the first item, and how well it separates right first items from wrong ones (AUC)
- *demand*: queries follow a power law; ranking with `boost=temperature * log(1 + clicks)`
- *filters*: a search in a part of the gallery (a cluster of its documents), with the correction of all, or its own
- *items*: the correction was fitted when half of the items did not exist yet, or when twice as many did
- *hybrid*: reciprocal rank fusion (k = 60) of the search with BM25
- *sliding*: half of today's queries are about one of eight clusters; the correction was fitted on an old log about all,
  on the last log, which is like today's queries, or on both
- *bank*: `bank_size` of both sides, for tldr (12,000 items, a log of 10,000) and debian (7,000 of both); processor time
  on one thread
- *refit*: processor seconds on one thread, from nothing and from the solution of a log of which a tenth is new
- *latency*: HNSW of faiss with and without the additional coordinate, 20,000 items, one query at a time, processor time
- *check*: alarms of `fix.check` on 20 samples of 50 queries: the bank is of the same kind, documents, first sentences,
  or about one part while the queries are about all
- *drift*: the same with 50 and 500 queries, of which a share has moved to one of eight clusters
- *coverage*: warnings of `nuclr hubness` that a log may be about one part: even logs of 50, 200 and 1,000 queries, and
  logs about one of eight clusters; galleries of 500 and 3,000 items

`docs/production.md` is about these numbers.
"""

import argparse
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nuclr.arrays import as_rows
from nuclr.popularity import PopularityCorrection, solve
from nuclr.studies.items.measures import coverage
from nuclr.studies.items.verdict import SMALL_COVERAGE
from search import CLUSTERS, Vectors, k_means, load
from search_texts import read_texts

SETS = ("acl", "debian", "tldr_pages")
SPLITS = 3
GALLERY, LOG, TESTED = 3000, 2000, 1000
SAMPLES, SAMPLE = 20, 50
SERVED = 20_000
SECTIONS = (
    "scores",
    "demand",
    "filters",
    "items",
    "sliding",
    "hybrid",
    "bank",
    "refit",
    "latency",
    "check",
    "drift",
    "coverage",
)


@dataclass(frozen=True)
class Split:
    """A gallery, a log about other documents, and queries with their answers."""

    name: str
    rows: np.ndarray  # of the documents in the gallery
    gallery: Tensor
    log: Tensor
    queries: Tensor
    query_rows: np.ndarray
    right: Tensor
    generator: torch.Generator

    def recall(self, bias: Tensor | float = 0.0) -> float:
        """Return recall@1 of ranking by score minus bias."""
        return 100 * float(((self.queries @ self.gallery.T - bias).argmax(dim=1) == self.right).double().mean())


def splits(name: str, texts: Vectors, items: int = GALLERY, logged: int = LOG) -> Iterator[Split]:
    """Yield random splits of a set."""
    asked_by = dict(texts.links[::-1, ::-1].tolist())  # the first query of each document
    documents = np.array(sorted(asked_by))
    for seed in range(SPLITS):
        order = np.random.default_rng(seed).permutation(documents)
        size = min(items, len(order) // 2)
        inside, outside = order[:size], order[size : size + logged]
        tested = torch.from_numpy(np.random.default_rng(seed).permutation(size)[:TESTED])
        rows = np.array([asked_by[document] for document in inside[tested]])
        log = texts.queries[[asked_by[document] for document in outside]]
        generator = torch.Generator().manual_seed(seed)
        yield Split(name, inside, texts.documents[inside], log, texts.queries[rows], rows, tested, generator)


def auc(score: Tensor, right: Tensor) -> float:
    """Return the probability that a right answer has a higher score than a wrong one."""
    order = score.argsort()
    rank = torch.empty(len(score), dtype=torch.float64)
    rank[order] = torch.arange(1.0, len(score) + 1, dtype=torch.float64)
    hits = int(right.sum())
    return float((rank[right].sum() - hits * (hits + 1) / 2) / (hits * (len(score) - hits)))


# -- sections: each returns its measures for one split -----------------------------------------------------------------


def scores(split: Split) -> dict[str, float]:
    bias = PopularityCorrection().fit(split.log, split.gallery).bias(split.gallery, center=False)
    cosine = split.queries @ split.gallery.T
    found = {"plain": cosine.max(dim=1), "corrected": (cosine - bias).max(dim=1)}
    row: dict[str, float] = {}
    for name, (score, item) in found.items():
        row[f"first score, {name}"] = float(score.mean())
        row[f"AUC, {name}"] = auc(score, item == split.right)
    item = found["corrected"].indices
    row["AUC, cosine of the corrected first"] = auc(cosine.gather(1, item[:, None])[:, 0], item == split.right)
    return row


def demand(split: Split) -> dict[str, float]:
    """The test queries are asked again by a power law: the log has one half of the draws, clicks included."""
    weight = 1 / torch.arange(1, len(split.right) + 1, dtype=torch.float64)
    drawn = torch.multinomial(weight, 2 * LOG, replacement=True, generator=split.generator)
    clicks = torch.bincount(split.right[drawn[:LOG]], minlength=len(split.gallery)).double()
    wanted = 1 + clicks
    log = torch.cat([split.log, split.queries[drawn[:LOG]]])
    answers = torch.cat([torch.full((len(split.log),), -1), split.right[drawn[:LOG]]])
    asked = split.queries[drawn[LOG:]] @ split.gallery.T
    right = split.right[drawn[LOG:]]
    row = {"plain": 0.0 * wanted}
    fix = PopularityCorrection().fit(log, split.gallery, answers)
    row["corrected"] = fix.bias(split.gallery).double()
    row["and boost"] = fix.bias(split.gallery, boost=fix.temperature_ * wanted.log()).double()
    fix.fit(log, split.gallery, answers, demand=wanted)
    row["fit with demand"] = fix.bias(split.gallery).double()
    row["fit with demand and boost"] = fix.bias(split.gallery, boost=fix.temperature_ * wanted.log()).double()
    return {key: 100 * float(((asked - bias).argmax(dim=1) == right).double().mean()) for key, bias in row.items()}


def filters(split: Split) -> dict[str, float]:
    whole = PopularityCorrection().fit(split.log, split.gallery).bias(split.gallery)
    cluster = k_means(split.gallery, split.generator)
    nearest = cluster[(split.log @ split.gallery.T).argmax(dim=1)]
    hits: dict[str, list[Tensor]] = {"plain": [], "correction of all": [], "its own": []}
    for number in range(CLUSTERS):
        part = (cluster == number).nonzero().flatten()
        asked = cluster[split.right] == number
        if len(part) < 2 or not bool(asked.any()) or int((nearest == number).sum()) < 2:
            continue
        own = PopularityCorrection().fit(split.log[nearest == number], split.gallery[part]).bias(split.gallery[part])
        plain = split.queries[asked] @ split.gallery[part].T
        for name, bias in zip(hits, (0.0, whole[part], own), strict=True):
            hits[name].append(part[(plain - bias).argmax(dim=1)] == split.right[asked])
    return {name: 100 * float(torch.cat(every).double().mean()) for name, every in hits.items()}


def items(split: Split) -> dict[str, float]:
    half = split.gallery[::2]
    few = split.right % 2 == 0
    old = PopularityCorrection().fit(split.log, half)
    new = PopularityCorrection().fit(split.log, split.gallery)
    plain = split.queries[few] @ half.T

    def among_half(bias: Tensor | float) -> float:
        return 100 * float(((plain - bias).argmax(dim=1) == split.right[few] // 2).double().mean())

    return {
        "plain": split.recall(),
        "half are new": split.recall(old.bias(split.gallery)),
        "after a refit": split.recall(new.bias(split.gallery)),
        "plain, half deleted": among_half(0.0),
        "half deleted": among_half(new.bias(half)),
        "half deleted, refit": among_half(old.bias(half)),
    }


def hybrid(split: Split, queries: list[str], documents: list[str]) -> dict[str, float]:
    words = bm25([queries[row] for row in split.query_rows], [documents[row] for row in split.rows])
    bias = PopularityCorrection().fit(split.log, split.gallery).bias(split.gallery)
    cosine = split.queries @ split.gallery.T
    row = {"BM25": words, "plain": cosine, "corrected": cosine - bias}
    for name in ("plain", "corrected"):
        row[f"{name} and BM25"] = sum(
            1 / (61 + rank.argsort(dim=1, descending=True).argsort(dim=1)) for rank in (row[name], words)
        )
    return {name: 100 * float((score.argmax(dim=1) == split.right).double().mean()) for name, score in row.items()}


def bm25(queries: list[str], documents: list[str]) -> Tensor:
    """Return BM25 scores with k1 = 1.2 and b = 0.75, (queries, documents)."""
    counts = [Counter(re.findall(r"\w+", text.lower())) for text in documents]
    length = torch.tensor([float(sum(count.values())) for count in counts])
    norm = 1.2 * (0.25 + 0.75 * length / length.mean())
    places: dict[str, list[tuple[int, int]]] = {}
    for number, count in enumerate(counts):
        for word, times in count.items():
            places.setdefault(word, []).append((number, times))
    table = torch.zeros(len(queries), len(documents))
    for row, text in enumerate(queries):
        for word in set(re.findall(r"\w+", text.lower())) & places.keys():
            number, times = torch.tensor(places[word]).T
            rarity = math.log(1 + (len(documents) - len(number) + 0.5) / (len(number) + 0.5))
            table[row, number] += rarity * 2.2 * times / (times + norm[number])
    return table


def sliding(split: Split) -> dict[str, float]:
    cluster = k_means(split.gallery, split.generator)
    nearest = cluster[(split.log @ split.gallery.T).argmax(dim=1)]
    trend = int(torch.bincount(nearest, minlength=CLUSTERS).argmax())

    def half_about_it(member: Tensor) -> Tensor:
        inside = member.nonzero().flatten()
        return torch.cat([inside, (~member).nonzero().flatten()[: len(inside)]])

    middle = len(split.log) // 2
    old, last = split.log[:middle], split.log[middle:][half_about_it(nearest[middle:] == trend)]
    today = half_about_it(cluster[split.right] == trend)
    now = replace(split, queries=split.queries[today], right=split.right[today])
    row = {"plain": now.recall()}
    for name, log in (("old log", old), ("last log", last), ("both", torch.cat([old, last]))):
        row[name] = now.recall(PopularityCorrection().fit(log, split.gallery).bias(split.gallery))
    return row


# -- sections: each returns its own table ------------------------------------------------------------------------------


def bank(name: str, texts: Vectors, items: int, logged: int) -> dict[str, dict[str, float]]:
    rows: dict[str, list[dict[str, float]]] = {}
    for split in splits(name, texts, items, logged):
        rows.setdefault(f"{name}, plain", []).append({"recall@1": split.recall()})
        for size in (1000, 2000, 4000, 8000, 12_000):
            start = time.process_time()
            fix = PopularityCorrection(bank_size=size).fit(split.log, split.gallery)
            seconds = time.process_time() - start
            row = {"recall@1": split.recall(fix.bias(split.gallery)), "seconds": seconds, "strength": fix.strength_}
            rows.setdefault(f"{name}, {size:,}", []).append(row)
    return {name: mean(row) for name, row in rows.items()}


def refit(texts: Vectors) -> dict[str, dict[str, float]]:
    table = {}
    gallery = texts.documents[:SERVED]
    for size in (2000, 10_000):
        log = texts.queries[-2 * size :]
        fix = PopularityCorrection()
        start = time.process_time()
        fix.fit(log[:size], gallery)
        whole = time.process_time() - start
        candidates = gallery[: fix.bank_size]
        setting = {"temperature": fix.temperature_, "tolerance": 1e-3}
        zeta = solve(log[:size], candidates, **setting).zeta
        new = log[size // 10 : size + size // 10]
        row = {"fit": whole}
        for name, init in (("cold", None), ("warm", zeta)):
            start = time.process_time()
            result = solve(new, candidates, init=init, **setting)
            row[f"{name} solve"] = time.process_time() - start
            row[f"{name} passes"] = result.iterations
        start = time.process_time()
        fix.gallery(gallery)
        row["coordinates of all items"] = time.process_time() - start
        table[f"log of {size:,}"] = row
    return table


def latency(texts: Vectors) -> dict[str, dict[str, float]]:
    import faiss

    faiss.omp_set_num_threads(1)
    gallery = texts.documents[:SERVED]
    queries = texts.queries[-TESTED:]
    fix = PopularityCorrection().fit(texts.queries[-3 * TESTED : -TESTED], gallery)
    built = {"plain": (queries, gallery), "corrected": (fix.queries(queries), fix.gallery(gallery))}
    indexes = {}
    for name, (_, rows) in built.items():
        indexes[name] = faiss.IndexHNSWFlat(rows.shape[1], 32, faiss.METRIC_INNER_PRODUCT)
        indexes[name].add(rows.contiguous().numpy())
        indexes[name].hnsw.efSearch = 64
    table: dict[str, dict[str, float]] = {name: {"ms per query": math.inf} for name in built}
    for _ in range(5):  # in turns, because the machine may be busy
        for name, (asked, rows) in built.items():
            single = list(asked.numpy()[:, None])
            start = time.process_time()
            found = np.concatenate([indexes[name].search(query, 10)[1] for query in single])
            seconds = time.process_time() - start
            table[name]["ms per query"] = min(table[name]["ms per query"], 1000 * seconds / len(single))
            exact = (asked @ rows.T).topk(10, dim=1).indices
            shared = (torch.from_numpy(found)[:, :, None] == exact[:, None]).any(dim=2).double().mean()
            table[name]["share of the exact first ten"] = float(shared)
    return table


def check(sets: dict[str, Vectors], captions: Vectors) -> dict[str, dict[str, float]]:
    table = {}
    for name, texts in sets.items():
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(texts.queries), generator=generator)
        known, fresh = texts.queries[order[: len(order) // 2]], texts.queries[order[len(order) // 2 :]]
        gallery = texts.documents[:GALLERY]
        cluster = k_means(gallery, generator)
        chosen = int(torch.bincount(cluster, minlength=CLUSTERS).argsort()[CLUSTERS // 2])
        part = known[cluster[(known @ gallery.T).argmax(dim=1)] == chosen]
        banks = {"same kind": known, "documents": texts.documents, "first sentences": texts.sentences, "one part": part}
        table[name] = {key: alarms(bank, fresh, gallery) for key, bank in banks.items()}
    half = len(captions.queries) // 2
    table["captions"] = {
        "same kind": alarms(captions.queries[:half], captions.queries[half:], captions.documents),
        "documents": alarms(captions.documents, captions.queries, captions.documents),
    }
    return table


def drift(sets: dict[str, Vectors]) -> dict[str, dict[str, float]]:
    table = {}
    for name, texts in sets.items():
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(texts.queries), generator=generator)
        known, fresh = texts.queries[order[: len(order) // 2]], texts.queries[order[len(order) // 2 :]]
        gallery = texts.documents[:GALLERY]
        cluster = k_means(gallery, generator)
        moved = fresh[cluster[(fresh @ gallery.T).argmax(dim=1)] == int(torch.bincount(cluster).argmax())]
        table[name] = {
            f"{size} queries, {share:.0%} moved": alarms(known, fresh, gallery, size, (share, moved))
            for size in (50, 500)
            for share in (0.0, 0.25, 0.5)
        }
    return table


def coverages(sets: dict[str, Vectors]) -> dict[str, dict[str, float]]:
    table = {}
    for name, texts in sets.items():
        for size in (500, GALLERY):
            generator = torch.Generator().manual_seed(1)
            items = texts.documents[torch.randperm(len(texts.documents), generator=generator)[:size]]
            queries = texts.queries[torch.randperm(len(texts.queries), generator=generator)[:8000]]
            cluster = k_means(items, generator)
            nearest = cluster[(queries @ items.T).argmax(dim=1)]
            row = {}
            for count in (50, 200, 1000):
                for kind in ("even", "one part"):
                    warned = 0
                    for number in range(CLUSTERS):
                        pool = queries if kind == "even" else queries[nearest == number]
                        log = pool[torch.randperm(len(pool), generator=generator)[:count]]
                        warned += coverage(as_rows("log", log), as_rows("items", items), 10) < SMALL_COVERAGE
                    row[f"{kind}, {count}"] = warned / CLUSTERS
            table[f"{name}, {size:,}"] = row
    everything = list(table.values())
    return {**table, "mean": mean(everything)}


def alarms(
    bank: Tensor, queries: Tensor, gallery: Tensor, size: int = SAMPLE, other: tuple[float, Tensor] | None = None
) -> float:
    """Return how many of 20 samples of queries are said to differ from as many samples of the bank.

    Args:
        bank: all queries that a correction could be fitted on.
        queries: all queries that are asked.
        gallery: the items.
        size: queries per sample.
        other: the share of a sample that is drawn from other queries, and these.

    """
    count = 0
    for seed in range(SAMPLES):
        generator = torch.Generator().manual_seed(seed)
        some = bank[torch.randperm(len(bank), generator=generator)[:LOG]]
        asked = queries[torch.randperm(len(queries), generator=generator)[:size]]
        if other is not None:
            moved = other[1][torch.randperm(len(other[1]), generator=generator)[: round(other[0] * size)]]
            asked = torch.cat([asked[len(moved) :], moved])
        # The check depends on the bank only, so a few items and a wide temperature save time.
        fix = PopularityCorrection(temperature=1.0).fit(some, gallery[:100], items=True)
        count += not fix.check(asked).fits
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--vectors", type=Path, required=True)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/production.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.only.split(",")
    sets = {name: load(options.vectors, name, "static") for name in (*SETS, "tldr")}
    sections: dict[str, Callable[[Split], dict[str, float]]] = {
        "scores": scores,
        "demand": demand,
        "filters": filters,
        "items": items,
        "sliding": sliding,
    }
    found: dict[str, dict[str, dict[str, float]]] = {}
    for section, measure in sections.items():
        if section in names:
            found[section] = {name: mean([measure(split) for split in splits(name, sets[name])]) for name in SETS}
    if "hybrid" in names:
        found["hybrid"] = {}
        for name in SETS:
            texts = read_texts(options.data, name)
            rows = [hybrid(split, texts.queries, texts.documents) for split in splits(name, sets[name])]
            found["hybrid"][name] = mean(rows)
    if "bank" in names:
        found["bank"] = bank("tldr", sets["tldr"], 12_000, 10_000) | bank("debian", sets["debian"], 7000, 7000)
    if "refit" in names:
        found["refit"] = refit(sets["tldr"])
    if "latency" in names:
        found["latency"] = latency(sets["tldr"])
    if "check" in names:
        found["check"] = check(sets, load(options.vectors, "flickr8k", "minilm"))
    if "drift" in names:
        found["drift"] = drift(sets)
    if "coverage" in names:
        found["coverage"] = coverages({**sets, "captions": load(options.vectors, "flickr8k", "minilm")})
    for section, table in found.items():
        print(f"\n{section}")
        for name, row in table.items():
            print(f"  {name}: " + ", ".join(f"{key} {value:.3g}" for key, value in row.items()))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1))


def mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of every column."""
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}


if __name__ == "__main__":
    main()
