"""Stream keys with the real webdataset: its keys are those of the index, in any order and from any worker."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

webdataset = pytest.importorskip("webdataset")

from nuclr.data import KeyIndex  # noqa: E402
from nuclr.data.formats.keys import KeyReader  # noqa: E402
from nuclr.errors import UserError  # noqa: E402
from tests.data.formats.test_keys import sample, write_tar  # noqa: E402

ROOT = Path(__file__).parents[2]
PER_TAR = 30


@pytest.fixture
def tars(tmp_path):
    """Three tars as img2dataset writes them."""
    for tar in range(3):
        with webdataset.TarWriter(str(tmp_path / f"{tar:05d}.tar")) as writer:
            for number in range(PER_TAR):
                key = f"{tar:05d}{number:04d}"
                writer.write(
                    {"__key__": key, "jpg": b"image", "txt": f"caption {key}", "json": json.dumps({"key": key})}
                )
    return f"{tmp_path}/{{00000..00002}}.tar"


def stream(tars, seed=None, workers=0, fields=("__key__", "txt")):
    pipeline = webdataset.WebDataset(tars, shardshuffle=3 if seed is not None else False, seed=seed)
    if seed is not None:
        pipeline = pipeline.shuffle(50, seed=seed)
    pipeline = pipeline.decode().to_tuple(*fields).batched(8)
    return webdataset.WebLoader(pipeline, batch_size=None, num_workers=workers)


def test_every_order_and_worker_gives_the_same_numbers(nuclr, tmp_path, tars):
    keys = tmp_path / "train.keys"
    assert nuclr("index", tars, "--out", keys).status == 0
    index = KeyIndex.open(keys)
    numbers: dict[str, set[int]] = {}
    orders = []
    for seed, workers in ((None, 0), (1, 0), (2, 0), (3, 2)):
        order = []
        for names, texts in stream(tars, seed, workers):
            for number, text in zip(index.numbers(names).tolist(), texts, strict=True):
                numbers.setdefault(text, set()).add(number)
                order.append(number)
        orders.append(order)
        assert sorted(order) == list(range(3 * PER_TAR))
    assert orders[0] != orders[1] != orders[2]
    assert all(len(found) == 1 for found in numbers.values())


def test_the_index_inside_of_the_pipeline(nuclr, tmp_path, tars):
    keys = tmp_path / "train.keys"
    assert nuclr("index", tars, "--out", keys).status == 0
    index = KeyIndex.open(keys)

    def number(item):
        return {**item, "index": index[item["__key__"]]}

    pipeline = webdataset.WebDataset(tars, shardshuffle=False).map(number).to_tuple("index").batched(8)
    loader = webdataset.WebLoader(pipeline, batch_size=None, num_workers=2)
    assert sorted(np.concatenate([column for (column,) in loader]).tolist()) == list(range(3 * PER_TAR))


def test_keys_of_odd_names_are_those_of_webdataset(tmp_path):
    names = [*sample("a"), *sample("folder/b"), "folder/b.seg.png", "./c.jpg", *sample("e" * 120), "README", "café.txt"]
    tar = write_tar(tmp_path / "0.tar", names)
    read = [item["__key__"] for item in webdataset.WebDataset(str(tar), shardshuffle=False)]
    assert [key for key, _ in KeyReader([tar])()] == read
    assert len(read) == 5


def test_keys_that_start_again_in_every_tar(nuclr, tmp_path):
    for number in range(2):
        write_tar(tmp_path / f"{number}.tar", sample("a") + sample("b"))
    assert "use --with-tar" in nuclr("index", tmp_path, "--out", tmp_path / "x.keys").err
    assert nuclr("index", tmp_path, "--with-tar", "--out", tmp_path / "x.keys").status == 0
    index = KeyIndex.open(tmp_path / "x.keys")
    items = list(webdataset.WebDataset([f"{tmp_path}/1.tar", f"file:{tmp_path}/0.tar"], shardshuffle=False))
    numbers = index.numbers([item["__key__"] for item in items], [item["__url__"] for item in items])
    assert sorted(numbers.tolist()) == [0, 1, 2, 3]


def test_a_tar_that_was_not_indexed_is_reported(nuclr, tmp_path, tars):
    keys = tmp_path / "train.keys"
    assert nuclr("index", tmp_path / "00000.tar", "--key", "key", "--out", keys).status == 0
    index = KeyIndex.open(keys)
    with pytest.raises(UserError, match=r"train.keys: no key '000010000' \(2 of these 8 keys are not in the index\)"):
        for names, _ in stream(tars):
            index.numbers(names)
    assert nuclr("index", tars, "--key", "key", "--extend", keys, "--out", keys).status == 0
    longer = KeyIndex.open(keys)
    assert sorted(np.concatenate([longer.numbers(names) for names, _ in stream(tars)]).tolist()) == list(range(90))
    first = [f"00000{number:04d}" for number in range(PER_TAR)]
    assert np.array_equal(longer.numbers(first), index.numbers(first))


def test_the_example_runs(tmp_path):
    example = ROOT / "examples" / "webdataset_stream.py"
    ended = subprocess.run([sys.executable, example], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "1,024 keys" in ended.stdout and "100% of the pairs seen" in ended.stdout
    assert float(ended.stdout.split("recall@1 ")[1].split("%")[0]) > 50
