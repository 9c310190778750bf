"""Outages of a real server: calls are answered without asking it, and it is found when it is back.

How long calls take is measured by `python -m benchmarks.outages`.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from distwindow import AsyncLimiter, ConfigurationError, FlowRule, Guard, Health, StoreError
from distwindow.away.outages import PROBE_EVERY_S
from tests.harness import AsyncHarness, Harness
from tests.servers import Blackhole, DropReply, Proxy, Refuse, Silent, Standalone, until
from tests.servers.faults import Fault

FAULTS = {
    "refused": Refuse(),
    "black-holed": Blackhole(),
    "accepts-and-is-silent": Silent(),
    "reply-dropped": DropReply(),
}


@pytest.mark.parametrize("consistency", ["direct", "leased"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_calls_of_an_outage_are_answered_without_asking(
    harness: Harness, proxy: Proxy, prefix: str, fault: Fault, consistency: str
) -> None:
    told: list[Health] = []
    limiter = harness.limiter(
        proxy.url, "1000/hour", prefix=prefix, consistency=consistency, timeout=0.2,
        on_store_error="allow",
    )  # fmt: skip
    until(lambda: limiter.try_acquire("k").reason == "ok" and raw(limiter).health().up)
    raw(limiter).on_health_change(told.append)
    with proxy.inject(fault):
        proxy.cut()
        until(lambda: limiter.try_acquire(f"k{time.perf_counter()}") and told)
        assert not told[0].up
        assert told[0].down == raw(limiter).health().down == (f"127.0.0.1:{proxy.port}",)
        accepted, began = proxy.accepted, time.monotonic()
        decisions = [limiter.try_acquire(f"k{number}") for number in range(300)]
        probes = proxy.accepted - accepted
        assert {(d.allowed, d.reason, d.source) for d in decisions} == {
            (True, "store_down", "policy")
        }
        assert probes <= 1 + (time.monotonic() - began) / (PROBE_EVERY_S / 2)
    until(lambda: len(told) == 2)  # listeners hear of it after `health` says it
    assert [health.up for health in told] == [False, True]
    until(lambda: limiter.try_acquire("other").source == "store")


@pytest.mark.parametrize("consistency", ["direct", "leased"])
async def test_a_call_of_an_outage_does_not_wait_for_the_event_loop(
    proxy: Proxy, prefix: str, consistency: Any
) -> None:
    async with AsyncLimiter(
        proxy.url, "1000/hour", prefix=prefix, consistency=consistency, timeout=0.2,
        on_store_error="allow",
    ) as limiter:  # fmt: skip
        await limiter.try_acquire("k")
        with proxy.inject(Refuse()):
            proxy.cut()
            while limiter.health().up:
                await limiter.try_acquire(f"k{time.perf_counter()}")
            with pytest.raises(StopIteration) as answered:
                limiter.try_acquire("k").__await__().send(None)
        assert answered.value.value.reason == "store_down"


def test_where_the_policy_is_raise_calls_fail_at_once_and_say_so(
    harness: Harness, proxy: Proxy, prefix: str
) -> None:
    limiter = harness.limiter(proxy.url, "1000/hour", prefix=prefix, timeout=0.2)
    until(lambda: raised_by(lambda: limiter.try_acquire("k")) is None)
    with proxy.inject(Silent()):
        proxy.cut()
        for _ in range(5):
            with pytest.raises(StoreError):
                limiter.try_acquire("k")
        assert not raw(limiter).health().up
        with pytest.raises(StoreError) as raised:
            limiter.try_acquire("k")
        assert raised.value.charged is False
    until(lambda: raised_by(lambda: limiter.try_acquire("k")) is None)
    assert raw(limiter).health().up


def test_nothing_is_left_of_the_probes_of_a_closed_limiter(
    harness: Harness, proxy: Proxy, prefix: str
) -> None:
    limiter = harness.limiter(proxy.url, "10/hour", prefix=prefix, timeout=0.2)
    limiter.try_acquire("k")
    with proxy.inject(Blackhole()):
        proxy.cut()
        until(lambda: raised_by(lambda: limiter.try_acquire("k")) and not raw(limiter).health().up)
        opened = proxy.accepted
        until(lambda: proxy.accepted > opened)  # a probe that gets no answer
        limiter.close()
    until(lambda: proxy.open == 0)


def raised_by(call: Callable[[], object]) -> StoreError | None:
    """Return the error of the store that `call` raises."""
    try:
        call()
    except StoreError as exc:
        return exc
    return None


def test_a_probe_that_is_not_answered_does_not_take_the_timeout_of_a_call(
    harness: Harness, proxy: Proxy, prefix: str
) -> None:
    """Else a server that is back would be found as late as that."""
    limiter = harness.limiter(
        proxy.url, "10/hour", prefix=prefix, timeout=60, on_store_error="allow"
    )
    limiter.try_acquire("k")
    with proxy.inject(Refuse()):
        proxy.cut()
        until(lambda: limiter.try_acquire("k") and not raw(limiter).health().up)
        proxy.fault = Silent()
        accepted = proxy.accepted
        until(lambda: proxy.accepted > accepted + 1)
    until(lambda: raw(limiter).health().up)


@pytest.mark.parametrize("slow", ["log", "listener"])
def test_who_is_told_slowly_of_an_outage_delays_neither_calls_nor_its_end(
    harness: Harness, proxy: Proxy, prefix: str, slow: str
) -> None:
    limiter = harness.limiter(
        proxy.url, "1000/hour", prefix=prefix, timeout=0.2, on_store_error="allow"
    )
    told: list[object] = []
    release = threading.Event()

    def wait(what: object) -> None:
        told.append(what)
        release.wait(0.5)

    handler = logging.Handler()
    handler.emit = wait  # type: ignore[method-assign,assignment]  # it is all that it does
    logger = logging.getLogger("distwindow")
    if slow == "log":
        logger.addHandler(handler)
    else:
        raw(limiter).on_health_change(wait)
    try:
        limiter.try_acquire("k")
        with proxy.inject(Refuse()):
            until(lambda: limiter.try_acquire(f"{time.perf_counter()}") and told)
        until(lambda: limiter.try_acquire(f"{time.perf_counter()}").source == "store")
        until(lambda: raw(limiter).health().up)
    finally:
        release.set()
        logger.removeHandler(handler)


def test_a_password_that_was_changed_meanwhile_is_loud(harness: Harness, prefix: str) -> None:
    with Standalone() as server:
        limiter = harness.limiter(server.url, "10/hour", prefix=prefix, on_store_error="allow")
        limiter.try_acquire("k")
        server.kill()
        until(lambda: limiter.try_acquire("k") and not raw(limiter).health().up)
        server.password = "new"
        server.restart()
        until(lambda: re.search(r"password|NOAUTH", str(raw(limiter).health().last_error)))
        with pytest.raises(ConfigurationError, match=r"password|NOAUTH"):
            limiter.try_acquire("k")
        assert not raw(limiter).health().up


def test_a_full_server_is_an_outage_that_ends_with_an_answer(harness: Harness, prefix: str) -> None:
    with Standalone() as server, server.client() as admin:
        limiter = harness.limiter(server.url, "10/hour", prefix=prefix, on_store_error="local",
                                  share=0.5)  # fmt: skip
        assert limiter.try_acquire("k")
        admin.config_set("maxmemory", 1)
        decision = limiter.try_acquire("k")
        assert (decision.reason, decision.source) == ("store_down", "local")
        health = raw(limiter).health()
        assert not health.up
        assert "OOM" in str(health.last_error)
        admin.config_set("maxmemory", 0)
        assert limiter.try_acquire("k").source == "store"
        until(lambda: raw(limiter).health().up)
        limiter.flush()
        assert limiter.stats("k").passed == 3


def test_a_server_that_refuses_to_write_is_away_although_it_can_be_read(
    harness: Harness, prefix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An outage has one log line when it begins and one when it ends."""
    monkeypatch.setattr("distwindow.away.outages.PROBE_EVERY_S", 0.001)
    with Standalone() as server, server.client() as admin:
        limiter = harness.limiter(server.url, "1000/hour", prefix=prefix, on_store_error="allow")
        told: list[Health] = []
        raw(limiter).on_health_change(told.append)
        limiter.try_acquire("k")
        for outage in range(2):
            admin.config_set("min-replicas-to-write", 1)
            for number in range(50):
                assert limiter.try_acquire(f"{outage}:{number}").source == "policy"
                assert limiter.peek("k").source == "store"
            assert "NOREPLICAS" in str(raw(limiter).health().last_error)
            admin.config_set("min-replicas-to-write", 0)
            assert limiter.try_acquire("k").source == "store"
            until(lambda: raw(limiter).health().up)
        until(lambda: len(told) == 4)
    assert [health.up for health in told] == [False, True] * 2
    lines = [line for line in caplog.messages if " is away: " in line or " is back" in line]
    assert len(lines) == 4


