"""CSV and TSV tables: bad rows, encodings, and the messages for wrong tables."""

import gzip

import pytest

from nuclr.data import SideChoice, open_pairs
from nuclr.data.formats.table import read_column
from nuclr.errors import UserError
from tests.data import make


def test_rows_with_too_few_or_too_many_cells_are_bad_samples(tmp_path):
    pairs = open_pairs(
        make.write_list(tmp_path, "l.csv", 'filepath,title\na.jpg,one\nb.png\nc.jpg,two,three\n\nd.jpg,"four,\nfive"\n')
    )
    assert pairs.known_bad == {1: "line 3 has 1 cells, the header has 2", 2: "line 4 has 3 cells, the header has 2"}
    assert pairs.item("y", 3) == "four, five"


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path):
    pairs = open_pairs(make.write_list(tmp_path, "l.csv", b"\xef\xbb\xbfimage;caption\r\na.jpg;one\r\nb.png;two\r\n"))
    assert [pairs.item("y", number) for number in range(2)] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("l.csv", "a.jpg,one\nb.png,two\n", r"line 1 names an image \(a\.jpg\); put a header such as image,caption"),
        ("l.csv", "file,words,n\na.jpg,one,1\n", r"'file', 'words', 'n'"),
        ("l.csv", "image,words,n\na.jpg,one,1\n", r"'image', 'words', 'n'.*data.y.key"),
        ("l.csv", "image caption\na.jpg one\n", r"'image caption'"),
        ("l.csv", "image,caption\n", "holds no pairs"),
        ("l.csv", "\n\n", "empty; needs a header"),
        ("l.csv", b"image,caption\na.jpg,caf\xe9\n", r"l\.csv: not UTF-8"),
    ],
)  # fmt: skip
def test_a_wrong_table_is_refused_with_a_message(tmp_path, name, text, message):
    with pytest.raises(UserError, match=message) as caught:
        open_pairs(make.write_list(tmp_path, name, text))
    assert str(caught.value).count("\n") == 0


def test_a_misspelled_column_is_refused_with_the_nearest_name(tmp_path):
    path = make.table(tmp_path)
    with pytest.raises(
        UserError, match=r"no column 'tittle' \(data\.y\.key\); found: 'filepath', 'title'; nearest: 'title'"
    ):
        open_pairs(path, y=SideChoice("tittle"))


def test_the_cells_of_a_column(tmp_path):
    path = make.write_list(tmp_path, "t.csv", 'id;Name\n1;"a; b"\n\n2;c\n')
    assert read_column(path, "name") == ["a; b", "c"]
    with pytest.raises(UserError, match=r"no column 'title'; found: 'id', 'Name'"):
        read_column(path, "title")
    make.write_list(tmp_path, "t.csv", "id,name\n1\n")
    with pytest.raises(UserError, match=r"t\.csv, line 2: 1 cells, but the header has 2"):
        read_column(path, "name")


def test_a_cell_of_megabytes_is_a_bad_sample(tmp_path):
    text = "filepath,title\na.jpg,one\na.jpg," + "x" * 10_000_000 + "\na.jpg,three\n"
    pairs = open_pairs(make.write_list(tmp_path, "t.csv", text))
    assert list(pairs.known_bad) == [1]
    assert pairs.known_bad[1].startswith("caption of 10,000,000 characters")
    assert pairs.item("y", 2) == "three"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('image,caption\na.jpg,one\nb.png,"two\nc.jpg,three\n', 3),
        ('image,caption\n"a.jpg,one\n', 2),
    ],
)
def test_an_unclosed_quote_is_refused(tmp_path, text, line):
    with pytest.raises(UserError, match=rf"l\.csv, line {line}: .*quote"):
        open_pairs(make.write_list(tmp_path, "l.csv", text))


def test_compressed_tables_and_lists_are_read(tmp_path):
    table = 'question,answer\nwhy?,"because,\nso"\nwho?,they'
    lines = '{"question": "why?", "answer": "because, so"}\n{"question": "who?", "answer": "they"}\n'
    for name, text in (("p.csv.gz", table), ("p.jsonl.gz", lines)):
        (tmp_path / name).write_bytes(gzip.compress(text.encode()))
        pairs = open_pairs(tmp_path / name)
        assert [pairs[number][:2] for number in range(2)] == [("why?", "because, so"), ("who?", "they")]
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(table.encode() * 100)[:60])
    (tmp_path / "no.csv.gz").write_bytes(b"question,answer")
    for name in ("cut.csv.gz", "no.csv.gz"):
        with pytest.raises(UserError, match=name):
            open_pairs(tmp_path / name)


def test_a_compressed_table_that_expands_a_thousandfold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("nuclr.files._LARGE", 2**16)
    (tmp_path / "p.csv.gz").write_bytes(gzip.compress(b"question,answer\n" + b"a,b\n" * 200_000))
    with pytest.raises(UserError, match=r"p\.csv\.gz"):
        open_pairs(tmp_path / "p.csv.gz")
