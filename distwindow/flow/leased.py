"""Permits bought from the store in blocks, and spent here.

    store   |--- bucket ----------------|--- bucket ----------------|
            ^ lease 40       ^ 30, ahead of need       ^ returned 3
    here     ############### ###########              |############

A lease is charged when it is granted, in the bucket of that moment, and may be spent until that
bucket ends on the store's clock: so what is spent counts in the bucket in which it happens, and no
window ever holds more than the limit. What is left at the end is given back.

How large: what is needed (`local/demand.py`) until the bucket ends or a quarter of a second
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
from ..core.errors import DistwindowError, StoreError
from ..local.cell import Cell
from ..local.demand import Demand
from ..wire.command import Acquire, Charge, Count, Grant, Lease, Refund, counted_in
from ..wire.keys import AnyKey
from .admit import decide
from .book import Book
from .effect import Dialogue, Sleep, Together, Wait
from .gate import Gate
from .near import MARGIN, Errand, Nearby, costing, limits_of

HORIZON = 0.25
"""Seconds that a lease is to last at most: what a killed process takes with it."""
AHEAD = 0.02
"""Seconds before a lease is spent that the worker is told to get the next."""
_LAST = 0.005
"""Seconds before the end of a bucket that may be slept through, in which there can be no lease."""
_SETTLE = 0.002
"""Seconds after the end of a lease in which the store comes to the next bucket, too."""


class LeasedCell(Cell):
    """A key's lease, and the demand that sizes the next."""

    __slots__ = (
        "charged_ms", "demand", "ends_ms", "filling", "level", "seen", "watched", "width",
    )  # fmt: skip

    def __init__(self, key: Any, charges: tuple[Charge, ...], offset_ms: float, now: float) -> None:
        super().__init__(key, charges, limits_of(charges), offset_ms)
        self.demand = Demand(now)
        self.ends_ms = 0
        """When the bucket of the lease ends, on the store's clock: this names the bucket."""
        self.charged_ms = 0
        """A moment in it."""
        self.level = 0
        """What was left when the demand was last looked at."""
        self.seen = -1
        self.filling: Gate | None = None
        """Closed while a lease is being fetched."""
        self.watched = False
        self.width = min(charge.limit.bucket_ms for charge in charges)

    def until_turn(self, now: float) -> float:
        """Seconds until the present bucket ends."""
        return (self.width - (now * 1000 + self.offset_ms) % self.width) / 1000


