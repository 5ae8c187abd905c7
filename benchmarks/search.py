"""Corrections of search on texts that ask for texts: every regime in which a log of queries can mislead.

    python benchmarks/search_texts.py --data DATA --vectors FOLDER          # once
    python benchmarks/search.py --vectors FOLDER [--quick] [--sets acl,debian] [--encoders static] [--splits 5]
        [--families peers,ours] [--out runs/search]

The table is `OUT/search.md`, its numbers `OUT/search.json` (benchmarks/search_report.py). What is in OUT is not
measured again. To measure a changed default, delete `OUT/*-ours.npz`; the results of the peers stay.

A *topic* consists of documents and the queries that ask for them: mostly one document, and two for descriptions of
images, which are both right. A split draws a gallery of at most 2,000 documents, and 2,000 topics outside of it. The
regimes:

- clean-50, clean-200, clean-2000: the log asks for the topics outside, so no document of the gallery is asked for
- once: the log asks for one half of the gallery, the test for the other. It flatters every correction, because what
  the log asked for can be pushed down and is never the answer
- repeated: log and test ask for the same 40 % of the topics, 1.7 questions per topic
- power law: demand proportional to 1/rank; 2,000 questions; three random orders of the topics per split
- part, own queries; part, all queries: the log is about one of eight clusters
- no log: the first sentence of every document, with the document as its answer (captions: the caption itself)

Where topics have one query each, another wording is the query plus 0.35 times a random other one, normalized.

Methods: "ours" is `PopularityCorrection().fit(log, gallery)`; if it refuses first sentences because they equal the
documents, nothing is corrected. Peers (benchmarks/peers.py) get the distinct queries of the log and their published
settings. "Tuned" has the settings with the best recall@1, ours by `fit(pairs=...)`, on labels of the regime clean-2000
of a further split; they are chosen once per set and encoder. "Answers" knows the answers of the log where the regime
has any. Without a log all methods know them. "Whitened" features are multiplied by C^(-1/4), C the covariance of the
gallery, after its mean is subtracted.

Settings of the default were chosen on acl and debian; docs/results.md says what else was seen.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.nn.functional import normalize

from nuclr.arrays import checked_rows
from nuclr.popularity import PopularityCorrection
from nuclr.popularity.bank import distinct_rows
from peers import GRIDS, PEERS, Task, published
from search_report import report
from search_texts import ENCODERS

GALLERY = 2000
TESTED = 800
LOGGED = 2000
WORDING = 0.35
CLUSTERS = 8
ORDERS = 3  # random orders of the topics under a power law, per split
FOUND = 10  # results of a query
TUNING_SPLIT = 1000  # is not reported
QUICK_SPLITS = 2
QUICK_ENCODERS = dict.fromkeys(ENCODERS, "static") | {"flickr8k": "minilm", "multi30k": "trained"}
WHITENED = ("CSLS", "DBSN")  # the best two peers in the regime clean-2000 on acl and debian


@dataclass(frozen=True)
class Vectors:
    """Unit-norm vectors of a set.

    Attributes:
        queries: (n, d).
        documents: (m, d).
        sentences: First sentences of the documents, (m, d), or none.
        links: (k, 2), rows (query, document).

    """

    queries: Tensor
    documents: Tensor
    sentences: Tensor
    links: np.ndarray


@dataclass(frozen=True)
class Regime:
    """A log and test queries of a gallery.

    Attributes:
        name: See the module's docstring.
        gallery: (m, d).
        log: (n, d).
        answers: Answers of the log, (n, k) rows of the gallery; -1 for none.
        queries: (t, d).
        right: Their right answers, (t, k) rows of the gallery.
        items: Whether items search items.

    """

    name: str
    gallery: Tensor
    log: Tensor
    answers: Tensor
    queries: Tensor
    right: Tensor
    items: bool = False


def load(folder: Path, name: str, encoder: str) -> Vectors:
    """Return the vectors of a set, without links of empty texts."""
    file = folder / f"{name}_{encoder}.npz"
    if not file.exists():
        raise SystemExit(f"{file} is missing; run benchmarks/search_texts.py first")
    content = np.load(file)
    queries, documents, sentences = (normalize(torch.from_numpy(content[key]).float().nan_to_num()) for key in "qdf")
    links = content["links"]
    usable = queries[links[:, 0]].any(dim=1) & documents[links[:, 1]].any(dim=1)
    return Vectors(queries, documents, sentences, links[usable.numpy()])


# -- regimes -----------------------------------------------------------------------------------------------------------


class Topics:
    """Topics of a set in random order: those of the gallery, and others.

    Attributes:
        rows: Rows of the gallery per topic, (topics, k).
        gallery: (m, d).
        gallery_documents: Their rows in the set, (m,).
        outside: Vector of the first document of each topic outside, (topics, d).
        log: A query for each of them, (topics, d).

    """

    def __init__(self, vectors: Vectors, generator: torch.Generator) -> None:
        self.vectors = vectors
        self.generator = generator
        links = vectors.links[torch.randperm(len(vectors.links), generator=generator).numpy()]
        documents: dict[int, list[int]] = {}
        queries: dict[int, list[int]] = {}
        for topic, query, document in zip(topic_of(links), *links.T, strict=True):
            documents.setdefault(topic, []).append(document)
            queries.setdefault(topic, []).append(query)
        # a topic with two documents has each of them, and each of its queries, in several links
        width = max(len(set(one)) for one in documents.values())
        names = [topic for topic, one in documents.items() if len(set(one)) == width]
        order = torch.randperm(len(names), generator=generator).tolist()
        self.size = min(GALLERY // width, len(names) // 2)
        chosen = [names[number] for number in order[: self.size + LOGGED]]
        members = [sorted(set(documents[topic])) for topic in chosen]
        self.asked_by = [list(dict.fromkeys(queries[topic])) for topic in chosen]
        self.several = np.mean([len(one) for one in self.asked_by]) > 2
        self.gallery_documents = torch.tensor(members[: self.size]).flatten()
        self.gallery = vectors.documents[self.gallery_documents]
        self.rows = torch.arange(self.size * width).view(self.size, width)
        self.outside = vectors.documents[[one[0] for one in members[self.size :]]]
        self.log = vectors.queries[[one[0] for one in self.asked_by[self.size :]]]

    def shuffled(self) -> Tensor:
        """Return the topics of the gallery in random order."""
        return torch.randperm(self.size, generator=self.generator)

    def first_query(self, topics: Tensor) -> Tensor:
        """Return one query of each topic, always the same."""
        return self.vectors.queries[[self.asked_by[topic][0] for topic in topics.tolist()]]

    def ask(self, topics: Tensor, part: int) -> Tensor:
        """Return a random query of each topic; part 0 (log) and part 1 (test) have different ones."""
        chosen = []
        for topic in topics.tolist():
            queries = self.asked_by[topic]
            if self.several and len(queries) > 1:
                middle = len(queries) // 2
                queries = queries[middle:] if part else queries[:middle]
            chosen.append(queries[self.random_row(len(queries), 1)[0]])
        asked = self.vectors.queries[chosen]
        if self.several:
            return asked
        other = self.vectors.queries[self.random_row(len(self.vectors.queries), len(asked))]
        return normalize(asked + WORDING * other, dim=1)

    def random_row(self, rows: int, count: int) -> list[int]:
        """Return random row numbers."""
        return torch.randint(rows, (count,), generator=self.generator).tolist()


def topic_of(links: np.ndarray) -> np.ndarray:
    """Return the topic of each link: the connected component of its query and its document."""
    shape = tuple(links.max(axis=0) + 1)
    queries = shape[0]
    ones = np.ones(len(links))
    graph = coo_array((ones, (links[:, 0], queries + links[:, 1])), shape=(sum(shape), sum(shape)))
    return connected_components(graph, directed=False)[1][links[:, 0]]


def regimes(vectors: Vectors, split: int) -> Iterator[Regime]:
    """Yield the regimes of a split; see the module's docstring."""
    generator = torch.Generator().manual_seed(split)
    topics = Topics(vectors, generator)
    gallery = topics.gallery
    tested = topics.shuffled()[:TESTED]
    test = topics.first_query(tested), topics.rows[tested]

    def unknown(log: Tensor) -> Tensor:
        return torch.full((len(log), topics.rows.shape[1]), -1)

    for count in (50, 200, LOGGED):
        log = topics.log[:count]
        yield Regime(f"clean-{count}", gallery, log, unknown(log), *test)

    halves = topics.shuffled()
    first = halves[: topics.size // 2]
    second = halves[topics.size // 2 :][:TESTED]
    log = topics.first_query(first)
    yield Regime("once", gallery, log, topics.rows[first], topics.first_query(second), topics.rows[second])

    wanted = topics.shuffled()[: int(0.4 * topics.size)]
    logged = wanted[topics.random_row(len(wanted), int(1.7 * len(wanted)))]
    asked = wanted[topics.random_row(len(wanted), TESTED)]
    log = topics.ask(logged, 0)
    yield Regime("repeated", gallery, log, topics.rows[logged], topics.ask(asked, 1), topics.rows[asked])

    demand = 1 / torch.arange(1, topics.size + 1, dtype=torch.float64)
    for _ in range(ORDERS):
        ranked = topics.shuffled()
        logged = ranked[torch.multinomial(demand, LOGGED, replacement=True, generator=generator)]
        asked = ranked[torch.multinomial(demand, TESTED, replacement=True, generator=generator)]
        log = topics.ask(logged, 0)
        yield Regime("power law", gallery, log, topics.rows[logged], topics.ask(asked, 1), topics.rows[asked])

    cluster = k_means(gallery, generator)
    middle = int(torch.bincount(cluster, minlength=CLUSTERS).argsort()[CLUSTERS // 2])  # neither small nor large
    order = topics.shuffled()
    members = order[cluster[topics.rows[order, 0]] == middle]
    logged = members[: len(members) // 2]
    held_out = members[len(members) // 2 :]
    near = cluster[(topics.outside @ gallery.T).topk(5, dim=1).indices].mode(dim=1).values == middle
    log = torch.cat([topics.first_query(logged), topics.log[near]])
    answers = torch.cat([topics.rows[logged], unknown(topics.log[near])])
    new = tested[~torch.isin(tested, logged)]
    for name, asked in (("part, own queries", held_out), ("part, all queries", new)):
        yield Regime(name, gallery, log, answers, topics.first_query(asked), topics.rows[asked])

    if len(vectors.sentences):
        log = vectors.sentences[topics.gallery_documents]
        same = bool(torch.equal(vectors.sentences, vectors.documents))
        yield Regime("no log", gallery, log, torch.arange(len(gallery))[:, None], *test, items=same)


def k_means(vectors: Tensor, generator: torch.Generator) -> Tensor:
    """Return the cluster of each vector."""
    centers = vectors[torch.randperm(len(vectors), generator=generator)[:CLUSTERS]].clone()
    for _ in range(10):
        cluster = (vectors @ centers.T).argmax(dim=1)
        for number in range(CLUSTERS):
            if bool((cluster == number).any()):
                centers[number] = normalize(vectors[cluster == number].mean(dim=0), dim=0)
    return (vectors @ centers.T).argmax(dim=1)


# -- methods -----------------------------------------------------------------------------------------------------------


def as_links(answers: Tensor) -> Tensor:
    """Return links (row, answer) of padded answers."""
    row, column = (answers >= 0).nonzero(as_tuple=True)
    return torch.stack([row, answers[row, column]], dim=1)


def whitened(regime: Regime) -> Regime:
    """Return the regime with half whitened features."""
    mean = regime.gallery.mean(dim=0)
    values, vectors = torch.linalg.eigh((regime.gallery - mean).T.cov().double())
    values = values.clamp(min=1e-3 * float(values.mean()))
    root = ((vectors * values**-0.25) @ vectors.T).float()

    def apply(features: Tensor) -> Tensor:
        return normalize((features - mean) @ root, dim=1)

    return replace(regime, gallery=apply(regime.gallery), log=apply(regime.log), queries=apply(regime.queries))


def task_of(regime: Regime, answers: bool) -> Task:
    """Return the search and its distinct queries of the log for the peers."""
    rows = distinct_rows(checked_rows(regime.log))
    return Task(regime.queries, regime.gallery, regime.log[rows], answers=regime.answers[rows] if answers else None)


def our_scores(regime: Regime, answers: bool, settings: dict[str, Any]) -> Tensor:
    """Return corrected scores of the test queries."""
    plain = regime.queries @ regime.gallery.T
    known = as_links(regime.answers) if answers else None
    options = {"items": True} if regime.items else {}
    try:
        fix = PopularityCorrection(**settings).fit(regime.log, regime.gallery, known, **options)
    except ValueError as error:
        if regime.name == "no log" and "items=True" in str(error):
            return plain  # the first sentences are the documents themselves
        raise
    return plain - fix.bias(regime.gallery)


def our_methods(regime: Regime, tuned: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the scores of our corrections."""
    no_log = regime.name == "no log"
    yield "ours", our_scores(regime, no_log, {})
    yield "ours, tuned", our_scores(regime, no_log, tuned)
    yield "whitened, ours", our_scores(whitened(regime), no_log, {})
    if not no_log and bool((regime.answers >= 0).any()):
        yield "ours, answers", our_scores(regime, True, {})


def peer_methods(regime: Regime, tuned: dict[str, dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """Yield plain scores and those of the peers."""
    no_log = regime.name == "no log"
    task = task_of(regime, no_log)
    yield "plain", task.scores
    for name, setting in published(task).items():
        yield name, PEERS[name](task, **setting)
        yield f"{name}, tuned", PEERS[name](task, **tuned[name])
    task = task_of(whitened(regime), no_log)
    yield "whitened", task.scores
    for name in WHITENED:
        yield f"whitened, {name}", PEERS[name](task, **published(task)[name])
    if not no_log and bool((regime.answers >= 0).any()):
        task = task_of(regime, True)
        for name, setting in published(task).items():
            yield f"{name}, answers", PEERS[name](task, **setting)


def tune_ours(regime: Regime) -> dict[str, Any]:
    """Return the settings that our correction chooses on labels."""
    pairs = regime.queries, regime.gallery, as_links(regime.right)
    fix = PopularityCorrection().fit(regime.log, regime.gallery, pairs=pairs)
    return {"temperature": fix.temperature_, "strength": fix.strength_}


def tune_peers(regime: Regime) -> dict[str, dict[str, Any]]:
    """Return the setting of each peer with the best recall@1."""
    task = task_of(regime, False)
    best = {}
    for name, grid in GRIDS.items():
        hits = []
        for setting in grid:
            ranks = first_ranks(PEERS[name](task, **setting), regime.right)
            hits.append(int((ranks == 1).sum()))
        best[name] = grid[int(np.argmax(hits))]
    return best


# -- measures ----------------------------------------------------------------------------------------------------------


def first_ranks(scores: Tensor, right: Tensor) -> Tensor:
    """Return the rank of the best right answer of each query; half of the items with the same score count as better.

    A method whose scores are mostly ties would otherwise seem perfect. Right answers do not count.
    """
    best = scores.gather(1, right).max(dim=1, keepdim=True).values
    tied = (scores == best).sum(dim=1) - (scores.gather(1, right) == best).sum(dim=1)
    return 1 + (scores > best).sum(dim=1) + tied / 2


def measure(scores: Tensor, right: Tensor) -> dict[str, np.ndarray]:
    """Return per query the rank of the first right answer and nDCG@10, and the share of items that are never found."""
    ranks = torch.stack([first_ranks(scores, right[:, [column]]) for column in range(right.shape[1])], dim=1)
    gain = 1 / torch.log2(1 + ranks.double())
    ideal = 1 / torch.log2(2 + torch.arange(min(FOUND, right.shape[1]), dtype=torch.float64))
    found = torch.unique(scores.topk(FOUND, dim=1).indices)
    return {
        "rank": first_ranks(scores, right).numpy().astype(np.float32),
        "ndcg": ((gain * (ranks <= FOUND)).sum(dim=1) / ideal.sum()).numpy().astype(np.float16),
        "never": np.array([1 - len(found) / scores.shape[1]], np.float32),
    }


def measure_split(
    vectors: Vectors, split: int, methods: Callable[[Regime], Iterator[tuple[str, Tensor]]]
) -> dict[str, np.ndarray]:
    """Return the measures of a split by regime, method and measure; several orders of a regime are pooled."""
    parts: dict[str, list[np.ndarray]] = {}
    for regime in regimes(vectors, split):
        for method, scores in methods(regime):
            for name, values in measure(scores, regime.right).items():
                parts.setdefault(f"{regime.name}|{method}|{name}", []).append(values)
    return {key: np.concatenate(values) for key, values in parts.items()}


def main() -> None:
    """Measure what is missing and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=Path, required=True)
    parser.add_argument("--sets", default=",".join(ENCODERS))
    parser.add_argument("--encoders", default="static,minilm,trained")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--families", default="peers,ours", help="methods; peers do not depend on our default")
    parser.add_argument("--quick", action="store_true", help="one encoder per set, two splits")
    parser.add_argument("--out", type=Path, default=Path("runs/search"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    families = {"peers": (peer_methods, tune_peers), "ours": (our_methods, tune_ours)}
    files = []
    for name in options.sets.split(","):
        encoders = [encoder for encoder in options.encoders.split(",") if encoder in ENCODERS[name]]
        for encoder in [QUICK_ENCODERS[name]] if options.quick else encoders:
            vectors = load(options.vectors, name, encoder)
            for family in options.families.split(","):
                methods, tune = families[family]
                tuned = None
                for split in range(QUICK_SPLITS if options.quick else options.splits):
                    file = options.out / f"{name}-{encoder}-{split}-{family}.npz"
                    files.append(file)
                    if file.exists():
                        continue
                    if tuned is None:
                        clean = next(one for one in regimes(vectors, TUNING_SPLIT) if one.name == f"clean-{LOGGED}")
                        tuned = tune(clean)
                        settings = options.out / f"{name}-{encoder}-{family}.json"
                        settings.write_text(json.dumps(tuned, indent=1), encoding="utf-8")
                    unfinished = options.out / "unfinished.npz"
                    np.savez(unfinished, **measure_split(vectors, split, partial(methods, tuned=tuned)))
                    unfinished.replace(file)
                    print(file.stem, flush=True)
    if len(options.families.split(",")) < len(families):
        return  # a report compares both
    text, numbers = report(files)
    (options.out / "search.md").write_text(text, encoding="utf-8")
    (options.out / "search.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
