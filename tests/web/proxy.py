"""Reverse proxies that append the address of their client to X-Forwarded-For: one for every
machine, and nginx with `$proxy_add_x_forwarded_for`.
"""

from __future__ import annotations

import http.client
import shutil
import socket
import subprocess
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.servers import free_port
from tests.servers.wait import until

if TYPE_CHECKING:
    from typing_extensions import Self


class AppendingProxy:
    """Listens on a free port of all addresses of this machine's loopback. Its own address, for its
    upstream, is `source`.
    """

    def __init__(self, upstream: int, source: str = "") -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                link = http.client.HTTPConnection(
                    "127.0.0.1", upstream, 60, source_address=(source, 0) if source else None
                )
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


APPENDING = """
server {
    listen 80;
    location / {
        proxy_pass http://127.0.0.1:8000;
        proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
    }
}
"""


def nginx_binary() -> str | None:
    """Return the path of nginx, if it is installed."""
    return shutil.which("nginx") or shutil.which("/usr/sbin/nginx")


class Nginx:
    """nginx in the place of `AppendingProxy`. `config` is what stands in the block `http`, with a
    server on port 80 in front of one on port 8000: both are replaced.
    """

    def __init__(self, upstream: int, config: str = "") -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        config = config or APPENDING
        assert "listen 80;" in config
        assert "127.0.0.1:8000" in config
        self._config = config.replace("127.0.0.1:8000", f"127.0.0.1:{upstream}").replace(
            "listen 80;", f"listen 127.0.0.1:{self.port};"
        )

    def __enter__(self) -> Self:
        program = nginx_binary()
        assert program is not None
        self._folder = tempfile.TemporaryDirectory(prefix="distwindow-nginx-")
        folder = Path(self._folder.name)
        paths = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temporary = " ".join(f"{name}_temp_path {folder}/{name};" for name in paths)
        (folder / "nginx.conf").write_text(
            f"""daemon off; pid {folder}/pid; error_log {folder}/log; events {{}}
            http {{
                access_log off; {temporary}
                {self._config}
            }}"""
        )
        config = str(folder / "nginx.conf")
        self._process = subprocess.Popen(
            [program, "-c", config, "-p", str(folder), "-e", f"{folder}/log"]
        )
        until(self._listens, 30, what="nginx listens")
        return self

    def _listens(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), 10):
            return True

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()


NEEDS_NGINX = pytest.mark.skipif(not nginx_binary(), reason="nginx is not installed")
ProxyType = type[AppendingProxy] | type[Nginx]
PROXIES = pytest.mark.parametrize(
    "proxy_type",
    [
        AppendingProxy,
        pytest.param(Nginx, marks=NEEDS_NGINX),
    ],
)
"""Marks a test that runs behind each."""
