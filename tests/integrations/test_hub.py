"""A model and a correction on the Hugging Face hub: its own client, and a hub of one repository on this machine."""

import base64
import hashlib
import json
import runpy
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
import torch

from nuclr.models import DualEncoder
from nuclr.popularity import PopularityCorrection
from tests.export.runs import texts
from tests.integrations.common import ENVIRONMENT, EXAMPLES

pytest.importorskip("huggingface_hub")

REPOSITORY = "me/model"
COMMIT = "a" * 40


class Hub(BaseHTTPRequestHandler):
    """The answers that the client needs to create a repository, commit files, and download them."""

    files: ClassVar[dict[str, bytes]] = {}

    def log_message(self, *_) -> None:
        """Print nothing."""

    def answer(self, content, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        url = f"http://{self.headers['Host']}/{REPOSITORY}"
        if self.path == "/api/repos/create":
            self.answer({"url": url, "name": REPOSITORY, "id": REPOSITORY})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            self.answer({"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer({"success": True, "commitUrl": f"{url}/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            self.answer({"errors": [], "warnings": []})

    def do_GET(self) -> None:
        if "/tree/" in self.path:
            sizes = {name: len(content) for name, content in self.files.items()}
            self.answer([{"type": "file", "path": name, "size": size, "oid": COMMIT} for name, size in sizes.items()])
            return
        if self.path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in self.files]
            self.answer({"id": REPOSITORY, "sha": COMMIT, "siblings": siblings})
            return
        content = self.files.get(self.path.partition("/resolve/")[2].partition("/")[2])
        if content is None:
            self.send_error(404)
        else:
            self.answer(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=COMMIT)

    def do_HEAD(self) -> None:
        self.do_GET()


@pytest.fixture
def environment(tmp_path):
    """The variables with which the client uses this hub."""
    Hub.files.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    online = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_TOKEN": "hf_any"}
    yield ENVIRONMENT | online | {"HF_HOME": str(tmp_path / "cache"), "no_proxy": "127.0.0.1"}
    server.shutdown()
    server.server_close()


def test_a_run_and_a_correction_come_back_from_the_hub(runs, environment, tmp_path, monkeypatch):
    def example(*arguments) -> str:
        command = [sys.executable, EXAMPLES / "share_on_hub.py", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    run = runs("separate")
    model = DualEncoder.from_pretrained(run / "model")
    gallery = model.encode_texts(texts())
    fix = PopularityCorrection(strength=1.0).fit(gallery[:50], gallery, items=True)
    fix.save(tmp_path / "fix.safetensors")
    example("push", run, tmp_path / "fix.safetensors", REPOSITORY)
    assert example("load", REPOSITORY).splitlines() == [repr(model), repr(fix)]

    # Now from the cache, without a network.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    load = runpy.run_path(str(EXAMPLES / "share_on_hub.py"))["load"]
    loaded, correction = load(REPOSITORY)
    assert torch.equal(loaded.encode_texts(texts()), gallery)
    assert torch.equal(correction.bias(gallery), fix.bias(gallery))
