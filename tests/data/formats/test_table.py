"""CSV and TSV tables: bad rows, encodings, and the messages for wrong tables."""

import pytest

from nuclr.data import open_pairs
from nuclr.data.formats.table import read_column
from nuclr.errors import UserError
from tests.data import make


def test_rows_with_too_few_or_too_many_cells_are_bad_samples(tmp_path):
    pairs = open_pairs(
        make.write_list(tmp_path, "l.csv", 'filepath,title\na.jpg,one\nb.png\nc.jpg,two,three\n\nd.jpg,"four,\nfive"\n')
    )
    assert pairs.known_bad == {1: "line 3 has 1 cells, the header has 2", 2: "line 4 has 3 cells, the header has 2"}
    assert pairs.y(3) == "four, five"


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path):
    pairs = open_pairs(make.write_list(tmp_path, "l.csv", b"\xef\xbb\xbfimage;caption\r\na.jpg;one\r\nb.png;two\r\n"))
    assert [pairs.y(number) for number in range(2)] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("l.csv", "a.jpg,one\nb.png,two\n", r"line 1 names an image \(a\.jpg\); put a header such as image,caption"),
        ("l.csv", "file,words,n\na.jpg,one,1\n", r"no two usual columns among 'file', 'words', 'n'"),
        ("l.csv", "image,words,n\na.jpg,one,1\n", r"no column for the caption among 'image', 'words', 'n'"),
        ("l.csv", "image caption\na.jpg one\n", r"no two usual columns among 'image caption'"),
        ("l.csv", "image,caption\n", "holds no pairs"),
        ("l.csv", "\n\n", "empty; needs a header"),
        ("l.csv", b"image,caption\na.jpg,caf\xe9\n", r"l\.csv, line 2: not UTF-8 text"),
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
        open_pairs(path, y_key="tittle")


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
    assert pairs.y(2) == "three"
