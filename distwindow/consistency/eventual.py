"""Decided here, settled with the store periodically.

    here     .#.##..#.|.##.#....|..#.##...        counts, by bucket
    store   --^---------^---------^-------        every `sync_interval`: ours go, the fleet's come

A key's window is what all had passed at the last sync, by bucket, and what was passed here since.
The store is never waited for. So all processes together may pass what they pass within two syncs
and the ways there and back beyond the limit, and no more than the limit each.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from threading import Lock
from typing import Any

from ..core.clock import Clock
from ..core.decision import Decision
from ..core.errors import ConfigurationError
from ..core.interrupts import is_interruption
from ..operations.command_cache import Book
from ..operations.steps import Dialogue
from ..protocol.commands import Charge, Fleet, Flush, counted_in
from ..protocol.keys import AnyKey, plain_key
from .base import Errand, Nearby, costing, limits_of
from .fleet_window import Share
from .key_state import FAR, Cell, Denial

_FOLLOWED = 60.0
"""Seconds for which a key that nobody calls is still synced, within its window."""
_SLOWER = 8
"""What is known then is never older than this part of the time for which nobody has called."""
_AT_ONCE = 1000
"""Such keys in one sync."""

_new = tuple.__new__


class SharedCell(Cell):
    """A key's windows, as this process sees them."""

    __slots__ = ("again", "asked_at", "binding", "followed", "shares")

    def __init__(
        self, key: Any, charges: tuple[Charge, ...], offset_ms: float, share: float
    ) -> None:
        super().__init__(key, charges, limits_of(charges), offset_ms)
        self.shares = tuple(Share(charge.limit, share) for charge in charges)
        self.binding = self.shares[0]
        """The one that has least left."""
        self.asked_at = -FAR
        """When somebody last called, as of the last sync."""
        self.again = False
        """It was called before within its window."""
        self.followed = False

    def closed(self, start: int, passed: int) -> None:
        for share in self.shares:
            share.passed(start, passed)

    def rebase(self, lock: Lock, offset_ms: float, now: float) -> None:
        shift = round(offset_ms - self.offset_ms)
        super().rebase(lock, offset_ms, now)
        for share in self.shares:
            share.shift(shift)


