"""A reverse proxy that appends the address of its client to X-Forwarded-For, as nginx does with
`$proxy_add_x_forwarded_for`.
"""

from __future__ import annotations

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class AppendingProxy:
    """Listens on a free port of all addresses of this machine's loopback."""

    def __init__(self, upstream: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                link = http.client.HTTPConnection("127.0.0.1", upstream, 60)
                before = self.headers.get_all("X-Forwarded-For") or []
                chain = ", ".join([*before, self.client_address[0]])
                link.request("GET", self.path, headers={"X-Forwarded-For": chain})
                answer = link.getresponse()
                body = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)
                link.close()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # its name
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
