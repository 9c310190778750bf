"""What is decided in this process, without the store: the rooms of `local/` and the commands of
`wire/` come together here.

    judge(key, cost)    a decision without the store, or None: the hot path
    ask(key, cost)      the dialogue with the store that follows a None
    errands(now)        what a background worker has to carry to the store now
    next_at             when it has to come

`Direct` remembers refusals and carries what is counted here; `Leased` and `Eventual` add to that.
`Inside` is for a store in this process, which is asked each time.
"""

from __future__ import annotations

import itertools
import secrets
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from threading import Lock, RLock
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

from ..core.clock import Clock
from ..core.decision import Decision, Source
from ..core.errors import ConfigurationError, StoreError
from ..core.interrupts import is_interruption
from ..core.limit import Limit
from ..core.stats import Bucket
from ..operations.command_cache import Book
from ..operations.steps import Dialogue, Wait
from ..protocol.commands import NEWEST, Acquire, Charge, Command, Fleet, Flush
from ..protocol.keys import AnyKey, Key, plain_key
from .key_state import FAR, Cell, Denial, merged
from .key_state_cache import Cells

C = TypeVar("C", bound=Cell)

LONGEST_KEY = 256
"""Longer keys are not kept: the store is asked each time."""

MARGIN = 0.001
"""The store counts whole ms, so what it says of a moment may be one too late."""

_KEPT_S = 5.0
"""Seconds for which counts that the store does not take are kept in any case. Where it fails for
longer, and more than `max_local_keys` keys are waiting that are not in use any more, those are
dropped: their number has no other bound.
"""

_new = tuple.__new__


class Errand(NamedTuple):
    """A command for the worker to carry, and whom to tell what came of it: the reply or the error,
    and when it was sent (monotonic seconds).
    """

    command: Command[Any]
    settle: Callable[[Any, float], None]
    """May be called twice with the same; the second time does nothing."""


class Flight(NamedTuple):
    """Counts that have been sent, to be sent again under the same number until they arrive."""

    seq: int
    buckets: tuple[Bucket, ...]
    since: float
    """When it was made, monotonic seconds."""


