"""Retrieval examples as the page shows them: rows of features -> pictures and captions."""

from collections.abc import Callable
from typing import Any

from nuclr.data.pairs import Pairs
from nuclr.report.examples import Example, Examples, examples
from nuclr.report.gallery import Label
from nuclr.report.pictures import Pictures
from nuclr.report.sample import Sample


def caption_of(pairs: Pairs) -> Label:
    """From a pair's number to its caption, None where the data holds vectors."""
    return lambda number: str(pairs.y(number)) if pairs.y_kind == "text" else None


def retrieval(drawn: Sample, picture: Pictures) -> list[dict[str, Any]]:
    """Both directions: queries with what they found, as plain values."""
    caption = caption_of(drawn.pairs)

    def image(row: int) -> dict[str, Any]:
        number = int(drawn.x_number[row])
        return {"picture": picture(number), "text": drawn.pairs.name(number), "number": number, "kind": "image"}

    def text(row: int) -> dict[str, Any]:
        number = int(drawn.y_number[row])
        return {"picture": None, "text": caption(number) or f"caption {number}", "number": number, "kind": "text"}

    found = []
    for key, title, ask, answer, result in (
        ("i2t", "Image to text", image, text, examples(drawn.x, drawn.y, drawn.links)),
        ("t2i", "Text to image", text, image, examples(drawn.y, drawn.x, drawn.links.flip(1))),
    ):
        found.append({"key": key, "title": title, **_shown(result, ask, answer)})
    return found


def _shown(found: Examples, ask: Callable[[int], Any], answer: Callable[[int], Any]) -> dict[str, Any]:
    def one(example: Example) -> dict[str, Any]:
        return {
            "query": ask(example.query),
            "rank": example.rank,
            "answers": [{**answer(a.row), "score": a.score, "right": a.right} for a in example.answers],
            "right": {**answer(example.right), "score": example.right_score},
        }

    return {
        "random": [one(e) for e in found.random],
        "worst": [one(e) for e in found.worst],
        "queries": found.queries,
        "gallery": found.gallery,
    }
