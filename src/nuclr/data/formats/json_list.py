"""Lists of pairs in JSON.

- `.jsonl`: one entry per line, such as `{"question": ..., "answer": ...}` or `{"image": ..., "caption": ...}`. A value
  is a text, a list of numbers, or a list of such values for several x or y in one row;
- `.json`: a list of the same entries (ALBEF's, for example), or Karpathy's
  `{"images": [{"filename", "filepath", "split", "sentences": [{"raw": ...}]}]}`.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from nuclr.data.formats.choose import Request, choose_columns
from nuclr.data.formats.columns import ListedPairs, Row, open_listed
from nuclr.data.formats.lines import json_lines
from nuclr.data.modalities.base import shorten
from nuclr.data.pairs import BadSample, SideName
from nuclr.errors import UserError
from nuclr.files import read_json, read_text

_PROBED = 100  # entries whose keys are the columns
_BETWEEN = (" ", ",", "\n", "\t", "\r")  # between two entries of a list

Entry = tuple[int, Any]  # the line, and its content or BadSample


def open_json_list(request: Request) -> ListedPairs:
    """Open a list of pairs.

    Of a list with splits, only entries whose "split" is `request.split` are kept; several splits are joined by "+", as
    in "train+restval".

    Raises:
        UserError: if the file is not a list of pairs; it names the line.

    """
    entries = _of_split(request, _entries(request.path))
    first = list(islice(entries, _PROBED))
    contents = [content for _, content in first if not isinstance(content, BadSample)]
    entries = chain(first, entries)
    keys: dict[SideName, str | None] = {"x": None, "y": None}
    if contents and request.sides["y"].key is None and all(map(_is_karpathy, contents)):
        known: dict[SideName, str] = {"x": "image", "y": "image" if request.views else "text"}
        return open_listed(
            request,
            keys,
            _rows(request, entries, keys),
            known,
        )
    columns = dict.fromkeys(key for content in contents for key in content)
    if request.split is not None:
        columns.pop("split", None)
    if not columns:
        raise UserError(f"{request.path}: holds no pairs")
    keys.update(choose_columns(list(columns), request))
    pairs = open_listed(request, keys, _rows(request, entries, keys))
    is_named = any(side.key is not None for side in request.sides.values())
    if not is_named and pairs.modalities == ("image", "text"):
        # Held-out pairs, which are read with the keys of the training pairs, may have "captions" or be Karpathy's.
        for name, side in pairs.sides.items():
            pairs.sides[name] = replace(side, key=None)
    return pairs


def _of_split(request: Request, entries: Iterator[Entry]) -> Iterator[Entry]:
    splits = set(request.split.split("+")) if request.split else None
    others: set[str] = set()
    kept = False
    for line, entry in entries:
        if not isinstance(entry, dict | BadSample):
            example = '{"question": ..., "answer": ...}'
            raise UserError(f"{request.path}, line {line}: {shorten(entry)} is not an entry such as {example}")
        if splits is not None and isinstance(entry, dict) and entry.get("split") not in splits:
            others.add(str(entry.get("split")))
            continue
        kept = True
        yield line, entry
    if splits is not None and not kept:
        found = ", ".join(sorted(others))
        raise UserError(f"{request.path}: no entry of split {request.split!r} (data.split); found: {found}")


def _rows(
    request: Request,
    entries: Iterator[Entry],
    keys: dict[SideName, str | None],
) -> Iterator[Row]:
    for line, entry in entries:
        if isinstance(entry, BadSample):
            yield Row(None, None, line, entry.reason)
        elif request.sides["y"].key is None and _is_karpathy(entry):
            yield _karpathy_row(request, line, entry)
        else:
            yield Row(entry.get(keys["x"]), entry.get(keys["y"]), line)


def _is_karpathy(entry: Any) -> bool:
    sentences = entry.get("sentences") if isinstance(entry, dict) else None
    return isinstance(sentences, list) and all(isinstance(sentence, dict) for sentence in sentences[:1])


def _karpathy_row(
    request: Request,
    line: int,
    entry: Any,
) -> Row:
    try:
        name = str(Path(entry.get("filepath", "")) / entry["filename"])
        captions = [sentence["raw"] for sentence in entry["sentences"]]
    except (KeyError, TypeError):
        needs = '"filename" and "sentences": [{"raw": ...}, ...]'
        raise UserError(f"{request.path}, entry {line}: needs {needs}") from None
    return Row(name, name if request.views else captions, line)


def _entries(path: Path) -> Iterator[Entry]:
    """Return the line (or the number in "images") and the content of the entries.

    They are read one at a time, so that millions of entries are never in memory as Python objects.
    """
    if path.suffix.lower() != ".json":
        return json_lines(path)
    text = read_text(path)
    if text.lstrip().startswith("["):
        return _array(path, text)
    content = read_json(path)
    images = content.get("images") if isinstance(content, dict) else None
    if not isinstance(images, list) or not all(map(_is_karpathy, images)):
        raise UserError(
            f'{path}: {shorten(content)} is neither a list of {{"question": ..., "answer": ...}} nor a Karpathy split '
            'with "sentences" of each image'
        )
    return enumerate(images)


def _array(path: Path, text: str) -> Iterator[Entry]:
    """Yield the line and the content of the entries of a JSON list."""
    decoder = json.JSONDecoder()
    line = 1
    counted = 0  # characters whose lines are counted
    position = text.index("[") + 1
    try:
        while True:
            while text.startswith(_BETWEEN, position):
                position += 1
            if text.startswith("]", position):
                return
            line += text.count("\n", counted, position)
            counted = position
            entry, position = decoder.raw_decode(text, position)
            yield line, entry
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg}, column {error.colno})") from None
    except (RecursionError, ValueError):
        reason = "brackets nested too deep, or a number with thousands of digits"
        raise UserError(f"{path}, line {line}: not JSON ({reason})") from None
