r"""Losses of sentence-transformers and of nuclr for the same encoder: recall on held-out pairs.

    python benchmarks/losses.py --data DATA --out FOLDER [--parts peers,steps,masks,negatives,curation]
        [--sets tldr,debian,acl,multi30k] [--batches 32,128] [--report]

DATA holds `search` and `multi30k`. `StaticEmbedding`, which starts as wordllama's table (256 dimensions, in the package
`wordllama`), is trained on 4,000 pairs of texts for four epochs with AdamW and a linear schedule, as the trainer of
sentence-transformers does without clipping. Texts are cut to 64 tokens. The loop calls the loss modules on pairs that
were tokenized once; a test compares it with the trainer. The parts:

    peers      the losses that a user has to choose from, per set and batch size
    steps      NUCLR with a smaller step of the popularity, and without steps
    masks      losses without a mask against false negatives, with the margin, and with equal texts masked
    negatives  the same loss with a hard negative for each pair, mined once by the starting encoder
    curation   `MultipleNegativesRankingLoss` on a part of the pairs, chosen by popularity, scores or at random

Sets are those of benchmarks/study.py, with 4,000 held-out pairs (Multi30k: the first descriptions of 4,000 images for
training, all ten of 1,014 others held out). Its halves, recall and bootstrap are used: every loss has the same six
settings, temperature times learning rate. The best setting on one half with seed 0 is evaluated on the other half with
seeds 0 to 2, and the reverse. Recall@1 is the mean of both directions and both halves.

Each run is a line of FOLDER/{set}.jsonl, which a restarted benchmark does not repeat; one process per set may run at
a time. `--report` trains nothing: it prints the tables of what is there and names the missing cells. On Linux, the
variables MALLOC_MMAP_THRESHOLD_=4294967296 and MALLOC_TRIM_THRESHOLD_=4294967296 make a step two to four times as fast,
because the memory of the gradient of the table is then kept from step to step.
"""

import argparse
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.sampler import NoDuplicatesBatchSampler
from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss, MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import normalize

from nuclr.integrations.sentence_transformers import NuclrLoss
from nuclr.popularity import solve
from search_texts import WORDLLAMA_WIDTH, package_folder, read_lines, read_search
from study import PAIRS, Data, Pairs, Study, first_hits, resampled_difference, sample_links, split, text_ids

SETS = ("tldr", "debian", "acl", "multi30k")
HELD_OUT = 4000
TOKENS = 64
EPOCHS = 4
TEMPERATURES = (0.04, 0.08, 0.16)
RATES = (1.5e-2, 4.5e-2)
SMALL_BATCH = 16
SMALL_BATCH_RATES = (5e-3, 1.5e-2)
SEEDS = (0, 1, 2)
MARGIN = 0.1
HARDNESS = 9.0  # the strength in the paper that sentence-transformers cites
HARD_SHARE = 0.95  # a hard negative scores less than this share of the positive
POPULARITY_TEMPERATURE = 0.05
SHARE = 0.2  # of the pairs, that are spoiled and that are dropped
SPOILED = 1  # seed of the spoiled pairs; the pairs that are dropped at random have others
RANDOM_DROPS = 1000
FOUR = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


# -- data --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Vocabulary:
    """The distinct texts of a set and the tokens that occur in them, those of training texts first.

    Attributes:
        tokens: Per text, rows of the table.
        table: (V, d), the starting vectors.
        trained: Number of rows that occur in training texts; the others cannot change.

    """

    tokens: list[np.ndarray]
    table: Tensor
    trained: int

    def features(self, numbers: Tensor) -> dict[str, Tensor]:
        """Return some texts as `StaticEmbedding` takes them."""
        rows = [self.tokens[number] for number in numbers.tolist()]
        lengths = torch.tensor([0] + [len(row) for row in rows[:-1]])
        return {"input_ids": torch.from_numpy(np.concatenate(rows)), "offsets": lengths.cumsum(0)}

    def vectors(self, numbers: Tensor, trained: Tensor | None = None) -> Tensor:
        """Return the embeddings of texts (unit norm), of the starting table or after training."""
        table = self.table if trained is None else torch.cat([trained, self.table[self.trained :]])
        features = self.features(numbers.flatten())
        bags = nn.functional.embedding_bag(features["input_ids"], table, features["offsets"])
        return normalize(bags, dim=1).reshape(*numbers.shape, -1)


