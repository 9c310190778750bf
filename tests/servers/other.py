"""A server that is no Redis: it sends what another one would send, whatever is asked."""

from __future__ import annotations

import socketserver
import ssl
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from typing_extensions import Self


class Manner(NamedTuple):
    """How a server answers on a new connection."""

    banner: bytes = b""
    """It is sent at once."""
    answer: bytes = b""
    """It is sent after the first bytes that were received."""
    after: bytes = b""
    """It is waited for before the answer: the end of the head of a request."""
    silent_s: float = 0.0
    """Seconds for which the connection stays open then."""


HTTP = Manner(answer=b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
HTTP_AFTER_HEAD = HTTP._replace(after=b"\r\n\r\n")
"""As h11, and so uvicorn, which reads the whole head first."""
HTTP_WITHOUT_STATUS = Manner(answer=b'<!DOCTYPE HTML>\n<html lang="en">')
"""As `http.server`, for a first line that it cannot read."""
SMTP = Manner(banner=b"220 mail.example ESMTP Postfix\r\n", silent_s=5)
SSH = Manner(banner=b"SSH-2.0-OpenSSH_9.2\r\n", silent_s=5)
IMAP = Manner(banner=b"* OK [CAPABILITY IMAP4rev1] Dovecot ready.\r\n", silent_s=5)
MYSQL = Manner(banner=b"\x4a\0\0\0\x0a8.0.36\0\x08\0\0\0", silent_s=5)
MEMCACHED = Manner(answer=b"ERROR\r\n", silent_s=5)
GRPC = Manner(banner=b"\0\0\x06\x04\0\0\0\0\0\0\x05\0\0\x40\0", silent_s=5)
BLANK = Manner()
"""As a load balancer without a server behind it."""
SILENT = Manner(silent_s=5)


class OtherServer:
    """Answers in one manner on a free port of 127.0.0.1, or on `port`."""

    def __init__(self, manner: Manner, *, tls: ssl.SSLContext | None = None, port: int = 0) -> None:
        stopped = threading.Event()
        self.received: list[bytes] = []
        """The first bytes of each connection."""

        def handle(request: Any) -> None:
            with suppress(OSError):
                sock = request if tls is None else tls.wrap_socket(request, server_side=True)
                sock.sendall(manner.banner)
                received = b"" if manner.banner else sock.recv(4096)
                self.received.append(received)
                while manner.after not in received:
                    received += sock.recv(4096) or manner.after
                sock.sendall(manner.answer)
                stopped.wait(manner.silent_s)
                if sock is not request:
                    sock.close()

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                handle(self.request)

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

        self._stopped = stopped
        self._server = Server(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.05])

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
