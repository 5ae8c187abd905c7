"""Notice within seconds that another process of the run has ended, also while this process is busy with its own work.

Communication notices a lost process only at the next exchange, which may be minutes away: a long evaluation, a large
step, a page that is being written. Each process therefore keeps a connection to the first one, on which nothing is sent
until the end. The operating system closes the connection of a process that was killed, and the others see that.
"""

import contextlib
import os
import secrets
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

GRACE = 4.0  # seconds in which the program itself may notice the loss, at an exchange
_HELLO = 32  # bytes of the token by which the processes of a run recognize each other
_KEY = "nuclr/peers"
_GOODBYE, _LOST = b"g", b"l"


class PeerWatch:
    """A thread that ends this process with one line if another process ended without saying goodbye.

    Args:
        store: the processes' common store, through which the first one announces its address.
        rank: number of this process.
        world: number of processes.
        describe: gives the line to print. Its argument is the number of the lost process.

    """

    def __init__(self, store: Any, rank: int, world: int, describe: Callable[[int], str]) -> None:
        self._rank, self._describe = rank, describe
        self._stopped = threading.Event()
        self._peers: dict[socket.socket, int] = {}
        self._server: socket.socket | None = None
        # Without a connection (a firewall between the machines), a lost process is noticed at the next exchange.
        with contextlib.suppress(OSError):
            if rank == 0:
                self._listen(store, world)
            else:
                self._connect(store)
        self._thread = threading.Thread(target=self._watch, name="nuclr-peers", daemon=True)
        self._thread.start()

    def stop(self, goodbye: bool) -> None:
        """End the watch; with `goodbye`, the other processes do not count this one as lost."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        for peer in self._peers:
            with contextlib.suppress(OSError):
                if goodbye:
                    peer.sendall(_GOODBYE)
                peer.shutdown(socket.SHUT_RDWR)  # wakes the thread up
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(GRACE)

    def _listen(self, store: Any, world: int) -> None:
        token = secrets.token_bytes(_HELLO)
        self._expected, self._token = world - 1, token
        self._server = socket.create_server(("", 0))
        store.set(_KEY, f"{self._server.getsockname()[1]} {token.hex()}")

    def _connect(self, store: Any) -> None:
        port, token = store.get(_KEY).decode().split()
        peer = socket.create_connection((os.environ.get("MASTER_ADDR", "localhost"), int(port)), timeout=GRACE)
        peer.settimeout(None)
        peer.sendall(bytes.fromhex(token) + self._rank.to_bytes(4))
        self._peers[peer] = 0

    def _accept(self, server: socket.socket) -> None:
        """Accept the other processes. Connections that do not know the token are closed."""
        while self._expected and not self._stopped.is_set():
            peer, _ = server.accept()
            peer.settimeout(GRACE)
            hello = b""
            with contextlib.suppress(OSError):
                while len(hello) < _HELLO + 4 and (part := peer.recv(_HELLO + 4 - len(hello))):
                    hello += part
            if len(hello) == _HELLO + 4 and secrets.compare_digest(hello[:_HELLO], self._token):
                peer.settimeout(None)
                self._peers[peer] = int.from_bytes(hello[_HELLO:])
                self._expected -= 1
            else:
                peer.close()
        server.close()

    def _watch(self) -> None:
        try:
            if self._server is not None:
                self._accept(self._server)
            lost = self._wait()
        except OSError:  # the sockets were closed by `stop`
            return
        if lost is None or self._stopped.is_set():
            return
        if self._rank == 0:  # pass it on: the others are connected only to this process
            for peer in self._peers:
                with contextlib.suppress(OSError):
                    peer.sendall(_LOST + lost.to_bytes(4))
        if not self._stopped.wait(GRACE):
            sys.stderr.write(f"nuclr: {self._describe(lost)}\n")
            sys.stderr.flush()
            os._exit(1)

    def _wait(self) -> int | None:
        """Return the number of the process that was lost, or None if all have said goodbye."""
        with selectors.DefaultSelector() as selector:
            for peer, rank in self._peers.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    connection: Any = key.fileobj
                    try:
                        message = connection.recv(1)
                    except OSError:
                        message = b""
                    if message == _GOODBYE:
                        selector.unregister(connection)
                    elif message == _LOST:
                        return int.from_bytes(connection.recv(4))
                    else:
                        return int(key.data)
        return None
