"""Processes with threads and tasks use the slots of one key, over a link that drops replies, while
some are killed and calls are cancelled: never more are held than the limit, and none is left.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from distwindow import Concurrency
from tests.concurrency.slot_hammer import HammerProcess, Span, most_at_once
from tests.servers import Proxy
from tests.servers.faults import Delay, DropReply, Pass, ResetAfterSend
from tests.servers.wait import until

pytestmark = pytest.mark.slow  # the quick tier stays under a minute

LIMIT, TTL, SECONDS = 4, 2.0, 8.0
SCRIPT = b"EVALSHA"
FAULTS = (
    Pass(),
    DropReply(only=SCRIPT, times=2),
    ResetAfterSend(only=SCRIPT, times=2),
    Delay(replies=0.05),
)


def test_never_more_are_held_than_the_limit_and_none_is_left(
    redis_url: str, proxy: Proxy, prefix: str, tmp_path: Path
) -> None:
    chance = random.Random(11)
    urls = [redis_url, proxy.url, proxy.url]
    started: list[HammerProcess] = []

    def start(url: str) -> HammerProcess:
        log = tmp_path / f"{len(started)}.log"
        log.touch()
        started.append(HammerProcess(url, prefix, LIMIT, TTL, log, len(started)))
        return started[-1]

    running = [start(url) for url in urls]
    ends = time.monotonic() + SECONDS
    while time.monotonic() < ends:
        time.sleep(0.25)
        proxy.fault = chance.choice(FAULTS)
        if chance.random() < 0.2:
            which = chance.randrange(len(running))
            running[which].kill()
            running[which] = start(urls[which])
    proxy.fault = Pass()
    for process in started:
        process.stop()
    with Concurrency(redis_url, LIMIT, prefix=prefix) as slots:
        until(lambda: slots.stats("k").held == 0, 2 * TTL, what="all slots are freed")
    spans = [span for process in started for span in process.spans()]
    assert len(started) > len(urls), "no process was killed"
    assert proxy.affected > 10
    assert len(spans) > 100
    assert most_at_once(spans) == LIMIT


def test_the_check_finds_a_slot_too_many() -> None:
    spans = [Span(0.0, 2.0), Span(1.0, 3.0), Span(2.0, 4.0)]
    assert most_at_once(spans) == 2
    assert most_at_once([*spans, Span(1.5, 1.6)]) == 3
