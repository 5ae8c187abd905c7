"""A web server on 127.0.0.1 that counts requests and fails as it is asked to."""

import contextlib
import threading
from collections.abc import Iterator
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Serves `files`, path -> content.

    Attributes:
        requests: (method, path, Range header or None) of every request.
        ranges: whether parts of files can be requested.
        sizes: whether answers say how long they are.
        cuts: how many of the next downloads break off in the middle.
        go: if set, a download breaks off only after `release`, when the client has read the first half.
        refuse: path -> (status, how many times).
        pause: if set, downloads stop in the middle until it is cleared.

    """

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.requests = files, []
        self.ranges, self.sizes, self.cuts = True, True, 0
        self.refuse: dict[str, tuple[int, int]] = {}
        self.go: threading.Semaphore | None = None
        self.pause, self.lock = threading.Event(), threading.Lock()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"

    def gets(self, path: str | None = None) -> list[tuple[str, str, str | None]]:
        return [row for row in self.requests if row[0] == "GET" and path in (None, row[1])]

    def handle_error(self, request, client_address) -> None:
        """Say nothing: clients that go away are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        server, path = self.server, self.path.partition("?")[0]
        with server.lock:
            server.requests.append((self.command, path, self.headers.get("Range")))
            status, times = server.refuse.get(path, (0, 0))
            if times:
                server.refuse[path] = (status, times - 1)
            cut = bool(body and server.cuts)
            server.cuts -= cut
        if times:
            self.send_error(status)
            return
        if path not in server.files:
            self.send_error(404)
            return
        content, begin, end = server.files[path], 0, None
        etag = md5(content).hexdigest()
        if server.ranges and self.headers.get("Range"):
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            begin, end = int(first), int(last) + 1 if last else None
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{(end or len(content)) - 1}/{len(content)}")
        else:
            self.send_response(200)
        content = content[begin:end]
        self.send_header("ETag", f'"{etag}"')
        if server.sizes:
            self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        if not body:
            return
        half = len(content) // 2
        self.wfile.write(content[:half])
        self.wfile.flush()
        if cut:
            if server.go is not None:
                server.go.acquire(timeout=60)
            self.connection.close()
            return
        while server.pause.is_set():
            threading.Event().wait(0.01)
        self.wfile.write(content[half:])


@contextlib.contextmanager
def serve(files: dict[str, bytes]) -> Iterator[Server]:
    """Serve files during the block."""
    server = Server(files)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.pause.clear()
        server.shutdown()
        server.server_close()