class Nearby(Generic[C]):
    """What all modes have: cells, remembered refusals, and counts on their way to the store."""

    leases = False
    """Does it hold permits that have to be given back?"""

    def __init__(self, book: Book, clock: Clock, most: int, interval: float) -> None:
        self.next_at = FAR
        """When `errands` has something, monotonic seconds."""
        self.wake: Callable[[], object] = lambda: None
        """Tells the worker that `next_at` is earlier than it was."""
        self._book = book
        self._monotonic = clock.monotonic
        self._clock = clock
        self._interval = interval
        self._dearest = min(limit.amount for limit in book.limits)
        self._cells: Cells[C] = Cells(most, self._evicted)
        self._closed = False
        self.after_fork()

    def after_fork(self) -> None:
        """The child has its own name, and spends nothing of its parent's."""
        self._cells.clear()
        # Bound once, for the hot path.
        self._get, self._used = self._cells.get, self._cells.used
        self._lock: Lock | _Closed = _Closed() if self._closed else self._cells.lock
        """Held while a call is counted; what is counted already is moved under the cells' own."""
        self._sender = secrets.token_hex(5)
        # Re-entrant, as a signal handler may flush the limiter that it has interrupted.
        self._collecting = RLock()
        self._left_behind: list[C] = []
        """The cells there were when this was closed."""
        self._seq = itertools.count(1)
        self._dirty: deque[C] = deque()
        self.next_at = FAR

    # -- decisions --------------------------------------------------------------------------------

    def judge(self, key: AnyKey, cost: int) -> Decision | None:
        """The decision, where this process can make it: a permit that it has, or a refusal that it
        remembers. One piece, as it is what hot keys cost.
        """
        try:
            cell = self._get(key)
            if cell is None:
                if key.__class__ is str:
                    return None
                key = plain_key(key)
                cell = self._get(key)
                if cell is None:
                    return None
            self._used(key)
        except (TypeError, KeyError) as exc:  # no key at all, or evicted just now
            if is_interruption(exc):
                raise
            return None
        if cost.__class__ is not int or cost < 1:
            return None
        now = self._monotonic()
        if now < cell.until:
            with self._lock:
                left = cell.left - cost
                if left >= 0:
                    cell.left = left
                charges = cell.charges  # with the permits: the next lease names another bucket
            if left >= 0:
                if left <= cell.low:
                    self._refill(cell, now)
                if cost != 1:
                    charges = costing(charges, cost)
                # Decision(...) itself costs twice as much.
                return _new(
                    Decision,
                    (
                        True, key, cost, cell.limit, cell.beyond + left, 0.0, cell.reset_at - now,
                        0.0, "ok", "lease", int(now * 1000 + cell.offset_ms), charges,
                    ),
                )  # fmt: skip
        if now < cell.denied_until and cell.denied <= cost <= self._dearest:
            denial = cell.denial
            if denial is not None:  # not forgotten just now
                if now >= cell.turns:
                    self._roll(cell, now)
                if not cell.dirty:  # before it is counted: a signal handler may raise in between
                    self._soil(cell)
                with self._lock:
                    cell.blocked += cost
                if not cell.dirty:  # flushed just now
                    self._soil(cell)
                limit, remaining, retry_at, reset_at = denial
                return _new(
                    Decision,
                    (
                        False, key, cost, limit, remaining, retry_at - now, reset_at - now, 0.0,
                        "over_limit", "deny_cache", int(now * 1000 + cell.offset_ms), None,
                    ),
                )  # fmt: skip
        return None

    def ask(self, key: AnyKey, cost: int) -> Dialogue[Decision]:
        """The decision, with the store."""
        raise NotImplementedError

    def peek(self, key: AnyKey) -> Decision | None:
        """What `judge` would say to a cost of 1, counting nothing."""
        cell = self._get(key)
        now = self._monotonic()
        if cell is None or now >= cell.denied_until or cell.denied > 1 or cell.denial is None:
            return None
        return self._repeated(cell, cell.denial, key, 1, now, "deny_cache")

    def refused(self, key: AnyKey, decision: Decision, sent_at: float) -> Decision:
        """The store has refused: remember it, for calls of that cost or more, until the moment it
        named, but not for longer than a bucket (a refund or a raised limit is not noticed here).
        """
        now = self._monotonic()
        width = decision.limit.bucket_ms / 1000
        until = sent_at + min(decision.retry_after, width) - MARGIN
        if until > now and self._kept(key):
            cell = self._cell(key, decision.now_ms - now * 1000)
            cell.clocked(decision.now_ms, sent_at, now)
            denial = Denial(
                decision.limit,
                decision.remaining,
                now + decision.retry_after,
                now + max(decision.retry_after, decision.reset_after),
            )
            with self._cells.slow:
                if now >= cell.denied_until or decision.cost <= cell.denied:
                    cell.denial, cell.denied, cell.denied_until = denial, decision.cost, until
        return decision

    def forget(self, key: AnyKey) -> None:
        """Its windows are not what they were: ask anew."""
        with self._cells.slow:
            cell = self._get(key)
            if cell is not None:
                cell.denied_until, cell.denial = 0.0, None

    def reset(self, key: AnyKey) -> None:
        """Its windows are being emptied: drop what is not told yet, too."""
        cell = self._cells.drop(key)
        if cell is not None:
            with self._cells.slow:
                cell.close(self._cells.lock)
                cell.pending, cell.flight = (), None
                self._lost(cell)

    def _lost(self, cell: C) -> None:
        """Whatever else there is of the windows that are no more."""

    def _repeated(
        self, cell: C, denial: Denial, key: AnyKey, cost: int, now: float, source: Source
    ) -> Decision:
        limit, left, retry_at, reset_at = denial
        return Decision(
            False, key, cost, limit, left, retry_at - now, reset_at - now, 0.0, "over_limit",
            source, int(now * 1000 + cell.offset_ms),
        )  # fmt: skip

    def _refill(self, cell: C, now: float) -> None:
        """A lease runs low."""

    # -- statistics -------------------------------------------------------------------------------

    def record(self, decision: Decision, failed: bool, rt_ms: int) -> Command[Any] | None:
        """Count a finished call; a command only where that has to be asked of the store at once."""
        now = self._monotonic()
        # What the store's clock says now: it said `now_ms` when the call began.
        offset = decision.now_ms + rt_ms - now * 1000
        cell = self._cell_of(decision, offset)
        cell.offset_ms = max(cell.offset_ms, offset)
        if now >= cell.turns:
            self._roll(cell, now)
        if not cell.dirty:
            self._soil(cell)
        with self._lock:
            if cell.success + cell.error == 0 or rt_ms < cell.rt_min:
                cell.rt_min = rt_ms
            if failed:
                cell.error += 1
            else:
                cell.success += 1
            cell.rt_sum += rt_ms
        if not cell.dirty:
            self._soil(cell)
        return None

    def tell(self, key: AnyKey) -> Errand | None:
        """What is not told yet of `key`, for a caller who is about to ask the store about it."""
        cell = self._get(key)
        return None if cell is None else self._flush(cell)

    def ahead(self, keys: Iterable[AnyKey]) -> list[Errand]:
        """What the store has to know or have before it is asked about several keys at once."""
        return []

    # -- errands ----------------------------------------------------------------------------------

    def greeting(self) -> list[Errand]:
        """What has to be known before anything is told."""
        return []

    def errands(self, now: float, found: list[Errand], *, last: bool = False) -> None:
        """Put to `found` what the worker has to carry now; with `last`, all that is to be carried
        ever. Where this raises, what has been found is to be settled as not sent.
        """
        done: dict[int, C] = {}
        with self._collecting:
            try:
                for _ in range(len(self._dirty)):
                    cell = self._dirty[0]
                    cell.dirty = False  # before its counts are taken: later ones are noticed
                    self._collect(cell, done, found)
                    # Only now, so that a signal handler that raises leaves it there.
                    if self._dirty and self._dirty[0] is cell:
                        self._dirty.popleft()
                if last:
                    # Also what is not marked: where a signal handler has raised just before it was,
                    # or when the reply to its flush had come.
                    for cell in [*self._cells.all(), *self._left_behind]:
                        if cell.counted():
                            self._collect(cell, done, found)
            except BaseException:
                self._dirty.extend(done.values())  # nothing of `found` will be sent
                raise

    def _collect(self, cell: C, done: dict[int, C], found: list[Errand]) -> None:
        """Put the flush of `cell` to `found`, once."""
        if id(cell) not in done:
            done[id(cell)] = cell
            errand = self._flush(cell)
            if errand is not None:
                found.append(errand)

    def worked(self, now: float) -> None:
        """The worker has been: when is it to come again?"""
        try:
            self.next_at = FAR  # before looking: what comes up meanwhile sets it itself
            self._come_again(now)
        except BaseException:  # a signal handler's exception
            self.next_at = now
            raise
        finally:
            if self.next_at < FAR:
                self.wake()  # the worker may have looked just before

    def _come_again(self, now: float) -> None:
        if self._dirty:
            self.next_at = min(self.next_at, now + self._interval)

    def fetches(self, keys: Iterable[AnyKey] | None = None) -> list[Wait]:
        """How to wait for what is being fetched from the store to be kept here: for these keys, or
        by any call.
        """
        return []

    def close(self) -> None:
        """Nothing is decided here any more."""
        self._closed = True
        # Nobody counts any more after these lines, and whoever was about to is told so: what was
        # counted after the last flush, nobody would send.
        self._lock = _Closed()
        with self._cells.lock:
            pass
        self._left_behind += self._cells.all()  # again, where a signal handler raised in between
        self._cells.empty()

    # -- the end of the process (worker/shutdown.py) --------------------------------------------

    def freeze(self, hold: Callable[[], object]) -> None:
        """Have calls wait in `hold` before they are decided here. Not where the caller has `slow`:
        the last flush needs that lock.
        """
        cells = self._cells
        owned: Callable[[], bool] = getattr(cells.slow, "_is_owned")  # noqa: B009

        def get(key: AnyKey) -> C | None:
            if not owned():
                hold()
            return cells.get(key)

        self._get = cast(Any, get)

    def unfreeze(self) -> None:
        """Decide calls again."""
        self._get = self._cells.get

    def held(self) -> int:
        """How many permits are still to be given back."""
        return 0

    def unsent(self) -> int:
        """How many counts the store has not been sent, or has not acknowledged."""
        total = 0
        for cell in self._cells.all():
            total += cell.passed + cell.blocked + cell.success + cell.error
            sent = () if cell.flight is None else cell.flight.buckets
            for seen in (*cell.pending, *sent):
                total += seen.passed + seen.blocked + seen.success + seen.error
        return total

    def _soil(self, cell: C) -> None:
        at = self._monotonic() + self._interval
        self._due(at)  # where a signal handler raises after the next lines, the worker comes
        cell.dirty = True
        self._dirty.append(cell)
        self._due(at)  # where the worker has just gone to sleep, it is woken again

    def _due(self, at: float) -> None:
        # A second overdue: whoever was to come, an event loop, is gone.
        if at < self.next_at or self.next_at < at - self._interval - 1:
            self.next_at = at
            try:
                self.wake()
            except BaseException:  # a signal handler's exception: the next caller wakes it
                self.next_at = FAR
                raise

    def _flush(self, cell: C) -> Errand | None:
        with self._cells.slow:
            flight: Flight | None = cell.flight
            if flight is None:
                cell.close(self._cells.lock)
                buckets = cell.pending
                if not buckets and not self._follows(cell):
                    self._cells.settled(cell)
                    return None
                flight = Flight(next(self._seq), buckets, self._monotonic())
                cell.flight, cell.pending = flight, ()  # in one step: no signal handler in between
        sender = self._sender
        if isinstance(cell.key, tuple):
            # Its rings have other cells, too, and each sender's flights have to stay in order.
            sender += format(zlib.crc32(b" ".join(cell.key)), "x")
        counts = tuple(merged(flight.buckets, c.limit.bucket_ms) for c in cell.charges)
        command = Flush(
            cell.charges, counts=counts, sender=sender, seq=flight.seq, pull=self._pulls()
        )
        return Errand(command, lambda reply, sent_at: self._flushed(cell, flight, reply, sent_at))

    def _pulls(self) -> bool:
        return False

    def _follows(self, cell: C) -> bool:
        """Is there something to ask, though there is nothing to tell?"""
        return False

    def _follow(self, cell: C, now: float) -> bool:
        """See to it that it is asked, then."""
        return False

    def _flushed(self, cell: C, flight: Flight, reply: Fleet | Exception, sent_at: float) -> None:
        now = self._monotonic()
        with self._cells.slow:
            if cell.flight is not flight:
                return  # it was sent twice; what this reply tells of the fleet is older
            if isinstance(reply, StoreError) and self._alive(cell, flight, now):
                self._soil(cell)  # whatever became of it: sent again, it counts once
                return
            if isinstance(reply, Fleet):
                cell.clocked(reply.now_ms, sent_at, now)
                self._told(cell, reply)
            # Only now: where a signal handler raises in between, its counts are seen twice here
            # until it is sent again, rather than not at all.
            cell.flight = None
            self._changed(cell, now)
            if cell.counted():
                if not cell.dirty:
                    self._soil(cell)
            elif not self._follow(cell, now):
                self._cells.settled(cell)

    def _told(self, cell: C, fleet: Fleet) -> None:
        """What the fleet has passed."""

    def _changed(self, cell: C, now: float) -> None:
        """A flush has come back: what is known of the window is not what it was."""

    def _alive(self, cell: C, flight: Flight, now: float) -> bool:
        """Is any of it still in the window, and is there room to keep it?"""
        too_many = self._cells.leaving() > self._cells.most and now - flight.since > _KEPT_S
        if too_many or not flight.buckets:
            return False
        newest = max(seen.start for seen in flight.buckets)
        return bool(now * 1000 + cell.offset_ms - newest < cell.longest_ms)

    # -- cells ------------------------------------------------------------------------------------

    def _roll(self, cell: C, now: float) -> None:
        with self._cells.slow:
            cell.roll(self._cells.lock, now)

    def _kept(self, key: AnyKey) -> bool:
        parts = (key.resource, key.tag) if isinstance(key, Key) else (key,)
        return not self._closed and max(map(len, parts)) <= LONGEST_KEY

    def _cell(self, key: AnyKey, offset_ms: float) -> C:
        """The cell of `key`."""
        cell = self._get(key)
        if cell is None:
            charges = self._book.acquire(key).charges
            cell = self._cells.add(key, lambda: self._new_cell(key, charges, offset_ms))
        return cell

    def _cell_of(self, decision: Decision, offset: float) -> C:
        """The cell that counts the end of an admitted call."""
        if self._closed:
            raise ConfigurationError("this limiter is closed; make a new one")
        charges: tuple[Charge, ...] = decision.charged
        key = charges[0].key
        cell = self._get(key)
        if cell is not None and cell.charges[-1].ring == charges[-1].ring:
            return cell
        rings = tuple(charge.ring for charge in charges)
        own = self._book.acquire(key).charges
        name = key if self._kept(key) and rings == tuple(c.ring for c in own) else rings
        plain = tuple(charge._replace(cost=1, bucket_start_ms=None) for charge in charges)
        return self._cells.add(name, lambda: self._new_cell(name, plain, offset))

    def _new_cell(self, key: Any, charges: tuple[Charge, ...], offset_ms: float) -> C:
        raise NotImplementedError

    def _evicted(self, cell: C) -> None:
        """The cell has to go: whatever it has not told yet is on its way."""


