"""Corrected retrieval for `nuclr evaluate`: where the bank of queries comes from, and how its temperature is chosen."""

from dataclasses import asdict, dataclass
from typing import Any

from nuclr.errors import UserError
from nuclr.evaluation import Bank, Correction, choose, retrieval, summary
from nuclr.evaluation.corrected import cross_chosen
from nuclr.evaluation.correction import DEFAULT_SPREAD, SPREADS, STRENGTHS
from nuclr.runs import components as parts
from nuclr.studies.evaluate.features import PairFeatures, pair_features, query_bank
from nuclr.studies.evaluate.subject import Subject

BANKS = {
    "train": "training queries and what they choose from; nothing of the test set but its gallery is used",
    "queries": "the test queries themselves: a transductive figure, to be had only where all queries come at once",
}


def parse_bank(text: str) -> str:
    """The bank of "bank=train" or "bank=queries"."""
    key, _, bank = text.partition("=")
    if key != "bank" or bank not in BANKS:
        allowed = " or ".join(f"bank={name}" for name in BANKS)
        raise UserError(f"--correct {text}: unknown; allowed: {allowed}")
    return bank


@dataclass(frozen=True)
class Corrector:
    """A bank (pairs None: each test set's own), with temperature and strength, and where these were chosen.

    `val`: the fingerprint of the validation pairs.
    """

    bank: str
    val: str | None
    pairs: Bank | None
    correction: Correction
    chosen_on: str

    def __call__(self, found: PairFeatures) -> dict[str, float]:
        """Corrected figures of a test set."""
        bias_x, bias_y = self.correction.biases(self._bank(found), found.x, found.y)
        return retrieval(found.x, found.y, found.pairs, bias_x=bias_x, bias_y=bias_y)

    def crossed(self, found: PairFeatures) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """The same of the validation pairs: each half under the correction chosen on the other, and what that was."""
        ranked, chosen = cross_chosen(found.x, found.y, found.pairs, self._bank(found))
        return summary(*ranked), [asdict(correction) for correction in chosen]

    def _bank(self, found: PairFeatures) -> Bank:
        return Bank(found.x, found.y) if self.pairs is None else self.pairs

    def describe(self) -> dict[str, Any]:
        """For the file."""
        told = {"bank": self.bank, "transductive": self.bank == "queries", "told": BANKS[self.bank]}
        if self.pairs is not None:
            told |= {"bank_images": len(self.pairs.x), "bank_captions": len(self.pairs.y)}
        grid = {
            "temperatures": f"{', '.join(map(str, SPREADS))} standard deviations of the scores",
            "strengths": STRENGTHS,
        }
        return told | asdict(self.correction) | {"chosen_on": self.chosen_on, "chosen_from": grid}


def make_corrector(subject: Subject, bank: str, size: int) -> Corrector:
    """The bank encoded, temperature and strength chosen on the run's validation pairs where it has some."""
    data = subject.data
    pairs = None
    if bank == "train":
        if data is None or data.train is None:
            raise UserError(f"--correct bank=train needs a run, and {subject.path} is none; use bank=queries")
        source = parts.open_train(data)
        pairs = Bank(*query_bank(subject, source.pairs, source.numbers, size))
    if data is None or data.val is None:
        return Corrector(bank, None, pairs, Correction(), f"nothing (no validation pairs): {DEFAULT_SPREAD} deviations")
    val = parts.open_val(data)
    found = pair_features(subject, val.pairs, val.numbers, "merge")
    chosen = choose(found.x, found.y, found.pairs, Bank(found.x, found.y) if pairs is None else pairs)
    return Corrector(bank, val.pairs.fingerprint, pairs, chosen, f"data.val: {data.val}")