class Eventual(Nearby[SharedCell]):
    """`consistency="eventual"`. `share` is the part of each limit that one process may admit."""

    def __init__(
        self, book: Book, clock: Clock, most: int, interval: float, share: float = 1.0
    ) -> None:
        self._share = share
        self._offset_ms: float | None = None
        """Of the store's clock; None before its first reply. A forked child has the same clocks."""
        self._going_on = True
        self._order = itertools.count()
        super().__init__(book, clock, most, interval)
        cap = min(max(1, int(limit.amount * share)) for limit in book.limits)
        self._dearest = min(self._dearest, cap)

    def after_fork(self) -> None:
        super().after_fork()
        self._followed: list[tuple[float, int, SharedCell]] = []

    # -- decisions --------------------------------------------------------------------------------

    def judge(self, key: AnyKey, cost: int) -> Decision | None:
        try:
            cell = self._get(key)
            if cell is None and key.__class__ is not str:
                key = plain_key(key)
                cell = self._get(key)
            if cell is not None:
                self._used(key)
        except (TypeError, KeyError) as exc:
            if is_interruption(exc):
                raise
            cell = None
        if cell is None or type(cost) is not int or not 1 <= cost <= self._dearest:
            cell = self._met_first(key, cost)
        now = self._monotonic()
        if now >= cell.until:
            self._estimate(cell, now)
        if not cell.dirty:  # before it is counted: a signal handler may raise in between
            self._soil(cell)
        with self._lock:
            left = cell.left - cost
            if left >= 0:
                cell.left = left
                cell.passed += cost
            charges = cell.charges
        if left < 0:
            return self._refuse(cell, key, cost, now)
        if not cell.dirty:  # flushed just now
            self._soil(cell)
        if cost != 1:
            charges = costing(charges, cost)
        return _new(
            Decision,
            (
                True, key, cost, cell.binding.limit, left, 0.0, cell.reset_at - now, 0.0, "ok",
                "local", int(now * 1000 + cell.offset_ms), charges,
            ),
        )  # fmt: skip

    def ask(self, key: AnyKey, cost: int) -> Dialogue[Decision]:
        raise AssertionError("decided without the store")
        yield

    def peek(self, key: AnyKey) -> Decision | None:
        cell, now = self._get(key) or self._met_first(key, 1), self._monotonic()
        if now >= cell.until:
            self._estimate(cell, now)
        if cell.left < 1:
            return self._refuse(cell, key, 1, now, counted=False)
        return Decision(
            True, key, 1, cell.binding.limit, cell.left, 0.0, cell.reset_at - now, 0.0, "ok",
            "local", int(now * 1000 + cell.offset_ms),
        )  # fmt: skip

    def ahead(self, keys: Iterable[AnyKey]) -> list[Errand]:
        cells = {key: cell for key in keys if (cell := self._get(key)) is not None}
        return [errand for cell in cells.values() if (errand := self._flush(cell)) is not None]

    def forget(self, key: AnyKey) -> None:
        """A refund is seen with the next sync, soon."""
        cell = self._get(key)
        if cell is not None:
            cell.again, cell.asked_at = True, self._monotonic()
            if not cell.dirty:
                self._soil(cell)

    def _met_first(self, key: AnyKey, cost: int) -> SharedCell:
        """The cell of a key that is called for the first time, or not as it should be."""
        if self._closed:
            raise ConfigurationError("this limiter is closed; make a new one")
        charges = self._book.acquire(key, cost).charges
        if cost > self._dearest:
            raise ValueError(
                f"cost={cost} can never be admitted: the share of one process is {self._dearest}"
            )
        name = key if self._kept(key) else charges[0].ring
        cell = self._get(name)
        if cell is not None:
            return cell
        offset = self._offset_ms
        if offset is None:
            offset = self._clock.now_ms() - self._monotonic() * 1000
        plain, known = costing(charges, 1), offset
        return self._cells.add(name, lambda: self._new_cell(name, plain, known))

    def _new_cell(self, key: Any, charges: tuple[Charge, ...], offset_ms: float) -> SharedCell:
        return SharedCell(key, charges, offset_ms, self._share)

    # -- the window -------------------------------------------------------------------------------

    def _estimate(self, cell: SharedCell, now: float) -> None:
        """Say anew how many permits are left until the present bucket ends."""
        lock = self._cells.lock
        with self._cells.slow:
            if not cell.roll(lock, now):
                cell.close(lock)
            now_ms = int(now * 1000 + cell.offset_ms)
            untold = cell.pending if cell.flight is None else (*cell.flight.buckets, *cell.pending)
            room, binding = None, cell.binding
            for share in cell.shares:
                here = share.room(now_ms, untold)
                if room is None or here < room:
                    room, binding = here, share
            assert room is not None
            cell.binding = binding
            limit = binding.limit
            cell.reset_at = now + (limit.span * limit.bucket_ms - now_ms % limit.bucket_ms) / 1000
            charges = cell.charges
            if cell.start > now_ms:
                # The store's clock was set back: it is counted in a bucket ahead of that.
                widths = (charge.limit.bucket_ms for charge in charges)
                charges = counted_in(charges, [cell.start - cell.start % width for width in widths])
            elif charges[0].bucket_start_ms is not None:
                charges = tuple(charge._replace(bucket_start_ms=None) for charge in charges)
            with lock:
                cell.charges = charges
                cell.left = room - cell.passed  # what has been passed meanwhile
                cell.until = cell.turns

    def _refuse(
        self, cell: SharedCell, key: AnyKey, cost: int, now: float, *, counted: bool = True
    ) -> Decision:
        denial = cell.denial
        if denial is None or now >= cell.denied_until or cost != cell.denied:
            with self._cells.slow:
                denial = cell.denial = self._denial(cell, cost, now)
                cell.denied, cell.denied_until = cost, cell.until
        if counted:
            if not cell.dirty:
                self._soil(cell)
            with self._lock:
                cell.blocked += cost
            if not cell.dirty:
                self._soil(cell)
        return self._repeated(cell, denial, key, cost, now, "local")

    def _denial(self, cell: SharedCell, cost: int, now: float) -> Denial:
        self._estimate(cell, now)  # what has been sent since the last time is not in `passed`
        now_ms = int(now * 1000 + cell.offset_ms)
        retry, binding = -1, cell.binding
        for share in cell.shares:
            here = share.retry_ms(now_ms, cost, cell.passed)
            if here > retry:
                retry, binding = here, share
        retry = max(1, retry)
        reset = max(retry, binding.reset_ms(now_ms, cell.passed))
        return Denial(binding.limit, max(0, cell.left), now + retry / 1000, now + reset / 1000)

    # -- errands ----------------------------------------------------------------------------------

    def greeting(self) -> list[Errand]:
        """The first thing to learn is what time it is there: counts carry their bucket."""
        if self._offset_ms is not None:
            return []
        try:
            cell = self._dirty[0]
        except IndexError as exc:
            if is_interruption(exc):
                raise
            return []
        command = Flush(cell.charges, pull=True)
        return [Errand(command, lambda reply, sent_at: self._told_time(reply))]

    def errands(self, now: float, found: list[Errand], *, last: bool = False) -> None:
        self._going_on = not last
        if self._offset_ms is None and not last:
            return
        with self._cells.slow:
            while self._followed and self._followed[0][0] <= now and len(found) < _AT_ONCE:
                cell = heapq.heappop(self._followed)[2]
                cell.followed = False
                # What is told now anyway is asked about with that.
                if not cell.dirty and cell.flight is None and (errand := self._flush(cell)):
                    found.append(errand)
        super().errands(now, found, last=last)

    def _come_again(self, now: float) -> None:
        super()._come_again(now)
        if self._followed:
            self.next_at = min(self.next_at, max(self._followed[0][0], now + self._interval))

    def _flush(self, cell: SharedCell) -> Errand | None:
        if cell.counted():
            now = self._monotonic()
            cell.again = now - cell.asked_at < cell.longest_ms / 1000
            cell.asked_at = now
        return super()._flush(cell)

    def _pulls(self) -> bool:
        return True

    def _follows(self, cell: SharedCell) -> bool:
        """A key that is called now and then has to know what the others pass meanwhile. One that
        was called once is none of these: there may be a flood of them.
        """
        idle = self._monotonic() - cell.asked_at
        wanted = cell.again and idle < min(_FOLLOWED, cell.longest_ms / 1000)
        return wanted and self._going_on and self._get(cell.key) is cell

    def _follow(self, cell: SharedCell, now: float) -> bool:
        """Ask again, the later the longer nobody calls."""
        if not self._follows(cell):
            return False
        if not cell.followed:
            cell.followed = True
            at = now + max(self._interval, (now - cell.asked_at) / _SLOWER)
            heapq.heappush(self._followed, (at, next(self._order), cell))
            self._due(at)
        return True

    def _told_time(self, reply: Fleet | Exception) -> None:
        if not isinstance(reply, Fleet):
            return
        now = self._monotonic()
        self._offset_ms = reply.now_ms - now * 1000
        for cell in self._cells.all():
            with self._cells.slow:
                cell.rebase(self._cells.lock, self._offset_ms, now)
                self._estimate(cell, now)

    def _told(self, cell: SharedCell, fleet: Fleet) -> None:
        self._offset_ms = cell.offset_ms
        for share, passed in zip(cell.shares, fleet.passed, strict=True):
            share.told(passed)

    def _changed(self, cell: SharedCell, now: float) -> None:
        cell.denied_until = 0.0
        self._estimate(cell, now)
