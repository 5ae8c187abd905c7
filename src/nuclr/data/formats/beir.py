"""BEIR folders: queries, a corpus of documents, and graded judgments (Thakur et al., "BEIR", NeurIPS Datasets 2021).

- `queries.jsonl`: one `{"_id": ..., "text": ...}` per line;
- `corpus.jsonl`: one `{"_id": ..., "title": ..., "text": ...}` per line. A document is its title and its text, joined
  by a space. The title may be missing;
- `qrels/SPLIT.tsv`: query, document and relevance per line, separated by tabs, with or without a header. A document is
  relevant if its relevance is 1 or more.

`read_beir` reads a split for evaluation, with the whole corpus. `BeirPairs` are the pairs of a query and a relevant
document, for training. `queries.jsonl` usually holds the queries of all splits; those without a judgment are not used.
"""

import difflib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nuclr.data.pairs import BadSample, Checkable
from nuclr.data.texts import Texts, clean, text_problem
from nuclr.errors import UserError
from nuclr.files import file_stamp, not_utf8, parse_json

CORPUS, QUERIES, QRELS = "corpus.jsonl", "queries.jsonl", "qrels"
_LAYOUT = f"a BEIR folder has {CORPUS}, {QUERIES} and {QRELS}/SPLIT.tsv"
_LONGEST_LINE = 2**24  # characters
_HEADER = {"query-id", "query_id", "queryid", "qid", "query"}
_WHOLE = re.compile(r"[+-]?[0-9]{1,9}")


def is_beir(path: Path) -> bool:
    """Return whether a folder has the files of a BEIR set."""
    return (path / CORPUS).is_file() and (path / QUERIES).is_file()


# -- evaluation --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class BeirSet:
    """One split of a BEIR folder: the judged queries and the whole corpus, without bad samples.

    Attributes:
        path: the folder.
        split: the split of the judgments.
        query_ids: identifiers of the n queries.
        queries: their texts.
        document_ids: identifiers of the m documents.
        documents: their texts.
        qrels: (k, 3) int64, rows (row of the query, row of the document, relevance).
        ignore: (i, 2) int64, rows (query, document) that have the same identifier: as in BEIR, a document that is the
            query itself is not an answer.
        bad: what was left out -> reason.
        fingerprint: a hash of queries, corpus and judgments.

    """

    path: Path
    split: str
    query_ids: list[str]
    queries: Texts
    document_ids: list[str]
    documents: Texts
    qrels: np.ndarray
    ignore: np.ndarray
    bad: dict[str, str]
    fingerprint: str

    def __repr__(self) -> str:
        """Return one line with the sizes."""
        sizes = f"{len(self.queries):,} queries, {len(self.documents):,} documents, {len(self.qrels):,} judgments"
        return f"BeirSet('{self.path.name}', {self.split!r}, {sizes})"


