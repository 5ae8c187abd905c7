"""Remote data with a real S3 server (moto) on 127.0.0.1: training, the commands on embedding files, and failures."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto")
pytest.importorskip("flask")  # of moto[server]

from tests.data import make
from tests.remote.server import serve
from tests.training import runs

BUCKET, PER_TAR, TARS = "bucket", 30, 2
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",  # nothing but 127.0.0.1 is asked
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
}


class S3:
    """The server, its address and the requests that it has answered."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        self.lines: list[str] = []
        log = logging.getLogger("werkzeug")
        log.setLevel(logging.INFO)
        log.propagate = False
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append(record.getMessage())
        log.handlers = [handler]
        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self.server.start()
        self.port = self.server.get_host_and_port()[1]

    def client(self):
        import boto3

        return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self.port}")

    def upload(self, path: Path, key: str) -> str:
        self.client().upload_file(str(path), BUCKET, key)
        return f"s3://{BUCKET}/{key}"

    def downloads(self, key: str) -> int:
        return sum(f"GET /{BUCKET}/{key}" in line for line in self.lines)


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch:
        for key, value in ENVIRONMENT.items():
            patch.setenv(key, value)
        opened = S3()
        opened.client().create_bucket(Bucket=BUCKET)
        yield opened
        opened.server.stop()


@pytest.fixture
def s3(server, tmp_path, monkeypatch):
    """The S3 server for this process and those that it starts, and a cache of its own."""
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("NUCLR_CACHE", str(tmp_path / "cache"))
    s3fs.S3FileSystem.clear_instance_cache()
    server.lines.clear()
    return server


@pytest.fixture(scope="module")
def data(server, tmp_path_factory):
    """Two tars of photographs and an embedding file, in a folder and on the server."""
    folder = tmp_path_factory.mktemp("data")
    for tar in range(TARS):
        numbers = range(tar * PER_TAR, (tar + 1) * PER_TAR)
        members = [make.sample(f"{number:06d}", number, f"photograph {number}") for number in numbers]
        make.write_tar(folder / f"0000{tar}.tar", {k: v for sample in members for k, v in sample.items()})
    runs.write_vectors(folder / "pairs.npz", images=60)
    rng = np.random.default_rng(0)
    np.savez(folder / "equal.npz", x=rng.standard_normal((60, 8)), y=rng.standard_normal((60, 8)))
    for path in folder.iterdir():
        server.upload(path, f"data/{path.name}")
    return folder


def settings(folder: Path, root: str | Path) -> list[str]:
    own = {"data.train": "{00000..00001}.tar", "data.val": "00001.tar", "data.root": root, "data.batch_size": 12}
    return runs.picture_settings(folder, **own, **{"model.x.image_size": 16, "checkpoint_every": 1, "log.every": 1})


def start(folder: Path, root: str | Path, out: Path, world: int = 1, *more: str):
    return runs.start([folder / "empty.yaml", *settings(folder, root), f"out={out}", *more], world)


def train(folder: Path, root: str | Path, out: Path, world: int = 1, *more: str) -> None:
    for status, _, err in runs.finish(start(folder, root, out, world, *more)):
        assert status == 0, err


def command(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "nuclr", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, env=os.environ | environment, timeout=120)


# Training


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run on local files that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, data, folder / "run")
    return folder / "run"


def test_training_from_s3_equals_training_from_local_files(s3, whole, tmp_path, nuclr):
    overrides = settings(tmp_path, f"s3://{BUCKET}/data")
    status, _, err = nuclr("train", tmp_path / "empty.yaml", *overrides, f"out={tmp_path / 'run'}")
    assert status == 0, err
    runs.assert_same_outcome(whole, tmp_path / "run")
    assert [s3.downloads(f"data/0000{tar}.tar") for tar in range(TARS)] == [1, 1]  # for data.train and data.val


def test_killed_and_resumed_from_a_local_copy(s3, data, whole, tmp_path):
    (process,) = start(tmp_path, f"s3://{BUCKET}/data", tmp_path / "run")
    runs.wait_for(tmp_path / "run" / "metrics.jsonl", 3, process)
    process.kill()
    process.communicate()
    train(tmp_path, data, tmp_path / "run", 1, "--resume")
    runs.assert_same_outcome(whole, tmp_path / "run")


