"""The handshake on a new connection, which is the same for both kinds of connections."""

from __future__ import annotations

import pytest
from redis.exceptions import NoPermissionError, ResponseError

from distwindow import ConfigurationError
from distwindow.stores.redis.handshake import HandshakeResult, handshake
from distwindow.stores.redis.outcome import RawReply
from distwindow.stores.redis.topology import CallSettings, Node
from tests.clock_and_stores import ManualClock

INFO = ("INFO", "server")
TIME = ("TIME",)
REPLIES: dict[tuple[str, ...], RawReply] = {
    INFO: b"# Server\r\nredis_version:7.0.15\r\n",
    TIME: [b"1700000000", b"250999"],
}


def node_of(clock: ManualClock, *, client_clock: bool = False) -> Node:
    return Node("node", lambda: None, CallSettings(clock, 1.0, client_clock))


def run_handshake(
    node: Node, clock: ManualClock, **replies: RawReply
) -> tuple[list[tuple[str, ...]], HandshakeResult]:
    """Return the commands of a handshake, each of which takes 50 ms, and its result."""
    asked = []
    steps = handshake(node, clock)
    try:
        words = next(steps)
        while True:
            asked.append(words)
            clock.move(50)
            words = steps.send(replies.get(words[0], REPLIES[words]))
    except StopIteration as end:
        return asked, end.value


def test_version_and_time_are_read_and_the_version_once() -> None:
    clock = ManualClock()
    node = node_of(clock)
    asked, result = run_handshake(node, clock)
    assert asked == [INFO, TIME]
    assert result.now_ms == 1_700_000_000_250
    assert result.at == clock.monotonic()
    assert result.round_trip_s == pytest.approx(0.05)
    asked, _ = run_handshake(node, clock)
    assert asked == [TIME]


def test_with_the_clients_clock_no_time_is_read() -> None:
    clock = ManualClock()
    node = node_of(clock, client_clock=True)
    asked, result = run_handshake(node, clock)
    assert asked == [INFO]
    assert result.now_ms is None
    assert result.round_trip_s == 0.0
    assert run_handshake(node, clock)[0] == []


def test_info_may_be_forbidden_but_time_may_not() -> None:
    clock = ManualClock()
    forbidden = NoPermissionError("NOPERM this user has no permissions")
    asked, _ = run_handshake(node_of(clock), clock, INFO=forbidden)
    assert asked == [INFO, TIME]
    with pytest.raises(ResponseError) as caught:
        run_handshake(node_of(clock), clock, TIME=forbidden)
    assert caught.value is forbidden


def test_an_old_server_is_refused_each_time() -> None:
    clock = ManualClock()
    node = node_of(clock)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"Redis 6\.0, which is too old"):
            run_handshake(node, clock, INFO=b"redis_version:6.0.16")


def test_the_result_is_noted_on_the_node() -> None:
    clock = ManualClock()
    node = node_of(clock)
    node.on_connect_failed("refused", clock.monotonic(), slow=True)
    assert node.unavailable_reason() == "refused"
    assert node.clock.last_reply is None
    _, result = run_handshake(node, clock)
    clock.move(1000)
    result.apply(node)
    assert node.unavailable_reason() is None
    assert node.clock.new_stamp(result.at).startswith(b"1700000000250.")
