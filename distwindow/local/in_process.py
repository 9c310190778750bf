"""The strategy for a store in this process: it keeps nothing, and asks the store at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from ..minute.operations import EntryViews
from ..observer import NO_ROW, Tally, drained
from ..ring.clock import NEVER, Clock
from ..ring.commands import CURRENT_BUCKET, Acquire, Flush
from ..ring.decision import Charge, Decision
from ..ring.key import AnyKey
from ..ring.stats import Bucket
from ..runtime.command_cache import COST_MARKER, CommandCache
from ..runtime.flush import FlushSchedule, OutgoingCommand
from ..runtime.options import Options
from ..runtime.strategy import Strategy
from ..support.fork import register_after_fork
from ..support.locks import SWITCHES_ONLY_AT_CALLS


class DecisionCounts:
    """Calls of one cost, on keys of one label, that were not told yet. `MemoryStore` counts them.

    Both numbers are None until the worker is to come, so that no call has to ask whether it is: the
    first addition fails, and `count` takes its place. Commands of this cost and label share one.
    """

    __slots__ = ("__weakref__", "_tally", "_untold", "admitted", "charge", "label", "refused")

    def __init__(
        self, tally: Tally, untold: deque[DecisionCounts], label: str | None, charge: Charge
    ) -> None:
        """`untold`: where this adds itself when it has something to tell. `charge`: that of one of
        the calls.
        """
        self._tally, self._untold, self.label, self.charge = tally, untold, label, charge
        self.admitted: int | Any = None
        self.refused: int | Any = None

    def count(self, admitted: int, refused: int) -> None:
        """Count calls, and have the worker come."""
        self._tally.schedule_flush()
        self.admitted = (self.admitted or 0) + admitted
        self.refused = (self.refused or 0) + refused
        self._untold.append(self)
        if self._tally.is_idle:  # it has come in between
            self._tally.schedule_flush()


class InProcess(Strategy):
    """Decides every call by `decide`, which executes a command in the store at once."""

    counts_at_once = True

    def __init__(
        self,
        commands: CommandCache,
        decide: Callable[[Acquire], Decision],
        clock: Clock,
        options: Options,
    ) -> None:
        """`decide` is `MemoryStore.decide_at_once`."""
        self._commands, self._decide = commands, decide
        self._monotonic = clock.monotonic
        self._schedule = FlushSchedule(options.flush_interval)
        self._views: list[EntryViews] = []
        self._tally: Tally
        self._counts: WeakValueDictionary[tuple[str | None, int], DecisionCounts]
        """By the label of the key, and the cost: those that commands have."""
        self._untold: deque[DecisionCounts] = deque()
        acquire_command = commands.acquire_command
        cached = commands.cached

        def decide_locally(key: AnyKey, cost: int) -> Decision | None:
            if key.__class__ is str and cost.__class__ is int:
                command = cached(key if cost == 1 else (COST_MARKER, key, cost))
                if command is not None:  # what `acquire_command` would return
                    return decide(command)
            return decide(acquire_command(key, cost))

        # A closure, as a method would have to look up both attributes in each call.
        self.decide_locally = decide_locally

    def tell(self, tally: Tally) -> None:
        limits = self._commands.limits
        if len(limits) > 1 or limits[0].is_shaped or not SWITCHES_ONLY_AT_CALLS:
            self.decide_locally = self._telling_each(tally)
            return
        # The limit is known, so that one addition by the store is enough: to look at what was
        # decided would be a tenth of a call.
        self._tally, self._counts = tally, WeakValueDictionary()
        self._commands.counts_of = self._counts_of
        register_after_fork(self)

    def _telling_each(self, tally: Tally) -> Callable[[AnyKey, int], Decision | None]:
        """Return a `decide_locally` that tells of each decision."""
        decide, cached = self._decide, self._commands.cached
        acquire_command, decided = self._commands.acquire_command, tally.decided

        def decide_and_tell(key: AnyKey, cost: int) -> Decision | None:
            command = None
            if key.__class__ is str and cost.__class__ is int:
                command = cached(key if cost == 1 else (COST_MARKER, key, cost))
            decision = decide(command or acquire_command(key, cost))
            rows = tally.row_of_key  # as in `BaseDecider.answered`; the source is always the same
            row = tally.last_row if rows is None else rows.get(decision[1], NO_ROW)
            if decision[3] is row.limit and decision[8] is row.reason:
                row.calls += 1
                row.permits += decision[2]
                if decision[4] < row.few:
                    row.near += 1
                if tally.is_idle:
                    tally.schedule_flush()
            else:
                decided(decision)
            return decision

        return decide_and_tell

    def _counts_of(self, charge: Charge) -> DecisionCounts:
        """Return what counts the calls with this charge."""
        name = self._tally.label_of(charge.key), charge.cost
        counts = self._counts.get(name)
        if counts is None:
            new = DecisionCounts(self._tally, self._untold, name[0], charge)
            counts = self._counts.setdefault(name, new)
        return counts

    def record(self, decision: Decision, failed: bool, rt_ms: int) -> Flush | None:
        ended = Bucket(
            CURRENT_BUCKET,
            success=int(not failed),
            error=int(failed),
            rt_sum_ms=rt_ms,
            rt_min_ms=rt_ms,
        )
        charges = decision.charged or ()  # an admitted decision has charges
        return Flush(charges, counts=((ended,),) * len(charges))

    def count_debt(
        self, charges: tuple[Charge, ...], permits: int, offset_ms: float
    ) -> Flush | None:
        """Return the command that counts these permits in the newest bucket."""
        debt = Bucket(CURRENT_BUCKET, permits)
        return Flush(charges, counts=((debt,),) * len(charges))

    def add_views(self, options: Options) -> EntryViews:
        register_after_fork(self)
        views = EntryViews(options, self._schedule, self._monotonic)
        self._views = [views]
        return views

    @property
    def dropped(self) -> int:  # type: ignore[override]  # others add them up
        return sum(views.dropped for views in self._views)

    def collect_commands(
        self, now: float, outgoing: list[OutgoingCommand], *, everything: bool = False
    ) -> None:
        for counts in drained(self._untold):
            admitted, counts.admitted = counts.admitted, None
            refused, counts.refused = counts.refused, None
            _, limit, cost, _, _ = counts.charge
            for allowed, calls in ((True, admitted), (False, refused)):
                if calls:
                    self._tally.counted_by_label(
                        counts.label, limit, allowed, "local", calls, calls * cost
                    )
        for views in self._views:
            views.collect(now, outgoing, everything=everything)

    def reschedule(self, now: float) -> None:
        self._schedule.recompute(now, [views.next_due_at for views in self._views])

    def close(self) -> None:
        for views in self._views:
            views.close()

    def unacknowledged_counts(self) -> int:
        return sum(views.unacknowledged() for views in self._views)

    def after_fork(self) -> None:
        for counts in drained(self._untold):  # the parent tells of these
            counts.admitted = counts.refused = None
        for views in self._views:
            views.after_fork()
        self._schedule.next_due_at = NEVER
