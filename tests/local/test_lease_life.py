"""Every row of the table in `local/leased.py`."""

from __future__ import annotations

from typing import Any

import pytest

from distwindow import Limit, StoreTimeout, StoreUnavailable
from distwindow.local import leased
from distwindow.local.leased import Leased
from distwindow.local.leases import LeasedKeyState
from distwindow.ring.commands import Lease, Refund
from distwindow.runtime.options import Options
from distwindow.runtime.steps import Fetch, Operation, Pipeline
from tests.clock_and_stores import T0
from tests.simulation.process import OperationRun, Process
from tests.simulation.scripted import RecordingStore
from tests.state_tables import Row, RowChecks

ROW_CHECKS = RowChecks(leased, "none")
LIMIT = Limit(1000, per=10.0, buckets=5)
"""Its buckets are 2 s wide, so that leases can be idle within one."""
BUCKET_MS = 2000.0
INTERVAL_MS = 250.0


class Leasing:
    """One process that calls one key often enough to lease."""

    def __init__(self, max_keys: int = 1000) -> None:
        self.store = RecordingStore(T0 + 5.0)
        self.process = Process(
            self.store,
            LIMIT,
            lambda commands, clock: Leased(
                commands, clock, Options(max_local_keys=max_keys, flush_interval=INTERVAL_MS / 1000)
            ),
        )
        strategy: Any = self.process.strategy
        self.strategy = strategy
        self.process.acquire("k")
        self.state: LeasedKeyState = strategy._key_states.get("k")

    def calls(self, times: int) -> None:
        for _ in range(times):
            self.process.acquire("k")

    def holds(self) -> None:
        """Call until a lease is held."""
        for _ in range(100):
            if self.where() == "held":
                return
            self.calls(1)
        raise AssertionError("nothing was leased")

    def fetches(self) -> tuple[Operation[Any], Fetch]:
        """Begin a call that leases, and stop before its command is sent."""
        for _ in range(100):
            operation = self.strategy.acquire_remote("k", 1)
            step = next(operation)
            if isinstance(step, Fetch):
                assert self.where() == "fetching"
                return operation, step
            self.ends(operation, self.store.execute(step))
        raise AssertionError("nothing is leased")

    def ends(self, operation: Operation[Any], reply: Any) -> None:
        with pytest.raises(StopIteration):
            operation.send(reply)

    def fails(self, operation: Operation[Any], error: Exception) -> None:
        with pytest.raises(type(error)):
            operation.throw(error)

    def works(self, *, everything: bool = False) -> OperationRun:
        """Let the worker flush, and execute all its commands."""
        run = self.process.flush(everything=everything)
        while not run.done:
            run.execute()
            if isinstance(run.step, Pipeline):  # which `execute` does not log
                self.store.log += zip(run.step.commands, run.reply, strict=True)
            run.deliver()
        return run

    def passes(self, ms: float) -> None:
        self.store.ms += ms

    def refunded(self) -> int:
        """Return the permits that were refunded to the store."""
        sent = [c.charges[0].cost for c, _ in self.store.log if isinstance(c, Refund)]
        queued: list[int] = [refund.permits for refund in self.strategy._refunds._queue]
        return sum(sent) + sum(queued)

    def where(self) -> str:
        state = self.state
        if state.lease_fetch is not None:
            return "fetching"
        if state.permits_left:
            now = self.process.clock.monotonic()
            return "held" if now < state.permits_until else "ended"
        return "refunded" if self.refunded() else "none"


def held() -> Leasing:
    it = Leasing()
    it.holds()
    assert it.refunded() == 0
    return it


def ended() -> Leasing:
    """The lease has ended, and its bucket has not."""
    it = held()
    it.passes(0.95 * BUCKET_MS)
    assert it.where() == "ended"
    return it


@ROW_CHECKS.row("none", "a call that the store decides, with demand")
def _() -> str:
    it = Leasing()
    _operation, _ = it.fetches()  # kept, as it would be closed if it was collected
    return it.where()


@ROW_CHECKS.row("none", "a prefetch")
def _() -> str:
    it = held()
    it.works()
    it.passes(BUCKET_MS)
    it.state.demand.observe(it.process.clock.monotonic(), 200)
    run = it.process.flush()  # the bucket has ended, so what was left is refunded
    assert it.state.permits_left == 0
    assert isinstance(run.step, Pipeline)
    assert any(isinstance(c, Lease) and c.prefetch for c in run.step.commands)
    return it.where()


@ROW_CHECKS.row("fetching", "a grant")
def _() -> str:
    it = Leasing()
    operation, step = it.fetches()
    it.ends(operation, it.store.execute(step.command))
    return it.where()


@ROW_CHECKS.row("fetching", "a grant for a caller that has given up")
def _() -> str:
    it = Leasing()
    operation, step = it.fetches()
    operation.close()
    assert it.where() == "none"
    step.on_late_reply(it.store.execute(step.command))
    return it.where()


@ROW_CHECKS.row("fetching", "a grant, overtaken by a later bucket's")
def _() -> str:
    it = Leasing()
    operation, step = it.fetches()
    late = it.store.execute(step.command)
    operation.close()
    it.passes(BUCKET_MS)
    it.holds()
    before, left = it.refunded(), it.state.permits_left
    step.on_late_reply(late)
    assert it.state.permits_left == left
    return "refunded" if it.refunded() == before + late.extra + 1 else it.where()


@ROW_CHECKS.row("fetching", "a grant, and the key was evicted")
def _() -> str:
    it = Leasing(max_keys=1)
    operation, step = it.fetches()
    it.process.acquire("other")
    it.ends(operation, it.store.execute(step.command))
    return it.where()


