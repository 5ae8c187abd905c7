"""BEIR folders: as an evaluation set, as training pairs, and the messages for wrong files."""

import json

import numpy as np
import pytest

from nuclr.data import open_pairs
from nuclr.data.formats import lines
from nuclr.data.formats.beir import BeirPairs, read_beir
from nuclr.errors import UserError

QUERIES = [("q1", "what is a hub?"), ("q2", "Wer\nfragt?"), ("3", "a third one"), ("q4", "of another split")]
CORPUS = [
    ("d1", "Hub", "An item near to many."),
    ("d2", "", "Ein Satz."),
    ("3", "Title only", ""),
    ("d4", None, "four"),
]
TEST = [("q1", "d1", 2), ("q1", "d2", 0), ("q1", "d4", 1), ("q2", "d2", 1), ("3", "3", 1), ("3", "d1", -1)]
TRAIN = [("q4", "d4", 1), ("q4", "d1", 0), ("q1", "d4", 3)]


def write(folder, queries=QUERIES, corpus=CORPUS, header=True, **qrels):
    """Write a BEIR folder; a split is a list of judgments or the text of its file."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"_id": key, "text": text, "metadata": {}}) for key, text in queries]
    (folder / "queries.jsonl").write_text("\n".join(lines))
    lines = [json.dumps({"_id": key, "title": title, "text": text}) for key, title, text in corpus]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    for split, rows in (qrels or {"test": TEST, "train": TRAIN}).items():
        text = rows if isinstance(rows, str) else "".join(f"{q}\t{d}\t{r}\n" for q, d, r in rows)
        (folder / "qrels" / f"{split}.tsv").write_text(("query-id\tcorpus-id\tscore\n" if header else "") + text)
    return folder


@pytest.mark.parametrize("header", [True, False])
def test_a_split_for_evaluation(tmp_path, header):
    loaded = read_beir(write(tmp_path, header=header))
    assert (loaded.split, loaded.query_ids) == ("test", ["q1", "q2", "3"])
    assert [loaded.queries[row] for row in range(3)] == ["what is a hub?", "Wer fragt?", "a third one"]
    documents = [loaded.documents[row] for row in range(4)]
    assert documents == ["Hub An item near to many.", "Ein Satz.", "Title only", "four"]
    named = [(loaded.query_ids[q], loaded.document_ids[d], r) for q, d, r in loaded.qrels.tolist()]
    assert named == TEST and loaded.bad == {}
    assert loaded.ignore.tolist() == [[2, 2]], "query 3 and document 3 have one identifier"
    assert read_beir(tmp_path, "train").query_ids == ["q1", "q4"]
    assert read_beir(tmp_path).fingerprint == loaded.fingerprint != read_beir(tmp_path, "train").fingerprint


def test_training_pairs_are_queries_with_relevant_documents(tmp_path):
    pairs = open_pairs(write(tmp_path), split="test")
    assert [(pairs.item("x", n), pairs.item("y", n)) for n in range(len(pairs))] == [
        ("what is a hub?", "Hub An item near to many."),
        ("what is a hub?", "four"),
        ("Wer fragt?", "Ein Satz."),
        ("a third one", "Title only"),
    ]
    assert (*pairs.modalities, *pairs.side_names) == ("text", "text", "query", "document")
    assert pairs.sides["x"].ids.tolist() == [0, 0, 1, 2] and len(set(pairs.sides["y"].ids.tolist())) == 4
    assert pairs.name(1) == "query q1, document d4" and pairs.known_bad == {}
    write(tmp_path, queries=[*QUERIES, ("q5", "new")])
    again = open_pairs(tmp_path, split="test")
    assert again.fingerprint == pairs.fingerprint, "a query that is not used does not matter"
    assert len(open_pairs(tmp_path, split="train")) == 2
    with pytest.raises(UserError, match=r"data\.split.*test, train"):
        open_pairs(tmp_path)


def test_bad_samples_are_left_out_counted_and_named(tmp_path):
    corpus = [*CORPUS, ("d5", "", "  "), ("d6", "", "x" * 100_001)]
    qrels = [*TEST, ("q1", "d7", 1), ("q9", "d1", 1), ("q4", "d5", 1)]
    write(tmp_path, corpus=corpus, test=qrels)
    loaded = read_beir(tmp_path, max_bad_share=0.5)
    assert [key.rpartition("/")[2] for key in loaded.bad] == [
        "corpus.jsonl, 'd5'", "corpus.jsonl, 'd6'", "test.tsv, query q1, document d7",
        "test.tsv, query q9, document d1", "test.tsv, query q4, document d5", "query 'q4'",
    ]  # fmt: skip
    reasons = list(loaded.bad.values())
    assert reasons[0] == "empty document" and reasons[1].startswith("document of 100,001 characters")
    assert reasons[2:4] == ['"d7" is not in corpus.jsonl', '"q9" is not in queries.jsonl']
    assert len(loaded.qrels) == 6 and len(loaded.documents) == 4 and loaded.query_ids == ["q1", "q2", "3"]
    with pytest.raises(UserError, match=r"2 of 10 .*data\.max_bad_share=0\.05"):
        read_beir(tmp_path)
    write(tmp_path, test=qrels)
    with pytest.raises(UserError, match=r"3 of 9 .*\"d7\""):
        read_beir(tmp_path)
    write(tmp_path, corpus=corpus, test=qrels)
    pairs = BeirPairs(tmp_path)
    assert list(pairs.known_bad.values()) == [
        '"d7" is not in corpus.jsonl', '"q9" is not in queries.jsonl', "empty document"
    ]  # fmt: skip
    assert list(pairs.known_bad) == [4, 5, 6] and len(pairs) == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test": "q1\td1\t0.5\n"}, r"test\.tsv, line 2.*0\.5"),
        ({"test": "q1\td1\t99999999999\n"}, "line 2.*99999999999"),
        ({"test": "q1\td1\n"}, "line 2"),
        ({"test": "q1 d1 1\n"}, "q1 d1 1"),
        ({"test": "q1\td1\t1\nq1\td1\t2\n"}, "line 3.*'d1'.*'q1'"),
        ({"test": ""}, r"test\.tsv"),
        ({"queries": [("q1", "a"), ("q1", "b")]}, r"queries\.jsonl, line 2.*\"q1\""),
        ({"corpus": [*CORPUS, ("d2", "", "b")]}, r"corpus\.jsonl, line 5.*\"d2\""),
        ({"corpus": [("d1", "", 3)]}, r"corpus\.jsonl, line 1.*3"),
        ({"corpus": [("d1", ["a"], "b")]}, r"line 1.*\[\"a\"\]"),
        ({"corpus": [(None, "", "b")]}, "line 1.*null"),
        ({"corpus": [("d1", "", "")]}, "'d1'"),
        ({"train": TRAIN, "dev": TRAIN}, "--split.*dev, train"),
    ],
)  # fmt: skip
def test_wrong_folders_are_refused_with_one_line(tmp_path, change, message):
    with pytest.raises(UserError, match=message) as caught:
        read_beir(write(tmp_path, **change))
    assert "\n" not in str(caught.value)


def test_missing_and_damaged_files_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="nothing"):
        read_beir(tmp_path / "nothing")
    folder = write(tmp_path)
    with pytest.raises(UserError, match=r"'tests'.*--split.*test, train"):
        read_beir(folder, "tests")
    with pytest.raises(UserError, match=r"no split 'dev' \(data\.split\)"):
        open_pairs(folder, split="dev")
    for text, message in (
        (b"{", r"corpus\.jsonl, line 1: not JSON"),
        (b"[" * 100_000, "line 1: .*nested too deep"),
        (b"[1]", r"line 1: .*\[1\]"),
        (b'{"_id": "a", "text": "caf\xe9"}', r"corpus\.jsonl: not UTF-8"),
        (b'{"_id": true, "text": "a"}', "line 1.*true"),
    ):
        (folder / "corpus.jsonl").write_bytes(text)
        with pytest.raises(UserError, match=message):
            read_beir(folder)
    monkeypatch.setattr(lines, "LONGEST_LINE", 100)
    (folder / "corpus.jsonl").write_text(json.dumps({"_id": "d1", "text": "x" * 200}))
    with pytest.raises(UserError, match=r"corpus\.jsonl.*100"):
        read_beir(folder)
    for missing in ("queries.jsonl", "qrels/test.tsv", "qrels/train.tsv"):
        (folder / missing).unlink()
        with pytest.raises(UserError, match=r"queries\.jsonl|split 'test'|qrels"):
            read_beir(folder, "test")


def test_pairs_need_a_relevant_document(tmp_path):
    write(tmp_path, test=[("q1", "d1", 0)])
    with pytest.raises(UserError, match=r"test\.tsv"):
        BeirPairs(tmp_path)


def test_numbers_as_identifiers_are_texts(tmp_path):
    folder = write(tmp_path, queries=[(1, "one")], corpus=[(7, "", "seven")], test="1\t7\t1\n")
    loaded = read_beir(folder)
    assert (loaded.query_ids, loaded.document_ids) == (["1"], ["7"])
    assert np.array_equal(loaded.qrels, [[0, 0, 1]])
