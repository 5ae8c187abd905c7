"""`nuclr evaluate`: a model on test sets, plain and corrected for popularity, with the protocol of the numbers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np

from nuclr import __version__
from nuclr.data.pairs import Pairs
from nuclr.errors import UserError
from nuclr.evaluation import (
    choose_correction,
    cross_validated_ranks,
    metrics_by_convention,
    retrieval_metrics,
    summarize_ranks,
    zero_shot_metrics,
)
from nuclr.evaluation.corrected import STRENGTHS, TEMPERATURE_FACTORS
from nuclr.popularity import Bank, Correction
from nuclr.popularity.correction import BANK_SIZE, DEFAULT_TEMPERATURE_FACTOR
from nuclr.runs.features import PairFeatures
from nuclr.studies.evaluate.subject import DUPLICATES, Subject, class_task_features, pair_features, query_bank
from nuclr.studies.evaluate.tasks import ClassificationTask, RetrievalTask, VectorClasses, classification_task

COMMAND = "nuclr evaluate"
PROTOCOL = {
    "scores": "cosine similarity of the features",
    "hit": "a query is right if one of its partners is among the k best",
    "ties": "equal scores count with their expectation over random orders",
    "rank": "expected rank of the best partner, from 1; mean and median over the queries",
    "prompts": "features of all templates normalized, averaged, normalized",
    "numbers": "fractions, except those named as in the paper: percent",
}
BANKS = {
    "train": "training queries and the candidates they choose from; of the test set only the gallery is used",
    "queries": "the test queries themselves (transductive): possible only if all queries are known at once",
}
COLUMNS = {"plain": "plain", "train": "corrected", "queries": "transductive"}
_ROWS = (("image_to_text", "image to text"), ("text_to_image", "text to image"), ("mean", "mean"))


def own_sets(subject: Subject) -> tuple[list[RetrievalTask], list[ClassificationTask]]:
    """Return the held-out pairs and the classes of a run, exactly as training read them."""
    run, data = subject.run, subject.data
    if run is None or (data.val is None and data.classes is None):
        reason = "is not a run folder" if run is None else "has neither data.val nor data.classes"
        raise UserError(
            f"{subject.path} {reason}, so there is nothing to evaluate on; use --retrieval or --classification"
        )
    pairs, classes = [], []
    if run.val is not None:
        split = data.val_split or data.split
        pairs = [RetrievalTask("val", str(data.val), split, run.val.pairs, run.val.numbers, run.val.bad, known=False)]
    if data.classes is not None:
        numbers = np.arange(len(run.classes))
        classes = [classification_task("classes", data.classes, run.classes, numbers, data.max_bad_share)]
    return pairs, classes


def evaluate_subject(
    subject: Subject,
    retrievals: Sequence[RetrievalTask],
    classifications: Sequence[ClassificationTask],
    banks: Sequence[str] = (),
    duplicates: str | None = None,
    bank_size: int = BANK_SIZE,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Return every metric with the protocol.

    Args:
        subject: the model.
        retrievals: pairs to retrieve.
        classifications: labeled images or vectors.
        banks: keys of BANKS: correct the ranking for popularity as well.
        duplicates: a key of DUPLICATES; None: the default of each set (`RetrievalTask.duplicates`).
        bank_size: largest number of x, and of y, in a bank.
        say: called with a line before each part.

    """
    for task in retrievals:
        subject.check_kinds(task.path, task.pairs)
    for labeled in classifications:
        _check_classes(subject, labeled)
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
    }
    for task in retrievals:
        say(f"retrieval: {task.name}")
        name = _free_name(task.name, content["retrieval"])
        content["retrieval"][name] = _retrieval(subject, task, correctors, duplicates)
    for labeled in classifications:
        say(f"classification: {labeled.name}")
        name = _free_name(labeled.name, content["classification"])
        content["classification"][name] = _classification(subject, labeled)
    return content


def _retrieval(
    subject: Subject, task: RetrievalTask, correctors: Sequence["Corrector"], duplicates: str | None
) -> dict[str, Any]:
    way = duplicates or task.duplicates
    features = pair_features(subject, task.pairs, task.numbers, way)
    if correctors and min(len(features.x), len(features.y)) < 2:
        raise UserError(f"{task.path}: --correct needs at least two images and two captions")
    plain = retrieval_metrics(features.x, features.y, features.links)
    # If the correction is chosen on these pairs, each half of the images is ranked with the choice of the other half.
    crossed = any(corrector.val == task.pairs.fingerprint for corrector in correctors)
    outcomes = {c.bank: c.crossed(features) if crossed else (c(features), None) for c in correctors}
    corrected = {bank: metrics for bank, (metrics, _) in outcomes.items()}
    return {
        "path": task.path,
        "split": task.split,
        "fingerprint": task.pairs.fingerprint,
        "images": len(features.x),
        "captions": len(features.y),
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
        "class_names": None if isinstance(task.classes, VectorClasses) else list(task.classes.classes),
        "templates": task.templates,
        "bad_samples": len(task.bad),
        "smallest_class": int(np.bincount(labels.numpy(), minlength=len(classes)).min()),
        "plain": plain,
        "names": {"plain": metrics_by_convention(plain)},
    }


def _check_classes(subject: Subject, task: ClassificationTask) -> None:
    if isinstance(task.classes, VectorClasses):
        if (subject.model.x.modality, subject.model.y.modality) != ("vector", "vector"):
            raise UserError(f"{task.path}: holds vectors, but {subject.path} takes images and texts")
        subject.check_width(task.path, "x", task.classes.x.shape[1])
        subject.check_width(task.path, "y", task.classes.prompts.shape[2])
    else:
        subject.check_kinds(task.path, cast(Pairs, task.classes))


