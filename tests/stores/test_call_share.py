"""The shares that the callers of one script call get of its reply."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from distwindow import Limit
from distwindow.ring.commands import Acquire, charges_of
from distwindow.ring.decisions import decision_of
from distwindow.ring.replies import AcquireReply
from distwindow.stores.memory import MemoryStore
from distwindow.stores.redis.asyncio import Batch, LoopTick
from distwindow.stores.redis.call_sharing import CallShare, decisions_of_reply, split_share
from distwindow.stores.redis.outcome import NoReply, RawReply

STAMP = b"1700000000250.000042"
NOW_MS = 1_700_000_000_000


@given(calls=st.integers(1, 40), cost=st.integers(1, 4), amount=st.integers(1, 80))
def test_shares_are_the_replies_of_calls_one_after_the_other(
    calls: int, cost: int, amount: int
) -> None:
    limit = Limit(amount, per=600, buckets=10)
    command = Acquire(charges_of("k", b"p", [limit], cost), NOW_MS)
    one_by_one = MemoryStore()
    expected = [one_by_one.execute(command) for _ in range(calls)]
    reply = MemoryStore().execute(command.combined(calls))
    assert list(split_share(reply, calls, [cost])) == expected
    decisions = [decision_of(command, share, "store") for share in expected]
    assert decisions_of_reply(command, reply, calls) == decisions
    if reply.admitted == calls:
        # The script answers this with the short reply. `reset_ms` is then that of a window whose
        # newest bucket includes `now_ms`, as it is here.
        short: CallShare = (reply.left, reply.now_ms)
        shares = split_share(short, calls, [cost])
        assert [decisions_of_reply(command, share, 1)[0] for share in shares] == decisions
        assert decisions_of_reply(command, short, calls) == decisions


async def test_the_short_reply_is_recognized() -> None:
    loop = asyncio.get_running_loop()
    others: list[RawReply] = [
        [STAMP, -2, NOW_MS],
        [STAMP, 5, NOW_MS, 1],
        [b"1700000000250.000043", 5, NOW_MS],
        STAMP,
        ValueError("an error reply"),
        NoReply("timeout", sent=True),
        None,
    ]
    passed_on: list[RawReply] = []
    handler: Any = SimpleNamespace(on_reply=lambda batch, raw: passed_on.append(raw))

    def reply(stamp: bytes | None, raw: RawReply) -> asyncio.Future[Any]:
        command = Acquire(charges_of("k", b"p", [Limit("9/s")], 1))
        batch = Batch(LoopTick(handler, 0.0), command, True)
        batch.stamp = stamp
        batch.futures.append(loop.create_future())
        batch.on_reply(raw)
        return batch.futures[0]

    short = reply(STAMP, [STAMP, 0, NOW_MS])
    assert short.result()[:5] == (True, "k", 1, Limit("9/s"), 0)
    for other in others:
        reply(STAMP, other)
    reply(None, [STAMP, 5, NOW_MS])
    assert passed_on == [*others, [STAMP, 5, NOW_MS]]


def test_a_refused_share_keeps_its_refusal() -> None:
    limit = Limit(10, per=600, buckets=10)
    command = Acquire(charges_of("k", b"p", [limit], 1), NOW_MS)
    refused = AcquireReply(0, 0, 0, 600_000, 60_000, NOW_MS)
    decisions = decisions_of_reply(command, refused, 3)
    assert [decision.allowed for decision in decisions] == [False] * 3
    assert {decision.retry_after for decision in decisions} == {60.0}
