"""What is told of what is decided here, and what adds it up.

A limiter counts nothing more for an observer while it decides by a lease, a cached refusal or its
own window: the state of the key knows what was spent of a lease, and what was counted, when that is
flushed. Other decisions are appended to a queue. The worker adds both up, and tells the observer.

    decided by                 is noted                    cost in the call
    a lease, a cached          by the state of its key,    nothing
    refusal, `eventual`        when it is flushed
    the store, a policy, a     `Tally.decided`             an append
    store in this process
    nobody: the call raised    `Tally.failed`              an append

What a process that is killed has not told yet is lost: at most that of one flush interval.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .errors import ConfigurationError, DistwindowError, StoreTimeout, StoreUnavailable, short_repr
from .ring.clock import NEVER, SYSTEM
from .ring.decision import Decision, Source
from .ring.key import AnyKey
from .ring.limit import Limit
from .runtime.flush import FlushSchedule, ScheduledSource
from .runtime.timers import LOG
from .support.callables import RAISED_BY_CALLBACKS, check_not_async, check_takes
from .support.fork import register_after_fork

if TYPE_CHECKING:
    from .runtime.flush import OutgoingCommand
    from .runtime.options import Options

__all__ = ["Counts", "Level", "Observer", "ObserverEvent", "StoreCall", "set_default_observer"]

SourceKind = Literal["limiter", "web", "queue", "concurrency", "breaker", "upstream"]
Result = Literal["allowed", "refused", "error"]
Outcome = Literal["ok", "timeout", "unavailable", "refused"]
OTHER_LABELS = "other"
"""The label of the keys beyond the first `MAX_LABELS` labels."""
MAX_LABELS = 100
_MANY = 1000
"""So many decisions are kept as they are; then a call adds them up, and not the worker."""
_MAX_KEYS = 10_000
"""Of how many keys a tally knows the label."""
_MAX_NAMES = 1000
"""Of how many names one tally counts. Those beyond are `OTHER_LABELS`: clients may write paths."""
_SLOW_S = 0.05
"""What takes an observer longer delays the flushes of the process, and is logged."""
_LOG_EVERY_S = 60.0


class Counts(NamedTuple):
    """Decisions of one kind since the last time."""

    source_kind: SourceKind
    name: str
    """Of a limiter or a concurrency limit its `metric_name`, by default the prefix; of the web the
    name of the limit; of a queue the task; of a breaker its name.
    """
    limit: str
    """The limit that refused, or of those that admitted the one that had least left."""
    label: str | None
    """What `key_label` has made of the key; None without it."""
    result: Result
    """`error`: the call raised a `StoreError`."""
    reason: str
    """As in `Decision`; of a concurrency limit `no_slot`, and of a breaker `open`."""
    source: str
    """As in `Decision`."""
    shadow: bool
    """It was decided, and not enforced."""
    calls: int
    permits: int
    near: int
    """Calls after which less than a fifth of the limit was left; 0 where this is not known."""
    waited: tuple[float, ...] = ()
    """For how long calls have waited that ended so, in seconds. They are counted above each time
    that they were decided."""


class StoreCall(NamedTuple):
    """One exchange with the store."""

    source_kind: SourceKind
    name: str
    operation: str
    """The name of the script, or `flush` for several at once."""
    seconds: float
    outcome: Outcome
    charged: bool | None = False
    """Of one that failed: whether it was counted; None where nobody knows."""


class ObserverEvent(NamedTuple):
    """Something has changed."""

    source_kind: SourceKind
    name: str
    change: Any
    """A `Health`, a `BreakerChange`, or what `UpstreamLimits.on_event` is told."""


class Level(NamedTuple):
    """How much there is of something now, in this process."""

    source_kind: SourceKind
    name: str
    what: Literal["slots_held", "tasks_waiting", "oldest_wait_s"]
    limit: str
    """The limit, or why tasks wait."""
    value: float


class Observer:
    """Base class of observers, whose methods do nothing. They are called by the worker, or in its
    event loop, and by `flush` and `close`; so they should return soon. What they raise is logged
    once a minute, and fails nothing.
    """

    def on_counts(self, batch: Sequence[Counts]) -> None:
        """Called once in a flush interval in which anything was decided."""

    def on_store_call(self, call: StoreCall) -> None:
        """Called for each exchange with a store, after `on_counts`."""

    def on_event(self, event: ObserverEvent) -> None:
        """Called after each change."""

    def on_levels(self, batch: Sequence[Level]) -> None:
        """Called when a level has changed, at most once in a flush interval."""


_default: Observer | None = None


def set_default_observer(observer: Observer | None) -> None:
    """Have all objects that are made from now on without an `observer` of their own tell this one.
    None ends that. Raises `ConfigurationError` for what is no `Observer`.
    """
    global _default
    _default = check_observer(observer)


def check_observer(observer: Any) -> Any:
    """Return `observer`; raise `ConfigurationError` for what is neither one nor None."""
    if observer is None or isinstance(observer, Observer):
        return observer
    raise ConfigurationError(
        f"observer={short_repr(observer)} is no distwindow.Observer; an object of a subclass is one"
    )


def observer_of(observer: Observer | None) -> Observer | None:
    """Return `observer`, or the default one where there is none."""
    return check_observer(observer) or _default


UNOBSERVED = Observer()
"""The observer of what is counted already by what has made it."""


class Tally(ScheduledSource):
    """Adds up what one object decides, and tells its observer once in a flush interval. A source of
    its worker, which sends nothing.
    """

    def __init__(
        self,
        observer: Observer,
        source_kind: SourceKind,
        name: str,
        interval_s: float,
        monotonic: Callable[[], float],
        key_label: Callable[[AnyKey], str] | None = None,
    ) -> None:
        self._observer, self._source_kind, self.name = observer, source_kind, name
        self._monotonic = monotonic
        self._key_label = key_label
        self._schedule = FlushSchedule(interval_s)
        self._log_at = -NEVER
        register_after_fork(self)
        self.after_fork()

    def after_fork(self) -> None:
        """Start empty: the parent tells what it has counted."""
        # Appending to these takes no lock, which a signal handler could find held.
        self._decisions: deque[Any] = deque()
        self._notes: deque[tuple[Any, ...]] = deque()
        self._events: deque[ObserverEvent] = deque()
        self._store_calls: deque[StoreCall] = deque()
        self._rows: dict[tuple[Any, ...], list[Any]] = {}
        self._label_of_key: dict[AnyKey, str] = {}
        self._labels = {OTHER_LABELS}
        self._names: set[str] = set()
        self._told_levels: Sequence[Level] = ()
        self._adding = threading.Lock()
        self._is_idle = True
        """Nothing was noted since the worker came; set before it takes what there is."""
        self._schedule.next_due_at = NEVER

    # -- what is noted ------------------------------------------------------------------------

    def decided(self, decision: Decision, name: str | None = None) -> None:
        """Note a decision of the store, or of `on_store_error`; with a `name`, of what has it."""
        decisions = self._decisions
        decisions.append(decision if name is None else (name, decision))
        if self._is_idle:
            self._begin()
        elif len(decisions) > _MANY:
            self._add_up_early()

    def counted(
        self,
        key: AnyKey,
        limit: Limit | str,
        result: Result,
        reason: str,
        source: str,
        calls: int,
        permits: int,
        waited: tuple[float, ...] = (),
        near: int = 0,
        name: str | None = None,
    ) -> None:
        """Note decisions that were counted elsewhere. `calls` may be below 0 where earlier ones
        were too many. `name` takes the place of that of the object.
        """
        notes = self._notes
        notes.append((key, limit, result, reason, source, calls, permits, near, waited, name))
        if self._is_idle:
            self._begin()
        elif len(notes) > _MANY:
            self._add_up_early()

    def failed(
        self, key: AnyKey, cost: int, limits: Sequence[Limit | int], name: str | None = None
    ) -> None:
        """Note a call that raises, as neither the store nor `on_store_error` has decided it."""
        limit = sys.intern(", ".join(map(str, limits)))  # rows are told apart by identity
        self.counted(key, limit, "error", "store_down", "policy", 1, cost, name=name)

    def held(
        self, key: AnyKey, limit: Limit, allowed: bool, source: Source, calls: int, permits: int
    ) -> None:
        """Note calls and permits that the state of a key has counted."""
        result: Result = "allowed" if allowed else "refused"
        reason = "ok" if allowed else "over_limit"
        self.counted(key, limit, result, reason, source, calls, permits)

    def waited(self, decision: Decision, seconds: float, name: str | None = None) -> None:
        """Note how long a call has waited for `decision`, which is counted already."""
        result: Result = "allowed" if decision.allowed else "refused"
        limit, reason, source = decision.limit, decision.reason, decision.source
        self.counted(decision.key, limit, result, reason, source, 0, 0, (seconds,), name=name)

    def called(self, operation: str, seconds: float, error: BaseException | None) -> None:
        """Note an exchange with the store, and the error with which it ended."""
        outcome: Outcome = "ok"
        if isinstance(error, StoreTimeout):
            outcome = "timeout"
        elif isinstance(error, StoreUnavailable):
            outcome = "unavailable"
        elif error is not None:
            outcome = "refused"
        charged = getattr(error, "charged", False)
        self._store_calls.append(
            StoreCall(self._source_kind, self.name, operation, seconds, outcome, charged)
        )
        if self._is_idle:
            self._begin()

    def changed(self, change: Any, name: str | None = None) -> None:
        """Note a change. Who has noticed it may be in a call, or hold a lock."""
        self._events.append(ObserverEvent(self._source_kind, name or self.name, change))
        if self._is_idle:
            self._begin()

    levels: Callable[[], Sequence[Level]] | None = None
    """Returns the levels of now, for an object that has some."""

    def level_changed(self) -> None:
        """Have the levels told."""
        if self._is_idle:
            self._begin()

    def _begin(self) -> None:
        self._is_idle = False
        self._schedule.flush_by(self._monotonic() + self._schedule.interval_s)

    # -- what is told -------------------------------------------------------------------------

    def collect_commands(
        self, now: float, outgoing: list[OutgoingCommand], *, everything: bool = False
    ) -> None:
        """Tell the observer what was noted."""
        self._is_idle = True
        batch = self._take()
        if batch:
            self._tell(self._observer.on_counts, batch)
        self._tell_each(self._observer.on_store_call, self._store_calls)
        self._tell_each(self._observer.on_event, self._events)
        if self.levels is not None and (levels := self.levels()) != self._told_levels:
            self._told_levels = levels
            self._tell(self._observer.on_levels, levels)
            if any(level.what == "oldest_wait_s" and level.value for level in levels):
                self._is_idle = False  # it grows

    def _take(self) -> list[Counts]:
        """Return what was noted, added up, and begin again."""
        if not self._adding.acquire(timeout=1.0):  # this thread adds up, below a signal handler
            self._begin()
            return []
        try:
            self._add_up()
            batch: dict[tuple[Any, ...], Counts] = {}
            for name, row in list(self._rows.items()):
                limit, calls, permits, near, waited = row
                if calls < 0:
                    continue  # those of a call that is being counted now, or is still to come
                del self._rows[name]
                if not (calls or permits or waited):
                    continue
                _, label, result, reason, source, of = name
                counts = Counts(
                    self._source_kind, of or self.name, str(limit), label, result, reason, source,
                    False, calls, permits, near, tuple(waited),
                )  # fmt: skip
                same = batch.get(counts[:8])  # of an equal limit
                batch[counts[:8]] = counts if same is None else _sum_of(same, counts)
            return list(batch.values())
        finally:
            self._adding.release()

    @property
    def has_untold(self) -> bool:  # type: ignore[override]  # until the worker has come
        return not self._is_idle

    def reschedule(self, now: float) -> None:
        self._schedule.recompute(now, [self._next_due_at])

    def _next_due_at(self, now: float) -> float:
        return NEVER if self._is_idle else now + self._schedule.interval_s

    def _add_up_early(self) -> None:
        self._begin()  # should have come long ago, if the event loop in which it was to has ended
        if self._adding.acquire(blocking=False):
            try:
                self._add_up()
            finally:
                self._adding.release()

    def _add_up(self) -> None:
        """Add what was noted to the rows. Under `_adding`."""
        while self._decisions:
            decision, of = self._decisions.popleft(), None
            if type(decision) is tuple:
                of, decision = decision
            allowed, key, cost, limit, remaining = decision[:5]
            near = 1 if allowed and remaining * 5 < limit.amount else 0
            result = "allowed" if allowed else "refused"
            self._add((key, limit, result, decision[8], decision[9], 1, cost, near, (), of))
        while self._notes:
            self._add(self._notes.popleft())

    def _add(self, note: tuple[Any, ...]) -> None:
        key, limit, result, reason, source, calls, permits, near, waited, of = note
        if of is not None and of not in self._names:
            if len(self._names) < _MAX_NAMES:
                self._names.add(of)
            else:
                of = OTHER_LABELS
        # By its identity, as the hash of a limit takes longer; the row keeps the limit alive.
        name = (id(limit), self._label_of(key), result, reason, source, of)
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = [limit, 0, 0, 0, []]
        row[1] += calls
        row[2] += permits
        row[3] += near
        if waited:
            row[4].extend(waited)

    def _label_of(self, key: AnyKey) -> str | None:
        if self._key_label is None:
            return None
        label = self._label_of_key.get(key)
        if label is None:
            try:
                label = str(self._key_label(key))
            except RAISED_BY_CALLBACKS:
                self._log("key_label=%r has failed", self._key_label)
                label = OTHER_LABELS
            if label not in self._labels:
                if len(self._labels) > MAX_LABELS:
                    label = OTHER_LABELS
                self._labels.add(label)
            if len(self._label_of_key) >= _MAX_KEYS:
                self._label_of_key.clear()
            self._label_of_key[key] = label
        return label

    def _tell_each(self, method: Callable[[Any], object], queue: deque[Any]) -> None:
        # No more than there were: an observer may call what it observes.
        for _ in range(len(queue)):
            with suppress(IndexError):  # another thread has told the last ones
                self._tell(method, queue.popleft())

    def _tell(self, method: Callable[[Any], object], what: Any) -> None:
        began_at = SYSTEM.monotonic()
        try:
            method(what)
        except RAISED_BY_CALLBACKS:
            self._log("an observer has failed, and what it was told is lost: %r", self._observer)
        seconds = SYSTEM.monotonic() - began_at
        if seconds > _SLOW_S:
            text = "%s of an observer has taken %.3f s, which delays what is flushed here: %r"
            self._log(text, method.__name__, seconds, self._observer)

    def _log(self, text: str, *values: object) -> None:
        now = SYSTEM.monotonic()
        if now >= self._log_at:
            self._log_at = now + _LOG_EVERY_S
            LOG.warning(text, *values, exc_info=sys.exc_info()[0] is not None)


def _sum_of(one: Counts, two: Counts) -> Counts:
    return one._replace(
        calls=one.calls + two.calls, permits=one.permits + two.permits, near=one.near + two.near,
        waited=one.waited + two.waited,
    )  # fmt: skip


def tally_of(
    options: Options, source_kind: SourceKind, monotonic: Callable[[], float]
) -> Tally | None:
    """Return what adds up what an object with these options decides; None without an observer."""
    name, key_label = options.metric_name, options.key_label
    if name is not None and (not isinstance(name, str) or not name):
        raise ConfigurationError(f"metric_name={short_repr(name)} is no text, such as 'search'")
    if key_label is not None:
        if not callable(key_label):
            raise ConfigurationError(f"key_label={short_repr(key_label)} is no function of a key")
        check_not_async("key_label", key_label)
        check_takes("key_label", key_label, 1)
    observer = observer_of(options.observer)
    if observer is None or observer is UNOBSERVED:
        return None
    name = options.prefix if name is None else name
    return Tally(observer, source_kind, name, options.flush_interval, monotonic, key_label)


class TimedStore:
    """A store elsewhere, each exchange of which a tally notes."""

    def __init__(self, store: Any, tally: Tally) -> None:
        self._store, self._tally = store, tally
        self._monotonic = store.clock.monotonic

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def decide(self, *arguments: Any) -> Any:
        """See `Store`."""
        return self._timed("acquire", self._store.decide, arguments)

    def execute(self, command: Any, *arguments: Any) -> Any:
        """See `Store`."""
        return self._timed(command.script, self._store.execute, (command, *arguments))

    def execute_many(self, *arguments: Any) -> Any:
        """See `Store`."""
        return self._timed("flush", self._store.execute_many, arguments)

    def _timed(self, operation: str, send: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        began_at = self._monotonic()
        try:
            reply = send(*arguments)
        except DistwindowError as exc:
            self._tally.called(operation, self._monotonic() - began_at, exc)
            raise
        self._tally.called(operation, self._monotonic() - began_at, _error_in(reply))
        return reply


class AsyncTimedStore(TimedStore):
    """`TimedStore` for tasks."""

    async def _timed(
        self, operation: str, send: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        began_at = self._monotonic()
        try:
            reply = await send(*arguments)
        except DistwindowError as exc:
            self._tally.called(operation, self._monotonic() - began_at, exc)
            raise
        self._tally.called(operation, self._monotonic() - began_at, _error_in(reply))
        return reply


def _error_in(reply: Any) -> BaseException | None:
    replies = reply if isinstance(reply, list) else ()
    return next((each for each in replies if isinstance(each, DistwindowError)), None)
