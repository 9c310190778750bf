"""A minimal Redis client: a socket, packed commands, parsed replies."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import hiredis

if TYPE_CHECKING:
    from typing_extensions import Self

NOOP = "return 1"
NOOP_SHA = hashlib.sha1(NOOP.encode(), usedforsecurity=False).hexdigest()


def pack(*words: object) -> bytes:
    """Return one command in RESP."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        raw = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%s\r\n" % (len(raw), raw))
    return b"".join(parts)


class Socket:
    """A blocking connection to 127.0.0.1."""

    def __init__(self, port: int, timeout: float | None = 30) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A timeout would make Python call poll before every send and receive.
        self._socket.settimeout(None)
        self._reader = hiredis.Reader()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def call(self, *words: object) -> Any:
        """Send one command, and return its reply; raise an error reply."""
        (reply,) = self.pipeline([pack(*words)])
        if isinstance(reply, hiredis.ReplyError):
            raise RuntimeError(f"{words[0]}: {reply}")
        return reply

    def pipeline(self, commands: Sequence[bytes], chunk: int = 200) -> list[Any]:
        """Send packed commands and return their replies, by chunks that fit the socket buffers."""
        replies: list[Any] = []
        for at in range(0, len(commands), chunk):
            part = commands[at : at + chunk]
            self._socket.sendall(b"".join(part))
            replies += [self._next() for _ in part]
        return replies

    def send(self, command: bytes) -> None:
        """Send a packed command; `receive` returns its reply."""
        self._socket.sendall(command)

    def receive(self) -> Any:
        """Return the next reply."""
        return self._next()

    def exchange(self, command: bytes) -> bytes:
        """Send one short command and return its unparsed reply, as fast as a round trip can be."""
        self._socket.sendall(command)
        return self._socket.recv(4096)

    def info(self, part: str) -> dict[str, str]:
        text: str = self.call("INFO", part).decode()
        return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)

    def sizes(self) -> dict[bytes, int]:
        """Return the bytes of each key."""
        return {
            name: self.call("MEMORY", "USAGE", name, "SAMPLES", 0)
            for name in self.call("KEYS", "*")
        }

    def script_calls(self) -> tuple[int, int]:
        """Return how many scripts were called, and their µs with all commands that they call."""
        stats = self.info("commandstats")
        lines = [stats[name] for name in ("cmdstat_evalsha", "cmdstat_eval") if name in stats]
        figures = [dict(pair.split("=") for pair in line.split(",")) for line in lines]
        return sum(int(one["calls"]) for one in figures), sum(int(one["usec"]) for one in figures)

    def _next(self) -> Any:
        while (reply := self._reader.gets()) is False:
            data = self._socket.recv(65536)
            if not data:
                raise ConnectionError("the server closed the connection")
            self._reader.feed(data)
        return reply
