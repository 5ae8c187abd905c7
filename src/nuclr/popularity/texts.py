r"""Queries for a gallery that nobody has searched yet: what its texts begin with.

A correction needs queries of the kind that people ask. Documents are not: a bank of documents finds other hubs and can
cost recall. Titles, headings and first sentences are more like queries, and the item that each was taken from is its
answer. If the items have titles, use those. Otherwise `pseudo_queries` takes the first line or sentence of each text.

A beginning that is nearly the whole text is the document itself again, and is left out. So are very short ones. Shell
commands have no first sentence, and nearly all of them are left out; a correction that was fitted on their first words
lost about four points of recall@1.
"""

import re
import warnings
from collections.abc import Sequence

END = re.compile("(?<=[.!?])\\s|(?<=[\u3002\uff01\uff1f])|\n")  # of a sentence, also a Chinese one, or of a line
LARGEST_SHARE = 0.8  # of the characters of a text
FEWEST_CHARACTERS = 10
USUAL_SHARE = 0.5  # of the texts; below it they are hardly prose


def pseudo_queries(texts: Sequence[str]) -> tuple[list[str], list[int]]:
    r"""Return the beginnings of texts that can stand for queries, and the text that each is taken from.

    Args:
        texts: One text per item of the gallery, in the same order.

    Returns:
        The first line or sentence of each text, without those that are shorter than 10 characters or longer than 80 %
        of their text, and the number of each one's text: the `answers` of `PopularityCorrection.fit`.

    Warns:
        UserWarning: If fewer than half of the texts have one.

    Example:
        >>> texts = ["# Pear trees\nHow to cut them.", "Plums are sweet. They ripen in August.", "ls -l", "A pear."]
        >>> pseudo_queries(texts)
        (['Pear trees', 'Plums are sweet.'], [0, 1])

    """
    queries = []
    answers = []
    for number, text in enumerate(texts):
        whole = text.strip().lstrip("# ")
        beginning = END.split(whole, maxsplit=1)[0].strip()
        if FEWEST_CHARACTERS <= len(beginning) <= LARGEST_SHARE * len(whole):
            queries.append(beginning)
            answers.append(number)
    if len(queries) < USUAL_SHARE * len(texts):
        warnings.warn(
            f"texts: {len(queries):,} of {len(texts):,} begin with a title or sentence that is not the whole text; "
            "that is too few to stand for queries, so collect real ones before you correct a search",
            stacklevel=2,
        )
    return queries, answers