class Leased(Nearby[LeasedCell]):
    """`consistency="leased"`."""

    def __init__(
        self, book: Book, clock: Clock, most: int, interval: float, patience: float = 0.25
    ) -> None:
        """`patience`: seconds that a caller waits for a lease that another is fetching."""
        self._patience = patience
        self._order = itertools.count()
        super().__init__(book, clock, most, interval)

    def after_fork(self) -> None:
        super().after_fork()
        self._thirsty: deque[LeasedCell] = deque()
        self._granted: deque[LeasedCell] = deque()
        self._looks: list[tuple[float, int, LeasedCell]] = []
        self._returns: deque[tuple[tuple[Charge, ...], int]] = deque()

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
        more = 0
        if cell.filling is None:
            more = cell.demand.needed(now, min(HORIZON, cell.until_turn(now)))
        if 0 < cell.left < cost:
            decision = yield from self._without_lease(cell, command)
            return decision if decision.allowed else self.refused(key, decision, now)
        if more < 1:
            decision = yield command
            cell.clocked(decision.now_ms, now, self._monotonic())
            return decision if decision.allowed else self.refused(key, decision, now)
        gate = cell.filling = Gate()
        failure: StoreError | None = None
        try:
            grant: Grant = yield Lease(command.charges, more=more)
            verdict = grant.verdict._replace(left=grant.verdict.left + grant.more)
            decision = decide(command, verdict, "store")
            if not decision.allowed:
                return self.refused(key, decision, now)
            self._gain(cell, grant, grant.more, now)
            return decision
        except StoreError as exc:
            failure = exc
            raise
        finally:
            cell.filling = None
            gate.open(failure)

    def _without_lease(self, cell: LeasedCell, command: Acquire) -> Dialogue[Decision]:
        """Ask for a call that costs more than the lease has left, which is given back before: it
        might be refused for want of these permits.
        """
        surplus = self._surplus(cell)
        if surplus == 0:  # spent meanwhile
            decision: Decision = yield command
            return decision
        back = Refund(costing(cell.charges, surplus), charged_ms=cell.charged_ms)
        _, verdict = yield Together((back, command))
        if isinstance(verdict, DistwindowError):
            raise verdict
        return decide(command, verdict, "store")

    def ahead(self, keys: Iterable[AnyKey]) -> list[Errand]:
        cells = {key: cell for key in keys if (cell := self._get(key)) is not None and cell.left}
        return [
            self._return(costing(cell.charges, surplus), cell.charged_ms)
            for cell in cells.values()
            if (surplus := self._surplus(cell))
        ]

    def _lost(self, cell: LeasedCell) -> None:
        self._surplus(cell)  # it was charged in windows that are no more

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
            with self._lock:
                spent = cell.level - cell.left
                cell.level = cell.left
            cell.demand.saw(now, max(0, spent) + cost)

    def _gain(self, cell: LeasedCell, grant: Grant, permits: int, sent_at: float) -> None:
        """Put the permits of a grant with those of the same bucket."""
        now = self._monotonic()
        verdict = grant.verdict
        ends_ms = verdict.now_ms + grant.ends_ms
        until = sent_at + grant.ends_ms / 1000 - MARGIN
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
                self._give_back(charges, permits, charged_ms)
                return
            if ends_ms != cell.ends_ms:
                self._give_back(cell.charges, self._surplus(cell), cell.charged_ms)
                cell.until, cell.ends_ms = 0.0, ends_ms
                cell.charged_ms = charged_ms
            rate = cell.demand.rate(now)
            left = cell.left + permits  # never more than there is: only others' hits lower it
            low = -1 if left >= rate * max(0.0, until - now) else min(left // 2, int(rate * AHEAD))
            with self._lock:
                cell.charges = charges
                cell.left += permits
                cell.level += permits
                cell.low = low
                if until > cell.until:
                    cell.until = until
            if not cell.watched:
                cell.watched = True
                self._granted.append(cell)
            self._due(min(until + _SETTLE, now + self._interval))

    def _gone(self, cell: LeasedCell) -> bool:
        return self._closed or self._get(cell.key) is not cell

    def _surplus(self, cell: LeasedCell) -> int:
        """Take what is left, so that nobody can spend it any more."""
        with self._lock:
            left = cell.left
            cell.level -= left
            cell.left = 0
            cell.low = -1
        return left

    def _give_back(self, charges: tuple[Charge, ...], permits: int, charged_ms: int) -> None:
        if permits:
            self._returns.append((costing(charges, permits), charged_ms))
            self._due(self._monotonic())

    def _refill(self, cell: LeasedCell, now: float) -> None:
        cell.low = -1
        self._thirsty.append(cell)
        self._due(now)

    def _evicted(self, cell: LeasedCell) -> None:
        self._give_back(cell.charges, self._surplus(cell), cell.charged_ms)

    # -- errands ----------------------------------------------------------------------------------

    def errands(self, now: float, *, last: bool = False) -> list[Errand]:
        found: list[Errand] = []
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
            returns = [self._returns.popleft() for _ in range(len(self._returns))]
            found += [self._return(*given) for given in returns]
        return found + super().errands(now, last=last)

    def worked(self, now: float) -> None:
        super().worked(now)
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
        at = min(cell.until + _SETTLE, now + self._interval)
        heapq.heappush(self._looks, (at, next(self._order), cell))

    def _look(self, cell: LeasedCell, now: float, found: list[Errand], last: bool) -> None:
        """Give back what a lease has too much; get the next one where it has ended."""
        before = cell.level
        self._saw(cell, now)
        idle = cell.level == before and cell.seen == before
        cell.seen = cell.level
        ended = now >= cell.until
        if last or idle or ended:
            surplus = self._surplus(cell)
            if surplus:
                found.append(self._return(costing(cell.charges, surplus), cell.charged_ms))
        spent = idle and not cell.left  # and nobody wants more
        if last or self._gone(cell) or ended or spent:
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
        if more < 1 or cell.filling is not None or now < cell.denied_until:
            return
        cell.filling = Gate()
        command = Lease(cell.charges, more=more - 1, quiet=True)
        found.append(Errand(command, lambda reply, sent_at: self._fetched(cell, reply, sent_at)))

    def _fetched(self, cell: LeasedCell, reply: Grant | Exception, sent_at: float) -> None:
        gate, cell.filling = cell.filling, None
        if isinstance(reply, Grant):
            if reply.verdict.admitted:
                self._gain(cell, reply, reply.more + 1, sent_at)
            else:
                plain = self._book.acquire(cell.key)
                self.refused(cell.key, decide(plain, reply.verdict, "store"), sent_at)
        if gate is not None:
            gate.open()  # after a failure, too: callers ask for themselves

    def _return(self, charges: tuple[Charge, ...], charged_ms: int) -> Errand:
        def settle(reply: Count | Exception, sent_at: float) -> None:
            # Sent again only where it surely was not executed: twice would be permits from nowhere.
            if isinstance(reply, StoreError) and reply.charged is False:
                cell, now = self._get(charges[0].key), self._monotonic()
                if cell and now * 1000 + cell.offset_ms - charged_ms < cell.longest_ms:
                    self._returns.append((charges, charged_ms))

        return Errand(Refund(charges, charged_ms=charged_ms), settle)


def _theirs(failure: StoreError) -> StoreError:
    """Another caller's failure, for one who waited for it: nothing was sent on its behalf."""
    return type(failure)(str(failure), charged=False)


def _within(grant: Grant, cell: LeasedCell) -> int:
    """A moment in the bucket of a grant. That is the present one, or where the store's clock is
    behind its newest bucket, that.
    """
    now = grant.verdict.now_ms
    return max(now, now + grant.ends_ms - cell.width)
