"""Permits bought from the store in blocks, and spent here.

    store   |--- bucket ----------------|--- bucket ----------------|
            ^ lease 40       ^ 30, ahead of need       ^ returned 3
    here     ############### ###########              |############

A lease is charged when it is granted, in the bucket of that moment, and may be spent until that
bucket ends on the store's clock: so what is spent counts in the bucket in which it happens, and no
window ever holds more than the limit. What is left at the end is given back.

The end is known as "so long after the moment the store was asked", and our clock may run slower
than the store's: chrony slews a clock by up to 8.3 %. So a lease ends `_MAX_DRIFT` of that time
before the bucket does, and goes on with the next reply from the same bucket:

    store's bucket   |-----------------------------------------|
    first reply      t1 ---------------------------------> ends t1 + 0.91 of what was left
    a later one                     t2 -----------------------> ends t2 + 0.91 of what was left then

How large: what is needed (`consistency/demand.py`) until the bucket ends or a quarter of a second
has passed, and never more than half of what the limit has left. So a key with little demand, or
near its limit, is asked about call by call, as in `direct`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable
from typing import Any

from ..core.clock import Clock
from ..core.decision import Decision
from ..core.errors import StoreError
from ..operations.acquire import decide
from ..operations.command_cache import Book
from ..operations.completion import Gate
from ..operations.flush import carry
from ..operations.steps import Dialogue, Fetch, Sleep, Wait
from ..protocol.commands import Acquire, Charge, Count, Grant, Lease, Refund, counted_in
from ..protocol.keys import AnyKey
from .base import MARGIN, Errand, Nearby, costing, limits_of
from .demand import Demand
from .key_state import Cell

HORIZON = 0.25
"""Seconds that a lease is to last at most: what a killed process takes with it."""
AHEAD = 0.02
"""Seconds before a lease is spent that the worker is told to get the next."""
_LAST = 0.005
"""Seconds before the end of a bucket that may be slept through, in which there can be no lease."""
_SETTLE = 0.002
"""Seconds after the end of a lease in which the store comes to the next bucket, too."""
_MAX_DRIFT = 0.1
"""How much faster than ours the store's clock may run before more than the limit can be admitted:
a part of 1. Beyond that, and where our machine was suspended so that its clock stood still, a
process may spend what its lease still holds after the bucket has ended.
"""


class LeasedCell(Cell):
    """A key's lease, and the demand that sizes the next."""

    __slots__ = (
        "charged_ms", "demand", "ends_ms", "estimated_at", "filling", "lease_again_at", "level",
        "seen", "watched", "width",
    )  # fmt: skip

    def __init__(self, key: Any, charges: tuple[Charge, ...], offset_ms: float, now: float) -> None:
        super().__init__(key, charges, limits_of(charges), offset_ms)
        self.demand = Demand(now)
        self.ends_ms = 0
        """When the bucket of the lease ends, on the store's clock: this names the bucket."""
        self.charged_ms = 0
        """A moment in it."""
        self.estimated_at = 0.0
        """When the store was asked whose reply `until` is reckoned from, monotonic seconds."""
        self.lease_again_at = 0.0
        """No lease before then: the fate of one is unknown, and so it may be charged in vain."""
        self.level = 0
        """What was left when the demand was last looked at."""
        self.seen = -1
        self.filling: Gate | None = None
        """Closed while a lease is being fetched."""
        self.watched = False
        self.width = min(charge.limit.bucket_ms for charge in charges)

    def estimate_end(self, now_ms: int, sent_at: float) -> None:
        """The store's clock said `now_ms` after `sent_at`: until when the lease may be spent, as
        its bucket goes on. The newest estimate counts: clocks have had least time to drift apart.
        """
        left_ms = self.ends_ms - now_ms
        if sent_at >= self.estimated_at and 0 < left_ms <= self.width:
            self.estimated_at = sent_at
            self.until = sent_at + left_ms / 1000 / (1 + _MAX_DRIFT) - MARGIN

    def until_turn(self, now: float) -> float:
        """Seconds until the present bucket ends."""
        return (self.width - (now * 1000 + self.offset_ms) % self.width) / 1000


