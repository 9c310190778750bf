"""The proxy of the tests causes the faults that it is told to, as other tests rely on them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import pytest
import redis

from tests.servers import (
    Blackhole,
    Delay,
    DropReply,
    Fault,
    Pass,
    Proxy,
    Refuse,
    ResetAfterSend,
    ResetBeforeSend,
    Silent,
    Standalone,
    Trickle,
    until,
)
from tests.servers.plain_client import plain


@pytest.fixture
def line(proxy: Proxy) -> Iterator[redis.Redis]:
    """Yield a client that is connected through the proxy already, so that faults affect only its
    commands.
    """
    with plain(proxy.url, socket_timeout=0.3) as client:
        client.ping()
        yield client


@pytest.fixture
def direct(standalone: Standalone) -> Iterator[redis.Redis]:
    with standalone.client() as client:
        yield client


def test_pass_forwards_and_counts(proxy: Proxy, line: redis.Redis, prefix: str) -> None:
    up, down = proxy.bytes_up, proxy.bytes_down
    assert line.set(prefix, "x" * 1000)
    assert line.get(prefix) == b"x" * 1000
    assert proxy.bytes_up - up > 1000
    assert proxy.bytes_down - down > 1000
    assert proxy.accepted == proxy.open == 1
    line.close()
    until(lambda: proxy.open == 0, what="the proxy sees the client leave")


def test_large_values_pass(proxy: Proxy, line: redis.Redis, prefix: str) -> None:
    value = os.urandom(3_000_000)
    line.set(prefix, value)
    assert line.get(prefix) == value
    line.delete(prefix)


@pytest.mark.parametrize("fault", [Delay(requests=0.15), Delay(replies=0.15)])
def test_delay_delays_requests_and_replies(proxy: Proxy, line: redis.Redis, fault: Delay) -> None:
    with proxy.inject(fault):
        begun = time.monotonic()
        assert line.ping()
        assert time.monotonic() - begun >= 0.15
    shortest = 1.0
    for _ in range(20):  # a busy machine may delay one of them
        begun = time.monotonic()
        assert line.ping()
        shortest = min(shortest, time.monotonic() - begun)
    assert shortest < 0.1


@pytest.mark.slow
def test_a_delayed_request_is_dropped_with_its_connection(
    proxy: Proxy, line: redis.Redis, direct: redis.Redis, prefix: str
) -> None:
    with proxy.inject(Delay(requests=8)), pytest.raises(redis.TimeoutError):
        line.incr(prefix)
    assert direct.get(prefix) is None
    assert line.ping()


@pytest.mark.slow
def test_blackhole_stays_on_its_connection_when_lifted(proxy: Proxy) -> None:
    with socket.create_connection((proxy.host, proxy.port)) as raw:
        raw.settimeout(0.2)
        raw.sendall(b"PING\r\n")
        assert raw.recv(64) == b"+PONG\r\n"
        with proxy.inject(Blackhole()):
            raw.sendall(b"PING\r\n")
            with pytest.raises(TimeoutError):
                raw.recv(64)
        raw.sendall(b"PING\r\n")
        with pytest.raises(TimeoutError):
            raw.recv(64)


@pytest.mark.slow
def test_a_blackhole_without_connects_drops_the_packets_of_new_connections(proxy: Proxy) -> None:
    with plain(proxy.url, socket_timeout=0.3) as client, proxy.inject(Blackhole(connects=False)):
        with pytest.raises(redis.TimeoutError):
            client.ping()
    with plain(proxy.url) as client:
        assert client.ping()


def test_silent_accepts_and_never_replies(proxy: Proxy) -> None:
    proxy.fault = Silent()
    with socket.create_connection((proxy.host, proxy.port)) as raw:
        raw.settimeout(0.2)
        raw.sendall(b"PING\r\n")
        with pytest.raises(TimeoutError):
            raw.recv(64)
    assert proxy.bytes_up == 0
    proxy.fault = Pass()
    with plain(proxy.url) as client:
        assert client.ping()


def test_refuse_and_listen_again(proxy: Proxy, line: redis.Redis) -> None:
    port = proxy.port
    with proxy.inject(Refuse()):
        with pytest.raises(redis.ConnectionError):
            line.ping()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((proxy.host, port))
    assert proxy.port == port
    assert line.ping()


@pytest.mark.parametrize(
    ("fault", "error", "held"),
    [
        (Blackhole(), redis.TimeoutError, None),
        (ResetBeforeSend(times=1), redis.ConnectionError, None),
        (ResetAfterSend(times=1), redis.ConnectionError, "1"),
        (DropReply(), redis.TimeoutError, "1"),
        # The end comes before the client's timeout, which would be a `TimeoutError`.
        (DropReply(close=True), redis.ConnectionError, "1"),
    ],
)  # fmt: skip
def test_a_request_is_executed_or_not(
    proxy: Proxy, line: redis.Redis, direct: redis.Redis, prefix: str, fault: Fault,
    error: type[Exception], held: str | None,
) -> None:  # fmt: skip
    with proxy.inject(fault), pytest.raises(error):
        line.incr(prefix)
    until(lambda: direct.get(prefix) == held, 1, what="what the server has executed")
    assert proxy.affected == 1
    dropped = isinstance(fault, DropReply) and len(b":1\r\n")
    assert isinstance(fault, ResetAfterSend) or proxy.dropped_bytes == int(dropped)
    assert line.incr(prefix) == int(held or 0) + 1  # redis-py connects again


def test_a_reset_is_a_reset_and_not_an_end(proxy: Proxy) -> None:
    proxy.fault = ResetBeforeSend()
    with socket.create_connection((proxy.host, proxy.port)) as raw:
        raw.sendall(b"PING\r\n")
        with pytest.raises(ConnectionResetError):
            raw.recv(64)


def test_a_fault_affects_only_the_named_commands_and_so_many_times(
    proxy: Proxy, prefix: str
) -> None:
    proxy.fault = DropReply(only=b"INCR", times=2, close=True)
    with plain(proxy.url) as client:
        for _ in range(2):
            assert client.ping()
            with pytest.raises(redis.ConnectionError):
                client.incr(prefix)
        assert client.incr(prefix) == 3
    assert proxy.affected == 2


def test_trickle_sends_single_bytes(proxy: Proxy) -> None:
    proxy.fault = Trickle(pause=0.01)
    with socket.create_connection((proxy.host, proxy.port)) as raw:
        raw.sendall(b"PING\r\n")
        pieces: list[bytes] = []
        while b"".join(pieces) != b"+PONG\r\n":
            pieces.append(raw.recv(64))
    # On a busy machine two bytes may arrive together now and then.
    assert len(pieces) >= 5


def test_cut_resets_every_open_connection(proxy: Proxy) -> None:
    raws = [socket.create_connection((proxy.host, proxy.port)) for _ in range(3)]
    until(lambda: proxy.open == 3, what="accepted")
    proxy.cut()
    for raw in raws:
        with raw, pytest.raises(ConnectionResetError):
            raw.recv(1)
    until(lambda: proxy.open == 0, what="closed")


def test_stopping_the_proxy_with_open_connections_leaves_nothing(standalone: Standalone) -> None:
    with Proxy(standalone.port) as link:
        raw = socket.create_connection((link.host, link.port))
        until(lambda: link.open == 1, what="accepted")
    with raw, pytest.raises(ConnectionResetError):
        raw.recv(1)
    assert link.open == 0


def test_a_proxy_can_end_tls(standalone: Standalone, tls_server: Standalone) -> None:
    context = tls_server._make_certificates().server_context()
    with Proxy(standalone.port, tls=context) as front:
        with plain(front.url, ssl_ca_certs=str(tls_server.ca)) as client:
            assert client.ping()
            with front.inject(ResetBeforeSend()), pytest.raises(redis.ConnectionError):
                client.ping()