@dataclass(frozen=True)
class TextData(Data):
    """Pairs whose x, y and ids are all the numbers of texts in a vocabulary."""

    vocabulary: Vocabulary
    tokenizer: Tokenizer


def read_pairs(data: Path, name: str) -> tuple[list[list[str]], list[list[str]]]:
    """Return the versions of x and of y of every pair, PAIRS for training and then the held-out ones."""
    if name == "multi30k":
        images = read_lines(data / name / "train.jsonl")[:PAIRS]
        held_out = read_lines(data / name / "val.jsonl")
        sides = []
        for language in ("en", "de"):
            # A pair of a data set for sentence-transformers is fixed; versions are all five, so that shapes agree.
            first = [[image[language][0]] * len(image[language]) for image in images]
            sides.append(first + [image[language] for image in held_out])
        return sides[0], sides[1]
    texts = read_search(data / "search" / name.partition("_")[0])
    links = sample_links(texts, HELD_OUT, repeated=name.endswith("_repeated"))
    return [[texts.queries[row]] for row in links[:, 0]], [[texts.documents[row]] for row in links[:, 1]]


def make_data(
    x_texts: list[list[str]],
    y_texts: list[list[str]],
    tokenizer: Tokenizer,
    table: Tensor,
    pairs: int = PAIRS,
) -> TextData:
    """Return the data of pairs of texts, and the part of the table that they need."""
    flat = [text for side in (x_texts, y_texts) for versions in side for text in versions]
    numbers = text_ids(flat)
    distinct = [""] * (int(numbers.max()) + 1)
    for number, text in zip(numbers.tolist(), flat, strict=True):
        distinct[number] = text
    encoded = [row.ids[:TOKENS] or [0] for row in tokenizer.encode_batch(distinct, add_special_tokens=False)]
    x, y = numbers.reshape(2, len(x_texts), -1)
    all_pairs = Pairs(x, y, x, y)
    train, halves = split(all_pairs, pairs)
    in_training = torch.cat([train.x, train.y]).unique().tolist()
    trained = np.unique(np.concatenate([encoded[number] for number in in_training]))
    others = np.setdiff1d(np.unique(np.concatenate(encoded)), trained)
    order = np.concatenate([trained, others])
    row_of = np.zeros(len(table), np.int64)
    row_of[order] = np.arange(len(order))
    vocabulary = Vocabulary([row_of[ids] for ids in encoded], table[torch.from_numpy(order)].float(), len(trained))
    return TextData(train, halves, False, vocabulary, tokenizer)


def read_data(data: Path, name: str) -> TextData:
    """Return a set with wordllama's tokenizer and table."""
    from safetensors.numpy import load_file

    folder = package_folder("wordllama")
    (weights,) = load_file(next((folder / "weights").glob(f"*_{WORDLLAMA_WIDTH}.safetensors"))).values()
    tokenizer = Tokenizer.from_file(str(next((folder / "tokenizers").glob("*.json"))))
    return make_data(*read_pairs(data, name), tokenizer, torch.from_numpy(weights))


