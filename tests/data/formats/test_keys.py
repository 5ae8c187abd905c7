"""Keys of samples in tars, Parquet files and lists."""

import io
import json
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nuclr.data.formats.keys import KeyReader, key_files
from nuclr.errors import UserError


def write_tar(path, names, entry=None, kind=tarfile.PAX_FORMAT):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as tar:
        for name in names:
            data = json.dumps({"key": entry(name)} if entry else {}).encode() if name.endswith(".json") else b"x" * 700
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def sample(key):
    return [f"{key}.jpg", f"{key}.txt", f"{key}.json"]


def keys(*sources, **options):
    return [key for key, _ in KeyReader(key_files(list(map(str, sources))), **options)()]


# Files


def test_files_of_patterns(tmp_path):
    tars = [write_tar(tmp_path / folder / f"0000{n}.tar", sample("a")) for folder in "xy" for n in range(3)]
    assert key_files([f"{tmp_path}/x/{{00000..00002}}.tar"]) == tars[:3]
    assert key_files([f"{tmp_path}/x"]) == tars[:3]
    assert key_files([f"{tmp_path}/*/*.tar"]) == tars
    assert key_files([f"{tmp_path}/x::{tmp_path}/y/00001.tar"]) == [*tars[:3], tars[4]]
    assert key_files([f"{tmp_path}/{{x,y}}"]) == tars
    assert key_files(map(str, tars)) == tars


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x.tar", "x.tar: no such file"),
        ("*.tar", r"\*.tar: no file matches"),
        ("{0..2}.tar", r"0.tar: no such file \(3 of the 3 tars are missing\)"),
        ("data.csv", "data.csv: unknown format; keys are read from .tar, .parquet, .txt"),
        ("empty", "empty: has no .tar or .parquet file"),
        ("a.txt::a.txt", "a.txt: named twice"),
    ],
)
def test_wrong_files(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("a\n")
    with pytest.raises(UserError, match=message):
        key_files([source])


# Tars


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_keys_of_tars_are_those_of_webdataset(tmp_path, kind):
    long = "f" * 90 + "/" + "g" * 60
    names = [
        *sample("000000012"),
        *sample("folder/b"),
        "folder/b.seg.png",
        "./c.jpg",
        *sample(long),
        "__meta__",
        "__meta__/d.txt",
        "README",
        ".hidden",
        "folder.v1/e.jpg",
    ]
    tar = write_tar(tmp_path / "a.tar", names, kind=kind)
    assert keys(tar) == ["000000012", "folder/b", "./c", long, "folder.v1/e"]


def test_key_of_the_json(tmp_path):
    tar = write_tar(tmp_path / "a.tar", sample("x") + sample("y"), entry=lambda name: 100 + ord(name[0]))
    assert keys(tar, key="key") == ["220", "221"]
    with pytest.raises(
        UserError, match=r"'x.json' has no entry 'uid' with a text or an integer \(--key\); it has: key"
    ):
        keys(tar, key="uid")
    tar = write_tar(tmp_path / "b.tar", [*sample("x"), "y.jpg", *sample("z")], entry=str)
    with pytest.raises(UserError, match=r"b.tar: sample 'y' has no .json with an entry 'key' \(--key\)"):
        keys(tar, key="key")
    tar = write_tar(tmp_path / "c.tar", ["x.jpg"])
    with pytest.raises(UserError, match=r"sample 'x' has no .json"):
        keys(tar, key="key")


def test_names_of_tars_before_keys(tmp_path):
    for n in range(2):
        write_tar(tmp_path / f"{n}.tar", sample("a") + sample("b"))
    assert keys(tmp_path, with_tar=True) == ["0.tar/a", "0.tar/b", "1.tar/a", "1.tar/b"]
    (tmp_path / "a.txt").write_text("a\n")
    with pytest.raises(UserError, match="--with-tar is for tars only"):
        keys(tmp_path / "a.txt", with_tar=True)


def test_truncated_and_damaged_tars(tmp_path):
    tar = write_tar(tmp_path / "a.tar", sample("x") + sample("y") + sample("z"))
    content = tar.read_bytes()
    tar.write_bytes(content[: 512 * 14])  # within the second sample; a member takes three blocks, and .json two
    reader = KeyReader([tar])
    assert [key for key, _ in reader()] == ["x", "y"]
    assert (reader.count, reader.truncated) == (2, [tar])
    tar.write_bytes(b"\x1f\x8b" + content)
    with pytest.raises(UserError, match=r"a.tar: compressed; unpack it first \(gunzip\)"):
        keys(tar)
    tar.write_bytes(b"text" * 1000)
    with pytest.raises(UserError, match=r"a.tar: not a tar file"):
        keys(tar)


# Parquet files and lists


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


def test_columns_of_parquet(tmp_path):
    two = parquet(tmp_path / "a.parquet", url=["u", "v"], uid=[7, 8])
    assert keys(two, key="url") == ["u", "v"]
    assert keys(two, key="uid") == ["7", "8"]
    assert keys(parquet(tmp_path / "b.parquet", any_name=["u"])) == ["u"]
    assert keys(parquet(tmp_path / "c.parquet", text=["t"], __key__=["k"])) == ["k"]
    named = parquet(tmp_path / "d.parquet", url=pa.array(["u", "v", "u"]).dictionary_encode())
    assert list(KeyReader([named])())[2] == ("u", f"row 2 of {named}")


def test_wrong_parquet(tmp_path):
    two = parquet(tmp_path / "a.parquet", url=["u", None], size=[1.0, 2.0])
    with pytest.raises(UserError, match=r"a.parquet: name the column of the keys with --key; it has: url, size"):
        keys(two)
    with pytest.raises(UserError, match=r"no column 'uid' \(--key\); it has: url, size"):
        keys(two, key="uid")
    with pytest.raises(UserError, match="row 1 of column 'url' is empty"):
        keys(two, key="url")
    with pytest.raises(UserError, match="column 'size' holds double; keys are texts or integers"):
        keys(two, key="size")
    two.write_bytes(two.read_bytes()[:-20])
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        keys(two, key="url")


def test_lists(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a\nb c\n\N{LATIN SMALL LETTER E WITH ACUTE}", encoding="utf-8-sig")
    assert list(KeyReader([path])()) == [
        ("a", f"line 1 of {path}"),
        ("b c", f"line 2 of {path}"),
        ("é", f"line 3 of {path}"),
    ]
    path.write_text("a\n\nb\n")
    with pytest.raises(UserError, match="line 2 is empty; one key per line"):
        keys(path)
    path.write_bytes(b"a\n\xff\n")
    with pytest.raises(UserError, match="not UTF-8 text"):
        keys(path)
