"""What is told of what is decided here, and what adds it up.

A limiter counts nothing more for an observer while it decides by a lease, a cached refusal or its
own window: the state of the key knows what was spent of a lease, and what was counted, when that is
flushed. Other decisions are added up as they are made. The worker tells the observer.

    decided by                 is noted                    cost in the call
    a lease, a cached          by the state of its key,    nothing
    refusal, `eventual`        when it is flushed
    the store, a policy        `BaseDecider.answered`,     three additions, or a call more where
                               `Tally.decided`             it is not like the one before
    nobody: the call raised    `Tally.failed`              a call, and a look-up

What a process that is killed has not told yet is lost: at most that of one flush interval.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from .errors import (
    ConfigurationError,
    DistwindowError,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
    short_repr,
)
from .ring.clock import NEVER, SYSTEM
from .ring.decision import Decision, Source
from .ring.key import AnyKey
from .ring.limit import Limit
from .runtime.flush import FlushSchedule, ScheduledSource
from .runtime.timers import LOG
from .support.callables import RAISED_BY_CALLBACKS, check_not_async, check_takes
from .support.fork import register_after_fork
from .support.locks import SWITCHES_ONLY_AT_CALLS

if TYPE_CHECKING:
    from .runtime.flush import OutgoingCommand
    from .runtime.options import Options

__all__ = ["Counts", "Level", "Observer", "ObserverEvent", "StoreCall", "set_default_observer"]

T = TypeVar("T")
SourceKind = Literal["limiter", "web", "queue", "concurrency", "breaker", "upstream"]
Result = Literal["allowed", "refused", "error"]
Outcome = Literal["ok", "timeout", "unavailable", "refused"]
OTHER_LABELS = "other"
"""The label of the keys beyond the first `MAX_LABELS` labels."""
MAX_LABELS = 100
_MAX_KEYS = 10_000
"""Of how many keys a tally knows the label."""
_MAX_NAMES = 1000
"""Of how many names and limits one tally counts. Those beyond are `OTHER_LABELS`: clients write
paths, and a function may return any limit.
"""
_SLOW_S = 0.05
"""What takes an observer longer delays the flushes of the process, and is logged."""
_LOG_EVERY_S = 60.0
_NOT_TRIED_S = 0.001
"""A call that fails sooner, while a server is away, was answered without an attempt."""


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
    """`error`: the call raised, as the store had not decided it."""
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
    """Exchanges with the store, of one kind and with one outcome, since the last time."""

    source_kind: SourceKind
    name: str
    operation: str
    """The name of the script, or `flush` for several at once."""
    outcome: Outcome
    charged: bool | None
    """Of those that failed: whether they were counted; None where nobody knows."""
    seconds: tuple[float, ...]
    """How long each has taken."""


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
        """Called for each kind and outcome of exchanges with a store, after `on_counts`."""

    def on_event(self, event: ObserverEvent) -> None:
        """Called after each change."""

    def on_levels(self, batch: Sequence[Level]) -> None:
        """Called when a level has changed, at most once in a flush interval."""

    def on_request(self, decision: Decision, name: str) -> None:
        """Called in the thread or task of a request, and so in the context of its span, when the
        limit `name` refuses it, or admits it because the store is away. The request waits for it.
        """


_METHODS = [name for name in vars(Observer) if name.startswith("on_")]
_default: Observer | None = None


def set_default_observer(observer: Observer | None) -> None:
    """Have all objects that are made from now on without an `observer` of their own tell this one.
    None ends that. Raises `ConfigurationError` for what is no `Observer`.
    """
    global _default
    _default = check_observer(observer)


def check_observer(observer: Any) -> Any:
    """Return `observer`; raise `ConfigurationError` for what is neither one nor None."""
    if isinstance(observer, Observer):
        if type(observer) is not Observer:
            _check_methods(observer)
        return observer
    if observer is None:
        return None
    raise ConfigurationError(
        f"observer={short_repr(observer)} is no distwindow.Observer; an object of a subclass is one"
    )


def _check_methods(observer: Observer) -> None:
    known, has_own = ", ".join(_METHODS), False
    for name in dir(observer):
        if not name.startswith("on_") or not callable(method := getattr(observer, name)):
            continue
        if name not in _METHODS:
            raise ConfigurationError(
                f"observer={short_repr(observer)} has {name}, which nobody calls; the methods of "
                f"an observer are {known}"
            )
        check_not_async(f"observer.{name}", method)
        has_own |= getattr(method, "__func__", None) is not vars(Observer)[name]
    if not has_own:
        raise ConfigurationError(
            f"observer={short_repr(observer)} would be told nothing: it has none of {known}"
        )


def observer_of(observer: Observer | None) -> Observer | None:
    """Return `observer`, or the default one where there is none."""
    return check_observer(observer) or _default


COUNTED_IN_STATES = ("lease", "deny_cache")
"""Sources of decisions that the state of their key counts: a call that has waited for a lease that
another fetches may be decided by it.
"""
UNOBSERVED = Observer()
"""The observer of what is counted already by what has made it."""


class Row:
    """Decisions of one kind, ever since, and how many of them were told."""

    __slots__ = ("calls", "few", "limit", "near", "permits", "reason", "source", "told", "waited")

    def __init__(self, limit: Any, reason: str, source: str) -> None:
        self.limit, self.reason, self.source = limit, reason, source
        self.calls = self.permits = self.near = 0
        self.few = 0
        """A decision that leaves less is `near`, as `Tally.decided` counts it."""
        self.told = (0, 0, 0)
        self.waited: deque[float] = deque()

    def take(self) -> tuple[int, int, int, tuple[float, ...]]:
        """Return calls, permits, near, and the seconds of waits, since the last time."""
        counted = (self.calls, self.permits, self.near)
        calls, permits, near = (now - then for now, then in zip(counted, self.told, strict=True))
        if calls < 0 or permits < 0 or near < 0:  # of a call that is being counted, or taken back
            return 0, 0, 0, ()
        self.told = counted
        return calls, permits, near, tuple(drained(self.waited))


NO_ROW = Row(None, "", "")
"""A row that is that of no decision."""


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
        *,
        shadow: bool = False,
    ) -> None:
        self._observer, self._source_kind, self.name = observer, source_kind, name
        self._monotonic = monotonic
        self._key_label, self._shadow = key_label, shadow
        self._schedule = FlushSchedule(interval_s)
        self._seconds: dict[tuple[str, Outcome, bool | None], deque[float]] = {}
        self._log_at = -NEVER
        self._label_of_key: dict[AnyKey, str] = {}
        self._labels = {OTHER_LABELS}
        register_after_fork(self)
        self.after_fork()

    def after_fork(self) -> None:
        """Start empty: the parent tells what it has counted."""
        self._lock = threading.Lock()
        # Re-entrant, as a signal handler may flush the limiter that it has interrupted.
        self._telling = threading.RLock()
        self._rows: dict[tuple[Any, ...], Row] = {}
        self._names: set[str] = set()
        self._limits: set[Limit | str] = set()
        self._events: deque[ObserverEvent] = deque()
        self._told_levels: Sequence[Level] = ()
        self.last_row = NO_ROW
        """That of the last decision by a window, as most are like the one before:
        `BaseDecider.answered` counts these in it, in lines without a call. Without a GIL it is that
        of no decision.
        """
        self.row_of_key: dict[AnyKey, Row] | None = None if self._key_label is None else {}
        """With `key_label`, that of the last decision on each key, in its place."""
        self._row_of_kind: dict[tuple[Any, ...], Row] = {}
        """By the label, the id of the limit, the reason and the source."""
        for seconds in self._seconds.values():
            seconds.clear()
        self.is_idle = True
        """Nothing was noted since the worker came; set before it takes what there is."""
        self._schedule.next_due_at = NEVER

    # -- what is noted ------------------------------------------------------------------------

    def decided(self, decision: Decision) -> None:
        """Note a decision of the store, or of `on_store_error`."""
        row = self._row_of_decision(decision)
        self._add_calls(row, 1, decision[2], decision[4] < row.few)
        if self.is_idle:
            self.schedule_flush()

    def _row_of_decision(self, decision: Decision) -> Row:
        # By index, which takes half the time of unpacking a subclass of tuple.
        limit, reason, source = decision[3], decision[8], decision[9]
        # A limit is hashed slower than its id, which no other object has while a row keeps it.
        kind = self.label_of(decision[1]), id(limit), reason, source
        row = self._row_of_kind.get(kind)
        if row is None:
            result: Result = "allowed" if decision[0] else "refused"
            row = self._row(kind[0], limit, result, reason, source, None, self._shadow)
            if reason == "store_down":
                return row  # this reason is that of admitted calls, and that of refused ones
            if decision[0] and row.limit == limit:
                row.few = -(-limit.amount // 5)
            if row.limit is not limit:
                return row  # its limit is an equal one, or `OTHER_LABELS`, and has another id
            if len(self._row_of_kind) >= _MAX_KEYS:
                self._row_of_kind.clear()
            self._row_of_kind[kind] = row
        if source in COUNTED_IN_STATES or not SWITCHES_ONLY_AT_CALLS:
            return row
        if self.row_of_key is None:
            self.last_row = row
        else:
            if len(self.row_of_key) >= _MAX_KEYS:
                self.row_of_key.clear()
            self.row_of_key[decision[1]] = row
        return row

    def _add_calls(self, row: Row, calls: int, permits: int, near: int) -> None:
        if SWITCHES_ONLY_AT_CALLS:  # no call in these lines
            row.calls += calls
            row.permits += permits
            row.near += near
        else:
            with self._lock:
                row.calls += calls
                row.permits += permits
                row.near += near

    def counted(
        self,
        key: AnyKey,
        limit: Limit | str,
        result: Result,
        reason: str,
        source: str,
        calls: int,
        permits: int,
        waited: Sequence[float] = (),
        near: int = 0,
        name: str | None = None,
        shadow: bool = False,
    ) -> None:
        """Note decisions that were counted elsewhere. `calls` may be below 0 where earlier ones
        were too many. `name` takes the place of that of the object.
        """
        label = self.label_of(key)
        row = self._row(label, limit, result, reason, source, name, shadow or self._shadow)
        self._add_calls(row, calls, permits, near)
        row.waited.extend(waited)
        if self.is_idle:
            self.schedule_flush()

    def failed(
        self, key: AnyKey, cost: int, limits: Sequence[Limit | int], name: str | None = None
    ) -> None:
        """Note a call that raises, as neither the store nor `on_store_error` has decided it."""
        limit = ", ".join(map(str, limits))
        self.counted(key, limit, "error", "store_down", "policy", 1, cost, name=name)

    def counted_in_state(
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
        charged: bool | None = getattr(error, "charged", False)
        if isinstance(error, StoreTimeout):
            outcome = "timeout"
        elif isinstance(error, StoreUnavailable):
            outcome = "unavailable"
        elif error is not None:
            outcome = "refused"
        self.seconds_of(operation, outcome, charged).append(seconds)
        if self.is_idle:
            self.schedule_flush()

    def seconds_of(
        self, operation: str, outcome: Outcome = "ok", charged: bool | None = False
    ) -> deque[float]:
        """Return what takes the seconds of such exchanges."""
        return self._seconds.setdefault((operation, outcome, charged), deque())

    def changed(self, change: Any, name: str | None = None) -> None:
        """Note a change. Who has noticed it may be in a call, or hold a lock."""
        self._events.append(ObserverEvent(self._source_kind, name or self.name, change))
        if self.is_idle:
            self.schedule_flush()

    levels: Callable[[], Sequence[Level]] | None = None
    """Returns the levels of now, for an object that has some."""

    def in_request(self, decision: Decision, name: str) -> None:
        """Tell of a request that is refused, or admitted as the store is away, where it is."""
        if not decision.allowed or decision.reason == "store_down":
            self._tell(self._observer.on_request, decision, name)

    def level_changed(self) -> None:
        if self.is_idle:
            self.schedule_flush()

    def schedule_flush(self) -> None:
        self.is_idle = False
        try:
            self._schedule.flush_by(self._monotonic() + self._schedule.interval_s)
        except BaseException:  # a signal handler may raise anything in it
            self.is_idle = True
            raise

    # -- what is told -------------------------------------------------------------------------

    def collect_commands(
        self, now: float, outgoing: list[OutgoingCommand], *, everything: bool = False
    ) -> None:
        """Tell the observer what was noted."""
        self.is_idle = True
        try:
            self._tell_all()
        except BaseException:  # a signal handler may raise anything in it
            self.is_idle = False
            raise

    def _tell_all(self) -> None:
        batch = self._take()
        if batch:
            self._tell(self._observer.on_counts, batch)
        for (operation, outcome, charged), seconds in list(self._seconds.items()):
            if taken := tuple(drained(seconds)):
                call = StoreCall(self._source_kind, self.name, operation, outcome, charged, taken)
                self._tell(self._observer.on_store_call, call)
        for event in drained(self._events):
            self._tell(self._observer.on_event, event)
        if self.levels is not None and (levels := self.levels()) != self._told_levels:
            self._told_levels = levels
            self._tell(self._observer.on_levels, levels)
            if any(level.what == "oldest_wait_s" and level.value for level in levels):
                self.is_idle = False  # it grows

    def _take(self) -> list[Counts]:
        """Return what was noted since the last time."""
        batch = []
        with self._telling:
            for what, row in list(self._rows.items()):
                limit, label, result, reason, source, name, shadow = what
                calls, permits, near, waited = row.take()
                if calls or permits or near or waited:
                    batch.append(Counts(
                        self._source_kind, name or self.name, str(limit), label, result, reason,
                        source, shadow, calls, permits, near, waited,
                    ))  # fmt: skip
        return batch

    @property
    def has_untold(self) -> bool:  # type: ignore[override]  # until the worker has come
        return not self.is_idle

    def reschedule(self, now: float) -> None:
        interval_s = self._schedule.interval_s
        self._schedule.recompute(now, [lambda now: NEVER if self.is_idle else now + interval_s])

    def _row(
        self, label: str | None, limit: Any, result: str, reason: str, source: str,
        name: str | None, shadow: bool,
    ) -> Row:  # fmt: skip
        row = self._rows.get((limit, label, result, reason, source, name, shadow))
        if row is None:
            name = self._bounded(self._names, name and encodable(name))
            limit = self._bounded(self._limits, limit)
            what = (limit, label, result, reason, source, name, shadow)
            row = self._rows.setdefault(what, Row(limit, reason, source))
        return row

    def _bounded(self, known: set[Any], value: Any) -> Any:
        if value is not None and value not in known:
            if len(known) >= _MAX_NAMES:
                return OTHER_LABELS
            known.add(value)
        return value

    def label_of(self, key: AnyKey) -> str | None:
        """Return the label of `key`; None without `key_label`."""
        if self._key_label is None:
            return None
        label = self._label_of_key.get(key)
        if label is None:
            try:
                label = encodable(str(self._key_label(key)))
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

    def _tell(self, method: Callable[..., object], *what: Any) -> None:
        began_at = SYSTEM.monotonic()
        try:
            method(*what)
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


def drained(queue: deque[T]) -> Iterator[T]:
    """Take out what is in `queue` now, and no more: an observer may call what it observes. Another
    thread may flush, and take from it, too.
    """
    for _ in range(len(queue)):
        try:
            yield queue.popleft()
        except IndexError:
            return


def encodable(text: str) -> str:
    """Return `text` without what UTF-8 does not have, which would end a scrape."""
    return text.encode(errors="replace").decode()


def tally_of(
    options: Options, source_kind: SourceKind, monotonic: Callable[[], float]
) -> Tally | None:
    """Return what adds up what an object with these options decides; None without an observer."""
    name, key_label = options.metric_name, options.key_label
    if name is not None and (not isinstance(name, str) or not name or name != encodable(name)):
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
    return Tally(
        observer, source_kind, name, options.flush_interval, monotonic, key_label,
        shadow=bool(options.shadow),
    )  # fmt: skip


class TimedStore:
    """A store elsewhere, each exchange of which a tally notes."""

    def __init__(self, store: Any, tally: Tally) -> None:
        self.untimed, self._tally = store, tally
        self._monotonic = store.clock.monotonic
        self.took = tally.seconds_of("acquire").append
        """Note the seconds of a decision that was asked of `untimed`; they are told with it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.untimed, name)

    def decide(self, *arguments: Any) -> Any:
        return self._timed("acquire", self.untimed.decide, arguments)

    def execute(self, command: Any, *arguments: Any) -> Any:
        return self._timed(command.script, self.untimed.execute, (command, *arguments))

    def execute_many(self, *arguments: Any) -> Any:
        return self._timed("flush", self.untimed.execute_many, arguments)

    def exchange_failed(self, operation: str, began_at: float, exc: DistwindowError) -> None:
        """Note an exchange that has failed. One that was not tried, with a server away, is none."""
        seconds = self._monotonic() - began_at
        outages = getattr(self.untimed, "outages", None)
        is_tried = not isinstance(exc, StoreError) or outages is None or not outages.away
        if is_tried or seconds > _NOT_TRIED_S:
            self._tally.called(operation, seconds, exc)

    def _timed(self, operation: str, send: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        began_at = self._monotonic()
        try:
            reply = send(*arguments)
        except DistwindowError as exc:
            self.exchange_failed(operation, began_at, exc)
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
            self.exchange_failed(operation, began_at, exc)
            raise
        self._tally.called(operation, self._monotonic() - began_at, _error_in(reply))
        return reply


def _error_in(reply: Any) -> BaseException | None:
    replies = reply if isinstance(reply, list) else ()
    return next((each for each in replies if isinstance(each, DistwindowError)), None)
