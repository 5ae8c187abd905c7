"""Lists of pairs in JSON.

- `.jsonl`: one entry per line, such as `{"question": ..., "answer": ...}` or `{"image": ..., "caption": ...}`. A value
  is a text, a list of numbers, or a list of such values for several x or y in one row;
- `.json`: a list of the same entries (ALBEF's, for example), or Karpathy's
  `{"images": [{"filename", "filepath", "split", "sentences": [{"raw": ...}]}]}`.
"""

import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from nuclr.data.formats.choose import CAPTION_COLUMNS, IMAGE_COLUMNS, Choice, choose_columns, find_column, shorten
from nuclr.data.formats.listed import ListedPairs, Row, open_listed
from nuclr.data.pairs import BadSample
from nuclr.errors import UserError
from nuclr.files import not_utf8, parse_json, read_text

_PROBED = 100  # entries whose keys are the columns

Entry = tuple[int, Any]  # the line, and its content or BadSample


def open_json_list(
    path: Path,
    root: Path | None = None,
    choice: Choice | None = None,
    split: str | None = None,
    allow_outside: bool = False,
) -> ListedPairs:
    """Open a list of pairs.

    Args:
        path: the file.
        root: the folder that names of files are relative to.
        choice: the settings of both sides.
        split: keep only entries with this "split"; several are joined by "+", as in "train+restval".
        allow_outside: read files outside of the root as well.

    Raises:
        UserError: if the file is not a list of pairs; it names the line.

    """
    choice = choice or Choice()
    where, entries = _entries(path)
    entries = _of_split(path, entries, split)
    first = list(islice(entries, _PROBED))
    contents = [content for _, content in first if not isinstance(content, BadSample)]
    entries = chain(first, entries)
    if contents and choice.y.key is None and all(map(_is_karpathy, contents)):
        rows = _karpathy_rows(path, where, entries, choice.views)
        kinds = ("image", "image" if choice.views else "text")
        return open_listed(rows, path, root, allow_outside, choice, (None, None), kinds=kinds)
    columns = list(dict.fromkeys(key for content in contents for key in content if split is None or key != "split"))
    if not columns:
        raise UserError(f"{path}: holds no pairs")
    keys = choose_columns(columns, choice, path)
    pairs = open_listed(_rows(path, entries, keys, choice), path, root, allow_outside, choice, keys)
    if choice.x.key is None and choice.y.key is None and (pairs.x_kind, pairs.y_kind) == ("image", "text"):
        pairs.x_key = pairs.y_key = None  # an entry may have "captions" where another one has "caption"
    return pairs


def _of_split(path: Path, entries: Iterator[Entry], split: str | None) -> Iterator[Entry]:
    splits = set(split.split("+")) if split else None
    seen: set[str] = set()
    kept = False
    for line, entry in entries:
        if not isinstance(entry, dict | BadSample):
            raise UserError(
                f'{path}, line {line}: {shorten(entry)} is not an entry such as {{"question": ..., "answer": ...}}'
            )
        if splits is not None and isinstance(entry, dict):
            seen.add(str(entry.get("split")))
            if entry.get("split") not in splits:
                continue
        kept = True
        yield line, entry
    if splits is not None and not kept:
        raise UserError(
            f"{path}: no entry of split {'+'.join(sorted(splits))!r} (data.split); found: {', '.join(sorted(seen))}"
        )


def _rows(path: Path, entries: Iterator[Entry], keys: tuple[str, str], choice: Choice) -> Iterator[Row]:
    x, y = keys
    # Keys that were found automatically may be missing in an entry: one list may have both "caption" and "captions".
    others = [
        () if side.key else next((names for names in (IMAGE_COLUMNS, CAPTION_COLUMNS) if key.lower() in names), ())
        for side, key in ((choice.x, x), (choice.y, y))
    ]
    for line, entry in entries:
        if isinstance(entry, BadSample):
            yield None, None, entry.reason, line
        elif choice.y.key is None and _is_karpathy(entry):
            yield from _karpathy_rows(path, "line {}", iter([(line, entry)]), choice.views)
        else:
            yield (
                entry[x] if x in entry else entry.get(find_column(list(entry), others[0])),
                entry[y] if y in entry else entry.get(find_column(list(entry), others[1])),
                None,
                line,
            )


