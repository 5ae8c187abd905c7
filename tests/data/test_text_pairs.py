"""Pairs of two texts: the same pairs in every format, several x and y per row, bad rows, and messages."""

import csv
import json
import threading
import tracemalloc

import numpy as np
import pytest

from nuclr.data import Loader, batches, check_samples, epoch_order, open_pairs, usable, write_bad_samples
from nuclr.data.pairs import BadSample
from nuclr.errors import UserError
from tests.data import make

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = [
    ("Who wrote  it?", "Ada, alone"),
    ("When?", "In 1843"),
    ("Who wrote it?", 'the "Countess"; of | Lovelace'),
    ("Wo genau?", "In London ✓"),
    ("When?", "In 1843"),
    ("How long?", "ten\npages"),
]
X_ID = [0, 1, 0, 2, 1, 3]
Y_ID = [0, 1, 2, 3, 1, 4]
LISTS = [(["a 1", "a 2"], ["b 1", "b 2"]), (["c 1"], ["d 1", "d 2", "d 3"]), (["e 1", "e 2", "e 3"], ["f 1", "f 2"])]


def jsonl(folder, rows):
    return make.write_lines(folder / "pairs.jsonl", *({"question": x, "answer": y} for x, y in rows))


def json_array(folder, rows):
    path = folder / "pairs.json"
    path.write_text(json.dumps([{"id": i, "question": x, "answer": y} for i, (x, y) in enumerate(rows)], indent=1))
    return path


def table(folder, rows, name="pairs.csv", separator=","):
    path = folder / name
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=separator).writerows([("question", "answer"), *rows])
    return path


def tsv(folder, rows):
    return table(folder, rows, "pairs.tsv", "\t")


def upper_case(folder, rows):
    columns = {"ANSWER": [y for _, y in rows], "Question": [x for x, _ in rows], "url": ["http://a"] * len(rows)}
    parquet.write_table(pyarrow.table(columns), folder / "pairs.parquet")
    return folder / "pairs.parquet"


def parquet_files(folder, rows):
    folder = folder / "parts"
    folder.mkdir()
    for part in range(2):
        shard = rows[: len(rows) // 2] if part == 0 else rows[len(rows) // 2 :]
        columns = {"question": [x for x, _ in shard], "answer": [y for _, y in shard]}
        parquet.write_table(pyarrow.table(columns), folder / f"train-{part}.parquet", row_group_size=2)
    return folder


def hf_dataset(folder, rows):
    datasets = pytest.importorskip("datasets")
    columns = {"question": [x for x, _ in rows], "answer": [y for _, y in rows]}
    datasets.Dataset.from_dict(columns).save_to_disk(folder / "set", num_shards=2)
    return folder / "set"


FORMATS = (jsonl, json_array, table, tsv, upper_case, parquet_files, hf_dataset)


@pytest.mark.parametrize("write", FORMATS)
def test_all_formats_give_the_same_pairs_and_first_batches(tmp_path, write):
    pairs = open_pairs(write(tmp_path, ROWS))
    assert (*pairs.modalities, len(pairs)) == ("text", "text", 6)
    assert (pairs.sides["x"].name.lower(), pairs.sides["y"].name.lower()) == ("question", "answer")
    assert (pairs.sides["x"].key, pairs.sides["y"].key) == pairs.side_names
    assert pairs.sides["x"].ids.tolist() == X_ID and pairs.sides["y"].ids.tolist() == Y_ID and pairs.group is None
    assert pairs.known_bad == {} and check_samples(pairs) == {}
    assert pairs[0][:2] == ("Who wrote it?", "Ada, alone") and pairs.item("y", 5) == "ten pages"
    assert pairs.fingerprint == open_pairs(jsonl(tmp_path, ROWS)).fingerprint
    loaded = list(Loader(pairs).load(batches(epoch_order(pairs, seed=3, epoch=0), 3)))
    assert [batch.numbers.tolist() for batch in loaded] == [[2, 5, 4], [1, 3, 0]]
    for batch in loaded:
        assert batch.x == [" ".join(ROWS[number][0].split()) for number in batch.numbers.tolist()]
        assert batch.y == [" ".join(ROWS[number][1].split()) for number in batch.numbers.tolist()]
        assert batch.group is None
    assert repr(batch) == "Batch(3 pairs, x=3 texts, y=3 texts)"


@pytest.mark.parametrize("write", [jsonl, json_array, parquet_files, hf_dataset])
def test_rows_with_several_x_and_y_are_groups(tmp_path, write):
    pairs = open_pairs(write(tmp_path, LISTS))
    texts = [(pairs.item("x", number), pairs.item("y", number)) for number in range(len(pairs))]
    expected = [("a 1", "b 1"), ("a 2", "b 2"), ("c 1", "d 1"), ("c 1", "d 2"), ("c 1", "d 3")]
    assert texts == [*expected, ("e 1", "f 1"), ("e 2", "f 2"), ("e 3", "f 1")]
    assert pairs.group.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    assert pairs.sides["x"].ids.tolist() == [0, 1, 2, 2, 2, 3, 4, 5]
    assert pairs.sides["y"].ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 5]
    (batch,) = Loader(pairs).load([[7, 2]])
    assert batch.group.tolist() == [2, 1] and batch.x == ["e 3", "c 1"]
    assert pairs.fingerprint == open_pairs(jsonl(tmp_path, LISTS)).fingerprint


