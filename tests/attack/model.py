"""Scenario `model`: random commands at given times, to Redis and to a model, with equal replies.

It is deterministic: a difference is reduced by delta debugging to the fewest commands that show it.
Replies are compared as `Command` objects and a `Limiter` return them, so that the wire format may
change.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from typing import Any

from distwindow import Decision, Limit, Limiter
from distwindow.lifecycle.connect import open_store
from distwindow.ring.clock import SystemClock
from distwindow.ring.commands import Acquire, Flush, Lease, Peek, Read, Reset
from distwindow.ring.decision import Charge
from distwindow.ring.key import ring_name, ring_name_prefix
from distwindow.ring.replies import AcquireReply
from distwindow.ring.stats import Bucket
from distwindow.runtime.options import Options
from tests.attack.harness import Run, Violation, derive_seed, shrink
from tests.attack.model_cases import KEYS, SHAPES, Op, draw_case
from tests.attack.reference_model import Model, Outcome, Part
from tests.servers import Standalone

BEGIN_MS = 1_800_000_003_217


class SettableClock(SystemClock):
    """A wall clock that is set by hand. Monotonic time is the machine's, for timeouts."""

    ms = BEGIN_MS

    def now_ms(self) -> int:
        return self.ms


class Comparison:
    """Executes commands in Redis and in the model."""

    def __init__(self, url: str) -> None:
        self.clock = SettableClock()
        self.store = open_store(url, Options(timeout=10, clock="client", time=self.clock))
        self.begin("unused")

    def begin(self, prefix: str) -> None:
        self.prefix = prefix
        self.limiter = Limiter(self.store, "1/second", prefix=prefix, time=self.clock)
        self.clock.ms = BEGIN_MS
        self.model = Model()
        self.decisions: list[tuple[Decision, list[Part], list[int]]] = []
        self.flushes: dict[str, list[tuple[int, list[Charge], list[Part], Any]]] = {}
        self._seq = itertools.count(1)

    def close(self) -> None:
        self.store.close()

    def limit(self, shape: int, amount: int) -> Limit:
        bucket_ms, buckets, bound = SHAPES[shape]
        # `bound` is a str here, and one of the two literals there.
        return Limit(amount, bucket_ms * buckets / 1000, buckets, bound)  # type: ignore[arg-type]

    def parts(self, rings: Sequence[Sequence[int]]) -> tuple[list[Charge], list[Part]]:
        charges, parts = [], []
        for key, shape, amount, cost in rings:
            limit = self.limit(shape, amount)
            name = ring_name(ring_name_prefix(self.prefix, KEYS[key]), limit)
            charges.append(Charge(name, limit, cost, KEYS[key]))
            parts.append(Part(name.decode(), amount, limit.bucket_ms, limit.span, cost))
        return charges, parts

    def do(self, op: Op) -> tuple[Any, Any]:
        """Return the replies of the model and of Redis; None twice for a command left out."""
        name, elapsed_ms, *arguments = op
        self.clock.ms = max(BEGIN_MS - 10**9, self.clock.ms + elapsed_ms)
        method: Callable[..., tuple[Any, Any]] = getattr(self, f"_{name}")
        return method(*arguments)

    def _acquire(self, rings: Any, calls: int, write_limit: bool) -> tuple[Any, Any]:
        charges, parts = self.parts(rings)
        reply = self.store.execute(Acquire(tuple(charges), calls=calls, write_limit=write_limit))
        return self.model.acquire(parts, self.clock.ms, calls), outcome(reply)

    def _peek(self, rings: Any) -> tuple[Any, Any]:
        charges, parts = self.parts(rings)
        reply = self.store.execute(Peek(tuple(charges)))
        return self.model.peek(parts, self.clock.ms), outcome(reply)

    def _lease(self, rings: Any, extra: int, prefetch: bool) -> tuple[Any, Any]:
        charges, parts = self.parts(rings)
        now = self.clock.ms
        if len(parts) > 1 and any(
            self.model.newest(part, now) > now // part.bucket_ms for part in parts
        ):
            extra = 0  # while the clock is behind one of several rings, nothing is lent
        reply = self.store.execute(Lease(tuple(charges), extra=extra, prefetch=prefetch))
        expected = self.model.lease(parts, self.clock.ms, extra, prefetch)
        return expected, (outcome(reply.acquire_reply), reply.extra, reply.ends_in_ms)

    def _flush(self, rings: Any, counts: Any, sender: str, pull: bool, how: str) -> tuple[Any, Any]:
        charges, parts = self.parts(rings)
        now = self.clock.ms
        seen = [[(now + ago, *row) for ago, *row in ring] for ring in counts]
        seq = next(self._seq)
        sent = self.flushes.setdefault(sender, [])
        if how != "new" and sender:
            if not sent:
                return None, None
            seq, charges, parts, old = sent[-1] if how == "again" else sent[len(sent) // 2]
            seen = old if how == "again" else seen
            # A ring that began anew may have dropped the record of a sender: leave this out.
            if how == "stale" and len(seen) != len(parts):
                return None, None
            for part in parts:
                last = self.model.taken(part, sender, now)
                if last is None or not last[1] or last[0] < seq:
                    return None, None
        elif sender:
            sent.append((seq, charges, parts, seen))
        buckets = tuple(tuple(Bucket(*row) for row in ring) for ring in seen)
        reply = self.store.execute(
            Flush(tuple(charges), counts=buckets, sender=sender, seq=seq, pull=pull)
        )
        passed = [{at: sum_ for at, sum_ in ring.items() if sum_} for ring in reply.passed]
        expected = self.model.flush(parts, now, seen, sender, seq, pull)
        return expected if pull else [], passed

    def _call(self, rings: Any) -> tuple[Any, Any]:
        """Call through the limiter; the decision may be refunded later."""
        _, parts = self.parts(rings)
        items = [(KEYS[k], self.limit(shape, amount), cost) for k, shape, amount, cost in rings]
        decision = self.limiter.try_acquire_all(items)
        expected = self.model.acquire(parts, self.clock.ms)
        if decision.allowed:
            numbers = [self.model.newest(part, self.clock.ms) for part in parts]
            self.decisions.append((decision, parts, numbers))
            return (expected.admitted, expected.left), (1, decision.remaining)
        reply = (0, decision.remaining, round(decision.retry_after * 1000))
        return (expected.admitted, max(0, expected.left), expected.retry_ms), reply

    def _refund(self, which: int) -> tuple[Any, Any]:
        if not self.decisions:
            return None, None
        decision, parts, numbers = self.decisions[which % len(self.decisions)]
        given = self.limiter.refund(decision)
        return self.model.refund(parts, self.clock.ms, numbers), given

    def _read(self, ring: Any) -> tuple[Any, Any]:
        charges, parts = self.parts([ring])
        (state,) = self.store.execute(Read(tuple(charges))).states
        if state is None:
            return self.model.read(parts[0]), None
        rows = [
            (*row[:6], -1 if row[6] is None else row[6])
            for row in (astuple(bucket) for bucket in state.buckets)
        ]
        return self.model.read(parts[0]), rows

    def _reset(self, rings: Any) -> tuple[Any, Any]:
        charges, parts = self.parts(rings)
        return self.model.reset(parts), self.store.execute(Reset(tuple(charges))).affected


def outcome(reply: AcquireReply) -> Outcome:
    return Outcome(
        reply.admitted,
        reply.binding_index,
        reply.left,
        reply.reset_ms,
        reply.retry_ms,
        reply.admitted_binding,
    )


def first_difference(
    comparison: Comparison, ops: Sequence[Op], prefix: str
) -> tuple[int, Any, Any] | None:
    """Return the first command whose replies differ, with both replies; at the end read each ring,
    too.
    """
    comparison.begin(prefix)
    rings = sorted({tuple(r[:2]) for op in ops for r in op[2:3] if isinstance(r, list) for r in r})
    last: list[Op] = [("read", 0, (*ring, 1, 1)) for ring in rings]
    for index, op in enumerate([*ops, *last]):
        try:
            expected, found = comparison.do(op)
        except Exception as exc:
            expected, found = "no error", repr(exc)
        if expected != found:
            return index, expected, found
    return None


def model(run: Run) -> None:
    """Run cases until the time is up."""
    with Standalone() as server:
        comparison, until = Comparison(server.url), time.monotonic() + run.seconds
        try:
            for case in itertools.count():
                if time.monotonic() >= until:
                    return
                ops = list(draw_case(random.Random(derive_seed(run.seed, "model", case))))
                names = (f"m{case}-{attempt}" for attempt in itertools.count())
                found = first_difference(comparison, ops, next(names))
                run.count("calls", len(ops))
                if found is not None:
                    _report(comparison, ops, names, case)
        finally:
            comparison.close()


def _report(comparison: Comparison, ops: list[Op], names: Iterator[str], case: int) -> None:
    few = shrink(
        ops, lambda fewer: first_difference(comparison, fewer, next(names)) is not None, 20
    )
    found = first_difference(comparison, few, next(names))
    assert found is not None
    index, expected, reply = found
    raise Violation(
        f"case {case}: command {index} has another reply than in the model\n"
        f"  model {expected}\n  redis {reply}",
        [list(op) for op in few],
    )
