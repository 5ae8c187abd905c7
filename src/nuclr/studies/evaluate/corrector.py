"""Popularity-corrected ranking in `nuclr evaluate`: the bank, and the choice of temperature and strength."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from nuclr.data.formats.beir import BeirPairs, BeirSet
from nuclr.errors import UserError
from nuclr.evaluation import (
    Bank,
    Correction,
    choose_correction,
    cross_validated_ranks,
    retrieval_metrics,
    summarize_ranks,
)
from nuclr.popularity.correction import STRENGTHS, TEMPERATURE_FACTORS
from nuclr.runs.features import PairFeatures
from nuclr.studies.evaluate.subject import Subject, pair_features, query_bank

BANKS = {
    "train": "training queries and the candidates they choose from; of the test set only the gallery is used",
    "queries": "the test queries themselves (transductive): possible only if all queries are known at once",
}


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
        size: largest number of items per side in the bank of a test set.

    """

    bank: str
    val: str | None
    queries: Bank | None
    correction: Correction
    chosen_on: str
    size: int

    def __call__(self, features: PairFeatures) -> dict[str, float]:
        """Return the corrected metrics of a test set."""
        bias_x, bias_y = self.correction.biases(self._bank(features.x, features.y), features.x, features.y)
        return retrieval_metrics(
            features.x, features.y, features.links, bias_x=bias_x, bias_y=bias_y, sides=features.sides
        )

    def crossed(self, features: PairFeatures) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return metrics of the held-out pairs, each half ranked with the other's correction, and both corrections."""
        bank = self._bank(features.x, features.y)
        ranked, chosen = cross_validated_ranks(features.x, features.y, features.links, bank, features.x_group)
        return summarize_ranks(*ranked, sides=features.sides), [asdict(correction) for correction in chosen]

    def document_bias(self, queries: Tensor, documents: Tensor) -> Tensor:
        """Return what is subtracted from the scores of each document of a BEIR set."""
        bank = self.queries or Bank(self._some(queries), self._some(documents), transductive=True)
        return self.correction.biases(bank, queries, documents)[1]

    def _bank(self, x: Tensor, y: Tensor) -> Bank:
        return Bank(x, y, transductive=True) if self.queries is None else self.queries

    def _some(self, features: Tensor) -> Tensor:
        """Return at most `size` rows, evenly spaced."""
        n = len(features)
        return features[torch.linspace(0, n - 1, min(self.size, n), dtype=torch.float64).round().long()]

    def describe(self) -> dict[str, Any]:
        """Return the correction for the JSON file."""
        facts: dict[str, Any] = {
            "bank": self.bank,
            "transductive": self.bank == "queries",
            "meaning": BANKS[self.bank],
        }
        if self.queries is not None:
            facts |= {"bank_x": len(self.queries.x), "bank_y": len(self.queries.y)}
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
        chosen_on = "no labels (the run has no held-out pairs): the default of PopularityCorrection"
        return Corrector(bank, None, queries, Correction(), chosen_on, size)
    features = pair_features(subject, run.val.pairs, run.val.numbers, "merge")
    own = Bank(features.x, features.y, transductive=True) if queries is None else queries
    correction = choose_correction(features.x, features.y, features.links, own)
    name, first = next(iter(subject.data.val_sets.items()))
    chosen_on = f"{subject.data.val_key(name)}: {first.path}"
    return Corrector(bank, run.val.pairs.fingerprint, queries, correction, chosen_on, size)


def is_chosen_on(subject: Subject, task: BeirSet) -> bool:
    """Return whether the held-out pairs of the run are the judgments of this set."""
    held_out = None if subject.run is None or subject.run.val is None else subject.run.val.pairs
    return isinstance(held_out, BeirPairs) and (held_out.folder.resolve(), held_out.split) == (
        task.path.resolve(),
        task.split,
    )
