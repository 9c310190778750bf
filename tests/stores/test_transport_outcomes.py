"""Connections and servers fail: each call is not executed, executed, or of unknown outcome.

Every test checks that the server has counted what was admitted, plus at most one charge for each
call whose outcome is unknown, and that every call ends by its deadline. The file is long because
all kinds of failures are checked in this one way, by the same functions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest

from distwindow import Limiter, StoreError, StoreTimeout, StoreUnavailable
from distwindow.ring.command import ServerClock
from tests.harness import (
    Call,
    Harness,
    LimiterAdapter,
    admin,
    count_outcomes,
    in_time,
    used,
)
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

SCRIPT = b"EVALSHA"

slow = pytest.mark.slow


def warm(limiter: LimiterAdapter, keys: Iterable[str] = ("k",)) -> int:
    """Make the first calls, over a connection without a fault. Return their number."""
    return len(limiter.each([*keys] * 2))


def check_conserved(calls: Iterable[Call], held: int) -> None:
    """Check that nothing was charged twice, that no admission was lost, and that "not charged" is
    true.
    """
    calls = list(calls)
    admitted = sum(call.admitted for call in calls)
    unknown = sum(call.charged is None for call in calls)
    assert admitted <= held <= admitted + unknown, f"{held} of {count_outcomes(calls)}"


def call_until_admitted(limiter: LimiterAdapter, within: float = 1.0) -> list[Call]:
    """Call until one is admitted again. Return these calls."""
    calls: list[Call] = []

    def admitted() -> bool:
        calls.extend(limiter.burst(["k"]))
        assert not isinstance(calls[-1].outcome, BaseException) or isinstance(
            calls[-1].outcome, StoreError
        )
        return calls[-1].admitted

    until(admitted, within, what="a call is admitted")
    return calls


# -- the reply is lost ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lost", [1, 4, *(pytest.param(n, marks=slow) for n in (2, 3, *range(5, 11)))]
)
@pytest.mark.parametrize("way", ["alone", "together"])
def test_a_reply_lost_after_execution_is_charged_once_and_unknown(
    harness: Harness, proxy: Proxy, redis_url: str, prefix: str, lost: int, way: str
) -> None:
    limiter = harness.limiter(proxy.url, prefix=prefix, timeout=10)
    before = warm(limiter)
    with proxy.inject(DropReply(close=True, only=SCRIPT, times=lost)):
        calls = limiter.burst(["k"] * 90, at_once=1 if way == "alone" else 6)
    assert proxy.affected == lost
    unknown = [call for call in calls if call.charged is None]
    assert set(count_outcomes(unknown)) == {"StoreUnavailable"}
    assert len(unknown) == lost if way == "alone" else len(unknown) >= lost
    assert sum(call.charged is False for call in calls) == 0
    with admin(redis_url) as server:
        assert used(server, prefix) == before + len(calls)


@pytest.mark.slow
def test_a_reply_that_never_comes_is_unknown_at_the_deadline(
    harness: Harness, proxy: Proxy, redis_url: str, prefix: str
) -> None:
    limiter = harness.limiter(proxy.url, prefix=prefix, timeout=0.15)
    before = warm(limiter)
    with proxy.inject(DropReply(only=SCRIPT, times=2)):
        calls = limiter.burst(["k"] * 6, at_once=1)
    assert count_outcomes(calls) == {"StoreTimeout": 2, "ok": 4}
    assert {call.charged for call in calls} == {True, None}
    in_time(calls, 0.15)
    with admin(redis_url) as server:
        assert used(server, prefix) == before + 6


@pytest.mark.parametrize(
    ("fault", "executed"),
    [(ResetBeforeSend(only=SCRIPT, times=4), False), (ResetAfterSend(only=SCRIPT, times=4), True)],
    ids=["before the server saw it", "after"],
)
def test_a_reset_after_bytes_were_sent_is_unknown_and_never_repeated(
    harness: Harness, proxy: Proxy, redis_url: str, prefix: str, fault: Fault, executed: bool
) -> None:
    limiter = harness.limiter(proxy.url, prefix=prefix, timeout=10)
    before = warm(limiter)
    with proxy.inject(fault):
        calls = limiter.burst(["k"] * 10, at_once=1)
    assert proxy.affected == 4
    assert count_outcomes(calls) == {"StoreUnavailable": 4, "ok": 6}
    assert [call.charged for call in calls[:4]] == [None] * 4
    with admin(redis_url) as server:
        assert used(server, prefix) == before + (10 if executed else 6)


# -- nothing was sent -----------------------------------------------------------------------------


def test_a_connection_that_ended_between_calls_is_replaced_unnoticed(
    harness: Harness, proxy: Proxy, redis_url: str, prefix: str
) -> None:
    limiter = harness.limiter(proxy.url, prefix=prefix, timeout=10)
    before = warm(limiter)
    for _ in range(5):
        proxy.cut()
        until(lambda: not proxy.open, what="the connection is reset")
        time.sleep(0.02)  # a connection is checked only after some idle ms
        assert limiter.try_acquire("k")
    with admin(redis_url) as server:
        assert used(server, prefix) == before + 5


def test_a_connect_that_fails_once_is_tried_once_more(
    harness: Harness, proxy: Proxy, redis_url: str, prefix: str
) -> None:
    with proxy.inject(ResetBeforeSend(times=1)):
        assert harness.limiter(proxy.url, prefix=prefix, timeout=10).try_acquire("k")
    assert proxy.affected == 1
    with admin(redis_url) as server:
        assert used(server, prefix) == 1


def test_a_connect_that_fails_twice_is_an_error_and_nothing_was_charged(
    harness: Harness, proxy: Proxy, redis_url: str, prefix: str
) -> None:
    limiter = harness.limiter(proxy.url, prefix=prefix, timeout=10)
    with proxy.inject(ResetBeforeSend()):
        (call,) = limiter.burst(["k"])
    assert count_outcomes([call]) == {"StoreUnavailable": 1}
    assert call.charged is False
    # Two attempts, and between them a look at what answers there: in plain, and with TLS.
    assert proxy.affected == 4
    call_until_admitted(limiter)
    with admin(redis_url) as server:
        assert used(server, prefix) == 1


def test_a_connect_that_has_failed_since_the_last_call_is_tried_again(
    proxy: Proxy, prefix: str
) -> None:
    """The outage in which it failed may be over. (With asyncio no call waits for an old one.)"""
    with Limiter(proxy.url, "5/hour", prefix=prefix, timeout=0.2) as limiter:
        limiter.try_acquire("k")
        store: Any = limiter._store
        connection = store._connections.connection_to(store._topology.node)
        with proxy.inject(Silent()):
            proxy.cut()
            with pytest.raises(StoreTimeout, match="surely not executed; where no call"):
                limiter.try_acquire("k")
            left_opening = connection._opening
            assert left_opening.wait(20)
            assert left_opening.failure is not None
        until(lambda: connection.node.unavailable_reason() is None)
        raw = connection._open(connection._clock.monotonic() + 20)
        assert raw is None
        assert limiter.try_acquire("k").remaining == 3


@pytest.mark.compat
def test_refused_connections_fail_fast_until_the_server_is_back(
    harness: Harness, proxy: Proxy, redis_url: str, prefix: str
) -> None:
    limiter = harness.limiter(proxy.url, prefix=prefix, timeout=10)
    calls = limiter.burst(["k"] * 2, at_once=1)
    proxy.fault = Refuse()
    down = limiter.burst(["k"] * 40, at_once=4)
    proxy.fault = Pass()
    assert set(count_outcomes(down)) == {"StoreUnavailable"}
    # Only calls in flight when the connection broke can have an unknown outcome.
    assert sum(call.charged is None for call in down) <= 4
    assert sorted(call.seconds for call in down)[len(down) // 2] < 0.1
    calls += down + call_until_admitted(limiter)
    with admin(redis_url) as server:
        check_conserved(calls, used(server, prefix))


# -- hangs ----------------------------------------------------------------------------------------

HANGS: dict[str, Fault] = {
    "accepts and never speaks": Silent(),
    "blackhole": Blackhole(),
    "blackhole for scripts": Blackhole(only=SCRIPT),
    "one byte at a time": Trickle(pause=0.05),
    "slow replies": Delay(replies=1.0),
    "slow requests": Delay(requests=1.0),
    "mute": DropReply(),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "standing", [pytest.param(True, id="standing"), pytest.param(False, id="new", marks=slow)]
)
@pytest.mark.parametrize(
    "hang",
    [hang if hang == "blackhole" else pytest.param(hang, marks=slow) for hang in HANGS],
)
def test_every_call_ends_by_its_deadline_and_later_calls_succeed(
    harness: Harness, proxy: Proxy, redis_url: str, prefix: str, hang: str, standing: bool
) -> None:
    timeout = 0.2
    limiter = harness.limiter(proxy.url, prefix=prefix, timeout=timeout)
    calls = limiter.burst(["k"] * 2, at_once=1) if standing else []
    proxy.fault = HANGS[hang]
    if standing and hang == "accepts and never speaks":
        proxy.cut()
    slow = limiter.burst(["k", "j"] * 3, at_once=2)
    proxy.fault = Pass()
    if hang == "blackhole for scripts" or not hang.startswith("accepts"):
        assert "ok" not in count_outcomes(slow)
    assert all(isinstance(call.outcome, StoreError) for call in slow)
    in_time(slow, timeout)
    calls += slow + call_until_admitted(limiter)
    time.sleep(0.05)  # a late request that the proxy still forwards is counted by then
    with admin(redis_url) as server:
        check_conserved(calls, used(server, prefix))


@pytest.mark.parametrize("clock", ["server", pytest.param("client", marks=slow)])
def test_time_spent_on_connecting_counts(
    harness: Harness, proxy: Proxy, prefix: str, clock: str
) -> None:
    """Each step takes less than the timeout, and all of them together take more."""
    limiter = harness.limiter(proxy.url, prefix=prefix, timeout=0.2, clock=clock)
    with proxy.inject(Delay(replies=0.15)):
        calls = limiter.burst(["k"], at_once=1)
    assert set(count_outcomes(calls)) <= {"StoreTimeout", "StoreUnavailable"}
    in_time(calls, 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cluster", "sentinel"])
def test_time_spent_on_finding_the_node_counts(harness: Harness, proxy: Proxy, kind: str) -> None:
    path = "/service/0" if kind == "sentinel" else ""
    limiter = harness.limiter(f"redis+{kind}://127.0.0.1:{proxy.port}{path}", timeout=0.2)
    with proxy.inject(Silent()):
        calls = limiter.burst(["k"], at_once=1)
    assert all(isinstance(call.outcome, StoreError) for call in calls)
    assert {call.charged for call in calls} == {False}
    in_time(calls, 0.2)


# -- a server that stalls -------------------------------------------------------------------------


def stall(harness: Harness, server: Standalone, seconds: float = 0.5) -> tuple[list[Call], int]:
    """Call before and while the server is stopped. Return the calls, and what it holds after it
    continues.
    """
    limiter = harness.limiter(server.url, timeout=0.2)
    calls = limiter.burst(["k"] * 2, at_once=1)
    server.pause()
    try:
        began = time.monotonic()
        stalled = limiter.burst(["k"] * 2, at_once=1)
        # The stop lasts for so long, because commands expire meanwhile on the server's clock.
        time.sleep(max(0.0, seconds - (time.monotonic() - began)))
    finally:
        server.resume()
    assert all(isinstance(call.outcome, StoreError) for call in stalled)
    assert any(call.charged is None for call in stalled)
    in_time(stalled, 0.2)
    calls += stalled + call_until_admitted(limiter)
    with server.client() as client:
        time.sleep(0.05)  # requests that have reached the server are executed by then
        return calls, used(client, "distwindow")


@pytest.mark.slow
def test_a_server_that_stalls_charges_nothing_late(harness: Harness) -> None:
    with Standalone() as server:
        calls, held = stall(harness, server)
        assert held == sum(call.admitted for call in calls)


@slow
def test_without_the_deadline_in_the_guard_a_stalled_server_would_charge_late(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: without the deadline, the server executes commands whose callers
    have left.
    """
    monkeypatch.setattr(ServerClock, "new_stamp", no_deadline(ServerClock.new_stamp))
    with Standalone() as server:
        calls, held = stall(harness, server)
        assert held > sum(call.admitted for call in calls)
        check_conserved(calls, held)