def test_one_x_and_several_y_are_not_a_group(tmp_path):
    pairs = open_pairs(jsonl(tmp_path, [("a", ["b", "c"]), (["d", "e"], "f")]))
    assert pairs.group is None
    assert pairs.sides["x"].ids.tolist() == [0, 0, 1, 2]
    assert pairs.sides["y"].ids.tolist() == [0, 1, 2, 2]


def peak_of_opening(path):
    tracemalloc.start()
    try:
        pairs = open_pairs(path)
        return pairs, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("several", [1, 2])
def test_a_long_text_next_to_many_is_stored_once(tmp_path, several):
    # A list of 100 kB used to take 180 MB, and one of 1 MB 50 times as much.
    questions = [f"{number} " + "long " * 18_000 for number in range(several)]
    path = jsonl(tmp_path, [(questions[0] if several == 1 else questions, [f"answer {k}" for k in range(2_000)])])
    pairs, peak = peak_of_opening(path)
    assert peak < 10 * 2**20
    assert len(pairs) == 2_000
    assert pairs.item("x", 1_999) == questions[-1].strip()
    assert pairs.item("y", 1_999) == "answer 1999"


def test_a_table_that_expands_a_thousandfold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("nuclr.files._LARGE", 2**20)
    path = tmp_path / "pairs.parquet"
    columns = {"question": ["long " * 18_000] * 300, "answer": [f"answer {k}" for k in range(300)]}
    parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(UserError, match=r"pairs\.parquet.*MiB"):
        open_pairs(path)


def test_a_saved_dataset_that_expands_a_thousandfold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("nuclr.files._LARGE", 2**20)
    folder = hf_dataset(tmp_path, ROWS)
    columns = {"question": ["long " * 18_000] * 300, "answer": [f"answer {k}" for k in range(300)]}
    table = pyarrow.table(columns)
    file = sorted(folder.glob("*.arrow"))[0]
    with pyarrow.ipc.new_stream(file, table.schema, options=pyarrow.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    with pytest.raises(UserError, match=r"\.arrow.* 26 MiB"):
        open_pairs(folder)


def test_texts_are_loaded_without_threads(tmp_path):
    stream = Loader(open_pairs(jsonl(tmp_path, ROWS)), workers=3).load([[0, 1], [2, 3]])
    next(stream)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nuclr-loader")]


@pytest.mark.parametrize("write", [jsonl, json_array, parquet_files, hf_dataset])
def test_bad_rows_are_named_by_their_side(tmp_path, write):
    rows = [("a", ["b"]), ("", ["c"]), ("d", [" \n"]), ("e", []), ("f", ["g" * 100_001]), ("h", ["i"])]
    pairs = open_pairs(write(tmp_path, rows))
    assert pairs.known_bad == {
        1: "empty question",
        2: "empty answer",
        3: "empty answer",
        4: "answer of 100,001 characters; at most 100,000 are allowed",
    }
    with pytest.raises(BadSample, match="empty answer"):
        pairs.item("y", 3)
    with pytest.raises(BadSample, match="empty answer"):
        pairs.items("x", np.array([0, 3]))
    with pytest.raises(UserError, match=r"sample 3 \((line|row) \d+\): empty answer"):
        list(Loader(pairs).load([[0, 3, 5]]))
    with pytest.raises(UserError, match=r"4 of 6 .*2 x empty answer"):
        check_samples(pairs)
    bad = check_samples(pairs, max_bad_share=1)
    assert usable(pairs, bad).tolist() == [0, 5]
    write_bad_samples(tmp_path / "bad.jsonl", pairs, bad)
    assert json.loads((tmp_path / "bad.jsonl").read_text().splitlines()[0])["reason"] == "empty question"


def test_names_are_lines_and_rows(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('\n{"question": ["a", "b"], "answer": ["c", "d"]}\n\n{"question": "e", "answer": "f"}\n')
    pairs = open_pairs(path)
    assert [pairs.name(number) for number in range(3)] == ["line 2", "line 2", "line 4"]
    pairs = open_pairs(upper_case(tmp_path, ROWS))
    assert pairs.name(5) == "row 5"


def test_an_entry_without_an_answer_is_a_bad_sample(tmp_path):
    rows = [{"question": "a"}, {"question": "b", "answer": "c"}, {"answer": "d"}, {"question": None, "answer": "e"}]
    pairs = open_pairs(make.write_lines(tmp_path / "p.jsonl", *rows))
    assert pairs.known_bad == {0: "empty answer", 2: "empty question", 3: "empty question"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": 3, "answer": "a"}, "line 2: question is 3"),
        ({"question": "b", "answer": {"en": "a"}}, r"line 2: answer is \{"),
        ({"question": "b", "answer": [1, 2]}, r"line 2: answer is \[1, 2\]"),
    ],
)
def test_a_cell_of_another_type_is_refused_with_its_line(tmp_path, row, message):
    path = make.write_lines(tmp_path / "p.jsonl", {"question": "a", "answer": "b"}, row)
    with pytest.raises(UserError, match=message):
        open_pairs(path)


def test_a_split_is_not_a_column(tmp_path):
    rows = [{"en": "a", "de": "b", "split": "train"}, {"en": "c", "de": "d", "split": "val"}]
    pairs = open_pairs(make.write_lines(tmp_path / "p.jsonl", *rows), split="val")
    assert len(pairs) == 1 and pairs[0][:2] == ("c", "d") and pairs.side_names == ("en", "de")
