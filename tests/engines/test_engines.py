"""The recipes for engines run in local mode and give the bias of one process, also if a worker is killed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from nuclr.popularity import PopularityCorrection

psutil = pytest.importorskip("psutil")
arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
dataset = pytest.importorskip("pyarrow.dataset")

ROOT = Path(__file__).parents[2]
# Texts of Flickr8k by a sentence encoder; without them, random vectors
DATA = Path(os.environ.get("DATA", ROOT.parent / "shared" / "data")) / "flickr8k" / "embeddings"
FILES = 24
ROWS = 1000  # per file


@pytest.fixture(scope="module")
def gallery(tmp_path_factory) -> Path:
    """Write a correction and a folder of Parquet files."""
    folder = tmp_path_factory.mktemp("engines")
    vectors = torch.randn(30_000, 32, generator=torch.Generator().manual_seed(0)) + 0.3
    if (DATA / "train.npz").is_file():
        vectors = torch.from_numpy(np.load(DATA / "train.npz")["y"]).float()
    vectors = normalize(vectors, dim=1)
    items = vectors[: FILES * ROWS].numpy()
    PopularityCorrection().fit(vectors[FILES * ROWS :], items).save(folder / "fix.safetensors")
    (folder / "items").mkdir()
    for number in range(FILES):
        part = slice(number * ROWS, (number + 1) * ROWS)
        column = arrow.FixedSizeListArray.from_arrays(arrow.array(items[part].ravel()), items.shape[1])
        table = arrow.table({"id": np.arange(len(items))[part], "embedding": column})
        parquet.write_table(table, folder / "items" / f"{number:02}.parquet")
    np.save(folder / "items.npy", items)
    return folder


def start(name: str, gallery: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, ROOT / "examples" / name, gallery / "fix.safetensors", gallery / "items", out]
    patient = {"RAY_raylet_start_wait_time_s": "300"}  # on a busy machine
    environment = os.environ | patient | {"PYSPARK_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        list(map(str, command)), env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def assert_complete(gallery: Path, out: Path) -> None:
    """Check that every item is there once, with the bias that one process computes."""
    table = dataset.dataset(out, format="parquet").to_table(["id", "bias"])
    ids = table["id"].to_numpy()
    assert np.array_equal(np.sort(ids), np.arange(FILES * ROWS))
    fix = PopularityCorrection.load(gallery / "fix.safetensors")
    expected = fix.bias(np.load(gallery / "items.npy"), center=False).numpy()
    assert expected.std() > 1e-3
    np.testing.assert_allclose(table["bias"].to_numpy(), expected[ids], rtol=0, atol=1e-6)


def test_spark(gallery, tmp_path):
    pytest.importorskip("pyspark")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    process = start("spark_apply.py", gallery, tmp_path / "out")
    output = process.communicate()[0]
    assert process.returncode == 0, output[-4000:]
    assert_complete(gallery, tmp_path / "out")


@pytest.mark.parametrize("is_killed", [False, True])
def test_ray(gallery, tmp_path, is_killed):
    pytest.importorskip("ray.data")
    process = start("ray_apply.py", gallery, tmp_path / "out")
    if is_killed:
        kill_worker(process)
    output = process.communicate()[0]
    assert process.returncode == 0, output[-4000:]
    assert_complete(gallery, tmp_path / "out")


def command_of(process: "psutil.Process") -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""


def kill_worker(driver: subprocess.Popen[str]) -> None:
    """Kill a worker of Ray while it applies the correction."""
    while driver.poll() is None:
        children = psutil.Process(driver.pid).children(recursive=True)
        for child in children:
            if "MapBatches" in command_of(child):  # Ray names a process after its task
                child.send_signal(signal.SIGKILL)
                return
        time.sleep(0.01)
    pytest.fail(f"Ray ended before a worker could be killed: {driver.communicate()[0][-4000:]}")