# Commands on embedding files


def test_hubness_and_popularity_of_remote_files(s3, data, tmp_path, nuclr):
    def run(source: str, out: Path) -> tuple[np.ndarray, bytes]:
        for arguments in (
            ("hubness", f"{source}:y", f"{source}:y", "--out", out / "h", "--normalize"),
            ("popularity", source, "--temperature", "0.1", "--out", out / "p"),
        ):
            status, _, err = nuclr(*arguments)
            assert status == 0, err
        assert all((out / part / "report.html").is_file() for part in "hp")
        assert json.loads((out / "h" / "hubness.json").read_text())["queries"]["name"] == f"{source}:y"
        assert json.loads((out / "p" / "popularity.json").read_text())["file"] == source
        return np.load(out / "h" / "bias.npy"), (out / "p" / "popularity.csv").read_bytes()

    bias, table = run(str(data / "equal.npz"), tmp_path / "local")
    with serve({"/equal.npz": (data / "equal.npz").read_bytes()}) as web:
        for url in (web.url("/equal.npz"), f"s3://{BUCKET}/data/equal.npz"):
            remote_bias, remote_table = run(url, tmp_path / url.partition(":")[0])
            assert np.array_equal(remote_bias, bias) and remote_table == table
        assert len(web.gets()) == s3.downloads("data/equal.npz") == 1


def test_a_page_made_later_does_not_follow_the_url_in_a_summary(data, tmp_path, nuclr):
    assert nuclr("popularity", data / "equal.npz", "--temperature", "0.1", "--out", tmp_path)[0] == 0
    summary = tmp_path / "popularity.json"
    with serve({"/equal.npz": (data / "equal.npz").read_bytes()}) as web:
        summary.write_text(summary.read_text().replace(str(data / "equal.npz"), web.url("/equal.npz")))
        assert web.url("/equal.npz") in summary.read_text()
        status, _, err = nuclr("report", tmp_path)
        assert status == 0, err
        assert not web.requests


# Other kinds of URLs


def test_hf_urls(data, tmp_path):
    """The real client of the Hugging Face Hub, with a local server that answers as the Hub does."""
    pytest.importorskip("huggingface_hub")
    content = (data / "pairs.npz").read_bytes()
    files = {
        "/api/datasets/me/set": {"id": "me/set", "sha": "0" * 40},
        "/api/datasets/me/set/tree/main": [{"type": "file", "path": "a.npz", "size": len(content), "oid": "1" * 40}],
    }
    code = """if True:
        from nuclr.data.vectors import open_vectors
        for name in ("a.npz", "b.npz"):
            try:
                print(open_vectors(f"hf://datasets/me/set/{name}"))
            except ValueError as error:
                print(error)
    """
    with serve({path: json.dumps(answer).encode() for path, answer in files.items()}) as web:
        web.files["/datasets/me/set/resolve/main/a.npz"] = content
        own = {"HF_ENDPOINT": web.url(""), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        environment = os.environ | own | {"NUCLR_CACHE": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120
        )
    opened, refused = done.stdout.splitlines()
    assert opened == "Vectors('hf://datasets/me/set/a.npz:x', 60 x 12)", done.stderr
    assert "hf://datasets/me/set/b.npz" in refused


# Failures


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (f"s3://{BUCKET}/data/{{00000..00002}}.tar", f"s3://{BUCKET}/data/00002.tar"),
        ("s3://another/00000.tar", "s3://another/00000.tar"),
        (f"s3://{BUCKET}/data/pairs.npz/", f"s3://{BUCKET}/data/pairs.npz/"),
    ],
)
def test_wrong_names_on_the_command_line(s3, data, nuclr, source, named):
    status, _, err = nuclr("train", f"data.train={source}")
    assert status == 2 and err.startswith(f"nuclr: {named}: ") and err.count("\n") == 1


def test_access_without_credentials(s3, data, tmp_path):
    missing = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "HOME": str(tmp_path)}
    url = f"s3://{BUCKET}/data/pairs.npz"
    done = command("popularity", url, "--temperature", "0.1", "--out", tmp_path / "out", **missing)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"nuclr: {url}: ") and "FSSPEC_S3_ANON=true" in done.stderr
