"""Stream keys with Hugging Face datasets in streaming mode."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nuclr.data import KeyIndex
from tests.data.formats.test_keys import write_tar

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_tars_through_datasets(nuclr, tmp_path):
    files = []
    for tar in range(3):
        files.append(write_tar(tmp_path / f"{tar}.tar", [f"{key}.txt" for key in (f"{tar}a", f"folder/{tar}b")]))
    assert nuclr("index", f"{tmp_path}/{{0..2}}.tar", "--out", tmp_path / "x.keys").status == 0
    index = KeyIndex.open(tmp_path / "x.keys")
    data_files = {"train": [str(file) for file in files]}
    stream = datasets.load_dataset("webdataset", data_files=data_files, split="train", streaming=True)
    numbered = stream.shuffle(seed=0, buffer_size=3).map(lambda item: {"index": index[item["__key__"]]})
    assert sorted(item["index"] for item in numbered) == list(range(6))


def test_a_column_of_a_parquet_stream(nuclr, tmp_path):
    files = []
    for part in range(2):
        urls = [f"https://example.org/{part}/{number}.jpg" for number in range(20)]
        files.append(str(tmp_path / f"train-{part}.parquet"))
        pq.write_table(pa.table({"url": urls, "caption": [f"caption {url}" for url in urls]}), files[-1])
    ended = nuclr("index", *files, "--key", "url", "--out", tmp_path / "x.keys")
    assert ended.status == 0 and "40 keys" in ended.out
    index = KeyIndex.open(tmp_path / "x.keys")
    stream = datasets.load_dataset("parquet", data_files={"train": files}, split="train", streaming=True)
    seen = {}
    for seed in range(2):
        for batch in stream.shuffle(seed=seed, buffer_size=10).iter(batch_size=8):
            for caption, number in zip(batch["caption"], index.numbers(batch["url"]), strict=True):
                assert seen.setdefault(caption, number) == number
    assert np.array_equal(np.sort(list(seen.values())), np.arange(40))
