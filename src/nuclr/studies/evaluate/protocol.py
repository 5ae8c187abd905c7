"""`nuclr evaluate`: a model on test sets, plain and corrected for popularity, with the protocol of the numbers."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nuclr import __version__
from nuclr.data.formats.beir import BeirSet
from nuclr.errors import UserError
from nuclr.evaluation import (
    knn_accuracy,
    linear_probe_accuracy,
    metrics_by_convention,
    ranking_metrics,
    retrieval_metrics,
    zero_shot_metrics,
)
from nuclr.evaluation.probe import TEMPERATURE, K, choose_regularization, split_halves
from nuclr.evaluation.retrieval import direction_names
from nuclr.popularity.correction import BANK_SIZE
from nuclr.runs.components import val_split
from nuclr.runs.side_words import words_of_pairs
from nuclr.studies.evaluate.corrector import Corrector, is_chosen_on, make_corrector
from nuclr.studies.evaluate.subject import (
    DUPLICATES,
    Subject,
    beir_features,
    class_task_features,
    pair_features,
    probe_features,
)
from nuclr.studies.evaluate.tasks import (
    ClassificationTask,
    ProbeTask,
    RetrievalTask,
    classification_task,
    probe_task,
)

COMMAND = "nuclr evaluate"
OWN_CLASSES = "classes"  # name of the set of a run's own labeled images
PROTOCOL = {
    "scores": "cosine similarity of the features",
    "hit": "a query is right if one of its partners is among the k best",
    "ties": "equal scores count with their expectation over random orders",
    "rank": "expected rank of the best partner, from 1; mean and median over the queries",
    "prompts": "features of all templates normalized, averaged, normalized",
    "numbers": "fractions, except those named as in the paper: percent",
}
BEIR_PROTOCOL = (
    "as trec_eval: scores in float32, equal scores in descending order of document identifiers; the whole corpus is "
    "ranked; a document with the identifier of the query is left out; means over the judged queries"
)
PROBE_PROTOCOL = (
    "within each class the first, third, ... item is in the labeled half and the second, fourth, ... is classified; "
    "neighbors by cosine similarity, weighted by exp(similarity / temperature) (knn_acc1) or one vote each "
    "(knn_vote_acc1); linear probe: L2-regularized logistic regression on the labeled half"
)
BEIR_ROWS = ("nDCG@10", "MRR@10", "recall@100", "MAP")
PROBE_ROWS = {
    "knn_acc1": "k-nearest neighbors",
    "knn_vote_acc1": "k-nearest neighbors, vote",
    "linear_probe_acc1": "linear probe",
    "chance": "chance",
}
COLUMNS = {"plain": "plain", "train": "corrected", "queries": "transductive"}
LABEL = 28  # characters of the labels of a table's rows


def own_sets(
    subject: Subject, prompts: Path | None = None
) -> tuple[list[RetrievalTask], list[ClassificationTask], list[ProbeTask]]:
    """Return the held-out pairs and the classes of a run, exactly as training read them.

    Classes are for zero-shot classification if a side takes texts, and for neighbors and a linear probe otherwise.

    Args:
        subject: the run.
        prompts: a prompt file for the classes.

    """
    run, data = subject.run, subject.data
    if run is None or (data.val is None and data.classes is None):
        reason = "is not a run folder" if run is None else "has neither data.val nor data.classes"
        raise UserError(
            f"{subject.path} {reason}, so there is nothing to evaluate on; "
            "use --retrieval, --classification, --beir or --classes"
        )
    pairs, classes, probes = [], [], []
    for name, source in run.held_out.items():
        path, split = str(data.val_sets[name].path), val_split(data, name)
        pairs.append(RetrievalTask(name, path, split, source.pairs, source.numbers, source.bad, known=False))
    if data.classes is not None and subject.model.takes("text"):
        classes = [classification_task(OWN_CLASSES, data.classes, run.classes, data.max_bad_share, prompts)]
    elif data.classes is not None:
        probes = [probe_task(OWN_CLASSES, data.classes, run.classes, data.max_bad_share)]
    return pairs, classes, probes


def evaluate_subject(
    subject: Subject,
    retrievals: Sequence[RetrievalTask],
    classifications: Sequence[ClassificationTask],
    banks: Sequence[str] = (),
    duplicates: str | None = None,
    bank_size: int = BANK_SIZE,
    say: Callable[[str], None] = lambda _: None,
    searches: Sequence[BeirSet] = (),
    probes: Sequence[ProbeTask] = (),
) -> dict[str, Any]:
    """Return every metric with the protocol.

    Args:
        subject: the model.
        retrievals: pairs to retrieve.
        classifications: labeled images or vectors with prompts, for zero-shot classification.
        banks: keys of BANKS: correct the ranking for popularity as well.
        duplicates: a key of DUPLICATES; None: the default of each set (`RetrievalTask.duplicates`).
        bank_size: largest number of x, and of y, in a bank.
        say: called with a line before each part.
        searches: BEIR sets.
        probes: labeled images or vectors, for neighbors and a linear probe.

    """
    for task in retrievals:
        subject.check_kinds(task.path, task.pairs)
    for labeled in classifications:
        subject.check_zero_shot(labeled)
    for search in searches:
        subject.check_beir(search.path)
    for probe in probes:
        subject.check_probe(probe)
    correctors = []
    for bank in banks:
        say(f"--correct bank={bank}: encoding the bank, choosing temperature and strength")
        correctors.append(make_corrector(subject, bank, bank_size))
    content: dict[str, Any] = {
        "written_by": COMMAND,
        "version": __version__,
        "subject": subject.describe(),
        "protocol": PROTOCOL,
        "corrections": {corrector.bank: corrector.describe() for corrector in correctors},
        "retrieval": {},
        "classification": {},
        "beir": {},
        "probe": {},
    }
    for task in retrievals:
        say(f"retrieval: {task.name}")
        name = _free_name(task.name, content["retrieval"])
        content["retrieval"][name] = _retrieval(subject, task, correctors, duplicates)
    for labeled in classifications:
        say(f"classification: {labeled.name}")
        name = _free_name(labeled.name, content["classification"])
        content["classification"][name] = _classification(subject, labeled)
    for search in searches:
        say(f"BEIR: {search.path}, {search.split}")
        name = _free_name(str(search.path), content["beir"])
        content["beir"][name] = _beir(subject, search, correctors)
    for probe in probes:
        say(f"neighbors and linear probe: {probe.name}")
        name = _free_name(probe.name, content["probe"])
        content["probe"][name] = _probe(subject, probe)
    return content


def _retrieval(
    subject: Subject, task: RetrievalTask, correctors: Sequence["Corrector"], duplicates: str | None
) -> dict[str, Any]:
    way = duplicates or task.duplicates
    features = pair_features(subject, task.pairs, task.numbers, way)
    if correctors and min(len(features.x), len(features.y)) < 2:
        raise UserError(f"{task.path}: --correct needs at least two different items on each side")
    plain = retrieval_metrics(features.x, features.y, features.links, sides=features.sides)
    # If the correction is chosen on these pairs, each half of the x is ranked with the choice of the other half.
    crossed = any(corrector.val == task.pairs.fingerprint for corrector in correctors)
    outcomes = {c.bank: c.crossed(features) if crossed else (c(features), None) for c in correctors}
    corrected = {bank: metrics for bank, (metrics, _) in outcomes.items()}
    words = words_of_pairs(task.pairs)
    return {
        "path": task.path,
        "split": task.split,
        "fingerprint": task.pairs.fingerprint,
        "sides": list(features.sides),
        "items": [words[0].many, words[1].many],
        "sizes": [len(features.x), len(features.y)],
        "bad_samples": len(task.bad),
        "duplicates": {"way": way, "meaning": DUPLICATES[way]},
        "correction_crossed": crossed,
        "corrections_of_halves": {bank: chosen for bank, (_, chosen) in outcomes.items() if chosen is not None},
        "plain": plain,
        "corrected": corrected,
        "names": {
            "plain": metrics_by_convention(plain),
            **{bank: metrics_by_convention(values) for bank, values in corrected.items()},
        },
    }


def _classification(subject: Subject, task: ClassificationTask) -> dict[str, Any]:
    x, classes, labels = class_task_features(subject, task)
    plain = zero_shot_metrics(x, classes, labels)
    return {
        "path": task.path,
        "images": len(x),
        "classes": len(classes),
        "class_names": None if task.texts is None else task.texts.names,
        "templates": None if task.texts is None else task.texts.templates,
        "prompt_file": None if task.texts is None or task.texts.file is None else str(task.texts.file),
        "bad_samples": len(task.bad),
        "smallest_class": int(np.bincount(labels.numpy(), minlength=len(classes)).min()),
        "plain": plain,
        "names": {"plain": metrics_by_convention(plain)},
    }


def _beir(subject: Subject, task: BeirSet, correctors: Sequence[Corrector]) -> dict[str, Any]:
    queries, documents = beir_features(subject, task)
    if correctors and min(len(queries), len(documents)) < 2:
        raise UserError(f"--beir {task.path}: --correct needs at least two queries and two documents")

    def measure(bias: Any = None) -> dict[str, float]:
        return ranking_metrics(queries, documents, task.qrels, task.document_ids, bias, task.ignore)

    return {
        "path": str(task.path),
        "split": task.split,
        "fingerprint": task.fingerprint,
        "queries": len(queries),
        "documents": len(documents),
        "judgments": len(task.qrels),
        "bad_samples": len(task.bad),
        "first_bad_samples": dict(list(task.bad.items())[:5]),
        "protocol": BEIR_PROTOCOL,
        "correction_chosen_here": bool(correctors) and is_chosen_on(subject, task),
        "plain": measure(),
        "corrected": {c.bank: measure(c.document_bias(queries, documents)) for c in correctors},
    }


def _probe(subject: Subject, task: ProbeTask) -> dict[str, Any]:
    x, labels = probe_features(subject, task)
    first, second = split_halves(labels)
    halves = x[first], labels[first], x[second], labels[second]
    k = min(K, len(first))
    regularization = choose_regularization(*halves[:2])
    classes = len(labels.unique())
    return {
        "path": task.path,
        "classes": classes,
        "labeled": len(first),
        "classified": len(second),
        "bad_samples": len(task.bad),
        "protocol": PROBE_PROTOCOL,
        "k": k,
        "temperature": TEMPERATURE,
        "regularization": regularization,
        "plain": {
            "knn_acc1": knn_accuracy(*halves, k),
            "knn_vote_acc1": knn_accuracy(*halves, k, None),
            "linear_probe_acc1": linear_probe_accuracy(*halves, regularization),
            "chance": 1 / classes,
        },
    }


def _free_name(name: str, taken: dict[str, Any]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name} ({number})"
    return free


# -- for people --------------------------------------------------------------------------------------------------------


def table(content: dict[str, Any]) -> str:
    """Return plain and corrected metrics next to each other, in percent; ranks count from 1."""
    return "\n".join(_lines(content))


def _lines(content: dict[str, Any]) -> Iterator[str]:
    for name, task in content["retrieval"].items():
        yield from _retrieval_lines(name, task)
    for name, task in content["beir"].items():
        rankings = {"plain": task["plain"], **task["corrected"]}
        yield f"{name}, {task['split']}: {task['queries']:,} queries, {task['documents']:,} documents"
        yield _header(rankings)
        for key in BEIR_ROWS:
            yield _row(key, [metrics[key] for metrics in rankings.values()])
        if task["correction_chosen_here"]:
            yield "  The correction was chosen on these judgments (data.val): the corrected values are optimistic."
        yield ""
    for name, task in content["classification"].items():
        metrics = task["plain"]
        yield f"{name}: {task['images']:,} images, {task['classes']} classes"
        for key, label in (("acc1", "top-1"), ("acc5", "top-5"), ("mean_per_class_recall", "mean per-class recall")):
            yield _row(label, [metrics[f"zero_shot_{key}"]])
        yield _row("chance", [metrics["zero_shot_chance"]])
        yield ""
    for name, task in content["probe"].items():
        yield f"{name}: {task['labeled']:,} labeled, {task['classified']:,} to classify, {task['classes']} classes"
        for key, label in PROBE_ROWS.items():
            yield _row(label.replace("k-", f"{task['k']}-"), [task["plain"][key]])
        yield ""
    for correction in content["corrections"].values():
        column, temperature = COLUMNS[correction["bank"]], correction["temperature"]
        at = f"temperature {temperature:g}" if temperature is not None else "the default temperature"
        yield (
            f"{column}: score - {correction['strength']:g} * zeta (popularity), solved at {at}; "
            f"bank: {correction['meaning']}; chosen on {correction['chosen_on']}"
        )


def _retrieval_lines(name: str, task: dict[str, Any]) -> Iterator[str]:
    rankings = {"plain": task["plain"], **task["corrected"]}
    x, y = task["sides"]
    labels = dict(zip((*direction_names((x, y)), "mean"), (f"{x} to {y}", f"{y} to {x}", "mean"), strict=True))
    width = max(LABEL, 2 + max(len(f"median rank, {label}") for label in labels.values()))
    items, sizes = task["items"], task["sizes"]
    yield f"{name}: {sizes[0]:,} {items[0]}, {sizes[1]:,} {items[1]}"
    yield _header(rankings, width) + f"{'chance':>10}"
    for key, label in labels.items():
        for k in (1, 5, 10):
            values = [metrics[f"{key}_R@{k}"] for metrics in rankings.values()]
            chance = 100 * task["plain"][f"{key}_chance@{k}"]
            yield _row(f"recall@{k}, {label}", values, width) + f"{chance:>8.2f} %"
        if key != "mean":
            for kind in ("mean", "median"):
                ranks = [metrics[f"{key}_{kind}_rank"] for metrics in rankings.values()]
                yield f"  {f'{kind} rank, {label}':{width}}" + "".join(f"{rank:>12.1f}  " for rank in ranks)
    if task["correction_crossed"]:
        yield f"  Held-out pairs: each half of the {items[0]} is ranked with the correction chosen on the other half."
        yield "  The correction shown below was chosen on all held-out pairs and is used for other test sets."
    yield ""


def _header(rankings: dict[str, Any], width: int = LABEL) -> str:
    return f"  {'':{width}}" + "".join(f"{COLUMNS[column]:>14}" for column in rankings)


def _row(label: str, values: Sequence[float], width: int = LABEL) -> str:
    return f"  {label:{width}}" + "".join(f"{100 * value:>12.2f} %" for value in values)