class _Closed:
    """In the place of a closed limiter's lock, so that being open costs no check."""

    def __enter__(self) -> None:
        raise ConfigurationError("this limiter is closed; make a new one")

    def __exit__(self, *exc: object) -> None: ...


class Direct(Nearby[Cell]):
    """The store is asked for each admission."""

    def ask(self, key: AnyKey, cost: int) -> Dialogue[Decision]:
        sent_at = self._monotonic()
        decision: Decision = yield self._book.acquire(key, cost)
        return decision if decision.allowed else self.refused(key, decision, sent_at)

    def _new_cell(self, key: Any, charges: tuple[Charge, ...], offset_ms: float) -> Cell:
        return Cell(key, charges, limits_of(charges), offset_ms)


class Near(Protocol):
    """What a limiter needs of its mode; see the head of this file."""

    next_at: float
    wake: Callable[[], object]
    leases: bool

    @property
    def judge(self) -> Callable[[AnyKey, int], Decision | None]: ...
    def ask(self, key: AnyKey, cost: int) -> Dialogue[Decision]: ...
    def peek(self, key: AnyKey) -> Decision | None: ...
    def refused(self, key: AnyKey, decision: Decision, sent_at: float) -> Decision: ...
    def forget(self, key: AnyKey) -> None: ...
    def reset(self, key: AnyKey) -> None: ...
    def record(self, decision: Decision, failed: bool, rt_ms: int) -> Command[Any] | None: ...
    def tell(self, key: AnyKey) -> Errand | None: ...
    def ahead(self, keys: Iterable[AnyKey]) -> list[Errand]: ...
    def greeting(self) -> list[Errand]: ...
    def errands(self, now: float, found: list[Errand], *, last: bool = False) -> None: ...
    def worked(self, now: float) -> None: ...
    def fetches(self, keys: Iterable[AnyKey] | None = None) -> list[Wait]: ...
    def close(self) -> None: ...
    def freeze(self, hold: Callable[[], object]) -> None: ...
    def unfreeze(self) -> None: ...
    def held(self) -> int: ...
    def unsent(self) -> int: ...
    def after_fork(self) -> None: ...