def test_the_parts_of_a_guard_know_that_their_store_is_away(
    proxy: Proxy, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log line names them, and the end of the process does not wait for it."""
    with Guard(proxy.url, [FlowRule("r", 100)], prefix=prefix, timeout=0.2) as guard:
        with guard.entry("r"):
            pass
        with proxy.inject(Refuse()):
            proxy.cut()
            until(lambda: "is away" in caplog.text or _is_refused_by_the_store(guard))
            job = next(iter(guard._parts.values()))._flush_job
            job.flush(True)
            assert job.store_is_away
    assert f"limiter '{prefix}' at redis://127.0.0.1:{proxy.port}" in caplog.text


def _is_refused_by_the_store(guard: Guard) -> bool:
    with suppress(StoreError), guard.entry("r"):
        pass
    return False


@pytest.mark.event_loops
def test_an_event_loop_makes_no_call_that_blocks_while_its_server_is_silent(
    proxy: Proxy, prefix: str
) -> None:
    """What would block: a connection of a socket that waits, a name look-up, a sleep."""
    blocking: list[str] = []
    loops: set[int] = set()

    def audit(event: str, args: Any) -> None:
        if threading.get_ident() not in loops:
            return
        waits = event == "socket.connect" and args[0].gettimeout() != 0
        if waits or event in ("time.sleep", "socket.getaddrinfo", "socket.gethostbyname"):
            blocking.append(event)

    sys.addaudithook(audit)  # it can not be removed; it does nothing once `loops` is empty
    harness = AsyncHarness()
    try:
        limiter = harness.limiter(
            proxy.url, "10/hour", prefix=prefix, timeout=0.1, on_store_error="deny"
        )
        limiter.try_acquire("k")
        harness.run(_this_thread(loops))
        with proxy.inject(Silent()):
            proxy.cut()
            until(lambda: limiter.try_acquire("k") or not raw(limiter).health().up)
            for _ in range(50):
                limiter.try_acquire("k")
        until(lambda: raw(limiter).health().up)
        assert blocking == []
    finally:
        loops.clear()
        harness.close()


def raw(limiter: Any) -> Any:
    """Return the limiter itself."""
    return limiter.limiter


async def _this_thread(loops: set[int]) -> None:
    loops.add(threading.get_ident())
