"""An exception that a signal handler raises during a call reaches the caller unchanged, whatever
its type: here of all that distwindow catches for its own reasons.
"""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from distwindow import Limiter, StoreTimeout
from distwindow.stores.redis.call_sharing import CallGroup, GroupMember, InFlightCall
from tests.local.interrupted import PLENTY, SCRIPT, raised_after, subclass
from tests.servers import Proxy
from tests.servers.faults import Delay, Silent

KINDS = [Exception, TimeoutError, OSError, RuntimeError, RedisTimeoutError, RedisConnectionError,
         StoreTimeout, KeyboardInterrupt, KeyError, TypeError, ValueError, IndexError,
         BlockingIOError]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_arrives_unchanged_while_connecting(
    proxy: Proxy, prefix: str, kind: type[BaseException]
) -> None:
    expected = subclass(kind)
    with Limiter(proxy.url, PLENTY, prefix=prefix, timeout=5) as limiter:
        with proxy.inject(Silent()), raised_after(0.05, expected):
            with pytest.raises(kind) as caught:
                limiter.try_acquire("k")
        assert caught.value is expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["direct", "leased"])
def test_an_exception_arrives_unchanged_while_a_reply_is_awaited(
    proxy: Proxy, prefix: str, kind: type[BaseException], mode: Any
) -> None:
    expected = subclass(kind)
    with Limiter(proxy.url, PLENTY, prefix=prefix, timeout=5, consistency=mode) as limiter:
        limiter.try_acquire("k")
        with proxy.inject(Delay(only=SCRIPT, replies=0.3)), raised_after(0.05, expected):
            with pytest.raises(kind) as caught:
                limiter.try_acquire("k")
        assert caught.value is expected
        assert limiter.try_acquire("k")


def endless(limiter: Limiter) -> None:
    while True:
        limiter.try_acquire("k")


def test_an_exception_arrives_unchanged_over_tls(tls_url: str, prefix: str) -> None:
    expected = subclass(TimeoutError)
    with Limiter(tls_url, PLENTY, prefix=prefix, timeout=5) as limiter:
        with raised_after(0.05, expected), pytest.raises(TimeoutError) as caught:
            endless(limiter)
        assert caught.value is expected
        assert limiter.try_acquire("k")


def test_a_slow_connection_is_taken_over_after_an_interruption(proxy: Proxy, prefix: str) -> None:
    """The interrupted caller was waiting for a thread that connects; the next caller waits for the
    same one.
    """
    with Limiter(proxy.url, PLENTY, prefix=prefix, timeout=5) as limiter:
        for _ in range(5):
            with proxy.inject(Delay(replies=0.1)), raised_after(0.03, subclass(Exception)):
                with pytest.raises(Exception, match="too slow"):
                    limiter.try_acquire("k")
        assert limiter.try_acquire("k")


def test_members_get_their_shares_of_a_reply_that_has_arrived() -> None:
    """The leader is interrupted while it hands out the shares."""
    group, members = CallGroup(), [GroupMember(InFlightCall(5.0)) for _ in range(3)]
    for member in members:
        group.join(member)
    assert group.close() is members[0]
    group.sent = True
    group._shares = [(7, 1), (6, 1), (5, 1)]
    group.fail(KeyboardInterrupt())
    assert [member.share() for member in members] == [(7, 1), (6, 1), (5, 1)]
    assert members[1].wait(0.0)
