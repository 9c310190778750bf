"""A certificate authority for tests, and a server certificate for the loopback interface."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme


class Certificates:
    """Files in `folder`: `ca` (what a client trusts), `cert` and `key` (what the server shows)."""

    def __init__(self, folder: Path) -> None:
        self.ca = folder / "ca.pem"
        self.cert = folder / "server.pem"
        self.key = folder / "server.key"
        authority = trustme.CA()
        server = authority.issue_cert("localhost", "127.0.0.1")
        authority.cert_pem.write_to_path(str(self.ca))
        server.private_key_pem.write_to_path(str(self.key))
        for blob in server.cert_chain_pems:
            blob.write_to_path(str(self.cert), append=True)

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)
        return context
