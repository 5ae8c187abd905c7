"""Caption lists in JSON.

- `.jsonl`: one `{"image": ..., "caption": ...}` per line, or `"captions": [...]` for several captions;
- `.json`: a list of the same entries (ALBEF's, in which "caption" may also be a list), or Karpathy's
  `{"images": [{"filename", "filepath", "split", "sentences": [{"raw": ...}]}]}`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nuclr.data.formats.listed import ListedPairs, choose_column
from nuclr.data.pairs import BadSample
from nuclr.errors import UserError
from nuclr.files import parse_json, read_text

Row = tuple[str, str, str | None]


def open_caption_list(
    path: Path,
    root: Path | None = None,
    x_key: str | None = None,
    y_key: str | None = None,
    split: str | None = None,
    allow_outside: bool = False,
) -> ListedPairs:
    """Open a caption list.

    Args:
        path: the file.
        root: the folder that image names are relative to.
        x_key: the key of the image names.
        y_key: the key of the captions.
        split: keep only entries with this "split"; several are joined by "+", as in "train+restval".
        allow_outside: read images outside of the root as well.

    Raises:
        UserError: if the file is not a caption list; it names the line.

    """
    rows = _rows(path, x_key, y_key, set(split.split("+")) if split else None)
    return ListedPairs(rows, path, root, allow_outside)


def _rows(path: Path, x_key: str | None, y_key: str | None, splits: set[str] | None) -> Iterator[Row]:
    chosen: tuple[str, str] | None = None
    seen: set[str] = set()
    kept = False
    for location, entry in _entries(path):
        if isinstance(entry, BadSample):
            kept = True
            yield "", "", entry.reason
            continue
        if not isinstance(entry, dict):
            raise UserError(f'{path}, {location}: {_short(entry)} is not an entry {{"image": ..., "caption": ...}}')
        if splits is not None:
            seen.add(str(entry.get("split")))
            if entry.get("split") not in splits:
                continue
        kept = True
        if "sentences" in entry and y_key is None:
            yield from _karpathy(path, location, entry)
            continue
        if chosen is None or not (chosen[0] in entry and chosen[1] in entry):
            # Keys are chosen again if they are missing, so one list may have both "caption" and "captions".
            entry_path = Path(f"{path}, {location}")
            chosen = (
                choose_column(list(entry), "x", x_key, entry_path),
                choose_column(list(entry), "y", y_key, entry_path),
            )
        name = _text(path, location, chosen[0], entry[chosen[0]])
        captions = entry[chosen[1]]
        # An empty list counts as one empty caption: the image is reported as bad, not dropped silently.
        for caption in (captions or [""]) if isinstance(captions, list) else [captions]:
            yield name, _text(path, location, chosen[1], caption), None
    if splits is not None and not kept:
        raise UserError(
            f"{path}: no entry of split {'+'.join(sorted(splits))!r} (data.split); found: {', '.join(sorted(seen))}"
        )


def _karpathy(path: Path, location: str, entry: dict[str, Any]) -> Iterator[Row]:
    try:
        name = str(Path(entry.get("filepath", "")) / entry["filename"])
        captions = [sentence["raw"] for sentence in entry["sentences"]]
    except (KeyError, TypeError):
        raise UserError(f'{path}, {location}: needs "filename" and "sentences": [{{"raw": ...}}, ...]') from None
    for caption in captions or [""]:
        yield name, _text(path, location, "raw", caption), None


def _text(path: Path, location: str, key: str, value: Any) -> str:
    """Return a string; null gives an empty one, which makes the sample bad but not the list."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{path}, {location}: {key!r} is {_short(value)}; needs a text")
    return value


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (location, entry) one at a time, so that millions of entries are never in memory as Python objects."""
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8-sig") as file:
            number = 0
            try:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield f"line {number}", _parse_line(path, number, line)
            except UnicodeDecodeError:
                raise UserError(f"{path}, after line {number}: not UTF-8 text") from None
        return
    text = read_text(path)
    start = len(text) - len(text.lstrip())
    if text[start : start + 1] == "[":
        yield from _array(path, text, start)
    else:
        yield from _object(path, text)


def _parse_line(path: Path, number: int, line: str) -> Any:
    """Return the entry in a line, or BadSample if it is JSON that Python refuses to parse."""
    try:
        return parse_json(line)
    except json.JSONDecodeError as error:
        if not error.doc:  # too deep, or with a number that is too long
            return BadSample(f"line {number}: {error.msg}")
        raise UserError(f"{path}, line {number}: not JSON ({error.msg}, column {error.colno})") from None


def _array(path: Path, text: str, start: int) -> Iterator[tuple[str, Any]]:
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
        yield f"line {line}", entry
        first = False
        position = _skip_space(text, position)
        if text[position : position + 1] == "]":
            return
        if text[position : position + 1] != ",":
            raise UserError(
                f"{path}, line {line + text.count(chr(10), counted, position)}: not JSON (',' or ']' expected)"
            )
        position += 1


def _object(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        content = parse_json(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg}, column {error.colno})") from None
    images = content.get("images") if isinstance(content, dict) else None
    if not isinstance(images, list):
        raise UserError(
            f'{path}: {_short(content)} is neither a list of {{"image": ..., "caption": ...}} nor a Karpathy split'
        )
    for number, entry in enumerate(images):
        if not isinstance(entry, dict) or "sentences" not in entry:
            raise UserError(f'{path}, images[{number}]: has no "sentences"; is this a Karpathy split?')
        yield f"images[{number}]", entry


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _short(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (RecursionError, ValueError):  # nested too deep, or a number that is too long
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
