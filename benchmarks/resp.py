"""The least client that there can be: a socket, packed commands, parsed replies."""

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
    """One command in RESP."""
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
        # Blocking in the kernel: a Python timeout would add a poll to every exchange.
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
        """One command; an error reply is raised."""
        (reply,) = self.pipeline([pack(*words)])
        if isinstance(reply, hiredis.ReplyError):
            raise RuntimeError(f"{words[0]}: {reply}")
        return reply

    def pipeline(self, commands: Sequence[bytes], chunk: int = 200) -> list[Any]:
        """Many packed commands, a chunk at a time (neither side's buffer fills up)."""
        replies: list[Any] = []
        for at in range(0, len(commands), chunk):
            part = commands[at : at + chunk]
            self._socket.sendall(b"".join(part))
            replies += [self._next() for _ in part]
        return replies

    def exchange(self, command: bytes) -> bytes:
        """One short command and its reply as it comes: the floor of any client's round trip."""
        self._socket.sendall(command)
        return self._socket.recv(4096)

    def info(self, part: str) -> dict[str, str]:
        text: str = self.call("INFO", part).decode()
        return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)

    def _next(self) -> Any:
        while (reply := self._reader.gets()) is False:
            data = self._socket.recv(65536)
            if not data:
                raise ConnectionError("the server closed the connection")
            self._reader.feed(data)
        return reply
