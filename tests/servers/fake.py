"""fakeredis on a TCP port."""

from __future__ import annotations

import threading
from typing import Any

import redis
from fakeredis import TcpFakeServer

from tests.servers.wait import Started


class _ErrorsAsReplies:
    """A client's connection inside fakeredis that returns an error reply instead of raising it.

    If a connection raises an error, the handler of fakeredis's TCP server sends it and then closes
    the client's socket. Redis keeps the socket open after an error reply, and distwindow depends on
    that: the first call of a script gets NOSCRIPT, and sends the script on the same connection.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def read_response(self) -> Any:
        try:
            return self._connection.read_response()
        except redis.ResponseError as exc:
            return exc


class FakeServer(Started):
    """fakeredis's TCP server in a thread of this process. `version` is the version of Redis that it
    imitates.
    """

    def __init__(self, version: tuple[int, ...] = (7, 0)) -> None:
        self.version = version
        self.host = "127.0.0.1"
        self.port = 0
        self._server: TcpFakeServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    def _start(self) -> None:
        # With port 0 the system chooses a free port at bind, so no other program can take it first.
        server = TcpFakeServer((self.host, 0), server_version=self.version)
        # Otherwise a client that was not closed would keep this process from ending.
        server.daemon_threads = True
        server.block_on_close = False
        handler = server.RequestHandlerClass

        class Handler(handler):  # type: ignore[misc,valid-type]  # a base known only at run time
            current_client: Any

            def setup(self) -> None:
                super().setup()
                self.current_client = _ErrorsAsReplies(self.current_client)

        server.RequestHandlerClass = Handler
        self.port = server.server_address[1]
        self._server = server
        self._thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None
