"""What the numbers of a hubness report mean for the user: whether to use the correction.

The correction makes all items equally likely to be found. That is right if queries ask for all parts of the gallery. If
they ask for one part only, the other items are not found because nobody wants them, and the correction would push them
into searches for something else. Hubness alone cannot show this, recall can.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nuclr.studies.items.hubness_report import HubnessReport

LARGE_SHARE = 0.3  # of items that no query finds under plain ranking, beyond those that random results would miss
REPEATED = 0.2  # share of the bank's queries that repeat others


def advice(report: "HubnessReport") -> list[str]:
    """Return sentences on whether the correction helps, and what to beware of: the verdict, and warnings."""
    never_found = report.plain.never_found
    by_chance = report.chance.never_found
    bank = report.bank
    sentences = [judge(report)[0]]
    if never_found - by_chance > LARGE_SHARE:
        sentences.append(
            f"Beware: {never_found:.0%} of the items are found by no query ({by_chance:.0%} by chance). If nobody asks "
            "for them, the correction shows them to people who want something else; fit it on queries for all parts of "
            "the gallery."
        )
    if bank.repeated > REPEATED and not report.same:
        check = "" if report.recall_change else ": check it with --links or --tune"
        sentences.append(
            f"{bank.repeated:.0%} of the queries repeat others; each counts once. People then ask for some items far "
            f"more often than for others, and the correction treats all items alike{check}."
        )
    if report.corrected.never_found > never_found:
        fitted = "half of the queries" if bank.name is None else f"the bank {bank.name}"
        sentences.append(
            f"The correction does not make the search more even: {fitted} may be too few, or of another kind than the "
            "queries that are asked."
        )
    for origin in (report.queries, report.gallery):
        if origin.index is not None:
            sentences.append(
                f"{origin.name} holds compressed vectors ({origin.index}), so all numbers are approximate; use the "
                "original vectors if you have them."
            )
    return sentences


def judge(report: "HubnessReport") -> tuple[str, bool]:
    """Return what recall says about the correction, and whether nothing speaks against it.

    A loss of recall speaks against it, and so do known answers without a gain.
    """
    changes = report.recall_change
    if not changes:
        verdict = (
            "Without known answers (--links), this shows how evenly items are found, not whether results are better."
        )
        return verdict, True
    if _at_chance(report):
        order = f"are the rows of {report.links} numbered from 0, in the order (query, item)?"
        return f"Recall is at chance level: {order}", False
    improved = [depth for depth, change in changes.items() if change.low > 0]
    fell = [depth for depth, change in changes.items() if change.high < 0]
    first = _describe(report, "1")
    if improved and fell:
        return f"Mixed: {_describe(report, improved[0])}, but {_describe(report, fell[0])}.", True
    if fell:
        return f"Do not use this correction: {_describe(report, fell[0])}.", False
    if "1" in improved:
        return f"The correction helps: {first}.", True
    if improved:
        further = _describe(report, improved[0])
        return f"The correction helps further down, not at the first result: {further}; {first}.", True
    if changes["1"].difference > 0:
        return f"No significant difference: {first}.", True
    tune = "" if report.tuned_on else " (try --tune)"
    without = f"No gain shown; do not use it without labeled queries that show one{tune}."
    return f"No significant difference: {first}. {without}", False


def _describe(report: "HubnessReport", depth: str) -> str:
    change = report.recall_change[depth]
    interval = f"[{100 * change.low:+.1f}, {100 * change.high:+.1f}]"
    return f"recall@{depth} changes by {100 * change.difference:+.1f} points {interval}"


def _at_chance(report: "HubnessReport") -> bool:
    """Return whether recall with given links is hardly above that of random results, as if the links were wrong."""
    by_chance = report.chance.recall
    if report.links is None or by_chance is None:
        return False
    deepest = max(by_chance, key=int)
    best = 0.0
    for measures in (report.plain, report.corrected):
        assert measures.recall is not None
        best = max(best, measures.recall[deepest])
    return best <= min(3 * by_chance[deepest], by_chance[deepest] + 0.1)