def admitted_since(calls: list[Call], moment: float) -> bool:
    """True if a call that began after `moment` was admitted."""
    return any(call.admitted and call.ended - call.seconds > moment for call in calls[-50:])


def no_deadline(guard: Any) -> Any:
    def without(self: ServerClock, deadline: float) -> bytes:
        whole: bytes = guard(self, deadline)
        return b"9999999999999" + whole[13:]

    return without


@slow
def test_calls_succeed_again_after_a_server_stalled_under_load(harness: Harness) -> None:
    with Standalone() as server:
        limiter = harness.limiter(server.url, timeout=0.2)
        warm(limiter, "abc")
        stop = threading.Event()
        load = limiter.load(["a", "b", "c"], stop, at_once=6)
        time.sleep(0.2)  # calls go on
        server.pause()
        time.sleep(0.7)  # several calls time out
        server.resume()
        resumed = time.perf_counter()
        # Poll for it instead of sleeping a fixed time, as the machine itself may stall for a
        # second.
        until(lambda: admitted_since(load.calls, resumed), 20.0, what="a call is admitted")
        calls = load.result()
        assert set(count_outcomes(calls)) <= {"ok", "StoreTimeout", "StoreUnavailable"}
        in_time(calls, 0.2)
        with server.client() as client:
            held = used(client, "distwindow") - 6
        check_conserved(calls, held)
        # Only calls that were executed just before the stop and answered after it can be late.
        assert held - sum(call.admitted for call in calls) <= 6