class Inside:
    """For a store in this process: asked each time, as there is no way to save."""

    next_at = FAR
    leases = False

    def __init__(self, book: Book, attempt: Callable[[Acquire], Decision]) -> None:
        self.wake: Callable[[], object] = lambda: None
        self._command = command = book.acquire

        def judge(key: AnyKey, cost: int) -> Decision | None:
            return attempt(command(key, cost))

        self.judge = judge  # not a method: that would cost two look-ups more

    def ask(self, key: AnyKey, cost: int) -> Dialogue[Decision]:
        decision: Decision = yield self._command(key, cost)
        return decision

    def peek(self, key: AnyKey) -> Decision | None:
        return None

    def refused(self, key: AnyKey, decision: Decision, sent_at: float) -> Decision:
        return decision

    def forget(self, key: AnyKey) -> None: ...

    def reset(self, key: AnyKey) -> None: ...

    def record(self, decision: Decision, failed: bool, rt_ms: int) -> Command[Any] | None:
        seen = Bucket(
            NEWEST, success=int(not failed), error=int(failed), rt_sum_ms=rt_ms, rt_min_ms=rt_ms
        )
        charges: tuple[Charge, ...] = decision.charged
        return Flush(charges, counts=((seen,),) * len(charges))

    def tell(self, key: AnyKey) -> Errand | None:
        return None

    def ahead(self, keys: Iterable[AnyKey]) -> list[Errand]:
        return []

    def greeting(self) -> list[Errand]:
        return []

    def errands(self, now: float, found: list[Errand], *, last: bool = False) -> None: ...

    def worked(self, now: float) -> None: ...

    def fetches(self, keys: Iterable[AnyKey] | None = None) -> list[Wait]:
        return []

    def close(self) -> None: ...

    def freeze(self, hold: Callable[[], object]) -> None: ...

    def unfreeze(self) -> None: ...

    def held(self) -> int:
        return 0

    def unsent(self) -> int:
        return 0

    def after_fork(self) -> None: ...


def limits_of(charges: tuple[Charge, ...]) -> list[Limit]:
    """The limits that these are charged under."""
    return [charge.limit for charge in charges]


def costing(charges: Iterable[Charge], cost: int) -> tuple[Charge, ...]:
    """The same rings, for `cost` permits."""
    return tuple(charge._replace(cost=cost) for charge in charges)
