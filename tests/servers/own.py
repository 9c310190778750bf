"""A plain server that only some tests use."""

from __future__ import annotations

import os
from collections.abc import Iterator

from tests.servers.binary import NoServer, find_binary
from tests.servers.standalone import Standalone


def own_server(shared_url: str) -> Iterator[str]:
    """Yield the URL of a new server, or `shared_url` where it is given from outside or no process
    can be one. For folders of tests that make very many keys or search a whole server, each of
    which would slow the other one down.
    """
    try:
        find_binary()
    except NoServer:
        yield shared_url
        return
    if "DISTWINDOW_TEST_URL" in os.environ:
        yield shared_url
        return
    with Standalone() as server:
        yield server.url
