"""A server that sends the replies that a test gives it, such as errors that a real server rarely
sends.

```python
with Responder() as server:
    server.script = lambda words: b"-LOADING Redis is loading the dataset in memory\r\n"
```
It answers the handshake as Redis does. `script` returns the reply to EVALSHA and EVAL, or None for
no reply. By default it admits, with the right guard. `calls` holds every script call as it was
received.
"""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import hiredis

if TYPE_CHECKING:
    from typing_extensions import Self

Words = list[bytes]
Answer = Callable[[Words], "bytes | None"]


def guard_of(words: Words) -> bytes:
    """Return the guard of a script call: the first argument after the keys."""
    return words[3 + int(words[2])]


def admitting(words: Words, guard: bytes | None = None, now_ms: int | None = None) -> bytes:
    """Return the reply to an acquire that is admitted."""
    now = int(time.time() * 1000) if now_ms is None else now_ms
    return b"*3\r\n$20\r\n%s\r\n:9\r\n:%d\r\n" % (guard or guard_of(words), now)


class Responder:
    """Listens on `port` of 127.0.0.1."""

    def __init__(self, script: Answer = admitting) -> None:
        self.script = script
        self.calls: list[Words] = []
        self.asked: list[Words] = []
        """All other commands that were received: the handshake."""
        self.connections = 0
        self.version = "7.0.15"
        self.serves: Responder = self
        """The node of all slots, by this one's map of a cluster."""
        self.last_slot = 16383
        """The last slot of that map."""
        self._server: Any = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def answer(self, words: Words) -> bytes | None:
        verb = words[0].upper()
        if verb in (b"EVALSHA", b"EVAL"):
            self.calls.append(words)
            return self.script(words)
        self.asked.append(words)
        if verb == b"TIME":
            now = time.time()
            seconds, micro = b"%d" % now, b"%06d" % (now % 1 * 1_000_000)
            return b"*2\r\n$%d\r\n%s\r\n$6\r\n%s\r\n" % (len(seconds), seconds, micro)
        if verb == b"INFO":
            info = f"redis_version:{self.version}".encode()
            return b"$%d\r\n%s\r\n" % (len(info), info)
        if verb == b"CLUSTER":
            to = self.last_slot, self.serves.port
            return b"*1\r\n*3\r\n:0\r\n:%d\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % to
        if verb == b"COMMAND":
            return b"*0\r\n"
        if verb == b"ROLE":
            return b"*1\r\n$6\r\nmaster\r\n"
        return b"+OK\r\n"

    def start(self) -> Self:
        responder = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                responder.connections += 1
                reader = hiredis.Reader()
                try:
                    while data := self.request.recv(65_536):
                        reader.feed(data)
                        while (words := reader.gets()) is not False:
                            if (reply := responder.answer(words)) is not None:
                                self.request.sendall(reply)
                except OSError:
                    return

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 100

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()
        return self

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