def _free_name(name: str, taken: dict[str, Any]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name} ({number})"
    return free


# -- corrected retrieval -----------------------------------------------------------------------------------------------


def parse_bank(text: str) -> str:
    """Return the bank of "bank=train" or "bank=queries"."""
    key, _, bank = text.partition("=")
    if key != "bank" or bank not in BANKS:
        allowed = " or ".join(f"bank={name}" for name in BANKS)
        raise UserError(f"--correct {text}: unknown; allowed: {allowed}")
    return bank


@dataclass(frozen=True)
class Corrector:
    """A bank of queries with the temperature and strength of its correction.

    Attributes:
        bank: a key of BANKS.
        val: fingerprint of the held-out pairs that the correction was chosen on; None if there are none.
        queries: the bank; None: each test set is its own bank.
        correction: temperature and strength.
        chosen_on: where these were chosen, in words.

    """

    bank: str
    val: str | None
    queries: Bank | None
    correction: Correction
    chosen_on: str

    def __call__(self, features: PairFeatures) -> dict[str, float]:
        """Return the corrected metrics of a test set."""
        bias_x, bias_y = self.correction.biases(self._bank(features), features.x, features.y)
        return retrieval_metrics(features.x, features.y, features.links, bias_x=bias_x, bias_y=bias_y)

    def crossed(self, features: PairFeatures) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return metrics of the held-out pairs, each half ranked with the other's correction, and both corrections."""
        ranked, chosen = cross_validated_ranks(features.x, features.y, features.links, self._bank(features))
        return summarize_ranks(*ranked), [asdict(correction) for correction in chosen]

    def _bank(self, features: PairFeatures) -> Bank:
        return Bank(features.x, features.y) if self.queries is None else self.queries

    def describe(self) -> dict[str, Any]:
        """Return the correction for the JSON file."""
        facts: dict[str, Any] = {
            "bank": self.bank,
            "transductive": self.bank == "queries",
            "meaning": BANKS[self.bank],
        }
        if self.queries is not None:
            facts |= {"bank_images": len(self.queries.x), "bank_captions": len(self.queries.y)}
        grid = {
            "temperatures": f"{', '.join(map(str, TEMPERATURE_FACTORS))} standard deviations of the scores",
            "strengths": STRENGTHS,
        }
        return facts | asdict(self.correction) | {"chosen_on": self.chosen_on, "chosen_from": grid}


def make_corrector(subject: Subject, bank: str, size: int) -> Corrector:
    """Encode the bank, and choose temperature and strength on the run's held-out pairs if it has some."""
    run, queries = subject.run, None
    if bank == "train":
        if run is None:
            raise UserError(f"--correct bank=train needs a run folder; {subject.path} is not one, so use bank=queries")
        queries = Bank(*query_bank(subject, run.train.pairs, run.train.numbers, size))
    if run is None or run.val is None:
        chosen_on = f"nothing (no held-out pairs): {DEFAULT_TEMPERATURE_FACTOR} standard deviations"
        return Corrector(bank, None, queries, Correction(), chosen_on)
    features = pair_features(subject, run.val.pairs, run.val.numbers, "merge")
    own = Bank(features.x, features.y) if queries is None else queries
    correction = choose_correction(features.x, features.y, features.links, own)
    return Corrector(bank, run.val.pairs.fingerprint, queries, correction, f"data.val: {subject.data.val}")


# -- for people --------------------------------------------------------------------------------------------------------


def table(content: dict[str, Any]) -> str:
    """Return plain and corrected metrics next to each other, in percent; ranks count from 1."""
    return "\n".join(_lines(content))


def _lines(content: dict[str, Any]) -> Iterator[str]:
    for name, task in content["retrieval"].items():
        rankings = {"plain": task["plain"], **task["corrected"]}
        yield f"{name}: {task['images']:,} images, {task['captions']:,} captions"
        yield f"  {'':28}" + "".join(f"{COLUMNS[column]:>14}" for column in rankings) + f"{'chance':>10}"
        for key, label in _ROWS:
            for k in (1, 5, 10):
                values = [100 * metrics[f"{key}_R@{k}"] for metrics in rankings.values()]
                chance = 100 * task["plain"][f"{key}_chance@{k}"]
                yield f"  {f'recall@{k}, {label}':28}" + "".join(f"{v:>12.2f} %" for v in values) + f"{chance:>8.2f} %"
            if key != "mean":
                for kind in ("mean", "median"):
                    values = [metrics[f"{key}_{kind}_rank"] for metrics in rankings.values()]
                    yield f"  {f'{kind} rank, {label}':28}" + "".join(f"{value:>12.1f}  " for value in values)
        if task["correction_crossed"]:
            yield "  Held-out pairs: each half of the images is ranked with the correction chosen on the other half."
            yield "  The correction shown below was chosen on all held-out pairs and is used for other test sets."
        yield ""
    for name, task in content["classification"].items():
        metrics = task["plain"]
        yield f"{name}: {task['images']:,} images, {task['classes']} classes"
        for key, label in (("acc1", "top-1"), ("acc5", "top-5"), ("mean_per_class_recall", "mean per-class recall")):
            yield f"  {label:28}{100 * metrics[f'zero_shot_{key}']:>12.2f} %"
        yield f"  {'chance':28}{100 * metrics['zero_shot_chance']:>12.2f} %"
        yield ""
    for correction in content["corrections"].values():
        column, temperature = COLUMNS[correction["bank"]], correction["temperature"]
        at = f"temperature {temperature:g}" if temperature is not None else "the default temperature"
        yield (
            f"{column}: score - {correction['strength']:g} * zeta (popularity), solved at {at}; "
            f"bank: {correction['meaning']}; chosen on {correction['chosen_on']}"
        )