def _is_karpathy(entry: Any) -> bool:
    sentences = entry.get("sentences") if isinstance(entry, dict) else None
    return isinstance(sentences, list) and all(isinstance(sentence, dict) for sentence in sentences[:1])


def _karpathy_rows(path: Path, where: str, entries: Iterator[Entry], views: bool) -> Iterator[Row]:
    for line, entry in entries:
        if isinstance(entry, BadSample):
            yield None, None, entry.reason, line
            continue
        try:
            name = str(Path(entry.get("filepath", "")) / entry["filename"])
            captions = [sentence["raw"] for sentence in entry["sentences"]]
        except (KeyError, TypeError):
            location = f"{path}, {where.format(line)}"
            raise UserError(f'{location}: needs "filename" and "sentences": [{{"raw": ...}}, ...]') from None
        yield name, name if views else captions, None, line


def _entries(path: Path) -> tuple[str, Iterator[Entry]]:
    """Return how messages name an entry, and the entries.

    They are read one at a time, so that millions of entries are never in memory as Python objects.
    """
    if path.suffix.lower() == ".jsonl":
        return "line {}", _lines(path)
    text = read_text(path)
    start = len(text) - len(text.lstrip())
    if text[start : start + 1] == "[":
        return "line {}", _array(path, text, start)
    return "images[{}]", _object(path, text)


def _lines(path: Path) -> Iterator[Entry]:
    with path.open(encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _parse_line(path, number, line)
        except UnicodeDecodeError:
            raise not_utf8(path) from None


def _parse_line(path: Path, number: int, line: str) -> Any:
    """Return the entry in a line, or BadSample if it is JSON that Python refuses to parse."""
    try:
        return parse_json(line)
    except json.JSONDecodeError as error:
        if not error.doc:  # too deep, or with a number that is too long
            return BadSample(f"line {number}: {error.msg}")
        raise UserError(f"{path}, line {number}: not JSON ({error.msg}, column {error.colno})") from None


def _array(path: Path, text: str, start: int) -> Iterator[Entry]:
    decoder, position, line, counted = json.JSONDecoder(), start + 1, 1, 0
    first = True
    while True:
        position = _skip_space(text, position)
        line, counted = line + text.count("\n", counted, position), position
        if text[position : position + 1] == "]" and first:
            return
        try:
            entry, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg}, column {error.colno})") from None
        except RecursionError:
            raise UserError(f"{path}, line {line}: not JSON (brackets nested too deep)") from None
        except ValueError:
            raise UserError(f"{path}, line {line}: not JSON (a number with thousands of digits)") from None
        yield line, entry
        first = False
        position = _skip_space(text, position)
        if text[position : position + 1] == "]":
            return
        if text[position : position + 1] != ",":
            raise UserError(
                f"{path}, line {line + text.count(chr(10), counted, position)}: not JSON (',' or ']' expected)"
            )
        position += 1


def _object(path: Path, text: str) -> Iterator[Entry]:
    try:
        content = parse_json(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg}, column {error.colno})") from None
    images = content.get("images") if isinstance(content, dict) else None
    if not isinstance(images, list):
        raise UserError(
            f'{path}: {shorten(content)} is neither a list of {{"question": ..., "answer": ...}} nor a Karpathy split'
        )
    for number, entry in enumerate(images):
        if not _is_karpathy(entry):
            raise UserError(f'{path}, images[{number}]: has no "sentences"; is this a Karpathy split?')
        yield number, entry


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position