def read_beir(path: str | Path, split: str | None = None, max_bad_share: float = 0.05) -> BeirSet:
    r"""Read one split of a BEIR folder for evaluation.

    A document or a query without text, and a judgment of a query or a document that does not exist, are left out and
    reported in `bad`. A query whose relevant documents are all left out is left out too.

    Args:
        path: the folder.
        split: the file of judgments. None: test, or the only one.
        max_bad_share: the largest share of the documents, and of the judgments, that may be left out (setting
            `data.max_bad_share`).

    Returns:
        The queries, the corpus and the judgments.

    Raises:
        UserError: if a file is missing or wrong, an identifier occurs twice, a query has no relevant document, or too
            much would be left out. The message names the file and the line.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     folder = Path(name)
        ...     _ = (folder / "queries.jsonl").write_text('{"_id": "q1", "text": "what is a hub?"}\n')
        ...     _ = (folder / "corpus.jsonl").write_text('{"_id": "d1", "title": "Hub", "text": "A near item."}\n')
        ...     (folder / "qrels").mkdir()
        ...     _ = (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t2\n")
        ...     read_beir(folder).documents[0]
        'Hub A near item.'

    """
    path = Path(path)
    file = _qrels_file(path, split, "--split", default="test")
    judgments = list(_judgments(file))
    bad: dict[str, str] = {}
    documents, document_row = _usable(path / CORPUS, "document", None, bad, max_bad_share)
    queries, query_row = _usable(path / QUERIES, "query", {query for _, query, _, _ in judgments}, bad, max_bad_share)
    rows, missing = [], {}
    for line, query, document, relevance in judgments:
        for key, known, name in ((query, query_row, QUERIES), (document, document_row, CORPUS)):
            if key not in known:
                missing[f"{file}, line {line}"] = _missing(key, name)
                break
        else:
            rows.append((query_row[query], document_row[document], relevance))
    _check_share(file, "judgments", missing, len(judgments), max_bad_share)
    _refuse_irrelevant(file, judgments)
    qrels = np.array(rows, np.int64).reshape(-1, 3)
    kept = np.unique(qrels[qrels[:, 2] > 0, 0])
    if not len(kept):
        raise UserError(f"{file}: no query with a relevant document is left; {_LAYOUT}")
    ids = list(query_row)
    for row in np.setdiff1d(np.arange(len(ids)), kept).tolist():
        missing[f"query {ids[row]!r}"] = "no relevant document is left"
    new_row = np.full(len(ids), -1)
    new_row[kept] = np.arange(len(kept))
    qrels[:, 0] = new_row[qrels[:, 0]]
    qrels = qrels[qrels[:, 0] >= 0]
    ids, texts = [ids[row] for row in kept], Texts(queries[row] for row in kept.tolist())
    ignore = [(row, document_row[key]) for row, key in enumerate(ids) if key in document_row]
    hashed = "".join([texts.fingerprint(), documents.fingerprint(), Texts([*ids, *document_row]).fingerprint()])
    return BeirSet(
        path,
        file.stem,
        ids,
        texts,
        list(document_row),
        documents,
        qrels,
        np.array(ignore, np.int64).reshape(-1, 2),
        bad | missing,
        hashlib.sha256(hashed.encode() + qrels.tobytes()).hexdigest(),
    )


def _usable(
    path: Path, what: str, keep: set[str] | None, bad: dict[str, str], max_bad_share: float
) -> tuple[Texts, dict[str, int]]:
    """Return the texts without bad ones, and identifier -> row; add the others to `bad`."""
    texts, rows, wrong = Texts(), {}, {}
    for key, text in _texts(path, keep):
        problem = text_problem(text, what)
        if problem is not None:
            wrong[f"{path}, {key!r}"] = problem
            continue
        rows[key] = len(texts)
        texts.append(clean(text))
    if not rows:
        raise UserError(f"{path}: none of the texts can be used; {_LAYOUT}")
    _check_share(path, "texts", wrong, len(rows) + len(wrong), max_bad_share)
    bad |= wrong
    return texts, rows


def _check_share(path: Path, what: str, bad: dict[str, str], n: int, max_bad_share: float) -> None:
    if len(bad) > max_bad_share * n:
        where, reason = next(iter(bad.items()))
        raise UserError(
            f"{path}: {len(bad):,} of {n:,} {what} cannot be used, more than data.max_bad_share={max_bad_share:g}; "
            f"the first: {where.removeprefix(f'{path}, ')}: {reason}"
        )


def _refuse_irrelevant(file: Path, judgments: list[tuple[int, str, str, int]]) -> None:
    """Refuse a query whose judgments all say "not relevant": it has no right answer."""
    best: dict[str, int] = {}
    for _, query, _, relevance in judgments:
        best[query] = max(relevance, best.get(query, relevance))
    wrong = [query for query, relevance in best.items() if relevance < 1]
    if wrong:
        more = f" ({len(wrong):,} such queries)" if len(wrong) > 1 else ""
        raise UserError(
            f"{file}: query {wrong[0]!r} has no relevant document (relevance 1 or more); "
            f"add one or remove its lines{more}"
        )


