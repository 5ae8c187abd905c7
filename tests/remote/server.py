"""A web server on 127.0.0.1 that counts requests and fails as it is asked to."""

import contextlib
import threading
from collections.abc import Iterator
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Serves `files`, path -> content.

    Attributes:
        requests: (method, path) of every request.
        sizes: whether answers say how long they are.
        cuts: how many of the next downloads break off in the middle.
        refuse: path -> (status, how many times).

    """

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.requests: list[tuple[str, str]] = []
        self.sizes = True
        self.cuts = 0
        self.refuse: dict[str, tuple[int, int]] = {}
        self.lock = threading.Lock()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"

    def gets(self) -> list[str]:
        return [path for method, path in self.requests if method == "GET"]

    def handle_error(self, request, client_address) -> None:
        """Say nothing: clients that go away are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        pass

    def do_GET(self) -> None:
        server, path, body = self.server, self.path.partition("?")[0], self.command == "GET"
        with server.lock:
            server.requests.append((self.command, path))
            status, times = server.refuse.get(path, (0, 0))
            if times:
                server.refuse[path] = (status, times - 1)
            cut = bool(body and server.cuts)
            server.cuts -= cut
        if times or path not in server.files:
            self.send_error(status if times else 404)
            return
        content = server.files[path]
        self.send_response(200)
        self.send_header("ETag", f'"{md5(content).hexdigest()}"')
        if server.sizes:
            self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        if body:
            self.wfile.write(content[: len(content) // 2] if cut else content)

    do_HEAD = do_GET  # noqa: N815


@contextlib.contextmanager
def serve(files: dict[str, bytes]) -> Iterator[Server]:
    """Serve files during the block."""
    server = Server(files)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