@ROW_CHECKS.row("fetching", "a grant, and the key was reset")
def _() -> str:
    it = Leasing()
    operation, step = it.fetches()
    reply = it.store.execute(step.command)
    it.strategy.reset("k")
    it.ends(operation, reply)
    it.works(everything=True)  # a refund would take the permits of calls after the reset
    assert not any(isinstance(command, Refund) for command, _ in it.store.log)
    return it.where()


@ROW_CHECKS.row("fetching", "a refusal")
def _() -> str:
    it = Leasing()
    operation, step = it.fetches()
    other = Process(
        it.store, LIMIT, lambda commands, clock: Leased(commands, clock, Options(max_local_keys=10))
    )
    while other.acquire("k"):
        pass
    it.ends(operation, it.store.execute(step.command))
    assert it.state.refusal is not None
    return it.where()


@ROW_CHECKS.row("fetching", "an error, and it was surely not executed")
def _() -> str:
    it = Leasing()
    operation, _ = it.fetches()
    it.fails(operation, StoreUnavailable("refused", charged=False))
    assert it.state.no_lease_until == 0.0
    return it.where()


@ROW_CHECKS.row("fetching", "an error, and its outcome is unknown")
def _() -> str:
    it = Leasing()
    operation, _ = it.fetches()
    it.fails(operation, StoreTimeout("lost", charged=None))
    assert it.where() == "none"
    now = it.process.clock.monotonic()
    rest = it.state.no_lease_until - now
    bucket_ends = abs(rest - it.state.seconds_to_bucket_end(now)) < 1e-6
    return "none, and no lease in this bucket" if bucket_ends else "none"


@ROW_CHECKS.row("held", "a call")
def _() -> str:
    it = held()
    before = it.state.permits_left
    it.calls(1)
    return f"{it.where()}, with fewer permits" if it.state.permits_left < before else "spent"


@ROW_CHECKS.row("held", "any reply from the same bucket")
def _() -> str:
    it = held()
    it.passes(100)
    before, bucket = it.state.permits_until, it.state.lease_bucket_ends_ms
    it.strategy._prefetches.request(it.state, it.process.clock.monotonic())
    it.state.demand.observe(it.process.clock.monotonic(), 100)
    it.works()
    assert it.state.lease_bucket_ends_ms == bucket
    return f"{it.where()}, extended" if it.state.permits_until > before else it.where()


@ROW_CHECKS.row("held", "its time is over before its bucket's")
def _() -> str:
    it = held()
    it.passes(0.95 * BUCKET_MS)
    now = it.process.clock.monotonic()
    assert now * 1000 + it.state.offset_ms < it.state.lease_bucket_ends_ms
    return it.where()


@ROW_CHECKS.row("ended", "any reply from the same bucket")
def _() -> str:
    it = ended()
    before, bucket = it.state.permits_until, it.state.lease_bucket_ends_ms
    it.calls(1)
    assert it.state.lease_bucket_ends_ms == bucket
    return f"{it.where()}, extended" if it.state.permits_until > before else it.where()


@ROW_CHECKS.row("held", "a review after two intervals without calls")
def _() -> str:
    it = held()
    it.works()
    for _ in range(2):
        assert it.where() == "held"
        it.passes(INTERVAL_MS)
        it.works()
    assert it.state.permits_until > it.process.clock.monotonic()
    it.passes(INTERVAL_MS)
    it.works()
    return it.where()


@ROW_CHECKS.row("ended", "a review after the bucket's end")
def _() -> str:
    it = ended()
    it.works()
    it.passes(0.06 * BUCKET_MS)
    it.works()
    return it.where()


@ROW_CHECKS.row("held", "its key is evicted")
def _() -> str:
    it = Leasing(max_keys=1)
    it.holds()
    it.process.acquire("other")
    return it.where()


@ROW_CHECKS.row("held", "the limiter is closed")
def _() -> str:
    it = held()
    it.strategy.close()
    it.works(everything=True)
    return it.where()


@ROW_CHECKS.row("held", "a call that costs more than is left")
def _() -> str:
    it = held()
    cost = it.state.permits_left + 1
    run = it.process.call("k", cost)
    assert isinstance(run, OperationRun)
    assert isinstance(run.step, Pipeline)
    assert [type(command) for command in run.step.commands] == [Refund]
    assert it.refunded() == 0  # it is in no queue any more, and not in the store yet
    assert not it.state.permits_left
    return "refunded, before the store decides"


@ROW_CHECKS.row("held", "its key is reset")
def _() -> str:
    it = held()
    it.strategy.reset("k")
    return it.where()


@pytest.mark.parametrize("row", ROW_CHECKS.rows, ids=lambda row: f"{row.before}: {row.event}")
def test_each_row_of_the_table(row: Row) -> None:
    ROW_CHECKS.check(row)


def test_the_table_and_the_checks_have_the_same_rows() -> None:
    ROW_CHECKS.check_complete()


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_lease_is_timed_from_its_sending_however_late_its_reply(is_cancelled: bool) -> None:
    """Timed from the reply, it would be spent in a later bucket than it was charged in."""
    it = Leasing()
    operation, step = it.fetches()
    reply = it.store.execute(step.command)
    it.passes(0.2 * BUCKET_MS)
    if is_cancelled:
        operation.close()
        step.on_late_reply(reply)
    else:
        it.ends(operation, reply)
    assert it.state.permits_left
    assert it.state.permits_until * 1000 < it.state.lease_bucket_ends_ms


def test_a_late_reply_extends_no_lease_beyond_its_bucket() -> None:
    it = ended()
    operation = it.strategy.acquire_remote("k", 1)
    reply = it.store.execute(next(operation))
    it.passes(0.045 * BUCKET_MS)
    it.ends(operation, reply)
    assert it.state.permits_left
    assert it.state.permits_until * 1000 < it.state.lease_bucket_ends_ms