# -- a client of the caller that retries ----------------------------------------------------------


def lossy(stop: threading.Event, proxy: Proxy) -> None:
    faults = (
        DropReply(close=True, only=SCRIPT, times=2),
        ResetAfterSend(only=SCRIPT, times=2),
        ResetBeforeSend(only=SCRIPT, times=2),
        ResetBeforeSend(times=1),
        Pass(),
    )
    turn = 0
    while not stop.is_set():
        proxy.fault = faults[turn % len(faults)]
        turn += 1
        time.sleep(0.02)  # some calls meet each fault
    proxy.fault = Pass()


@pytest.mark.slow
@pytest.mark.compat
def test_through_a_lossy_link_no_call_is_charged_twice_even_where_the_client_retries(
    harness: Harness, proxy: Proxy, redis_url: str, prefix: str
) -> None:
    from redis.asyncio.retry import Retry as AsyncRetry
    from redis.backoff import NoBackoff
    from redis.exceptions import ConnectionError as Disconnected
    from redis.exceptions import TimeoutError as TimedOut
    from redis.retry import Retry

    retry: Any = (AsyncRetry if harness.kind == "async" else Retry)(NoBackoff(), 5)
    client = harness.client(proxy.url, retry=retry, retry_on_error=[Disconnected, TimedOut])
    limiter = harness.limiter(client, prefix=prefix, timeout=10)
    stop = threading.Event()
    thread = threading.Thread(target=lossy, args=(stop, proxy))
    thread.start()
    load = limiter.load(["k"], threading.Event(), at_once=1)
    time.sleep(0.5)  # calls go on, through all faults several times
    calls = load.result()
    stop.set()
    thread.join()
    assert set(count_outcomes(calls)) <= {"ok", "StoreUnavailable"}
    assert any(call.charged is None for call in calls)
    with admin(redis_url) as server:
        check_conserved(calls, used(server, prefix))


def test_errors_name_the_outcome(harness: Harness, proxy: Proxy, prefix: str) -> None:
    limiter = harness.limiter(proxy.url, prefix=prefix, timeout=0.5)
    warm(limiter)
    with proxy.inject(DropReply(only=SCRIPT, times=1)):
        with pytest.raises(StoreTimeout, match=r"within 0\.5 s; the outcome .* unknown") as timeout:
            limiter.try_acquire("k")
    with proxy.inject(ResetAfterSend(only=SCRIPT, times=1)):
        with pytest.raises(StoreUnavailable, match=r"not reachable.*unknown") as reset:
            limiter.try_acquire("k")
    for caught in (timeout.value, reset.value):
        assert caught.charged is None
        assert f"{proxy.port}" in str(caught)
