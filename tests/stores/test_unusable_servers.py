"""Servers that a limiter cannot use: too old, without the right password or rights, or not of the
kind that the URL says. Each raises one clear error.
"""

from __future__ import annotations

import asyncio
import re
import socketserver
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from distwindow import ConfigurationError, StoreError
from tests.limiter.first_call import SECRET, all_texts_of, attempt, each_limiter, error_of
from tests.servers import Standalone


class OldServer(socketserver.StreamRequestHandler):
    """Answers INFO as Redis 5 would, and all other commands without an error."""

    def handle(self) -> None:
        with suppress(OSError):
            while line := self.rfile.readline():
                words = []
                for _ in range(int(line[1:])):
                    size = int(self.rfile.readline()[1:])
                    words.append(self.rfile.read(size + 2)[:-2].upper())
                self.wfile.write(self.answer(words))

    def answer(self, words: list[bytes]) -> bytes:
        if words[0] == b"INFO":
            info = b"# Server\r\nredis_version:5.0.3\r\nredis_mode:standalone\r\n"
            return b"$%d\r\n%s\r\n" % (len(info), info)
        if words[0] == b"TIME":
            return b"*2\r\n$10\r\n1700000000\r\n$1\r\n0\r\n"
        if words[0].startswith(b"EVAL"):
            return b"-ERR it must not come to this\r\n"
        return b"+OK\r\n"


@each_limiter
def test_a_server_that_is_too_old(limiter_class: type) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), OldServer) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=[0.05])
        thread.start()
        try:
            port = server.server_address[1]
            exc = error_of(limiter_class, f"redis://127.0.0.1:{port}/0")
        finally:
            server.shutdown()
            thread.join()
    assert isinstance(exc, ConfigurationError)
    for text in (str(port), "5.0", "6.2"):
        assert text in str(exc)


@pytest.fixture(scope="module")
def guarded() -> Iterator[Standalone]:
    """Yield a server with a password, and with a user who has almost no rights."""
    with Standalone(password=SECRET, users=[f"reader on >{SECRET} ~* +get +info +time"]) as server:
        yield server


def address(server: Standalone) -> str:
    return f"127.0.0.1:{server.port}"


@each_limiter
def test_a_wrong_password(limiter_class: type, guarded: Standalone) -> None:
    for login in (f":{SECRET}wrong", f"nobody:{SECRET}wrong", f"default:{SECRET}wrong"):
        exc = error_of(limiter_class, f"redis://{login}@{address(guarded)}/0")
        assert isinstance(exc, ConfigurationError)
        assert "password" in str(exc)
        assert address(guarded) in str(exc)
        assert SECRET not in all_texts_of(exc)


@each_limiter
def test_no_password(limiter_class: type, guarded: Standalone) -> None:
    exc = error_of(limiter_class, f"redis://{address(guarded)}/0")
    assert isinstance(exc, ConfigurationError)
    assert re.search("password|[Aa]uth", str(exc))


@each_limiter
def test_too_few_rights(limiter_class: type, guarded: Standalone) -> None:
    exc = error_of(limiter_class, f"redis://reader:{SECRET}@{address(guarded)}/0")
    assert isinstance(exc, ConfigurationError)
    assert re.search("NOPERM|permission", str(exc))
    assert "rights" in str(exc)
    assert SECRET not in all_texts_of(exc)
    with guarded.client() as client:
        assert client.dbsize() == 0


@each_limiter
def test_the_right_password(limiter_class: type, guarded: Standalone) -> None:
    decision = asyncio.run(attempt(limiter_class, guarded.url, "right"))
    assert decision.allowed
    assert SECRET not in repr(decision)
    with guarded.client() as client:
        client.flushdb()


@each_limiter
def test_a_database_that_the_server_does_not_have(limiter_class: type, redis_url: str) -> None:
    exc = error_of(limiter_class, redis_url.rpartition("/")[0] + "/4711")
    assert isinstance(exc, ConfigurationError)
    assert "out of range" in str(exc)


@each_limiter
def test_a_service_that_sentinel_does_not_know(limiter_class: type, sentinel_url: str) -> None:
    url = sentinel_url.replace(sentinel_url.rstrip("/0").rpartition("/")[2], "nosuchservice")
    exc = error_of(limiter_class, url, timeout=10)
    assert isinstance(exc, (ConfigurationError, StoreError))
    assert "nosuchservice" in str(exc)


@each_limiter
def test_a_cluster_node_without_the_clusters_url(limiter_class: type, cluster: Any) -> None:
    """The URL of a single node works for the slots of that node; the error for another slot says
    which URL to use.
    """
    url = f"redis://127.0.0.1:{cluster.nodes[0].port}/0"
    messages = []
    for n in range(12):
        try:
            asyncio.run(attempt(limiter_class, url, f"key-{n}"))
        except ConfigurationError as exc:
            messages.append(str(exc))
    assert messages
    assert all("use redis+cluster://" in message for message in messages)
