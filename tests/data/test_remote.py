"""Pairs at URLs are the same pairs as in local files, and only URLs that the user names are requested."""

from pathlib import Path

import fsspec
import numpy as np
import pytest

from nuclr.data import check_samples, open_pairs
from nuclr.data.formats.tars import split_parts
from nuclr.data.opening import is_image_folder, locate
from nuclr.errors import UserError
from tests.data import make
from tests.remote.server import serve


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NUCLR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("nuclr.remote.WAITS", (0.01,))
    yield
    fsspec.filesystem("memory").store.clear()


def upload(folder: Path, url: str) -> str:
    """Copy the files of a folder to a URL."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and ".nuclr" not in path.parts:
            with fsspec.open(f"{url}/{path.relative_to(folder)}", "wb") as file:
                file.write(path.read_bytes())
    return url


def assert_same(remote, local) -> None:
    assert remote.fingerprint == local.fingerprint and len(remote) == len(local)
    assert np.array_equal(remote.sides["x"].ids, local.sides["x"].ids)
    assert np.array_equal(remote.sides["y"].ids, local.sides["y"].ids)
    assert repr(remote) == repr(local)
    for number in range(len(local)):
        assert remote.name(number) == local.name(number) and remote[number].y == local[number].y
        assert np.array_equal(np.asarray(remote[number].x), np.asarray(local[number].x))
    assert check_samples(remote) == check_samples(local)


@pytest.mark.parametrize(
    "name",
    [
        "shards/{00000..00001}.tar",
        "shards/00000.tar::shards/00001.tar",
        "shards/{00000,00001}.tar",
    ],
)
def test_tars_give_the_same_pairs_as_local_ones(tmp_path, name):
    make.tars(tmp_path / "shards")
    url = upload(tmp_path / "shards", "memory://bucket/shards").removesuffix("/shards")
    local = open_pairs(name, root=tmp_path)
    assert_same(open_pairs(name, root=url), local)
    assert_same(open_pairs("::".join(f"{url}/{part}" for part in name.split("::"))), local)


def test_local_and_remote_tars_can_be_joined(tmp_path):
    make.tars(tmp_path)
    url = upload(tmp_path, "memory://bucket")
    joined = open_pairs(f"{url}/00001.tar::{tmp_path}/00000.tar::{url}/00000.tar")
    local = open_pairs(f"{tmp_path}/00001.tar::{tmp_path}/00000.tar::{tmp_path}/00000.tar")
    assert_same(joined, local)


def test_brackets_of_an_address_do_not_join_parts():
    assert split_parts("http://[::1]:80/a.tar::b.tar") == ["http://[::1]:80/a.tar", "b.tar"]


def test_lists_of_texts_and_parquet_with_images(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "pairs.csv").write_text("question,answer\nwhy?,because\nwho?,they\n")
    make.parquet_bytes(tmp_path / "parquet")
    (shard,) = (tmp_path / "parquet").rglob("*00000.parquet")
    assert_same(
        open_pairs(upload(tmp_path / "data", "memory://a") + "/pairs.csv"), open_pairs(tmp_path / "data/pairs.csv")
    )
    url = upload(tmp_path / "parquet", "memory://b")
    assert_same(open_pairs(f"{url}/{shard.relative_to(tmp_path / 'parquet')}"), open_pairs(shard))


def test_a_list_at_a_url_names_images_in_the_local_root(tmp_path):
    path = make.jsonl_one_caption(tmp_path / "data")
    with fsspec.open("memory://pairs.jsonl", "wb") as file:
        file.write(path.read_bytes())
    assert_same(open_pairs("memory://pairs.jsonl", root=tmp_path / "data"), open_pairs(path))
    with pytest.raises(UserError, match=r"^memory://pairs\.jsonl: .*data\.root"):
        open_pairs("memory://pairs.jsonl")


def test_names_below_a_root():
    assert locate("s3://bucket/data", "a.tar") == "s3://bucket/data/a.tar"
    assert locate("s3://b/a/", "./c.tar") == locate("s3://b/a", "c.tar") == "s3://b/a/c.tar"
    assert locate("s3://bucket/data", "https://host/a.tar") == "https://host/a.tar"
    assert locate("s3://bucket/data", "/local/a.tar") == "/local/a.tar"
    assert locate("/local", "s3://bucket/a.tar") == "s3://bucket/a.tar"
    assert not is_image_folder("photographs", "s3://bucket") and not is_image_folder("s3://bucket/photographs")


def test_messages_name_the_url_and_not_the_copy(tmp_path):
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "e.npz", a=np.eye(3))
    (tmp_path / "data" / "bad.tar").write_bytes(b"x" * 2000)
    url = upload(tmp_path / "data", "memory://bucket")
    with pytest.raises(UserError, match=r"^memory://bucket/e\.npz: .*x"):
        open_pairs(f"{url}/e.npz")
    with pytest.raises(UserError, match=r"^memory://bucket/bad\.tar: "):
        open_pairs(f"{url}/bad.tar")
    with pytest.raises(UserError, match=r"^memory://bucket/none/1\.tar: "):
        open_pairs(f"{url}/none/{{1..3}}.tar")
    fsspec.filesystem("memory").rm("/bucket/bad.tar")
    with pytest.raises(UserError, match=r"^memory://bucket: .*tar"):
        open_pairs(url)


def test_addresses_inside_of_data_are_not_requested(tmp_path):
    """Names of images in lists, tables, Parquet and tars are local files, whatever they look like."""
    import pyarrow
    import pyarrow.parquet

    folder = make.write_images(tmp_path / "data")
    with serve({"/a.jpg": make.IMAGES["a.jpg"]}) as web:
        names = [web.url("/a.jpg"), *make.IMAGES]
        rows = [{"image": name, "caption": f"text {number}"} for number, name in enumerate(names)]
        sources = [make.write_lines(folder / "a.jsonl", *rows), folder / "a.csv", folder / "a.parquet"]
        sources[1].write_text("image,caption\n" + "".join(f"{row['image']},{row['caption']}\n" for row in rows))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sources[2])
        encoded = [{"image": {"bytes": None, "path": row["image"]}, "caption": row["caption"]} for row in rows]
        sources.append(folder / "b.parquet")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(encoded), sources[3])
        for source in sources:
            pairs = open_pairs(source, allow_outside=True)
            assert list(check_samples(pairs, max_bad_share=1)) == [0], source
        members = make.sample("1", 1) | {"1.json": f'{{"caption": "a", "url": "{web.url("/a.jpg")}"}}'.encode()}
        make.write_tar(folder / "a.tar", members)
        assert check_samples(open_pairs(folder / "a.tar")) == {}
        assert not web.requests