# -- training pairs ----------------------------------------------------------------------------------------------------


class BeirPairs(Checkable):
    """Pairs of a query and a document that is relevant for it, in the order of the judgments.

    Args:
        path: the folder.
        split: the file of judgments (setting `data.split`). None: the only one.

    Attributes:
        split: the split that was read.

    Raises:
        UserError: if a file is missing or wrong, or there is no relevant document.

    """

    x_kind = y_kind = "text"
    x_name, y_name = "query", "document"

    def __init__(self, path: Path, split: str | None = None) -> None:
        file = _qrels_file(path, split, "data.split", default=None)
        pairs = [(query, document) for _, query, document, relevance in _judgments(file) if relevance > 0]
        if not pairs:
            raise UserError(f"{file}: holds no pairs; a relevant document has relevance 1 or more")
        self.folder, self.split, self.known_bad = path, file.stem, {}
        self.label = f"{path.name}, {file.stem}"
        self._files = [path / QUERIES, path / CORPUS, file]
        self._queries, self._x_row, x_bad = _all_texts(path / QUERIES, "query", [query for query, _ in pairs])
        self._documents, self._y_row, y_bad = _all_texts(path / CORPUS, "document", [text for _, text in pairs])
        self._names = Texts(f"query {query}, document {document}" for query, document in pairs)
        for number, (query, document) in enumerate(pairs):
            reason = x_bad.get(query) or y_bad.get(document)
            if reason is not None:
                self.known_bad[number] = reason
        self.x_id, self.y_id = self._queries.ids()[self._x_row], self._documents.ids()[self._y_row]
        hashed = self._queries.fingerprint() + self._documents.fingerprint() + self._names.fingerprint()
        self.fingerprint = hashlib.sha256(hashed.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._names)

    def x(self, number: int) -> str:
        """Return the text of the query."""
        return self._text(self._queries, self._x_row, number)

    def y(self, number: int) -> str:
        """Return the title and the text of the document."""
        return self._text(self._documents, self._y_row, number)

    def name(self, number: int) -> str:
        """Return the identifiers of the query and the document."""
        return self._names[number]

    def stamp(self) -> str:
        """Return a hash of the sizes and modification times of the three files."""
        stamps = [str(file.absolute()) for file in self._files], [file_stamp(file) for file in self._files]
        return hashlib.sha256(repr(stamps).encode("utf-8", "surrogateescape")).hexdigest()

    def _text(self, texts: Texts, rows: np.ndarray, number: int) -> str:
        if number in self.known_bad:
            raise BadSample(self.known_bad[number])
        return texts[int(rows[number])]


def _all_texts(path: Path, what: str, keys: list[str]) -> tuple[Texts, np.ndarray, dict[str, str]]:
    """Return the texts with these identifiers, the row of each identifier, and identifier -> reason for bad ones."""
    texts, rows, bad = Texts(), {}, {}
    for key, text in _texts(path, set(keys)):
        problem = text_problem(text, what)
        if problem is not None:
            bad[key] = problem
        rows[key] = len(texts)
        texts.append("" if problem is not None else clean(text))
    for key in dict.fromkeys(keys):
        if key not in rows:
            bad[key], rows[key] = _missing(key, path.name), len(texts)
            texts.append("")
    return texts, np.array([rows[key] for key in keys], np.int64), bad


# -- files -------------------------------------------------------------------------------------------------------------


