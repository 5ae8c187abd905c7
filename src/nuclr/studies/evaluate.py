"""`nuclr evaluate`: a model on test sets, plain and corrected for popularity, with the protocol of the numbers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from nuclr import __version__, files
from nuclr.arrays import evenly_spaced
from nuclr.data.formats.beir import BeirPairs, BeirSet, read_beir
from nuclr.errors import UserError
from nuclr.evaluation import (
    Bank,
    Correction,
    Interval,
    Ranks,
    change_interval,
    choose_correction,
    cross_validated_ranks,
    metrics_of_widths,
    ranking_metrics,
    retrieval_metrics,
    retrieval_ranks,
    summarize_ranks,
    zero_shot_metrics,
)
from nuclr.evaluation.metrics import Kind, measure, named_metrics
from nuclr.evaluation.probe import TEMPERATURE, labeled_halves
from nuclr.evaluation.retrieval import direction_names
from nuclr.popularity.correction import BANK_SIZE, STRENGTHS, TEMPERATURE_FACTORS
from nuclr.remote import is_url
from nuclr.runs.components import val_split
from nuclr.runs.features import PairFeatures, encode_items
from nuclr.studies.tasks import (
    DUPLICATES,
    TEXTS,
    Subject,
    Task,
    add_prompts,
    open_labels,
    open_retrieval,
    open_subject,
    without_bad,
)

COMMAND = "nuclr evaluate"
KINDS = ("retrieval", "classification", "beir", "probe")
OWN_CLASSES = "classes"  # name of the set of a run's own labeled images
PLAIN = "plain"
COLUMNS = {
    PLAIN: "plain",
    "train": "corrected",
    "queries": "transductive",
}
BANKS = {
    "train": "training queries and the candidates they choose from; of the test set only the gallery is used",
    "queries": "the test queries themselves (transductive): possible only if all queries are known at once",
}
PROTOCOL = {
    "scores": "cosine similarity of the features",
    "hit": "a query is right if one of its partners is among the k best",
    "ties": "equal scores count with their expectation over random orders",
    "rank": "expected rank of the best partner, from 1; mean and median over the queries",
    "prompts": "features of all templates normalized, averaged, normalized",
    "numbers": "fractions",
}
BEIR_PROTOCOL = (
    "as trec_eval: scores in float32, equal scores in descending order of document identifiers; the whole corpus is "
    "ranked; a document with the identifier of the query is left out; means over the judged queries"
)
PROBE_PROTOCOL = (
    "within each class the first, third, ... item is in the labeled half and the second, fourth, ... is classified; "
    "neighbors by cosine similarity, weighted by exp(similarity / temperature); linear probe: L2-regularized logistic "
    "regression on the labeled half"
)
Metrics = dict[str, float]
TestSet = Task | BeirSet


# ---------------------------------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SetResult:
    """Metrics of one test set.

    Attributes:
        kind: "retrieval", "classification", "beir" or "probe".
        title: Line above the table: name and sizes.
        plain: Metrics of the plain ranking, by name.
        facts: What was measured, and how: path, sizes, classes, prompts, ...
        corrected: Metrics of corrected rankings, by bank.
        gains: Change of recall@1 with its interval, by bank and direction.
        notes: Lines below the table.

    """

    kind: str
    title: str
    plain: Metrics
    facts: dict[str, Any]
    corrected: dict[str, Metrics] = field(default_factory=dict)
    gains: dict[str, dict[str, Interval]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def rankings(self) -> dict[str, Metrics]:
        """The metrics of all rankings, the plain one first."""
        return {PLAIN: self.plain, **self.corrected}

    def to_json(self) -> dict[str, Any]:
        """Return the metrics with the facts."""
        content = self.facts | {
            "title": self.title,
            "plain": self.plain,
            "corrected": self.corrected,
        }
        if self.gains:
            content["gains"] = files.to_record(self.gains)
        return content

    def lines(self) -> Iterator[str]:
        """Yield the table: a row per metric, with a column per ranking and one for chance."""
        rows = [["", *(COLUMNS[column] for column in self.rankings), "chance"]]
        for one in named_metrics(self.plain):
            values = [*(metrics.get(one.name) for metrics in self.rankings.values()), one.chance(self.plain)]
            label = one.label.replace("k-", f"{self.facts.get('k', 'k')}-")
            rows.append([label, *("" if value is None else one.metric.text(value, 2) for value in values)])
        width = max(28, 2 + max(len(row[0]) for row in rows))
        yield self.title
        for label, *cells in rows:
            yield f"  {label:{width}}" + "".join(f"{cell:>14}" for cell in cells)
        for bank, gains in self.gains.items():
            for direction, gain in gains.items():
                points = "{:+.1f} points [{:+.1f}, {:+.1f}]".format(*(100 * x for x in asdict(gain).values()))
                yield f"  {COLUMNS[bank]}: recall@1, {direction.replace('_', ' ')}, changes by {points}"
        yield from (f"  {note}" for note in self.notes)
        yield ""


@dataclass(frozen=True)
class Evaluation:
    """Result of `evaluate`.

    Attributes:
        subject: The model, and how inputs become features.
        corrections: Temperature, strength and origin of each correction, by bank.
        sets: The test sets by kind and name.

    """

    subject: dict[str, Any]
    corrections: dict[str, dict[str, Any]]
    sets: dict[str, dict[str, SetResult]]

    def __repr__(self) -> str:
        """Return one line with the test sets."""
        names = [f"{kind}: {', '.join(results)}" for kind, results in self.sets.items() if results]
        return f"Evaluation({self.subject['path']}; {'; '.join(names)})"

    def to_json(self) -> dict[str, Any]:
        """Return all metrics with the protocol, as `nuclr evaluate --out` writes them."""
        content = {
            "written_by": COMMAND,
            "version": __version__,
            "subject": self.subject,
            "protocol": PROTOCOL,
            "corrections": self.corrections,
        }
        for kind, results in self.sets.items():
            content[kind] = {name: result.to_json() for name, result in results.items()}
        return content

    def table(self) -> str:
        """Return plain and corrected metrics next to each other, as the command prints them."""
        lines = [line for results in self.sets.values() for result in results.values() for line in result.lines()]
        for correction in self.corrections.values():
            temperature = correction["temperature"]
            at = "the default temperature" if temperature is None else f"temperature {temperature:g}"
            lines.append(
                f"{COLUMNS[correction['bank']]}: score - {correction['strength']:g} * zeta (popularity), solved at "
                f"{at}; bank: {correction['meaning']}; chosen on {correction['chosen_on']}"
            )
        return "\n".join(lines).rstrip()


# ---------------------------------------------------------------------------------------------------------------------
# Popularity-corrected ranking
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corrector:
    """A bank of queries with the temperature and strength of its correction.

    Attributes:
        bank: a key of BANKS.
        correction: temperature and strength.
        chosen_on: where these were chosen, for people.
        queries: the bank; None: each test set is its own bank.
        val: fingerprint of the held-out pairs that the correction was chosen on; None if there are none.

    """

    bank: str
    correction: Correction
    chosen_on: str
    queries: Bank | None = None
    val: str | None = None

    def bank_of(
        self,
        path: str,
        x: Tensor,
        y: Tensor,
    ) -> Bank:
        """Return the bank, or the x and y of a test set as their own bank.

        Raises:
            UserError: if the test set at this path is too small to correct.

        """
        if min(len(x), len(y)) < 2:
            raise UserError(f"{path}: --correct needs at least two different items on each side")
        return Bank(x, y, transductive=True) if self.queries is None else self.queries

    def describe(self) -> dict[str, Any]:
        """Return the correction for the JSON file."""
        facts: dict[str, Any] = {
            "bank": self.bank,
            "transductive": self.bank == "queries",
            "meaning": BANKS[self.bank],
            "chosen_on": self.chosen_on,
            "chosen_from": {
                "temperatures": f"{', '.join(map(str, TEMPERATURE_FACTORS))} standard deviations of the scores",
                "strengths": STRENGTHS,
            },
        }
        if self.queries is not None:
            facts |= {"bank_x": len(self.queries.x), "bank_y": len(self.queries.y)}
        return facts | asdict(self.correction)


def make_corrector(subject: Subject, bank: str) -> Corrector:
    """Encode the bank, and choose temperature and strength on the run's held-out pairs if it has some."""
    run = subject.run
    queries = None
    if bank == "train":
        if run is None:
            raise UserError(f"--correct bank=train needs a run folder; {subject.path} is not one, so use bank=queries")
        queries = subject.query_bank(run.train)
    if run is None or run.val is None:
        chosen_on = "no labels (the run has no held-out pairs): the default of PopularityCorrection"
        return Corrector(bank, Correction(), chosen_on, queries)
    features = subject.pair_features(run.val)
    own = Bank(features.x, features.y, transductive=True) if queries is None else queries
    correction = choose_correction(
        features.x,
        features.y,
        features.links,
        own,
    )
    name, first = next(iter(subject.data.val.items()))
    chosen_on = f"{subject.data.val_key(name)}: {first.path}"
    return Corrector(
        bank,
        correction,
        chosen_on,
        queries,
        run.val.pairs.fingerprint,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


def evaluate(
    run: str | Path,
    *,
    retrieval: Sequence[str] = (),
    classification: Sequence[str] = (),
    beir: Sequence[str | Path] = (),
    classes: Sequence[str] = (),
    prompts: Path | None = None,
    correct: Sequence[str] = (),
    duplicates: str | None = None,
    root: str | None = None,
    split: str | None = None,
    allow_outside: bool = False,
    head: bool | None = None,
    best: bool = False,
    batch_size: int | None = None,
    device: str = "auto",
    say: Callable[[str], None] = lambda _: None,
) -> Evaluation:
    """Evaluate a trained run, or a folder of encoders, on test sets; without any, on the run's own held-out data.

    Args:
        run: The run, or a folder of encoders (nuclr's, a CLIP or SigLIP).
        retrieval: Pairs in any format that training takes, or NAME:FOLDER with a standard set (mscoco, flickr30k).
        classification: Labeled images, vectors with prompts, or NAME:FOLDER with a standard set, for zero-shot
            classification.
        beir: BEIR folders.
        classes: Labeled images or vectors, for nearest neighbors and a linear probe.
        prompts: A prompt file for `classification`, see `nuclr.data.labeled`.
        correct: Banks to correct the ranking with: "bank=train" (training pairs), "bank=queries" (the test pairs
            themselves: transductive).
        duplicates: A key of DUPLICATES for items of side y that occur more than once. None: "miss" for standard sets,
            as in published results, and "merge" for others.
        root: The folder that pairs and their files are relative to. None: the run's, if it still exists.
        split: The split, if pairs have several.
        allow_outside: Read files that lists name outside of the root.
        head: Whether features include the projection heads. None: the run's setting.
        best: Use the weights of the best checkpoint instead of the last.
        batch_size: Samples per batch. None: the run's.
        device: "auto", "cpu", "cuda", ...
        say: Called with a line before each part.

    Returns:
        All metrics; `to_json()` has the content of the command's `--out`, `table()` its output.

    Raises:
        UserError: If something cannot be read, or the model does not take it.

    """
    banks = [text.removeprefix("bank=") for text in correct]
    for bank in banks:
        if bank not in BANKS:
            raise UserError(f"--correct {bank}: unknown; allowed: {', '.join(f'bank={name}' for name in BANKS)}")
    subject = open_subject(
        Path(run),
        best,
        batch_size,
        device,
        head,
    )
    data = subject.data
    for folder in beir:
        subject.check(f"--beir {folder}", TEXTS)  # before a large corpus is read
    own = not (retrieval or classification or beir or classes)
    if prompts is not None and not (classification or (own and data.classes)):
        raise UserError(f"--prompts {prompts}: there is no set for zero-shot classification")
    # As in training, unless the folder is no longer there: then paths are relative to the working directory.
    if root is None and data.root is not None and (is_url(data.root) or Path(data.root).is_dir()):
        root = data.root
    data = replace(
        data,
        root=root,
        allow_outside=allow_outside or data.allow_outside,
    )
    size = subject.image_size
    tasks = own_sets(subject, prompts) if own else []
    tasks += [open_retrieval(text, data, split) for text in retrieval]
    tasks += [open_labels(text, data, "zero_shot", prompts, size) for text in classification]
    tasks += [read_beir(Path(folder), split, data.max_bad_share) for folder in beir]
    tasks += [open_labels(text, data, "labels", size=size) for text in classes]
    return evaluate_subject(subject, tasks, banks, duplicates, say)


def own_sets(subject: Subject, prompts: Path | None = None) -> list[TestSet]:
    """Return the held-out pairs and the classes of a run, exactly as training read them.

    Classes are for zero-shot classification if a side takes texts, and for neighbors and a linear probe otherwise.

    Args:
        subject: the run.
        prompts: a prompt file for the classes.

    """
    run = subject.run
    data = subject.data
    if run is None or not (data.val or data.classes):
        reason = "is not a run folder" if run is None else "has neither data.val nor data.classes"
        raise UserError(
            f"{subject.path} {reason}, so there is nothing to evaluate on; "
            "use --retrieval, --classification, --beir or --classes"
        )
    tasks = []
    for name, source in run.held_out.items():
        path = str(data.val[name].path)
        tasks.append(Task(name, path, "retrieval", source, val_split(data, name)))
    if data.classes is not None:
        kind: Kind = "zero_shot" if subject.model.takes("text") else "labels"
        own = Task(OWN_CLASSES, data.classes, kind, without_bad(run.classes, data))
        tasks.append(add_prompts(own, prompts))
    return list(tasks)


def evaluate_subject(
    subject: Subject,
    tasks: Sequence[TestSet],
    banks: Sequence[str] = (),
    duplicates: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Evaluation:
    """Evaluate an opened model on opened test sets.

    Args:
        subject: The model.
        tasks: The test sets.
        banks: Keys of BANKS: correct the ranking for popularity as well.
        duplicates: A key of DUPLICATES. None: the default of each set.
        say: Called with a line before each part.

    Returns:
        All metrics.

    Raises:
        UserError: If the model does not take a test set.

    """
    for task in tasks:
        subject.check(str(task.path), TEXTS if isinstance(task, BeirSet) else task.needs)
    if banks and all(isinstance(task, Task) and task.kind != "retrieval" for task in tasks):
        raise UserError("--correct needs --retrieval or --beir; classification is not corrected")
    correctors = []
    for bank in dict.fromkeys(banks):
        say(f"--correct bank={bank}: encoding the bank, choosing temperature and strength")
        correctors.append(make_corrector(subject, bank))
    sets: dict[str, dict[str, SetResult]] = {kind: {} for kind in KINDS}
    for task in tasks:
        name = str(task.path) if isinstance(task, BeirSet) else task.name
        say(f"evaluating on {name}")
        if isinstance(task, BeirSet):
            result = _beir(subject, task, correctors)
        elif task.kind == "retrieval":
            result = _retrieval(
                subject,
                task,
                correctors,
                duplicates or task.duplicates,
            )
        else:
            result = _classification(subject, task) if task.kind == "zero_shot" else _probe(subject, task)
        results = sets[result.kind]
        copies = sum(known == name or known.startswith(f"{name} (") for known in results)
        results[f"{name} ({copies + 1})" if copies else name] = result
    corrections = {corrector.bank: corrector.describe() for corrector in correctors}
    return Evaluation(subject.describe(), corrections, sets)


def _retrieval(
    subject: Subject,
    task: Task,
    correctors: Sequence[Corrector],
    duplicates: str,
) -> SetResult:
    features = subject.pair_features(task.source, duplicates)
    pairs = task.source.pairs
    plain = retrieval_ranks(features.x, features.y, features.links)
    measure = partial(retrieval_metrics, links=features.links, sides=features.sides)
    short = metrics_of_widths(measure, features.x, features.y, subject.widths)
    # If the correction is chosen on these pairs, each half of the x is ranked with the choice of the other half.
    crossed = any(corrector.val == pairs.fingerprint for corrector in correctors)
    corrected: dict[str, Metrics] = {}
    halves: dict[str, list[dict[str, Any]]] = {}
    gains: dict[str, dict[str, Interval]] = {}
    for corrector in correctors:
        bank = corrector.bank_of(task.path, features.x, features.y)
        if crossed:
            ranks, chosen = cross_validated_ranks(
                features.x,
                features.y,
                features.links,
                bank,
                features.x_group,
            )
            halves[corrector.bank] = [asdict(correction) for correction in chosen]
        else:
            biases = corrector.correction.biases(bank, features.x, features.y)
            ranks = retrieval_ranks(features.x, features.y, features.links, *biases)
        corrected[corrector.bank] = summarize_ranks(*ranks, sides=features.sides)
        gains[corrector.bank] = _gains(features, plain, ranks)
    x, y = pairs.words
    notes = (
        f"Held-out pairs: each half of the {x.many} is ranked with the correction chosen on the other half.",
        "The correction shown below was chosen on all held-out pairs and is used for other test sets.",
    )
    return SetResult(
        "retrieval",
        f"{task.name}: {len(features.x):,} {x.many}, {len(features.y):,} {y.many}",
        summarize_ranks(*plain, sides=features.sides) | short,
        {
            "path": task.path,
            "split": task.split,
            "fingerprint": pairs.fingerprint,
            "sides": list(features.sides),
            "items": [x.many, y.many],
            "sizes": [len(features.x), len(features.y)],
            "bad_samples": len(task.source.bad),
            "duplicates": {"way": duplicates, "meaning": DUPLICATES[duplicates]},
            "correction_crossed": crossed,
            "corrections_of_halves": halves,
        },
        corrected,
        gains,
        notes if crossed else (),
    )


def _gains(
    features: PairFeatures,
    plain: tuple[Ranks, Ranks],
    corrected: tuple[Ranks, Ranks],
) -> dict[str, Interval]:
    """Return the change of recall@1 per direction; the y of one x, and all x of a group, are one observation."""
    groups = (features.x_group[plain[0].query], features.y_group[plain[1].query])
    gains = {}
    for direction, before, after, group in zip(direction_names(features.sides), plain, corrected, groups, strict=True):
        gains[direction] = change_interval(before.hits(1), after.hits(1), group)
    return gains


def _classification(subject: Subject, task: Task) -> SetResult:
    x, labels = subject.labeled_features(task)
    classes = subject.class_features(task)
    texts = task.texts
    return SetResult(
        "classification",
        f"{task.name}: {len(x):,} images, {len(classes)} classes",
        zero_shot_metrics(x, classes, labels),
        {
            "path": task.path,
            "images": len(x),
            "classes": len(classes),
            "class_names": None if texts is None else texts.names,
            "templates": None if texts is None else texts.templates,
            "prompt_file": None if texts is None or texts.file is None else str(texts.file),
            "bad_samples": len(task.source.bad),
            "smallest_class": int(np.bincount(labels.numpy(), minlength=len(classes)).min()),
        },
    )


def _beir(
    subject: Subject,
    task: BeirSet,
    correctors: Sequence[Corrector],
) -> SetResult:
    texts: Any = task.queries, task.documents  # read one at a time: a corpus of texts need not be a list
    queries = encode_items(subject.model.x, texts[0], subject.encoding)
    documents = encode_items(subject.model.y, texts[1], subject.encoding)

    def rank(x: Tensor, y: Tensor, bias: Tensor | None = None) -> Metrics:
        return ranking_metrics(
            x,
            y,
            task.qrels,
            task.document_ids,
            bias,
            task.ignore,
        )

    corrected: dict[str, Metrics] = {}
    for corrector in correctors:
        # A corpus may be much larger than what popularity can be solved with.
        some = documents[evenly_spaced(len(documents), BANK_SIZE)]
        bank = corrector.bank_of(str(task.path), queries[evenly_spaced(len(queries), BANK_SIZE)], some)
        bias = corrector.correction.biases(bank, queries, documents)[1]
        corrected[corrector.bank] = rank(queries, documents, bias)
    held_out = None if subject.run is None or subject.run.val is None else subject.run.val.pairs
    chosen_here = (
        bool(correctors)
        and isinstance(held_out, BeirPairs)
        and (held_out.folder.resolve(), held_out.split) == (task.path.resolve(), task.split)
    )
    note = "The correction was chosen on these judgments (data.val): the corrected values are optimistic."
    return SetResult(
        "beir",
        f"{task.path}, {task.split}: {len(queries):,} queries, {len(documents):,} documents",
        rank(queries, documents) | metrics_of_widths(rank, queries, documents, subject.widths),
        {
            "path": str(task.path),
            "split": task.split,
            "fingerprint": task.fingerprint,
            "queries": len(queries),
            "documents": len(documents),
            "judgments": len(task.qrels),
            "bad_samples": len(task.bad),
            "first_bad_samples": dict(list(task.bad.items())[:5]),
            "protocol": BEIR_PROTOCOL,
            "correction_chosen_here": chosen_here,
        },
        corrected,
        notes=(note,) if chosen_here else (),
    )


def _probe(subject: Subject, task: Task) -> SetResult:
    halves = labeled_halves(*subject.labeled_features(task))
    labeled = len(halves.known)
    classified = len(halves.asked)
    return SetResult(
        "probe",
        f"{task.name}: {labeled:,} labeled, {classified:,} to classify, {halves.classes} classes",
        measure("labels", halves),
        {
            "path": task.path,
            "classes": halves.classes,
            "labeled": labeled,
            "classified": classified,
            "bad_samples": len(task.source.bad),
            "protocol": PROBE_PROTOCOL,
            "k": halves.k,
            "regularization": halves.regularization,
            "temperature": TEMPERATURE,
        },
    )
