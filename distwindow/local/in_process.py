"""The strategy for a store in this process: it keeps nothing, and asks the store at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from ..minute.operations import EntryViews
from ..observer import Tally, drained
from ..ring.clock import NEVER, Clock
from ..ring.commands import CURRENT_BUCKET, Acquire, Flush
from ..ring.decision import Charge, Decision, Reason
from ..ring.key import AnyKey
from ..ring.stats import Bucket
from ..runtime.command_cache import COST_MARKER, CommandCache
from ..runtime.flush import FlushSchedule, OutgoingCommand
from ..runtime.options import Options
from ..runtime.strategy import Strategy
from ..support.fork import register_after_fork
from ..support.locks import SWITCHES_ONLY_AT_CALLS


class DecisionCounts:
    """Calls of one cost, on keys of one label, that one limit has decided and that were not told
    yet. `MemoryStore` counts them.

    `admitted` and `refused` are None until the worker is to come, so that no call has to ask
    whether it is: the first addition fails, and `count` takes its place. Commands of this cost and
    label share one.
    """

    __slots__ = (
        "__weakref__", "_charge", "_tally", "_untold", "admitted", "few", "near", "paced",
        "refused",
    )  # fmt: skip

    def __init__(
        self,
        tally: Tally,
        untold: deque[DecisionCounts],
        charge: Charge,
        few: int,
        paced: DecisionCounts | None = None,
    ) -> None:
        """`untold`: where this adds itself when it has something to tell. `charge`: that of one of
        the calls; all have its limit, its cost and the label of its key. `few`: an admitted call
        that leaves less adds to `near`. `paced`: what counts the admitted calls that wait; None in
        that itself.
        """
        self._tally, self._untold, self._charge = tally, untold, charge
        self.few, self.paced = few, paced
        self.drop()

    def drop(self) -> None:
        """Begin anew."""
        self.admitted: int | Any = None
        self.refused: int | Any = None
        self.near = 0

    def count(self, admitted: int, refused: int) -> None:
        """Count calls, and have the worker come."""
        self._tally.schedule_flush()
        self.admitted = (self.admitted or 0) + admitted
        self.refused = (self.refused or 0) + refused
        self._untold.append(self)
        if self._tally.is_idle:  # it has come in between
            self._tally.schedule_flush()

    def tell(self) -> None:
        """Tell of these calls, and begin anew. No call between what is read and what is set."""
        admitted, self.admitted = self.admitted, None
        refused, self.refused = self.refused, None
        near, self.near = self.near, 0
        _, limit, cost, key, _ = self._charge
        told = partial(self._tally.counted, key, limit)
        if admitted:
            reason: Reason = "paced" if self.paced is None else "ok"
            told("allowed", reason, "local", admitted, admitted * cost, near=near)
        if refused:
            told("refused", "over_limit", "local", refused, refused * cost)


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
        self._commands = commands
        self._monotonic = clock.monotonic
        self._schedule = FlushSchedule(options.flush_interval)
        self._views: list[EntryViews] = []
        self._tally: Tally
        self._counts: WeakValueDictionary[tuple[str | None, int, int], DecisionCounts]
        """By the label of the key, the index of the limit, and the cost: those of commands."""
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
        if not SWITCHES_ONLY_AT_CALLS:
            self.decide_locally = _telling_each(self.decide_locally, tally)
            return
        # One addition by the store is enough: to look at the decision would be a tenth of a call.
        self._tally, self._counts = tally, WeakValueDictionary()
        self._commands.counts_of = self._counts_of
        register_after_fork(self)

    def _counts_of(self, charges: tuple[Charge, ...]) -> tuple[DecisionCounts, ...]:
        """Return what counts the calls with these charges: for each limit what it decides."""
        tally, untold = self._tally, self._untold
        label = tally.label_of(charges[0].key)
        # The shortcut of one plain limit does not know how many are few.
        knows_few = len(charges) > 1 or charges[0].limit.is_shaped
        counts = []
        for index, charge in enumerate(charges):
            name = label, index, charge.cost
            of_limit = self._counts.get(name)
            if of_limit is None:
                few = -(-charge.limit.amount // 5) if knows_few else 0
                paced = DecisionCounts(tally, untold, charge, few)
                new = DecisionCounts(tally, untold, charge, few, paced)
                of_limit = self._counts.setdefault(name, new)
            counts.append(of_limit)
        return tuple(counts)

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
            counts.tell()
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
            counts.drop()
        for views in self._views:
            views.after_fork()
        self._schedule.next_due_at = NEVER


def _telling_each(
    decide_locally: Callable[[AnyKey, int], Decision | None], tally: Tally
) -> Callable[[AnyKey, int], Decision | None]:
    """Return a `decide_locally` that tells of each decision, where additions need a lock."""

    def decide_and_tell(key: AnyKey, cost: int) -> Decision | None:
        decision = decide_locally(key, cost)
        if decision is not None:
            tally.decided(decision)
        return decision

    return decide_and_tell