def _qrels_file(path: Path, split: str | None, setting: str, default: str | None) -> Path:
    """Return the file of judgments of a split."""
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; {_LAYOUT}")
    for name in (CORPUS, QUERIES):
        if not (path / name).is_file():
            raise UserError(f"{path}: has no {name}; {_LAYOUT}")
    folder = path / QRELS
    splits = sorted(file.stem for file in folder.glob("*.tsv") if file.is_file()) if folder.is_dir() else []
    if not splits:
        raise UserError(f"{path}: has no {QRELS}/*.tsv; {_LAYOUT}")
    if split is None and len(splits) == 1:
        split = splits[0]
    if split is None and default in splits:
        split = default
    if split is None:
        raise UserError(f"{path}: name a split with {setting}; found: {', '.join(splits)}")
    if split not in splits:
        near = difflib.get_close_matches(split, splits, n=1)
        hint = f"; nearest: {near[0]}" if near else ""
        raise UserError(f"{path}: no split {split!r} ({setting}); found: {', '.join(splits)}{hint}")
    return folder / f"{split}.tsv"


def _judgments(file: Path) -> Iterator[tuple[int, str, str, int]]:
    """Yield line, query, document and relevance of each judgment."""
    seen: dict[tuple[str, str], tuple[int, int]] = {}
    for number, line in _lines(file):
        cells = [cell.strip() for cell in line.rstrip("\r\n").split("\t")]
        if number == 1 and cells[0].lower() in _HEADER:
            continue
        if len(cells) != 3 or not (cells[0] and cells[1]):
            raise UserError(
                f"{file}, line {number}: {_short(line.strip())} is not a judgment; "
                "needs query, document and relevance, separated by tabs"
            )
        query, document, relevance = cells
        if not _WHOLE.fullmatch(relevance):
            raise UserError(f"{file}, line {number}: relevance {_short(relevance)}; needs a whole number")
        before, value = seen.get((query, document)), int(relevance)
        if before is not None and before[1] != value:
            raise UserError(
                f"{file}, line {number}: judges document {_short(document)} for query {_short(query)} again, with "
                f"relevance {value} instead of {before[1]} in line {before[0]}; remove one"
            )
        if before is None:
            seen[query, document] = number, value
            yield number, query, document, value
    if not seen:
        raise UserError(f"{file}: holds no judgments; needs query, document and relevance per line")


def _texts(path: Path, keep: set[str] | None) -> Iterator[tuple[str, str]]:
    """Yield identifier and text of each entry in `keep`, or of all; a title is put before the text."""
    first_line: dict[str, int] = {}
    for number, line in _lines(path):
        try:
            entry = parse_json(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error.msg})") from None
        if not isinstance(entry, dict) or "_id" not in entry or "text" not in entry:
            raise UserError(f'{path}, line {number}: {_short(line.strip())} is not {{"_id": ..., "text": ...}}')
        key = entry["_id"]
        if isinstance(key, bool) or not isinstance(key, str | int) or key == "":
            raise UserError(f"{path}, line {number}: _id is {_short(key)}; needs a text")
        key = str(key).strip()
        if keep is not None and key not in keep:
            continue
        if key in first_line:
            raise UserError(
                f"{path}, line {number}: _id {_short(key)} occurs in line {first_line[key]} already; "
                "identifiers must be different"
            )
        first_line[key] = number
        parts = [_text(path, number, name, entry.get(name)) for name in ("title", "text")]
        yield key, " ".join(part for part in parts if part)


def _text(path: Path, line: int, name: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{path}, line {line}: {name!r} is {_short(value)}; needs a text")
    return value


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and content of each line that is not empty. The length of a line is limited."""
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            while line := file.readline(_LONGEST_LINE):
                number += 1
                if len(line) == _LONGEST_LINE:
                    raise UserError(
                        f"{path}, line {number}: longer than {_LONGEST_LINE:,} characters; is it JSON lines?"
                    )
                if line.strip():
                    yield number, line
    except UnicodeDecodeError:
        raise not_utf8(path) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _missing(key: str, file: str) -> str:
    return f"{_short(key)} is not in {file}"


def _short(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError):  # nested too deep, or a number that is too long
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
