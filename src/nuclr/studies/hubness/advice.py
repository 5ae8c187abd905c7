"""What the numbers of `nuclr hubness` mean for the user: whether to use the correction."""

from typing import Any

LARGE_SHARE = 0.3  # of items that no query finds under plain ranking
ENOUGH = 3.0  # mean N_k: with fewer finds per item, many items are missed by chance


def advice(content: dict[str, Any]) -> list[str]:
    """Return sentences on whether the correction helps, and what to beware of.

    The correction makes all items equally likely to be found. That is right if queries ask for all parts of the
    gallery. If they ask for one part only, the other items are not found because nobody wants them, and the correction
    would push them into searches for something else. Hubness alone cannot show this, recall can.

    Args:
        content: Of hubness.json: the keys plain, corrected, bank, recall_change and k.

    Example:
        >>> measures = {"never_found": 0.02, "skewness": 2.0, "mean": 10.0}
        >>> advice({"plain": measures, "corrected": measures, "bank": {"name": None}, "recall_change": {}, "k": 10})[0]
        'Without known answers (--links), this shows how evenly items are found, not whether results are better.'

    """
    plain, corrected, sentences = content["plain"], content["corrected"], []
    change = content["recall_change"].get("1")
    if change is None:
        sentences.append(
            "Without known answers (--links), this shows how evenly items are found, not whether results are better."
        )
    else:
        numbers = f"{100 * change['difference']:+.1f} points [{100 * change['low']:+.1f}, {100 * change['high']:+.1f}]"
        if change["low"] > 0:
            sentences.append(f"The correction helps: recall@1 changes by {numbers}.")
        elif change["high"] < 0:
            sentences.append(f"Do not use this correction: recall@1 changes by {numbers}.")
        else:
            sentences.append(f"No significant difference in recall@1: {numbers}.")
    if plain["never_found"] > LARGE_SHARE and plain["mean"] >= ENOUGH:
        sentences.append(
            f"Beware: {plain['never_found']:.0%} of the items are found by no query. If nobody asks for them, the "
            "correction shows them to people who want something else; fit it on queries for all parts of the gallery."
        )
    if corrected["never_found"] > plain["never_found"] or corrected["skewness"] > plain["skewness"]:
        fitted = "half of the queries" if content["bank"]["name"] is None else f"the bank {content['bank']['name']}"
        sentences.append(
            f"The correction does not make the search more even: {fitted} may be too few, or of another kind than the "
            "queries that are asked."
        )
    return sentences
