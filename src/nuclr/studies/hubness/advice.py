"""What the numbers of `nuclr hubness` mean for the user: whether to use the correction."""

from typing import Any

LARGE_SHARE = 0.3  # of items that no query finds under plain ranking, beyond those that random results would miss
REPEATED = 0.2  # share of the bank's queries that repeat others


def advice(content: dict[str, Any]) -> list[str]:
    """Return sentences on whether the correction helps, and what to beware of.

    The correction makes all items equally likely to be found. That is right if queries ask for all parts of the
    gallery. If they ask for one part only, the other items are not found because nobody wants them, and the correction
    would push them into searches for something else. Hubness alone cannot show this, recall can.

    Args:
        content: Of hubness.json, without the advice.

    Returns:
        The verdict, and warnings.

    Example:
        >>> measures = {"never_found": 0.02, "skewness": 2.0}
        >>> content = {"plain": measures, "corrected": measures, "chance": measures, "recall_change": {}, "links": None}
        >>> sides = {"queries": {"index": None}, "gallery": {"index": None}, "bank": {"name": None, "repeated": 0.0}}
        >>> advice(content | sides | {"same": False, "tuned_on": 0})[0]
        'Without known answers (--links), this shows how evenly items are found, not whether results are better.'

    """
    plain, corrected, bank = content["plain"], content["corrected"], content["bank"]
    sentences = [_verdict(content)]
    if plain["never_found"] - content["chance"]["never_found"] > LARGE_SHARE:
        sentences.append(
            f"Beware: {plain['never_found']:.0%} of the items are found by no query "
            f"({content['chance']['never_found']:.0%} by chance). If nobody asks for them, the correction shows them "
            "to people who want something else; fit it on queries for all parts of the gallery."
        )
    if bank["repeated"] > REPEATED and not content["same"]:
        check = "" if content["recall_change"] else ": check it with --links or --tune"
        sentences.append(
            f"{bank['repeated']:.0%} of the queries repeat others; each counts once. People then ask for some items "
            f"far more often than for others, and the correction treats all items alike{check}."
        )
    if corrected["never_found"] > plain["never_found"]:
        fitted = "half of the queries" if bank["name"] is None else f"the bank {bank['name']}"
        sentences.append(
            f"The correction does not make the search more even: {fitted} may be too few, or of another kind than the "
            "queries that are asked."
        )
    for side in (content["queries"], content["gallery"]):
        if side["index"] is not None:
            sentences.append(
                f"{side['name']} holds compressed vectors ({side['index']}), so all numbers are approximate; use the "
                "original vectors if you have them."
            )
    return sentences


def is_recommended(content: dict[str, Any]) -> bool:
    """Return whether nothing speaks against the correction: no loss of recall, and no known answers without a gain.

    Args:
        content: As for `advice`.

    """
    changes = content["recall_change"]
    if not changes:
        return True
    if _at_chance(content):
        return False
    improved, fell = _significant(changes)
    return bool(improved) or (not fell and changes["1"]["difference"] > 0)


def _verdict(content: dict[str, Any]) -> str:
    """Return what recall says about the correction."""
    changes = content["recall_change"]
    if not changes:
        return "Without known answers (--links), this shows how evenly items are found, not whether results are better."
    if _at_chance(content):
        links = content["links"]
        return f"Recall is at chance level: are the rows of {links} numbered from 0, in the order (query, item)?"
    improved, fell = _significant(changes)
    first = _describe(changes, "1")
    if improved and fell:
        return f"Mixed: {_describe(changes, improved[0])}, but {_describe(changes, fell[0])}."
    if fell:
        return f"Do not use this correction: {_describe(changes, fell[0])}."
    if "1" in improved:
        return f"The correction helps: {first}."
    if improved:
        return (
            f"The correction helps further down, not at the first result: {_describe(changes, improved[0])}; {first}."
        )
    numbers = f"No significant difference: {first}."
    if changes["1"]["difference"] > 0:
        return numbers
    tune = "" if content["tuned_on"] else " (try --tune)"
    return f"{numbers} No gain shown; do not use it without labeled queries that show one{tune}."


def _significant(changes: dict[str, dict[str, float]]) -> tuple[list[str], list[str]]:
    """Return the depths at which recall rises, and those at which it falls, significantly."""
    improved = [depth for depth, change in changes.items() if change["low"] > 0]
    return improved, [depth for depth, change in changes.items() if change["high"] < 0]


def _describe(changes: dict[str, dict[str, float]], depth: str) -> str:
    difference, low, high = (100 * changes[depth][key] for key in ("difference", "low", "high"))
    return f"recall@{depth} changes by {difference:+.1f} points [{low:+.1f}, {high:+.1f}]"


def _at_chance(content: dict[str, Any]) -> bool:
    """Return whether recall with given links is hardly above that of random results, as if the links were wrong."""
    if content["links"] is None:
        return False
    deepest = max(content["chance"]["recall"], key=int)
    chance = content["chance"]["recall"][deepest]
    best = max(content[ranking]["recall"][deepest] for ranking in ("plain", "corrected"))
    return bool(best <= min(3 * chance, chance + 0.1))