def spoil(data: TextData, variant: str) -> TextData:
    """Give SHARE of the pairs the y of another one of them ("noise"), or replace them by copies of few ("copies")."""
    spoiled = spoiled_rows(len(data.train.x))
    source = spoiled.roll(1)
    if variant == "copies":
        source = spoiled[torch.arange(len(spoiled)) % (len(spoiled) // 8)]
    x = data.train.x.clone()
    y = data.train.y.clone()
    y[spoiled] = data.train.y[source]
    if variant == "copies":
        x[spoiled] = data.train.x[source]
    return replace(data, train=Pairs(x, y, x, y))


def spoiled_rows(pairs: int) -> Tensor:
    """Return the pairs that `spoil` changes, in random order."""
    order = torch.randperm(pairs, generator=torch.Generator().manual_seed(SPOILED))
    return order[: round(SHARE * pairs)]


def mine_hard_negatives(data: TextData) -> Tensor:
    """Return for each pair the number of the text that is nearest to x, is no right answer, and scores below y."""
    x = data.vocabulary.vectors(data.train.x[:, 0])
    y = data.vocabulary.vectors(data.train.y[:, 0])
    scores = x @ y.T
    limit = HARD_SHARE * scores.diagonal()[:, None]
    right = torch.zeros_like(scores, dtype=torch.bool)
    answers = (data.train.x_id[:, 0][:, None] == data.train.x_id[:, 0]).nonzero()
    for row, answer in answers.tolist():
        right[row] |= data.train.y_id[:, 0] == data.train.y_id[answer, 0]
    allowed = scores.masked_fill(right, -math.inf)
    below = allowed.masked_fill(scores >= limit, -math.inf)
    best = torch.where(below.isfinite().any(dim=1), below.argmax(dim=1), allowed.argmax(dim=1))
    return data.train.y[best, 0]


# -- losses ------------------------------------------------------------------------------------------------------------


class GuidedLoss(GISTEmbedLoss):
    """`GISTEmbedLoss` of a `StaticEmbedding`, which its constructor refuses because of the tokenizer's class.

    The forward pass is inherited. The guide has the model's own tokenizer, so nothing has to be tokenized again.
    """

    def __init__(self, model: nn.Module, guide: nn.Module, temperature: float, margin: float, same_side: bool) -> None:
        nn.Module.__init__(self)
        self.model = model
        self.guide = guide
        self.temperature = temperature
        self.must_retokenize = False
        self.margin_strategy = "absolute"
        self.margin = margin
        self.contrast_anchors = same_side
        self.contrast_positives = same_side
        self.gather_across_devices = False
        self.cross_entropy_loss = nn.CrossEntropyLoss()

    def sim_matrix(self, embed1: Tensor, embed2: Tensor) -> Tensor:
        """Return the cosines as a matrix product, without the (b, b, d) tensor of the parent class."""
        return normalize(embed1, dim=1) @ normalize(embed2, dim=1).T


@dataclass(frozen=True)
class Parts:
    """What a loss may be made of."""

    model: SentenceTransformer
    guide: SentenceTransformer
    pairs: int
    temperature: float


Maker = Callable[[Parts], nn.Module]


def ranking(**options: Any) -> Maker:
    """Return the maker of a `MultipleNegativesRankingLoss`."""
    return lambda parts: MultipleNegativesRankingLoss(parts.model, scale=1 / parts.temperature, **options)


def ours(name: str, **options: Any) -> Maker:
    """Return the maker of a `NuclrLoss`."""

    def make(parts: Parts) -> nn.Module:
        return NuclrLoss(parts.model, name, num_samples=parts.pairs, temperature=parts.temperature, **options)

    return make


MARGIN_MASK = {"false_negative_margin": MARGIN}
LOSSES: dict[str, Maker] = {
    "MNRL": ranking(),
    "MNRL, no_duplicates": ranking(),
    "MNRL, two directions": ranking(directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"),
    "MNRL, four directions": ranking(directions=FOUR),
    "MNRL, hardness": ranking(hardness_mode="in_batch_negatives", hardness_strength=HARDNESS),
    # A negative margin lets a negative exceed the positive; the model is its own guide.
    "MNRL, margin mask": lambda parts: GuidedLoss(parts.model, parts.model, parts.temperature, -MARGIN, False),
    "GIST": lambda parts: GuidedLoss(parts.model, parts.guide, parts.temperature, 0.0, True),
    "SogCLR": ours("sogclr"),
    "NUCLR": ours("nuclr"),
    "NUCLR, zeta_lr=0.03": ours("nuclr", zeta_lr=0.03),
    "NUCLR, zeta_lr=0": ours("nuclr", zeta_lr=0.0),
    "CLIP": ours("clip"),
    "CLIP, no mask": ours("clip"),
    "CLIP, margin": ours("clip", **MARGIN_MASK),
    "SogCLR, no mask": ours("sogclr"),
    "SogCLR, margin": ours("sogclr", **MARGIN_MASK),
    "NUCLR, no mask": ours("nuclr"),
    "NUCLR, margin": ours("nuclr", **MARGIN_MASK),
}
PEERS = (
    "MNRL",
    "MNRL, two directions",
    "MNRL, four directions",
    "MNRL, hardness",
    "MNRL, margin mask",
    "GIST",
    "SogCLR",
    "NUCLR",
)
STEPS = ("SogCLR", "NUCLR", "NUCLR, zeta_lr=0.03", "NUCLR, zeta_lr=0")
MASKS = (
    "MNRL",
    "MNRL, margin mask",
    "MNRL, no_duplicates",
    *(f"{name}{mask}" for name in ("CLIP", "SogCLR", "NUCLR") for mask in (", no mask", ", margin", "")),
)
HARD = " + hard negatives"
WITH_NEGATIVES = ("MNRL", "MNRL, hardness", "SogCLR", "NUCLR")


METHODS = {
    "peers": PEERS,
    "steps": STEPS,
    "masks": MASKS,
    "negatives": tuple(f"{name}{end}" for name in WITH_NEGATIVES for end in ("", HARD)),
}


def batches(data: TextData, size: int, no_duplicates: bool) -> Iterator[Tensor]:
    """Return the rows of the batches of one epoch; the last pairs are dropped."""
    n = len(data.train.x)
    if not no_duplicates:
        yield from torch.randperm(n)[: n // size * size].split(size)
        return
    rows = Dataset.from_dict({"x": data.train.x[:, 0].tolist(), "y": data.train.y[:, 0].tolist()})
    seed = int(torch.randint(2**31, ()))
    for batch in NoDuplicatesBatchSampler(rows, size, drop_last=True, generator=torch.Generator(), seed=seed):
        yield torch.tensor(batch)


def train(
    data: TextData,
    loss_of: Maker,
    setting: dict[str, float],
    plan: list[Tensor],
    mask: bool,
    negatives: Tensor | None = None,
) -> Tensor:
    """Return the trained rows of the table.

    Args:
        data: The pairs.
        loss_of: Makes the loss.
        setting: Temperature and rate.
        plan: Rows of the pairs of every batch, in the order of training.
        mask: Whether pairs with an equal text are not negatives of each other (`NuclrLoss` only).
        negatives: (n,) the number of the hard negative of each pair.

    """
    start = data.vocabulary.table[: data.vocabulary.trained]
    model, guide = (
        SentenceTransformer(modules=[StaticEmbedding(data.tokenizer, embedding_weights=start.clone())], device="cpu")
        for _ in range(2)
    )
    model.train()
    columns = [data.train.x[:, 0], data.train.y[:, 0]]
    if negatives is not None:
        columns.append(negatives)
    index = torch.arange(len(columns[0]))
    labels = torch.stack([index, columns[0], columns[1]] if mask else [index] * 3, dim=1)
    loss = loss_of(Parts(model, guide, len(index), setting["temperature"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting["rate"], weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / len(plan))
    for rows in plan:
        features = [data.vocabulary.features(column[rows]) for column in columns]
        optimizer.zero_grad()
        loss(features, labels[rows]).backward()
        optimizer.step()
        schedule.step()
    return model[0].embedding.weight.detach()


# -- curation ----------------------------------------------------------------------------------------------------------

SEPARATOR = " | "
KEEP_ALL = "all pairs"
RULES = {
    "": ("at random", "most popular", "least popular"),
    "noise": ("at random", "most popular", "lowest score", "lowest score - zeta", "the wrong ones"),
    "copies": ("at random", "most popular", "the copies"),
}


def kept_pairs(data: TextData, rule: str, seed: int) -> Tensor:
    """Return the pairs that are left when SHARE are dropped, by popularity and scores of the starting encoder."""
    n = len(data.train.x)
    x = data.vocabulary.vectors(data.train.x[:, 0])
    y = data.vocabulary.vectors(data.train.y[:, 0])
    at_random = torch.randperm(n, generator=torch.Generator().manual_seed(RANDOM_DROPS + seed))
    if rule == "at random":
        order = at_random
    elif rule == "the wrong ones":
        order = torch.cat([spoiled_rows(n), torch.arange(n)])
    elif rule == "the copies":  # the later of equal pairs
        first = {}
        for row, texts in enumerate(torch.stack([data.train.x[:, 0], data.train.y[:, 0]], dim=1).tolist()):
            first.setdefault(tuple(texts), row)
        copies = torch.tensor(sorted(set(range(n)) - set(first.values())))
        order = torch.cat([copies, at_random[~torch.isin(at_random, copies)]])
    else:
        score = (x * y).sum(dim=1)
        if rule != "lowest score":
            zeta = solve(x, y, temperature=POPULARITY_TEMPERATURE, tolerance=0.01).zeta.to(score)
            score = {"most popular": -zeta, "least popular": zeta, "lowest score - zeta": score - zeta}[rule]
        order = score.argsort()
    kept = torch.ones(n, dtype=torch.bool)
    kept[order[: round(SHARE * n)]] = False
    return kept.nonzero()[:, 0]


# -- the study ---------------------------------------------------------------------------------------------------------


class MissingError(Exception):
    """A run that a report needs is not in the file."""


class Losses(Study):
    """Runs of one set. A name is "{set}/{batch size}"; a method may end in a rule of curation."""

    seeds = SEEDS
    epochs = EPOCHS

    def __init__(self, file: Path, batch: int, trains: bool = True) -> None:
        super().__init__(file)
        self.batch = batch
        self.trains = trains
        self._negatives: dict[int, Tensor] = {}

    def settings_of(self, name: str, method: str) -> list[dict]:  # noqa: ARG002
        """Return the settings, the same for every loss."""
        rates = SMALL_BATCH_RATES if self.batch < SMALL_BATCH else RATES
        return [{"temperature": tau, "rate": rate} for tau, rate in itertools.product(TEMPERATURES, rates)]

    def choose(self, name: str, data: Data, method: str) -> list[dict]:
        """Return the best setting on each half; curation takes that of all pairs of the set as it is."""
        loss, separator, _ = method.partition(SEPARATOR)
        if not separator:
            return super().choose(name, data, method)
        name, _, batch = name.partition("/")
        return super().choose(f"{name.partition('_')[0]}/{batch}", data, loss)

    def run(self, name: str, data: Data, method: str, setting: dict, seed: int) -> dict:
        """Return the result of a run."""
        if not self.trains and self.key(name, method, setting, seed) not in self.results:
            raise MissingError(f"{name}: {method}")
        return super().run(name, data, method, setting, seed)

    def hits_of(self, data: TextData, method: str, setting: dict, seed: int) -> list[list[np.ndarray]]:
        """Train, and return the hits per half and direction."""
        torch.manual_seed(seed)
        method, _, rule = method.partition(SEPARATOR)
        used = data
        if rule not in ("", KEEP_ALL):
            used = replace(data, train=data.train.rows(kept_pairs(data, rule, seed)))
        name = method.removesuffix(HARD)
        plan: list[Tensor] = []
        for _ in range(EPOCHS):
            plan += batches(used, self.batch, no_duplicates=name.endswith("no_duplicates"))
        negatives = None
        if method.endswith(HARD):
            if id(data) not in self._negatives:
                self._negatives[id(data)] = mine_hard_negatives(data)
            negatives = self._negatives[id(data)]
        mask = not name.endswith((", no mask", ", margin"))
        trained = train(used, LOSSES[name], setting, plan, mask, negatives)
        return [evaluate(data, half, trained) for half in data.halves]


def evaluate(data: TextData, half: Pairs, trained: Tensor | None) -> list[np.ndarray]:
    """Return whether the first result is right, per held-out text of x and of y; None: before training."""
    x, y = (data.vocabulary.vectors(side, trained) for side in (half.x, half.y))
    same = torch.eye(x.shape[-1])
    return first_hits(replace(half, x=x, y=y), (same, same))


# -- tables ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """The results of a method on one set.

    Attributes:
        recall: Recall@1 per seed, in percent.
        gap: Difference to the baseline.
        draws: The same in every resample, (RESAMPLES,).
        chosen: The settings of the halves.

    """

    recall: np.ndarray
    gap: float
    draws: np.ndarray
    chosen: list[dict]


def row_of(study: Study, name: str, data: Data, method: str, baseline: str) -> Row:
    """Return the row of a method, trained if necessary and allowed."""
    chosen, hits = study.report(name, data, method)
    others = hits if baseline == method else study.report(name, data, baseline)[1]
    gap, draws = resampled_difference(data, hits, others)
    sides = [100 * side.mean(axis=1) for directions in hits for side in directions]
    return Row(np.mean(sides, axis=0), gap, draws, chosen)


def show_gap(gap: float, draws: np.ndarray) -> str:
    """Return a difference with its 95 % interval."""
    low, high = np.quantile(draws, (0.025, 0.975))
    return f"{gap:+.1f} [{low:+.1f}, {high:+.1f}]"


def print_table(title: str, columns: dict[str, dict[str, Row | None]], baseline: str) -> None:
    """Print recall@1 per method and set with the difference to the baseline, and the mean over the sets.

    Args:
        title: The first cell.
        columns: Set -> method -> row; None: missing.
        baseline: The method that the others are compared with.

    """
    print(f"\n| {title} | {' | '.join(columns)} | mean minus {baseline} |")
    print("| --- " * (len(columns) + 2) + "|")
    methods = dict.fromkeys(method for rows in columns.values() for method in rows)
    for method in methods:
        rows = [column.get(method) for column in columns.values()]
        cells = [method]
        for row in rows:
            if row is None:
                cells.append("missing")
            elif method == baseline:
                cells.append(f"{row.recall.mean():.1f}")
            else:
                cells.append(f"{row.recall.mean():.1f}, {show_gap(row.gap, row.draws)}")
        there = [row for row in rows if row is not None]
        mean = ""
        if len(there) == len(rows) and method != baseline:
            mean = show_gap(float(np.mean([row.gap for row in there])), np.mean([row.draws for row in there], axis=0))
        print("| " + " | ".join([*cells, mean]) + " |", flush=True)


class Tables:
    """The tables of a part; each set is read once.

    Args:
        data: The folder of the data.
        out: The folder of the runs.
        trains: Whether to train what is missing.

    """

    def __init__(self, data: Path, out: Path, trains: bool) -> None:
        self.folder = data
        self.out = out
        self.trains = trains
        self._read = cache(partial(read_data, data))

    def rows(
        self, name: str, variant: str, batch: int, methods: dict[str, str], baseline: str
    ) -> dict[str, Row | None]:
        """Return the rows of a set.

        Args:
            name: The set.
            variant: How its training pairs are spoiled, or "".
            batch: B.
            methods: Shown name -> method.
            baseline: The method that the others are compared with.

        """
        data = self._read(name)
        study = Losses(self.out / f"{name}.jsonl", batch, self.trains)
        if variant:
            data = spoil(data, variant)
            name += f"_{variant}"
        return {shown: try_row(study, f"{name}/{batch}", data, method, baseline) for shown, method in methods.items()}

    def losses(self, part: str, sets: list[str], batch: int, methods: list[str], baseline: str) -> None:
        """Print the table of losses."""
        columns = {}
        for name in sets:
            data = self._read(name)
            start = np.mean([[100 * hit.mean() for hit in evaluate(data, half, None)] for half in data.halves])
            columns[f"{name} ({start:.1f} before)"] = self.rows(
                name, "", batch, {method: method for method in methods}, baseline
            )
        print_table(f"{part}, B = {batch}", columns, baseline)

    def curation(self, sets: list[str], batch: int) -> None:
        """Print a table per kind of data, in which the rows say which pairs are dropped."""
        for variant, rules in RULES.items():
            methods = {rule: f"MNRL{SEPARATOR}{rule}" for rule in (KEEP_ALL, *rules)}
            if not variant:
                methods[KEEP_ALL] = "MNRL"
            columns = {name: self.rows(name, variant, batch, methods, methods[rules[0]]) for name in sets}
            print_table(f"{variant or 'as it is'}, B = {batch}, dropped", columns, rules[0])


def try_row(study: Study, name: str, data: Data, method: str, baseline: str) -> Row | None:
    """Return a row, or None if runs are missing and may not be trained."""
    try:
        return row_of(study, name, data, method, baseline)
    except MissingError:
        return None


def main() -> None:
    """Train what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "losses")
    parser.add_argument("--parts", default="peers")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--batches", default="32")
    parser.add_argument("--methods", default="", help="separated by semicolons; default: those of the part")
    parser.add_argument("--against", default="MNRL", help="the baseline of the differences")
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="this trainer does not save the state")
    options.out.mkdir(parents=True, exist_ok=True)
    tables = Tables(options.data, options.out, trains=not options.report)
    sets = options.sets.split(",")
    for part, batch in itertools.product(options.parts.split(","), map(int, options.batches.split(","))):
        if part == "curation":
            tables.curation(sets, batch)
        else:
            methods = options.methods.split(";") if options.methods else list(METHODS[part])
            tables.losses(part, sets, batch, methods, options.against)


if __name__ == "__main__":
    main()
