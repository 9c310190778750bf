"""Real processes, one Redis, and upstreams that are servers. No law has a time in it but that of
Redis: what may happen from a moment on only is compared with that moment as Redis keeps it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from functools import partial
from typing import Any, NamedTuple

import pytest

from distwindow.upstream.commands import pause_name
from tests.servers import Standalone, until

from . import clients, hidden_limit
from .hidden_limit import Answer, Upstream, joined, started, unexplained_refusals

pytestmark = pytest.mark.fleet
every_library = pytest.mark.parametrize("library", hidden_limit.CLIENTS)
# What the fleet knows is not the client's; one that blocks, and one that is awaited.
both_kinds = pytest.mark.parametrize("library", ["requests", "aiohttp"])
HOST = "127.0.0.1"
FAR_S = 60.0
"""Far beyond what a step of these tests takes."""


@pytest.fixture(scope="module")
def redis_server() -> Iterator[Standalone]:
    """A server of these tests only: they count its calls."""
    with Standalone() as server:
        yield server


class StoredPause(NamedTuple):
    """Moments of a pause as Redis keeps them, seconds since the epoch."""

    until: float
    said: float
    probe_until: float


def stored_pause(server: Standalone, prefix: str) -> StoredPause | None:
    with server.client() as client:
        moments = client.hmget(pause_name(prefix, HOST), "until", "said", "probe_until")
    if moments[0] is None:
        return None
    return StoredPause(*(int(moment or 0) / 1000 for moment in moments))


def until_paused(server: Standalone, prefix: str) -> StoredPause:
    until(lambda: stored_pause(server, prefix), FAR_S, what="a pause")
    pause = stored_pause(server, prefix)
    assert pause is not None
    return pause


def until_scripts_are_called(server: Standalone, times: int) -> None:
    """Wait until processes have asked so many times more."""
    with server.client() as client:

        def called() -> int:
            return int(client.info("commandstats")["cmdstat_evalsha"]["calls"])

        end = called() + times
        until(lambda: called() >= end, FAR_S, what=f"{times} scripts called")


@pytest.mark.timeout(300)
@every_library
def test_a_fleet_sends_what_the_upstream_admits(
    redis_server: Standalone, prefix: str, library: str
) -> None:
    """The upstream counts seconds of its clock, the fleet any second: those are within these. What
    arrives in a later second than it was sent in is no fault of the fleet.
    """
    assert unexplained_refusals(library, redis_server.url, prefix, "10/second strict") <= 2


@both_kinds
def test_a_pause_outlives_who_was_refused(
    redis_server: Standalone, prefix: str, library: str
) -> None:
    let_go = threading.Event()
    answers = [Answer(429, {"Retry-After": "5"}), Answer(200, after=let_go)]
    with Upstream(lambda number: (answers + [Answer(200)] * (number + 1))[number]) as upstream:
        start = partial(
            started, library, redis_server.url, upstream,
            limits=None, prefix=prefix, max_wait=FAR_S, calls=3,
        )  # fmt: skip
        first = start("first")
        pause = until_paused(redis_server, prefix)
        first.kill()
        first.join()
        others = [start(str(number)) for number in range(3)]
        until(lambda: len(upstream.arrivals) > 1, FAR_S, what="a probe")
        # While the probe has no answer the others ask, and send nothing.
        until_scripts_are_called(redis_server, 10)
        let_go.set()
        _, probe, *rest = upstream.arrivals
        assert not rest
        assert probe.arrived_at >= pause.until
        assert probe.caller != "first"
        joined(others)
        assert upstream.count(200) == 3 * 3


@both_kinds
def test_a_fleet_goes_on_without_a_probe_that_was_killed(
    redis_server: Standalone, prefix: str, library: str
) -> None:
    never = threading.Event()
    answers = [Answer(429, {"retry-after-ms": "100"}), Answer(200, after=never)]
    with Upstream(lambda number: (answers + [Answer(200)] * (number + 1))[number]) as upstream:
        start = partial(
            started, library, redis_server.url, upstream, limits=None, prefix=prefix, calls=3
        )
        probe = start("probe", max_wait=4)
        until(lambda: len(upstream.arrivals) > 1, FAR_S, what="a probe")
        probe.kill()
        probe.join()
        pause = until_paused(redis_server, prefix)
        joined([start(str(number), max_wait=FAR_S) for number in range(3)])
        assert upstream.arrivals[2].arrived_at >= pause.probe_until
        assert len(upstream.arrivals) == 2 + 3 * 3
        never.set()


@both_kinds
def test_calls_of_an_upstream_that_refuses_each_fifth_are_served(
    redis_server: Standalone, prefix: str, library: str
) -> None:
    with Upstream(
        lambda number: Answer(429, {"retry-after-ms": "50"}) if number % 5 == 4 else Answer(200)
    ) as upstream:
        joined(
            [
                started(
                    library, redis_server.url, upstream, str(number),
                    limits=None, prefix=prefix, max_wait=FAR_S, calls=5,
                )
                for number in range(4)
            ]
        )  # fmt: skip
        assert upstream.count(200) == 4 * 5
        assert upstream.count(429) == len(upstream.arrivals) // 5


@pytest.mark.parametrize(("library", "ahead_s"), [("requests", -3600), ("aiohttp", 3600)])
def test_a_clock_that_is_wrong_does_not_matter(
    redis_server: Standalone, prefix: str, library: str, ahead_s: int
) -> None:
    def answer(number: int) -> Answer:
        there = time.time() + ahead_s
        date = formatdate(there, usegmt=True)
        if number:
            return Answer(200, {"Date": date})
        return Answer(429, {"Date": date, "Retry-After": formatdate(there + 2, usegmt=True)})

    with Upstream(answer) as upstream:
        process = started(
            library, redis_server.url, upstream, "one",
            limits=None, prefix=prefix, max_wait=FAR_S, calls=3,
        )  # fmt: skip
        pause = until_paused(redis_server, prefix)
        a_ms = 0.001  # to which Redis rounds
        assert upstream.arrivals[0].arrived_at + 2 - a_ms <= pause.said <= time.time() + 2
        joined([process])
        assert upstream.arrivals[1].arrived_at >= pause.until


# -- while Redis is away ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", clients.CLIENTS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("away", [Standalone.pause, Standalone.kill], ids=["stopped", "ended"])
def test_calls_while_redis_is_away(kind: type[clients.Client], away: Any) -> None:
    status = [200]
    with Standalone() as server:
        allowing, raising = (
            kind(
                lambda url: clients.Answer(status[0]),
                clients.limits_of(
                    kind, server.url, "100/minute",
                    on_store_error=policy, timeout=0.5, max_wait=0,
                ),
            )
            for policy in ("allow", "raise")
        )  # fmt: skip
        assert allowing.call() == raising.call() == 200
        away(server)
        assert allowing.call() == 200
        for error in (raising.store_error, raising.library_error):
            with pytest.raises(error):
                raising.call()
        status[0] = 429
        assert allowing.call() == 429
        with pytest.raises(allowing.limited, match="has asked to wait"):
            allowing.call()
        for client in (allowing, raising):
            if kind.is_async:
                asyncio.run(client.limits.aclose())
            else:
                client.limits.close()
