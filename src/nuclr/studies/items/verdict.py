"""What the numbers of `nuclr hubness` mean.

The correction makes all items equally likely to be found. That is right if queries ask for all parts of the gallery. If
they ask for one part only, the other items are not found because nobody wants them, and the correction would push them
into searches for something else. Hubness alone cannot show whether results improve, recall can. Without labels,
`coverage` compares what the queries find with what as many items find: items ask for all parts of the gallery, and hubs
crowd out the rest for both.
"""

from typing import TYPE_CHECKING

from nuclr.evaluation.metrics import is_near_chance
from nuclr.popularity.correction import BankCheck

if TYPE_CHECKING:
    from nuclr.studies.items.hubness_report import HubnessReport

SMALL_COVERAGE = 0.9  # even logs mostly have 0.95 or more, and logs about one of eight parts less than 0.9
REPEATED = 0.2  # share of the bank's queries that repeat others


def judge(report: "HubnessReport") -> tuple[str, bool]:
    """Return what recall says about the correction, and whether nothing speaks against it.

    A loss of recall speaks against it, and so do known answers without a gain.
    """
    changes = report.recall_change
    if not changes:
        plain = report.plain
        corrected = report.corrected
        unknown = "Whether results improve cannot be seen without known answers (--links)."
        if report.links is not None:
            unknown = f"{report.links} has no answer of a query that is counted; give answers of a few hundred queries."
        return (
            f"{plain.never_found:.0%} of the items are never found, and one item turns up for {plain.largest:,} of "
            f"{report.counted:,} queries; after the correction {corrected.never_found:.0%} and {corrected.largest:,}. "
            + unknown,
            False,
        )
    if _is_at_chance(report):
        return f"Recall is at chance level: are the rows of {report.links} (query, item), numbered from 0?", False
    improved = [depth for depth, change in changes.items() if change.low > 0]
    fell = [depth for depth, change in changes.items() if change.high < 0]
    # The first significant changes, and what happens to the first result in any case.
    texts = []
    for depth in dict.fromkeys([*improved[:1], *fell[:1], "1"]):
        change = changes[depth]
        place = "first" if depth == "1" else f"among the first {depth}"
        texts.append(
            f"a right answer is {place} for {report.corrected.recall[depth]:.1%} of the queries instead of "
            f"{report.plain.recall[depth]:.1%} (recall@{depth} {100 * change.difference:+.1f} points "
            f"[{100 * change.low:+.1f}, {100 * change.high:+.1f}])"
        )
    shown = "; ".join(texts)
    if improved:
        return f"{'Mixed' if fell else 'The correction helps'}: {shown}.", not fell
    if fell:
        return f"Do not use this correction: {shown}.", False
    if changes["1"].difference > 0:
        return f"No significant difference: {shown}.", True
    tune = "" if report.tuned_on else " (try --tune)"
    advice = f"No gain shown; do not use it without labeled queries that show one{tune}."
    return f"No significant difference: {shown}. {advice}", False


def _is_at_chance(report: "HubnessReport") -> bool:
    """Return whether recall with a file of links is hardly above that of random results, as if the links were wrong."""
    chance = report.chance.recall
    if report.links is None or not chance:
        return False
    deepest = max(chance, key=int)
    best = max(report.plain.recall[deepest], report.corrected.recall[deepest])
    return is_near_chance(best, chance[deepest])


def warnings_of(report: "HubnessReport") -> list[str]:
    """Return sentences on what to beware of."""
    bank = report.bank
    sentences = []
    if report.strength == 0:
        sentences.append(
            "The strength is 0, so the correction changes nothing: with these queries, popularity is mostly noise."
        )
    if bank.coverage < SMALL_COVERAGE:
        sentences.append(
            f"Beware: the queries that fit the correction find {1 - bank.coverage:.0%} fewer different items than as "
            "many items of the gallery do. If they are about a part of it, the correction shows the rest to people who "
            "want something else; fit it on queries for all parts of the gallery."
        )
    if bank.repeated > REPEATED and not report.same:
        sentences.append(
            f"{bank.repeated:.0%} of the queries repeat others; each counts once. People then ask for some items far "
            "more often than for others, and the correction treats all items alike: check it with --links or --tune."
        )
    if bank.p_value is not None and not BankCheck(bank.p_value).fits:
        sentences.append(f"Beware: {BankCheck(bank.p_value).message}.")
    if report.corrected.never_found > report.plain.never_found:
        sentences.append(
            f"The correction does not make the search more even: {bank.name or 'half of the queries'} may be too few, "
            "or of another kind than the queries that are asked."
        )
    for origin in (report.queries, report.gallery):
        if origin.index is not None:
            sentences.append(
                f"{origin.name} holds compressed vectors ({origin.index}), so all numbers are approximate; use the "
                "original vectors if you have them."
            )
    return sentences