class Leased(Nearby[LeasedCell]):
    """`consistency="leased"`."""

    leases = True

    def __init__(
        self, book: Book, clock: Clock, most: int, interval: float, patience: float = 0.25
    ) -> None:
        """`patience`: seconds that a caller waits for a lease that another is fetching."""
        self._patience = patience
        self._order = itertools.count()
        super().__init__(book, clock, most, interval)

    def after_fork(self) -> None:
        super().after_fork()
        self._fetches: set[Gate] = set()
        """Of leases that calls and the worker are fetching."""
        self._thirsty: deque[LeasedCell] = deque()
        self._granted: deque[LeasedCell] = deque()
        self._looks: list[tuple[float, int, LeasedCell]] = []
        self._returns: deque[_Return] = deque()

    # -- decisions --------------------------------------------------------------------------------

    def peek(self, key: AnyKey) -> Decision | None:
        cell, now = self._get(key), self._monotonic()
        if cell is not None and now < cell.until and (left := cell.left) > 0:
            return Decision(
                True, key, 1, cell.limit, cell.beyond + left, 0.0, cell.reset_at - now, 0.0, "ok",
                "lease", int(now * 1000 + cell.offset_ms),
            )  # fmt: skip
        return super().peek(key)

    def ask(self, key: AnyKey, cost: int) -> Dialogue[Decision]:
        command = self._book.acquire(key, cost)
        key = command.charges[0].key
        cell = self._asking(key) if self._kept(key) else None
        if cell is None:
            decision: Decision = yield command
            return decision
        came = self._monotonic()
        while (gate := cell.filling) is not None:
            # Others would only ask for the same lease, each over a connection of its own.
            yield Wait(gate, came + self._patience - self._monotonic())
            if not gate.opened:
                break
            if gate.failure is not None:
                raise _theirs(gate.failure)
            nearby = self.judge(key, cost)
            if nearby is not None:
                return nearby
        now = self._monotonic()
        self._saw(cell, now, cost)
        last = (cell.ends_ms - now * 1000 - cell.offset_ms) / 1000
        if cell.until <= now and 0 < last < _LAST and cell.demand.needed(now, HORIZON):
            # The lease has ended, its bucket not quite: another would die at once, and call by call
            # all threads would connect and ask for these moments.
            yield Sleep(last)
            nearby = self.judge(key, cost)
            if nearby is not None:
                return nearby
            now = self._monotonic()
        if 0 < cell.left < cost:
            decision = yield from self._without_lease(cell, command)
            return decision if decision.allowed else self.refused(key, decision, now)
        more = 0
        if cell.filling is None and now >= cell.lease_again_at:
            # Permits whose lease has ended before its bucket can be spent again with any reply.
            kept = cell.left if now * 1000 + cell.offset_ms < cell.ends_ms else 0
            more = cell.demand.needed(now, min(HORIZON, cell.until_turn(now))) - kept
        if more < 1:
            decision = yield command
            with self._cells.slow:
                cell.clocked(decision.now_ms, now, self._monotonic())
                cell.estimate_end(decision.now_ms, now)
            return decision if decision.allowed else self.refused(key, decision, now)
        return (yield from self._with_lease(cell, command, more, now))

    def _with_lease(
        self, cell: LeasedCell, command: Acquire, more: int, now: float
    ) -> Dialogue[Decision]:
        """Ask for a call, and for `more` permits to keep."""
        gate = cell.filling = Gate()
        failure: StoreError | None = None
        try:
            self._fetches.add(gate)
            if self._closed:  # `close` may not have seen the gate
                decision: Decision = yield command
                return decision
            lease = Lease(command.charges, more=more)
            grant: Grant = yield Fetch(lease, lambda late: self._unclaimed(cell, late, now))
            verdict = grant.verdict._replace(left=grant.verdict.left + grant.more)
            decision = decide(command, verdict, "store")
            if not decision.allowed:
                return self.refused(cell.key, decision, now)
            self._gain(cell, grant, grant.more, now)
            return decision
        except Exception as exc:  # a signal handler's, too
            if isinstance(exc, StoreError):
                failure = exc
            if failure is None or failure.charged is None:
                self._may_be_lost(cell)
            raise
        finally:
            if cell.filling is gate:
                cell.filling = None
            try:
                gate.open(failure)
            finally:
                gate.open(failure)  # a signal handler may have raised before the first
                self._fetches.discard(gate)

    def _unclaimed(self, cell: LeasedCell, grant: Grant, sent_at: float) -> None:
        """The permits to keep have come, though nobody waits for the call that they came with."""
        if grant.verdict.admitted:
            self._gain(cell, grant, grant.more, sent_at)

    def _may_be_lost(self, cell: LeasedCell) -> None:
        """A lease may have been charged that nobody has: at most one in a bucket."""
        now = self._monotonic()
        cell.lease_again_at = now + cell.until_turn(now)

    def _without_lease(self, cell: LeasedCell, command: Acquire) -> Dialogue[Decision]:
        """Ask for a call that costs more than the lease has left, which is given back before: it
        might be refused for want of these permits.
        """
        yield from carry(self.ahead([cell.key]), self._monotonic)
        decision: Decision = yield command
        return decision

    def ahead(self, keys: Iterable[AnyKey]) -> list[Errand]:
        for key in keys:
            cell = self._get(key)
            if cell is not None and cell.left:
                self._take_back(cell)
        returns: list[Errand] = []
        self._collect_returns(returns)
        return returns

    def fetches(self, keys: Iterable[AnyKey] | None = None) -> list[Wait]:
        if keys is None:
            gates = list(self._fetches)
        else:
            cells = [cell for key in keys if (cell := self._get(key)) is not None]
            gates = [gate for cell in cells if (gate := cell.filling) is not None]
        return [Wait(gate, self._patience) for gate in gates]

    def _lost(self, cell: LeasedCell) -> None:
        with self._cells.lock:  # it was charged in windows that are no more
            cell.left = cell.level = 0
            cell.low = -1

    # -- leases -----------------------------------------------------------------------------------

    def _asking(self, key: AnyKey) -> LeasedCell:
        cell = self._get(key)
        if cell is None:
            charges, now = self._book.acquire(key).charges, self._monotonic()
            offset = self._clock.now_ms() - now * 1000  # until the first reply
            cell = self._cells.add(key, lambda: self._new_cell(key, charges, offset))
        return cell

    def _new_cell(self, key: Any, charges: tuple[Charge, ...], offset_ms: float) -> LeasedCell:
        return LeasedCell(key, charges, offset_ms, self._monotonic())

    def _saw(self, cell: LeasedCell, now: float, cost: int = 0) -> None:
        """Note the demand since the last time."""
        with self._cells.slow:
            with self._cells.lock:
                spent = cell.level - cell.left
                cell.level = cell.left
            cell.demand.saw(now, max(0, spent) + cost)

    def _gain(self, cell: LeasedCell, grant: Grant, permits: int, sent_at: float) -> None:
        """Put the permits of a grant with those of the same bucket."""
        now = self._monotonic()
        verdict = grant.verdict
        ends_ms = verdict.now_ms + grant.ends_ms
        until = sent_at + grant.ends_ms / 1000 / (1 + _MAX_DRIFT) - MARGIN
        with self._cells.slow:
            cell.clocked(verdict.now_ms, sent_at, now)
            cell.limit = cell.charges[verdict.ring].limit
            cell.beyond = max(0, verdict.left)
            cell.reset_at = now + verdict.reset_ms / 1000
            charged_ms = _within(grant, cell)
            widths = (charge.limit.bucket_ms for charge in cell.charges)
            starts = verdict.starts or [charged_ms - charged_ms % width for width in widths]
            charges = counted_in(cell.charges, starts)
            late = ends_ms < cell.ends_ms and not cell.until <= now < until
            if late or self._gone(cell):
                # A reply that came after that of a later bucket (where that bucket's lease has
                # ended first, the store's clock was set back), or for a cell that was evicted.
                self._give_back(cell, charges, permits, charged_ms)
                return
            if ends_ms != cell.ends_ms:
                if self._take_back(cell):
                    self._due(now)
                cell.until = cell.estimated_at = 0.0
                cell.charged_ms, cell.ends_ms = charged_ms, ends_ms
            rate = cell.demand.rate(now)
            left = cell.left + permits  # never more than there is: only others' hits lower it
            low = -1 if left >= rate * max(0.0, until - now) else min(left // 2, int(rate * AHEAD))
            with self._cells.lock:
                cell.charges = charges
                cell.left += permits
                cell.level += permits
                cell.low = low
                if sent_at >= cell.estimated_at:  # see `estimate_end`
                    cell.until, cell.estimated_at = until, sent_at
            if not cell.watched:
                cell.watched = True
                self._granted.append(cell)
            self._due(min(until + _SETTLE, now + self._interval))

    def _gone(self, cell: LeasedCell) -> bool:
        return self._closed or self._get(cell.key) is not cell

    def _take_back(self, cell: LeasedCell) -> int:
        """Take what the lease has left, so that nobody can spend it any more, and have it given
        back; how many permits.
        """
        back = _Return(cell, cell.charges, 0, cell.charged_ms)
        self._returns.append(back)
        with (
            self._cells.lock
        ):  # in one step, so that no signal handler comes before it is known there
            back.charges, back.charged_ms, back.permits = cell.charges, cell.charged_ms, cell.left
            cell.level -= cell.left
            cell.left = 0
            cell.low = -1
        return back.permits

    def _give_back(
        self, cell: LeasedCell, charges: tuple[Charge, ...], permits: int, charged_ms: int
    ) -> None:
        if permits:
            self._returns.append(_Return(cell, charges, permits, charged_ms))
            self._due(self._monotonic())

    def held(self) -> int:
        leases = sum([cell.left for cell in self._cells.all()])
        return leases + sum([back.permits for back in list(self._returns)])

    def _collect_returns(self, found: list[Errand]) -> None:
        with self._cells.slow:
            returns, self._returns = self._returns, deque()
            try:
                errands = [self._return(back) for back in returns if back.permits]
            except BaseException:  # a signal handler's exception
                self._returns.extend(returns)
                raise
            found.extend(errands)  # from here on, somebody settles them

    def _refill(self, cell: LeasedCell, now: float) -> None:
        cell.low = -1
        self._thirsty.append(cell)
        self._due(now)

    def _evicted(self, cell: LeasedCell) -> None:
        if self._take_back(cell):
            self._due(self._monotonic())

    # -- errands ----------------------------------------------------------------------------------

    def errands(self, now: float, found: list[Errand], *, last: bool = False) -> None:
        with self._cells.slow:  # closing a limiter works beside the worker
            for _ in range(len(self._thirsty)):
                cell = self._thirsty.popleft()
                if not last:
                    self._saw(cell, now)
                    self._order_more(cell, now, cell.until - now, found)
            while self._granted:
                self._look_at(self._granted.popleft(), now)
            while self._looks and (last or self._looks[0][0] <= now):
                self._look(heapq.heappop(self._looks)[2], now, found, last)
            if last:  # those, too, that a signal handler's exception has taken out of `_looks`
                for cell in [*self._cells.all(), *self._left_behind]:
                    self._take_back(cell)
            self._collect_returns(found)
        super().errands(now, found, last=last)

    def _come_again(self, now: float) -> None:
        super()._come_again(now)
        at = self.next_at
        if self._looks:
            at = min(at, self._looks[0][0])
        if self._returns:
            at = min(at, now + self._interval)
        if self._thirsty or self._granted:
            at = min(at, now)
        self.next_at = min(at, self.next_at)

    def _look_at(self, cell: LeasedCell, now: float) -> None:
        """Look at a lease once it has ended, and every now and then before."""
        at = cell.until + _SETTLE
        if at <= now:  # its lease has ended, its bucket not yet
            at = now + max(_SETTLE, cell.until_turn(now))
        at = min(at, now + self._interval)
        heapq.heappush(self._looks, (at, next(self._order), cell))

    def _look(self, cell: LeasedCell, now: float, found: list[Errand], last: bool) -> None:
        """Give back what a lease has too much; get the next one where it has ended."""
        before = cell.level
        self._saw(cell, now)
        idle = cell.level == before and cell.seen == before
        cell.seen = cell.level
        ended = now >= cell.until
        over = ended and now * 1000 + cell.offset_ms >= cell.ends_ms - 1
        if last or idle or over:
            self._take_back(cell)
        spent = idle and not cell.left  # and nobody wants more
        if last or self._gone(cell) or over or spent:
            cell.watched = False
        else:
            self._look_at(cell, now)
        if ended and not last and not idle:
            self._order_more(cell, now, cell.until_turn(now), found)

    def _order_more(
        self, cell: LeasedCell, now: float, seconds: float, found: list[Errand]
    ) -> None:
        """Have the next lease fetched ahead of need, if there is a need."""
        more = cell.demand.needed(now, min(HORIZON, seconds)) - cell.left
        if (
            more < 1
            or cell.filling is not None
            or now < max(cell.denied_until, cell.lease_again_at)
        ):
            return
        gate, command = Gate(), Lease(cell.charges, more=more - 1, quiet=True)
        errand = Errand(command, lambda reply, at: self._fetched(cell, gate, reply, at))
        self._fetches.add(gate)
        if self._closed:  # `close` may not have seen the gate
            self._fetches.discard(gate)
            return
        cell.filling = gate
        found.append(errand)  # no signal handler can come before: somebody settles it

    def _fetched(
        self, cell: LeasedCell, gate: Gate, reply: Grant | Exception, sent_at: float
    ) -> None:
        if gate.opened:  # a second time
            return
        if cell.filling is gate:
            cell.filling = None
        try:
            if isinstance(reply, Grant):
                if reply.verdict.admitted:
                    self._gain(cell, reply, reply.more + 1, sent_at)
                else:
                    plain = self._book.acquire(cell.key)
                    self.refused(cell.key, decide(plain, reply.verdict, "store"), sent_at)
            elif isinstance(reply, StoreError) and reply.charged is None:
                self._may_be_lost(cell)
        finally:
            gate.open()  # after a failure, too: callers ask for themselves
            self._fetches.discard(gate)

    def _return(self, back: _Return) -> Errand:
        settled = False

        def settle(reply: Count | Exception, sent_at: float) -> None:
            nonlocal settled
            again, settled = settled, True
            # Sent again only where it surely was not executed: twice would be permits from nowhere.
            if not again and isinstance(reply, StoreError) and reply.charged is False:
                cell, now = back.cell, self._monotonic()
                if now * 1000 + cell.offset_ms - back.charged_ms < cell.longest_ms:
                    self._returns.append(back)

        charges = costing(back.charges, back.permits)
        return Errand(Refund(charges, charged_ms=back.charged_ms), settle)


class _Return:
    """Permits of a lease to give back."""

    __slots__ = ("cell", "charged_ms", "charges", "permits")

    def __init__(
        self, cell: LeasedCell, charges: tuple[Charge, ...], permits: int, charged_ms: int
    ) -> None:
        self.cell = cell
        self.charges = charges
        self.permits = permits
        self.charged_ms = charged_ms
        """A moment in the bucket that they were charged in."""


def _theirs(failure: StoreError) -> StoreError:
    """Another caller's failure, for one who waited for it: nothing was sent on its behalf."""
    return type(failure)(str(failure), charged=False)


def _within(grant: Grant, cell: LeasedCell) -> int:
    """A moment in the bucket of a grant. That is the present one, or where the store's clock is
    behind its newest bucket, that.
    """
    now = grant.verdict.now_ms
    return max(now, now + grant.ends_ms - cell.width)
