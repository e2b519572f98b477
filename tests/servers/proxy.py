"""A TCP proxy between a client and a server, for faults of the network.

Example::

    with Proxy(redis_server.port) as proxy:
        connection = redis.Redis(port=proxy.port)
        proxy.cut_after_request(containing=b"EVALSHA")
        ...  # the server runs the script, and the client never hears of it
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress

from tests.processes import wait_for
from tests.servers.base import free_port

#: A swallowed reply is over when the server has been silent for so many seconds.
SILENCE = 0.05


class _Link:
    """One client's connection and the one to the server that belongs to it."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.answered = True
        self.swallow = False
        self.last_sent = 0.0
        self.muted = False
        self.seen = b""  # the end of what the client sent last, for a match across two chunks

    def cut(self) -> None:
        """Close both ends at once, what is on the way is lost."""
        for end in (self.client, self.server):
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # a close alone would not wake the threads
            end.close()


class Proxy:
    """Forwards bytes from :attr:`port` to a server on this machine, until told otherwise.

    Arguments:
        target: the server's port.
        patience: a reply waits until the client has been silent for so long, seconds. So each
            round trip is counted as one, however many requests it holds.
    """

    def __init__(self, target: int, *, patience: float = 0.0) -> None:
        self.target = target
        self.patience = patience
        #: Times that replies followed requests; to be read where nothing is on the way.
        self.round_trips = 0
        self.port = free_port()
        #: Replies that were swallowed so far.
        self.swallowed = 0
        self._links: set[_Link] = set()
        self._lock = threading.Lock()
        self._flowing = threading.Event()
        self._flowing.set()
        self._speaking = threading.Event()
        self._speaking.set()
        self._trap: tuple[int, bytes] | None = None
        self._mute: bytes | None = None
        self._listener: socket.socket | None = None

    def through(self, url: str) -> str:
        """Return the *url* of the server as one that leads through the proxy."""
        return url.replace(f":{self.target}/", f":{self.port}/")

    # -- faults -----------------------------------------------------------------------------

    def cut(self) -> None:
        """Cut all connections now; new ones are served."""
        with self._lock:
            links = list(self._links)
        for link in links:
            self._end(link)

    def blackhole(self) -> None:
        """Let nothing through in either direction; connections, also new ones, stay open.

        As on a real network, where TCP repeats what got lost, the bytes arrive after
        :meth:`heal`, even of a client that has given up meanwhile; :meth:`cut` loses them.
        """
        self._flowing.clear()

    def mute_after_request(self, containing: bytes) -> None:
        """Hold back all replies from the first request on that contains these bytes.

        What that client sends still reaches the server; :meth:`heal` lets the replies go.
        """
        with self._lock:
            self._mute = containing
        self._speaking.clear()

    @property
    def muted(self) -> bool:
        """Whether such a request has come."""
        with self._lock:
            return any(link.muted for link in self._links)

    def refuse(self) -> None:
        """Refuse new connections; the ones that are there go on."""
        listener, self._listener = self._listener, None
        if listener:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
            listener.close()

    def heal(self) -> None:
        """End :meth:`blackhole` and :meth:`refuse`, and disarm what waits for a request."""
        with self._lock:
            self._trap = self._mute = None
            for link in self._links:
                link.muted = False
        self._speaking.set()
        self._flowing.set()
        if self._listener is None:
            self._listen()

    def cut_after_request(self, n: int = 1, *, containing: bytes = b"") -> None:
        """Swallow the reply to one request, once: the server has executed it, the client is cut.

        The request goes to the server; when its reply comes, both ends are closed instead.

        Arguments:
            n: which request from now on, counted over all connections. A request begins with
                the first bytes that a client sends after the server's last ones.
            containing: count only what contains these bytes, for example ``b"COMMIT"``.
        """
        with self._lock:
            self._trap = (n, containing)

    def wait_swallowed(self, deadline: float = 10.0, *, count: int = 1) -> None:
        """Wait until *count* replies were swallowed, at most *deadline* seconds."""
        wait_for(lambda: self.swallowed >= count, deadline, f"{count} swallowed replies")

    @property
    def connections(self) -> int:
        """The number of connections that are open now."""
        with self._lock:
            return len(self._links)

    # -- life -------------------------------------------------------------------------------

    def start(self) -> Proxy:
        """Listen and forward."""
        self._listen()
        return self

    def close(self) -> None:
        """Cut everything and stop listening. Twice is fine."""
        self.refuse()
        self.cut()
        self._flowing.set()
        self._speaking.set()

    def __enter__(self) -> Proxy:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- threads ----------------------------------------------------------------------------

    def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=512)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client = listener.accept()[0]
            except OSError:  # refuse() has closed it
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target), 5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = _Link(client, server)
            with self._lock:
                self._links.add(link)
            for pump in (self._upward, self._downward):
                threading.Thread(target=pump, args=(link,), daemon=True).start()

    def _upward(self, link: _Link) -> None:
        with suppress(OSError):
            while data := link.client.recv(65536):
                self._flowing.wait()
                link.muted = link.muted or self._silences(data)
                link.swallow = link.swallow or self._springs(link, data)
                link.answered = False
                link.last_sent = time.monotonic()
                link.server.sendall(data)
            self._flowing.wait()
            link.server.shutdown(socket.SHUT_WR)
            return
        self._end(link)

    def _downward(self, link: _Link) -> None:
        with suppress(OSError):
            while data := link.server.recv(65536):
                if link.swallow:
                    self._swallow(link)
                    break
                self._flowing.wait()
                if link.muted:
                    self._speaking.wait()
                while (rest := link.last_sent + self.patience - time.monotonic()) > 0:
                    time.sleep(rest)
                self.round_trips += not link.answered
                link.answered = True
                link.client.sendall(data)
            self._flowing.wait()
        self._end(link)

    def _silences(self, data: bytes) -> bool:
        with self._lock:
            return self._mute is not None and self._mute in data

    def _springs(self, link: _Link, data: bytes) -> bool:
        """Return whether these bytes of a client are the ones that the trap waits for."""
        with self._lock:
            if self._trap is None:
                return False
            left, containing = self._trap
            begins = link.answered if not containing else containing in link.seen + data
            link.seen = (link.seen + data)[-len(containing) + 1 :] if len(containing) > 1 else b""
            if not begins:
                return False
            self._trap = (left - 1, containing) if left > 1 else None
            return left == 1

    def _swallow(self, link: _Link) -> None:
        link.server.settimeout(SILENCE)
        with suppress(TimeoutError):
            while link.server.recv(65536):
                pass
        self._end(link)
        self.swallowed += 1

    def _end(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)
        link.cut()
