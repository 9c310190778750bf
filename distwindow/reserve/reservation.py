"""`with limiter.reserve(key, estimate) as reservation:`, for calls whose cost is known afterwards.

    state       event                             to          what is counted
    -           the limits admit the estimate     open        the estimate, in the present bucket
    -           they refuse it                    refused     nothing, by any of the limits
    open        `extend`, admitted                open        more, in the bucket of that moment
    open        `commit` of less                  committed   the rest is given back, out of its
                                                              bucket; the newest part first
    open        `commit` of more                  committed   the debt, in the present bucket, and
                                                              whatever the window holds
    open        `release`                         released    all is given back
    open        its block is left                 open        nothing changes: the estimate stays
    open        `reset` of its key                open        nothing: its permits are gone, and are
                                                              not given back
    committed   `commit` of the same              committed   nothing
    committed   `commit` of another number        committed   nothing: `RuntimeError`
    refused     `commit`, `extend`, `release`     refused     nothing: `RuntimeError`

Nothing is stored of a reservation but its permits. One that is never settled leaves the window with
its bucket. The store has no state of it, so it is settled in the process that has made it.

A `commit` goes to the store with the next flush. What the store is not told stays charged.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..errors import (
    ConfigurationError,
    DistwindowError,
    RateLimitExceeded,
    closed_failure,
    short_repr,
)
from ..limiter.decider import AsyncDecider, BaseDecider, Decider
from ..ring.decision import Charge, Decision, limits_in
from ..ring.key import AnyKey
from ..ring.limit import Limit, max_cost, parse_limits
from ..ring.ring import MAX_TOTAL
from ..runtime.flush import send_all
from ..runtime.options import Options
from ..runtime.steps import Operation, send
from ..runtime.strategy import Strategy
from ..support import fork
from ..support.async_use import UnawaitedCoroutine, only_async_with
from ..support.fork import register_after_fork
from .refunds import PartRefund, PartRefunds

if TYPE_CHECKING:
    from typing_extensions import Self


class BaseReservation:
    """Base class of `Reservation` and `AsyncReservation`."""

    def __init__(
        self,
        reservations: _BaseReservations,
        calls: Sequence[tuple[Charge, ...]],
        decision: Decision,
        on_error: OnError,
    ) -> None:
        """`calls`: the charges of each item."""
        self.decision = decision
        """The decision on the estimate."""
        self._decider = reservations.decider
        self._settlement = settlement = reservations.settlement
        self._items = [ReservedKey(charges) for charges in calls]
        self._estimates = [charges[0].cost for charges in calls]
        self._on_error = on_error
        self._forks = fork.forks
        self._settled: dict[str, tuple[tuple[int, ...], State]] = {}
        """How it was settled first. A dictionary, as `setdefault` lets one thread be the first."""
        if decision.allowed:
            now = settlement.monotonic()
            for item, estimate in zip(self._items, self._estimates, strict=True):
                item.add(decision, estimate, now, settlement.resets)

    @property
    def key(self) -> AnyKey:
        """The key; of several, the one of `decision`."""
        return self.decision.key

    @property
    def estimate(self) -> int:
        """The permits that are reserved for `key`, with those that `extend` has added."""
        for item, estimate in zip(self._items, self._estimates, strict=True):
            if item.key == self.decision.key and self.decision.limit in item.limits:
                return estimate
        return self._estimates[0]

    @property
    def estimates(self) -> tuple[int, ...]:
        """The permits that are reserved for each item, in order."""
        return tuple(self._estimates)

    @property
    def state(self) -> State:
        """`open`, `committed`, `released`, or `refused`."""
        if not self.decision.allowed:
            return "refused"
        settled = self._settled.get("how")
        return "open" if settled is None else settled[1]

    def __bool__(self) -> bool:
        return self.decision.allowed

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.state} key={short_repr(self.key)} "
            f"estimate={self.estimate}>"
        )

    def _check(self, what: str) -> None:
        """Raise if this reservation can not be settled or extended here."""
        if not self.decision.allowed:
            raise RuntimeError(
                f"this reservation of {short_repr(self.key)} was refused, so it cannot be {what}: "
                "nothing was reserved; check it first (`if reservation:`), or use `reserve`, which "
                "raises RateLimitExceeded"
            )
        if self._forks != fork.forks:
            raise RuntimeError(
                f"this reservation of {short_repr(self.key)} is {what} in a forked child: both "
                "processes would settle it; reserve in the process that commits"
            )
        if self._settlement.closed:
            raise closed_failure()

    def _check_count(self, what: str, numbers: tuple[int, ...]) -> None:
        if len(numbers) != len(self._items):
            raise TypeError(
                f"{what} takes one number for each key that was reserved: {len(self._items)}, "
                f"and was given {len(numbers)}"
            )

    def _begin(self, actuals: tuple[int, ...], state: State) -> bool:
        """Note that it is settled. Return False if it was before, with the same numbers."""
        self._check(state)
        self._check_count("commit", actuals)
        for actual in actuals:
            check_permits("actual", actual, 0)
        mine = (actuals, state)
        first = self._settled.setdefault("how", mine)
        if first is not mine and first[0] != actuals:
            raise RuntimeError(
                f"this reservation of {short_repr(self.key)} was {first[1]} with "
                f"{_numbers(first[0])} before, and is {state} with {_numbers(actuals)}: what a "
                "call has used is counted once"
            )
        return first is mine

    def _settle(self, actuals: tuple[int, ...] | None, state: State, now: bool) -> Operation[int]:
        """Settle it; without `actuals` nothing was used."""
        actuals = (0,) * len(self._items) if actuals is None else actuals
        if not self._begin(actuals, state):
            return 0
        return (yield from self._settlement.settle(self._items, actuals, now=now))

    def _check_extension(self, more: tuple[int, ...]) -> None:
        self._check("extended")
        if self._settled:
            raise RuntimeError(
                f"this reservation of {short_repr(self.key)} is {self.state}, and cannot be "
                "extended; make a new one"
            )
        self._check_count("extend", more)
        for permits in more:
            check_permits("more", permits, 1 if len(more) == 1 else 0)
        if not any(more):
            raise ValueError("extend asks for more of one key at least")

    def _ask_for(self, more: tuple[int, ...]) -> Any:
        """Return the decision on an extension; of an `AsyncDecider` an awaitable of it."""
        self._check_extension(more)
        if len(more) == 1:
            return self._decider.try_acquire(self._items[0].key, more[0])
        asked = zip(self._items, more, strict=True)
        items = [(item.key, item.limits, permits) for item, permits in asked if permits]
        return self._decider.acquire_all(self._settlement.commands.charges_of_items(items))

    def _add_extension(self, decision: Decision, more: tuple[int, ...]) -> Operation[None]:
        """Add what `decision` has admitted. If the reservation was settled since, give that back,
        unless who settles it has taken it already.
        """
        if not decision.allowed:
            return
        now = self._settlement.monotonic()
        added = []
        for n, (item, permits) in enumerate(zip(self._items, more, strict=True)):
            if permits:
                added.append((item, item.add(decision, permits, now, self._settlement.resets)))
                self._estimates[n] += permits
        if self._settled:
            late = []
            for item, part in added:
                if item.take_part(part):
                    late.append(ReservedKey(item.charges))
                    late[-1].parts.append(part)
            yield from self._settlement.settle(late, (0,) * len(late), now=False)

    def _enter(self) -> None:
        if not self.decision.allowed:
            raise RateLimitExceeded(self.decision)

    def _is_to_be_released(self, exc: BaseException | None) -> bool:
        """True if the block that has ended with `exc` gives its estimate back. A cancelled call has
        not failed: nobody knows what it has used.
        """
        return (
            self._on_error == "release"
            and isinstance(exc, Exception)
            and not self._settled
            and self._forks == fork.forks
        )

    def _log_unreleased(self, why: DistwindowError) -> None:
        LOG.warning(
            "the reservation of %s was not released at the end of its block, and stays charged "
            "until its window ends: %s",
            short_repr(self.key), why,
        )  # fmt: skip


class Reservation(BaseReservation):
    """Permits that are reserved for one call, by an estimate of what it will use. True if they were
    admitted.

    Its block keeps the estimate when it is left without `commit`, by an exception as well, because
    nobody knows then what was used. With `on_error="release"` an exception gives it back; a
    cancellation does not. Entering a refused one raises `RateLimitExceeded`.
    """

    _decider: Decider

    def extend(self, *more: int) -> Decision:
        """Ask for `more` permits, in the bucket of now: for streams under a hard limit. Return the
        decision; a refusal changes nothing. Of several keys, a number for each (0: no more), all or
        none.

        Raises what `try_acquire` raises, and `RuntimeError` for a reservation that was refused or
        settled.
        """
        decision: Decision = self._ask_for(more)
        self._decider.run(self._add_extension(decision, more))
        return decision

    def commit(self, *actuals: int, now: bool = False) -> None:
        """Say what was used: one number for each key that was reserved, in order, from 0. What was
        reserved beyond it is given back, out of its bucket; what was used beyond the estimate is
        counted as a debt, in the bucket of now and whatever its window holds.

        It goes to the store with the next flush (`flush_interval` seconds at most), and never
        raises because of the store. With `now` it is sent at once, and a `StoreError` is raised
        that keeps it from being counted. What was surely not executed goes with the next flush
        then; a refund whose outcome is unknown is not sent again, and a debt is.

        A second `commit` of the same numbers does nothing. Raises `RuntimeError` for other numbers,
        for a refused reservation, and in a forked child; `ValueError` for numbers that are not
        whole or are negative.
        """
        self._decider.run(self._settle(actuals, "committed", now))

    def release(self, *, now: bool = False) -> int:
        """Give all back, as `commit(0)` does. Return how many permits that are, of several keys the
        most of any.
        """
        count: int = self._decider.run(self._settle(None, "released", now))
        return count

    def __enter__(self) -> Self:
        self._enter()
        return self

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        if self._is_to_be_released(exc):
            try:
                self.release()
            except DistwindowError as failure:
                self._log_unreleased(failure)


@only_async_with
class AsyncReservation(BaseReservation):
    """See `Reservation`; `async with`, and awaited where there is I/O."""

    _decider: AsyncDecider

    async def extend(self, *more: int) -> Decision:
        """See `Reservation.extend`."""
        decision: Decision = await self._ask_for(more)
        await self._decider.run(self._add_extension(decision, more))
        return decision

    async def commit(self, *actuals: int, now: bool = False) -> None:
        """See `Reservation.commit`."""
        await self._decider.run(self._settle(actuals, "committed", now))

    async def release(self, *, now: bool = False) -> int:
        """See `Reservation.release`."""
        count: int = await self._decider.run(self._settle(None, "released", now))
        return count

    async def __aenter__(self) -> Self:
        self._enter()
        return self

    async def __aexit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        if self._is_to_be_released(exc):
            try:
                await self.release()
            except DistwindowError as failure:
                self._log_unreleased(failure)


class UnawaitedReservation(UnawaitedCoroutine[AsyncReservation]):
    """A reservation to be awaited, or entered by `async with`, which awaits it."""

    __slots__ = ("_entered",)

    async def __aenter__(self) -> AsyncReservation:
        self._entered = await self
        return await self._entered.__aenter__()

    async def __aexit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        await self._entered.__aexit__(kind, exc, trace)


def _numbers(actuals: tuple[int, ...]) -> str:
    return ", ".join(map(str, actuals))


class _BaseReservations:
    """Base class of what makes the reservations of a limiter."""

    def __init__(self, settlement: Settlement, decider: Any) -> None:
        self.settlement = settlement
        self.decider = decider

    def _check(self, key: AnyKey, estimate: Any, clamp: bool, on_error: object) -> int:
        """Return the estimate to be asked for."""
        commands, strategy = self.decider.commands, self.decider.strategy
        check_reservable(commands.command_type, on_error)
        return clamped(estimate, strategy.max_cost(commands.limits_of(key)), clamp)

    def _check_all(
        self, items: Iterable[Sequence[Any]], clamp: bool, on_error: object
    ) -> list[tuple[Charge, ...]]:
        """Return the charges of each item."""
        commands = self.settlement.commands
        calls = commands.charges_of_items(clamped_items(items) if clamp else items)
        check_reservable(commands.acquire_all_command(calls), on_error)
        return calls

    def _charges_of(self, key: AnyKey, estimate: int) -> list[tuple[Charge, ...]]:
        """Return the charges of a call that was decided."""
        return [self.settlement.commands.acquire_command(key, estimate).charges]


class Reservations(_BaseReservations):
    """Makes the reservations of a `Limiter`, which documents the methods."""

    decider: Decider

    def try_reserve(
        self, key: AnyKey, estimate: int, clamp: bool, on_error: OnError
    ) -> Reservation:
        estimate = self._check(key, estimate, clamp, on_error)
        decision = self.decider.try_acquire(key, estimate)
        return Reservation(self, self._charges_of(key, estimate), decision, on_error)

    def reserve(
        self, key: AnyKey, estimate: int, timeout: float | None, clamp: bool, on_error: OnError
    ) -> Reservation:
        estimate = self._check(key, estimate, clamp, on_error)
        decision = self.decider.acquire(key, estimate, timeout, False)
        return Reservation(self, self._charges_of(key, estimate), decision, on_error)

    def reserve_all(
        self, items: Iterable[Sequence[Any]], clamp: bool, on_error: OnError
    ) -> Reservation:
        calls = self._check_all(items, clamp, on_error)
        return Reservation(self, calls, self.decider.acquire_all(calls), on_error)


class AsyncReservations(_BaseReservations):
    """Makes the reservations of an `AsyncLimiter`."""

    decider: AsyncDecider

    async def try_reserve(
        self, key: AnyKey, estimate: int, clamp: bool, on_error: OnError
    ) -> AsyncReservation:
        estimate = self._check(key, estimate, clamp, on_error)
        decision = await self.decider.try_acquire(key, estimate)
        return AsyncReservation(self, self._charges_of(key, estimate), decision, on_error)

    async def reserve(
        self, key: AnyKey, estimate: int, timeout: float | None, clamp: bool, on_error: OnError
    ) -> AsyncReservation:
        estimate = self._check(key, estimate, clamp, on_error)
        decision = await self.decider.acquire(key, estimate, timeout, False)
        return AsyncReservation(self, self._charges_of(key, estimate), decision, on_error)

    async def reserve_all(
        self, items: Iterable[Sequence[Any]], clamp: bool, on_error: OnError
    ) -> AsyncReservation:
        calls = self._check_all(items, clamp, on_error)
        return AsyncReservation(self, calls, await self.decider.acquire_all(calls), on_error)


class Settlement:
    """Settles the reservations of one limiter."""

    def __init__(self, options: Options, decider: BaseDecider) -> None:
        self.commands = decider.commands
        self.monotonic = decider.clock.monotonic
        self.closed = False
        self.resets = 0
        """How many there were."""
        self._last_resets: dict[AnyKey, int] = {}
        """The number of the last one of a key: what was charged before it is gone."""
        self._strategy = decider.strategy
        self._policy = decider.policy
        self._on_freed = decider.queues.on_freed
        self._refunds = register_after_fork(
            PartRefunds(options.flush_interval, self.monotonic, self._on_given_back)
        )
        # Before the counts that are sent now: until these are acknowledged, no refund of them is.
        decider.policy.flush_source.add_first(self._refunds)

    def reset(self, key: AnyKey) -> None:
        """Give back nothing that was charged for `key` so far, as its windows have been emptied."""
        self._refunds.reset(key)
        self.resets += 1
        self._last_resets.pop(key, None)
        self._last_resets[key] = self.resets
        if len(self._last_resets) > _MAX_RESETS:
            self._last_resets.pop(next(iter(self._last_resets), key), None)

    def close(self) -> None:
        """Settle nothing any more; what was committed is flushed."""
        self.closed = True

    def settle(
        self, items: Sequence[ReservedKey], actuals: Sequence[int], *, now: bool
    ) -> Operation[int]:
        """Give back what was admitted beyond `actuals`, and count what was used beyond it. Return
        how many permits are given back, the most of any item.

        With `now`, send it, and raise the store's error if it does not take it. What it was surely
        not told goes with the next flush, as without `now`.
        """
        refunds: list[PartRefund] = []
        flushes: list[tuple[Strategy, ReservedKey]] = []
        most = 0
        for item, actual in zip(items, actuals, strict=True):
            parts = item.take_parts()
            admitted = sum(part.permits for part in parts)
            if actual <= admitted:
                most = max(most, admitted - actual)
                of_item = self._give_back(parts, admitted - actual)
                flushes += [(refund.strategy, item) for refund in of_item if refund.has_to_wait()]
                refunds += of_item
            elif any(part.charges or part.decision.reason != "shadow" for part in parts):
                strategy = self._policy.strategy_of(parts[0].decision)
                newest = parts[0]
                offset_ms = newest.decision.now_ms - newest.decided_at * 1000
                command = strategy.count_debt(item.charges, actual - admitted, offset_ms)
                if command is not None:
                    yield from send(command)
                flushes.append((strategy, item))
        failure: DistwindowError | None = None
        if now:
            failure = yield from self._flush(flushes)
        if failure is None and (now or self._strategy.counts_at_once):
            commands = [self._refunds.command_of(refund) for refund in refunds]
            failure = yield from send_all(commands, self.monotonic)
        else:
            for refund in refunds:
                self._refunds.queue(refund)
        if now and failure is not None:
            raise failure
        return most

    def _on_given_back(self, refund: PartRefund) -> None:
        """Decide no more by what was known of a key: the store has taken out permits of it."""
        for strategy in {self._strategy, refund.strategy}:
            strategy.invalidate(refund.key)
        self._on_freed(refund.charges)

    def _give_back(self, parts: Sequence[ReservedPart], permits: int) -> list[PartRefund]:
        """Give back `permits` of these parts, the newest first, as what was reserved first was used
        first. Return what the store has to give back.
        """
        refunds = []
        for part in parts:
            unused = min(part.permits, permits)
            permits -= unused
            if not (unused and part.charges):
                continue
            if part.resets < self._last_resets.get(part.charges[0].key, 0):
                continue
            strategy = self._policy.strategy_of(part.decision)
            refund = PartRefund(part.decision, part.charges, unused, strategy, part.decided_at)
            if refund.is_counted_here:
                taken_back = strategy.take_back(part.charges, unused, refund.charged_ms)
                if taken_back:
                    self._on_freed(part.charges)
                refund.permits -= taken_back
            if refund.permits:
                refunds.append(refund)
        return refunds

    def _flush(
        self, flushes: Sequence[tuple[Strategy, ReservedKey]]
    ) -> Operation[DistwindowError | None]:
        """Send what is counted of these items. Return the first error."""
        for strategy, item in flushes:
            for _ in range(2):  # what was in flight already, and then the rest
                command = strategy.flush_of(item.charges)
                if command is not None:
                    failure = yield from send_all([command], self.monotonic)
                    if failure is not None:
                        return failure
        return None


class ReservedKey:
    """One key of a reservation, and what was admitted for it."""

    __slots__ = ("charges", "parts")

    def __init__(self, charges: tuple[Charge, ...]) -> None:
        self.charges = charges
        """What the estimate is charged."""
        self.parts: deque[ReservedPart] = deque()
        """Oldest first. Whoever takes one out settles it: that is once."""

    @property
    def key(self) -> AnyKey:
        return self.charges[0].key

    @property
    def limits(self) -> list[Limit]:
        return limits_in(self.charges)

    def add(self, decision: Decision, permits: int, decided_at: float, resets: int) -> ReservedPart:
        """Add what `decision` has admitted, and return it."""
        rings = {charge.ring for charge in self.charges}
        charges = tuple(charge for charge in decision.charged or () if charge.ring in rings)
        part = ReservedPart(decision, charges, permits, decided_at, resets)
        self.parts.append(part)
        return part

    def take_part(self, part: ReservedPart) -> bool:
        """Take `part` out. Return False if another thread has."""
        while True:
            try:
                self.parts.remove(part)
            except ValueError:
                return False
            except IndexError:  # others were taken out meanwhile
                continue
            return True

    def take_parts(self) -> list[ReservedPart]:
        """Take all parts out, the newest first."""
        parts = []
        while self.parts:
            try:
                parts.append(self.parts.pop())
            except IndexError:  # another thread has taken the last one
                break
        return parts


LOG = logging.getLogger("distwindow")
_MAX_RESETS = 1000
"""Of so many keys the last `reset` is known, for reservations that are open."""
State = Literal["open", "committed", "released", "refused"]
OnError = Literal["keep", "release"]


class ReservedPart(NamedTuple):
    """What one decision has admitted for one key of a reservation."""

    decision: Decision
    charges: tuple[Charge, ...]
    """Those of this key; empty where `on_store_error` has admitted it, as nothing was counted."""
    permits: int
    decided_at: float
    """Monotonic seconds."""
    resets: int
    """How many `reset`s the limiter had made before."""


def check_reservable(command: Any, on_error: object) -> None:
    """Raise `ConfigurationError` for a command, or class of commands, whose calls are promised a
    moment, and for an `on_error` that is none.
    """
    if command.has_own_moment:
        raise ConfigurationError(
            "reservations need limits that are neither paced nor warm up: what is given back or "
            "counted later cannot change the moment that a call was promised"
        )
    if on_error not in ("keep", "release"):
        raise ConfigurationError(
            f'on_error={short_repr(on_error)} is neither "keep" (the estimate stays charged when '
            'the block raises) nor "release"'
        )


def check_permits(name: str, value: object, least: int) -> None:
    """Raise `ValueError` for permits that are not an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_TOTAL:
        raise ValueError(
            f"{name}={short_repr(value)} is not a whole number from {least} to {MAX_TOTAL:,}"
        )


def clamped(estimate: Any, most: int, clamp: bool) -> int:
    """Return `estimate`, with `clamp` at most `most`. Raises `ValueError` for one that is not a
    whole number of at least 1, and for one that could never be admitted.
    """
    check_permits("estimate", estimate, 1)
    if estimate <= most:
        return int(estimate)
    if clamp:
        return most
    raise ValueError(
        f"estimate={estimate} can never be admitted: the smallest limit is {most}; with clamp=True "
        "it is cut to that"
    )


def clamped_items(items: Iterable[Sequence[Any]]) -> list[Sequence[Any]]:
    """Return `(key, limits, cost)` items whose costs are at most the smallest limit of each."""
    cut = []
    for item in items:
        if not isinstance(item, (str, bytes)) and len(item) == 3:
            most = max_cost(parse_limits(item[1]))
            item = (item[0], item[1], clamped(item[2], most, clamp=True))
        cut.append(item)
    return cut
