"""BEIR folders: queries, a corpus of documents, and graded judgments (Thakur et al., "BEIR", NeurIPS Datasets 2021).

- `queries.jsonl`: one `{"_id": ..., "text": ...}` per line;
- `corpus.jsonl`: one `{"_id": ..., "title": ..., "text": ...}` per line. A document is its title and its text, joined
  by a space. The title may be missing;
- `qrels/SPLIT.tsv`: query, document and relevance per line, separated by tabs, with or without a header. A document is
  relevant if its relevance is 1 or more.

`read_beir` reads a split for evaluation, with the whole corpus. `BeirPairs` are the pairs of a query and a relevant
document, for training. `queries.jsonl` usually holds the queries of all splits; those without a judgment are not used.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nuclr.data.formats.choose import Request
from nuclr.data.formats.columns import Column, Heading, ListedPairs, make_column
from nuclr.data.formats.lines import json_lines, numbered_lines
from nuclr.data.modalities import get_modality
from nuclr.data.modalities.base import shorten
from nuclr.data.modalities.text import Texts, check_text
from nuclr.data.pairs import BadSample, SideName
from nuclr.errors import UserError

CORPUS = "corpus.jsonl"
QUERIES = "queries.jsonl"
QRELS = "qrels"
_LAYOUT = f"a BEIR folder has {CORPUS}, {QUERIES} and {QRELS}/SPLIT.tsv"
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


def read_beir(
    path: str | Path,
    split: str | None = None,
    max_bad_share: float = 0.05,
) -> BeirSet:
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
    has_test = (path / QRELS / "test.tsv").is_file()
    file = _qrels_file(path, split or ("test" if has_test else None), "--split")
    judgments = _read_judgments(file)
    documents, document_row, bad = _read_texts(path / CORPUS, "document")
    queries, query_row, bad_queries = _read_texts(path / QUERIES, "query", {query for query, _ in judgments})
    bad |= bad_queries
    rows = []
    missing = {}
    for (query, document), relevance in judgments.items():
        for key, known, name in ((query, query_row, QUERIES), (document, document_row, CORPUS)):
            if key not in known:
                missing[f"{file}, query {query}, document {document}"] = _missing(key, name)
        if query in query_row and document in document_row:
            rows.append((query_row[query], document_row[document], relevance))
    texts_read = len(bad) + len(document_row) + len(query_row)
    for what, left_out, n in (("texts", bad, texts_read), ("judgments", missing, len(judgments))):
        if len(left_out) > max_bad_share * n:
            where, reason = next(iter(left_out.items()))
            raise UserError(
                f"{path}: {len(left_out):,} of {n:,} {what} cannot be used, more than "
                f"data.max_bad_share={max_bad_share:g}; the first: {where}: {reason}"
            )
    qrels = np.array(rows, np.int64).reshape(-1, 3)
    kept = np.unique(qrels[qrels[:, 2] > 0, 0])
    ids = list(query_row)
    if not len(kept):
        raise UserError(f"{file}: no query, such as {ids[:1]}, has a relevant document (1 or more) that is left")
    for row in np.setdiff1d(np.arange(len(ids)), kept).tolist():
        missing[f"query {ids[row]!r}"] = "no relevant document is left"
    qrels = qrels[np.isin(qrels[:, 0], kept)]
    qrels[:, 0] = np.searchsorted(kept, qrels[:, 0])
    ids = [ids[row] for row in kept]
    texts = Texts(queries[row] for row in kept.tolist())
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


# -- training pairs ----------------------------------------------------------------------------------------------------


class BeirPairs(ListedPairs):
    """Pairs of a query and a document that is relevant for it, in the order of the judgments.

    Args:
        path: the folder.
        split: the file of judgments (setting `data.split`). None: the only one.

    Attributes:
        split: the split that was read.

    Raises:
        UserError: if a file is missing or wrong, or there is no relevant document.

    """

    folder: Path

    def __init__(self, path: Path, split: str | None = None) -> None:
        file = _qrels_file(path, split, "data.split")
        pairs = [pair for pair, relevance in _read_judgments(file).items() if relevance > 0]
        if not pairs:
            raise UserError(f"{file}: holds no pairs; a relevant document has relevance 1 or more")
        queries, documents = zip(*pairs, strict=True)
        columns: dict[SideName, Column] = {
            "x": _read_column(path / QUERIES, "query", queries),
            "y": _read_column(path / CORPUS, "document", documents),
        }
        super().__init__(Request(file), columns, ())
        self.folder = path
        self.split = file.stem
        self.label = f"{path.name}, {file.stem}"
        self._names = Texts(f"query {query}, document {document}" for query, document in pairs)

    def name(self, number: int) -> str:
        """Return the identifiers of the query and the document."""
        return self._names[number]


def _read_column(
    path: Path,
    what: str,
    keys: Sequence[str],
) -> Column:
    """Return the texts with these identifiers, each of which is stored once."""
    texts, row_of, bad = _read_texts(path, what, set(keys))
    column = make_column(Heading(what, None, get_modality("text"), what))
    first: dict[str, int] = {}
    for number, key in enumerate(keys):
        if key in first:
            column.repeat(first[key])
            continue
        first[key] = number
        column.append(texts[row_of[key]] if key in row_of else None)
        if key not in row_of:
            column.bad[number] = bad.get(f"{path}, {key!r}") or _missing(key, path.name)
    return column


# -- files -------------------------------------------------------------------------------------------------------------


def _qrels_file(
    path: Path,
    split: str | None,
    setting: str,
) -> Path:
    """Return the file of judgments of a split; without one, the only file."""
    splits = sorted(file.stem for file in (path / QRELS).glob("*.tsv"))
    if not splits or not is_beir(path):
        raise UserError(f"{path}: {_LAYOUT}")
    if split is None and len(splits) == 1:
        split = splits[0]
    if split not in splits:
        raise UserError(f"{path}: no split {split!r} ({setting}); found: {', '.join(splits)}")
    return path / QRELS / f"{split}.tsv"


def _read_judgments(file: Path) -> dict[tuple[str, str], int]:
    """Return (query, document) -> relevance."""
    judgments: dict[tuple[str, str], int] = {}
    for number, line in numbered_lines(file):
        cells = [cell.strip() for cell in line.rstrip("\r\n").split("\t")]
        if number == 1 and cells[0].lower() in _HEADER:
            continue
        if len(cells) != 3 or not (cells[0] and cells[1] and _WHOLE.fullmatch(cells[2])):
            raise UserError(
                f"{file}, line {number}: {shorten(line.strip())} is not a judgment; "
                "needs query, document and relevance (a whole number), separated by tabs"
            )
        pair = (cells[0], cells[1])
        relevance = int(cells[2])
        if judgments.setdefault(pair, relevance) != relevance:
            raise UserError(f"{file}, line {number}: judges {pair[1]!r} for {pair[0]!r} again, differently; remove one")
    if not judgments:
        raise UserError(f"{file}: holds no judgments; needs query, document and relevance per line")
    return judgments


def _read_texts(
    path: Path,
    what: str,
    keep: set[str] | None = None,
) -> tuple[Texts, dict[str, int], dict[str, str]]:
    """Return the texts of some entries, or of all, without bad ones; identifier -> row; and where -> why it is bad."""
    texts = Texts()
    rows: dict[str, int] = {}
    bad: dict[str, str] = {}
    for number, entry in json_lines(path):
        if isinstance(entry, BadSample):
            raise UserError(f"{path}, {entry.reason}")
        key = entry.get("_id") if isinstance(entry, dict) else None
        parts = [entry.get("title") or "", entry.get("text") or ""] if isinstance(entry, dict) else [None]
        if not isinstance(key, str | int) or isinstance(key, bool) or not all(isinstance(part, str) for part in parts):
            needs = '{"_id": ..., "title": ..., "text": ...} with texts'
            raise UserError(f"{path}, line {number}: {shorten(entry)}; needs {needs}")
        key = str(key).strip()
        if keep is not None and key not in keep:
            continue
        where = f"{path}, {key!r}"
        if key in rows or where in bad:
            raise UserError(f"{path}, line {number}: _id {shorten(key)} occurs twice; identifiers must be different")
        text, problem = check_text(" ".join(filter(None, parts)), what)
        if problem is None:
            rows[key] = len(texts)
            texts.append(text)
        else:
            bad[where] = problem
    return texts, rows, bad


def _missing(key: str, file: str) -> str:
    return f"{shorten(key)} is not in {file}"
