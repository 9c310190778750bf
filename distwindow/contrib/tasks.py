"""Limits of tasks, for all task queues: their keys and costs, and the call that admits one."""

from __future__ import annotations

import inspect
import logging
import math
import re
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from .. import (
    AsyncLimiter,
    ConfigurationError,
    Decision,
    Limit,
    Limiter,
    RateLimitExceeded,
    StoreError,
)
from ..errors import KeysOnSeveralNodes, short_repr
from ..observer import Observer, Result, Tally
from ..ring.clock import SYSTEM, Clock
from ..ring.key import AnyKey, Key, encode_key, normalize_key
from ..ring.limit import parse_limits, reads_as_limit
from ..rules.shadow import as_enforced, is_in_shadow
from ..runtime.command_cache import check_cost
from ..runtime.options import ClockChoice, Options
from ..support.async_use import result_of, run_at_once
from ..support.callables import FunctionArguments, KeyTemplate, check_not_async, function_name
from .limiter_pool import AsyncLimiterPool, LimiterPool
from .queue_counts import (
    DecidedTask,
    WaitingTasks,
    count_task,
    decided_task,
    tell_waiting,
    text_of,
)
from .shared_windows import SharedWindows

_log = logging.getLogger("distwindow")


REPORT_EVERY_S = 60.0
"""How long a worker does not log a kind of failure again."""


class FailureLog:
    """Lets each kind of failure be logged once in `REPORT_EVERY_S`, and counts the others.

    The kinds must be few: they are kept forever. Two threads may log the same failure twice.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._logged: dict[Hashable, tuple[float, int]] = {}
        """By kind: when it was logged last, and how many failures were not logged since."""

    def unlogged_before(self, kind: Hashable) -> int | None:
        """Return how many of its kind were not logged since the last was; None: do not log it."""
        now_s = self._monotonic()
        logged_s, unlogged = self._logged.get(kind, (-math.inf, 0))
        if now_s - logged_s < REPORT_EVERY_S:
            self._logged[kind] = (logged_s, unlogged + 1)
            return None
        self._logged[kind] = (now_s, 0)
        return unlogged


TASK_OPTIONS = ("limits", "limit_key", "limit_cost")
"""The options of a task, which have the same names for all queues."""
_OUR_NAMES = re.compile(r"limit|limits?_.*|distwindow_.*")
_INSTEAD = {
    "concurrency": (
        "take a slot in the task, `with slots.try_hold(key) as slot:` of a distwindow.Concurrency, "
        "and retry it where the slot is false"
    ),
    "breaker": (
        "make the call in the task within `with breaker.call(key):` of a "
        "distwindow.CircuitBreaker, and retry it after the retry_after of a BreakerOpen"
    ),
}
"""What to write in a task for options that other libraries have, and that do not exist here."""


class TaskArguments(FunctionArguments):
    """The parameters of a task's function. Templates may name `{task}`, the task's name."""

    def __init__(
        self,
        task: str,
        function: Callable[..., Any],
        own: int = 0,
        injected: Collection[str] = (),
    ) -> None:
        super().__init__(f"task {task!r}", function, own, injected, {"task": task})
        self.task = task

    def check_callable(self, option: str, function: Callable[..., Any]) -> None:
        """Raise `ConfigurationError` if `function` must be awaited, or cannot take the arguments
        that the task takes.

        It is called with the bound arguments of a call: in the order of the parameters, with
        defaults, and only keyword-only ones by name. The arguments of functions without a
        signature, and of tasks with variable arguments, are not checked.
        """
        check_not_async(f"{self.subject}: {option}", function)
        if self.takes_any_name or self.takes_any_number:
            return
        try:
            theirs = inspect.signature(function)
        except (TypeError, ValueError):
            return
        only_named = [name for name in self.names if name not in self.positional]
        try:
            theirs.bind(*self.positional, **dict.fromkeys(only_named))
        except TypeError as exc:
            raise ConfigurationError(
                f"{self.subject}: {option} is called with the task's own arguments "
                f"({', '.join(self.names) or 'none'}), and cannot take them: {exc}"
            ) from None


class KeyAndCost:
    """The key and the cost of the calls of one task, for limits that count under one key.

    The key is a template over the task's arguments (`"tenant:{tenant}"`), or a function that is
    given the arguments of a call, with defaults; None: all calls count under the task's name. The
    cost is a whole number of permits, or a function of the arguments.

    Raises `ConfigurationError` for what could never work.
    """

    def __init__(
        self,
        arguments: TaskArguments,
        part: LimitsOfKey,
        log: logging.Logger,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, has_own_key, key, cost = part
        self._smallest = min(limit.amount for limit in self._limits)
        named = self._named = "" if has_own_key else "limit_"
        self._arguments = arguments
        self._log = log
        self._failures = FailureLog(monotonic)
        self._key_of: Callable[..., Any] | None = None
        self._cost_of: Callable[..., Any] = lambda args, kwargs: cost
        if key == "":
            raise ConfigurationError(
                f"{arguments.subject}: {named}key is empty; write a template such as "
                '"tenant:{tenant}", or leave it out to count all calls together'
            )
        if isinstance(key, str):
            shown = f"{arguments.subject}: {named}key={short_repr(key)}"
            template = KeyTemplate(key, arguments, shown)
            self._key_of = template.fill
            words = set(re.findall(r"\w+", key)) if template.is_fixed else set()
            unfilled = [name for name in arguments.names if name in words]
            if unfilled:
                log.warning(
                    "task %r: %skey=%r names no argument in braces, so all calls count under "
                    "one key; write {%s} where its value is meant",
                    *(arguments.task, named, key, unfilled[0]),
                )
        elif callable(key):
            self._key_of = self._of_task_arguments(f"{named}key", key)
        elif key is not None:
            raise ConfigurationError(
                f"task {arguments.task!r}: {named}key={short_repr(key)} is neither a template such "
                'as "tenant:{tenant}" nor a function of the task\'s arguments'
            )
        if callable(cost):
            self._cost_of = self._of_task_arguments(f"{named}cost", cost)
        elif not _is_cost(cost):
            raise ConfigurationError(
                f"task {arguments.task!r}: {named}cost={short_repr(cost)} is neither a whole "
                "number of at least 1 nor a function of the task's arguments"
            )
        elif cost > self._smallest:
            raise ConfigurationError(
                f"task {arguments.task!r}: {named}cost={cost} can never be admitted: the smallest "
                f"limit is {self._smallest}"
            )

    def _of_task_arguments(self, option: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` as a function of the positional and the named arguments of a task."""
        self._arguments.check_callable(option, function)

        def call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            bound = self._arguments.bind(args, kwargs)
            return function(*bound.args, **bound.kwargs)

        return call

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any], call: object = None) -> Item:
        """Return what one call is charged. `call` is an id of the call, for the log.

        A call whose key cannot be computed counts under the task's name, and one whose cost cannot
        be computed, or is above it, costs the smallest limit: a mistake opens no limit and loses no
        call. The task says what is wrong with its arguments.
        """
        task, smallest = self._arguments.task, self._smallest
        key: AnyKey = task
        cost = smallest
        if self._key_of is not None:
            try:
                computed = self._key_of(args, kwargs)
                if not isinstance(computed, Key):
                    encode_key(computed)  # raises for what is no key
                key = computed
            except Exception as exc:
                self._report("key", f"count under {task!r}", call, exc)
        try:
            found = self._cost_of(args, kwargs)
            if not _is_cost(found):
                shown = short_repr(found)
                raise ValueError(f"it returned {shown}, which is no whole number above 0")
            cost = found
            check_cost(cost, smallest)
        except Exception as exc:
            self._report("cost", f"cost {smallest}, the whole limit,", call, exc)
        return normalize_key(key), self._limits, min(cost, smallest)

    def _report(self, option: str, instead: str, call: object, exc: Exception) -> None:
        unlogged = self._failures.unlogged_before((option, type(exc).__name__))
        if unlogged is None:
            return
        self._log.error(
            "%s of task %r failed for %s (%s: %s)%s; such calls %s instead. Correct the option, or "
            "what calls the task with such arguments; this worker logs it again in %.0f s at the "
            "earliest",
            self._named + option, self._arguments.task,
            "a call" if call is None else f"the call {call}",
            type(exc).__name__, exc,
            f", and for {unlogged} other calls since this was logged last" if unlogged else "",
            instead, REPORT_EVERY_S,
        )  # fmt: skip


def _is_cost(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_option_names(task: str, options: Mapping[str, object]) -> None:
    """Raise `ConfigurationError` for an option that is none of ours and has a name of ours, where
    the queue accepts options of any name: `limit`, and what begins with `limit_`, `limits_` or
    `distwindow_`. Left alone are functions (a base class may have methods of such names), None,
    and a `limit` that is a number, such as that of the rows of an application.
    """
    for option, value in options.items():
        if option in TASK_OPTIONS or not _OUR_NAMES.fullmatch(option):
            continue
        if value is None or callable(value) or (option == "limit" and isinstance(value, int)):
            continue
        raise ConfigurationError(
            f"task {task!r} has the unknown option {option}={short_repr(value)}; names that begin "
            f"so are distwindow's, whose options are {', '.join(TASK_OPTIONS)}"
        )


def check_not_for_the_task(subject: str, options: Mapping[str, object]) -> None:
    """Raise `ConfigurationError` for `concurrency` and `breaker`, which are no options of a task,
    where the queue accepts options of any name. None and whatever can be called are left alone, as
    by `check_option_names`. `subject` is what has the options, in the error.
    """
    for option, instead in _INSTEAD.items():
        value = options.get(option)
        if value is not None and not callable(value):
            raise ConfigurationError(
                f"{subject}: {option}={short_repr(value)} is no option of a task, and would do "
                f"nothing; {instead}"
            )


def check_not_short(task: str, options: Mapping[str, object], *, with_functions: bool) -> None:
    """Raise `ConfigurationError` for `key` and `cost` beside `limits`, where the queue accepts
    options of any name: without `limit_key` all calls would count together, and nothing would say
    so. They are left alone beside `limit_key` and `limit_cost`, as the application's own, and where
    each limit has a key or a cost of its own. `with_functions` is False where the options may be
    the methods of a class.
    """
    limits = options.get("limits")
    for short, option in (("key", "limit_key"), ("cost", "limit_cost")):
        value = options.get(short)
        if limits is None or value is None or options.get(option) is not None:
            continue
        if callable(value) and not with_functions:
            continue
        parts = parse_task_limits(limits)
        if all(part.has_own_key if short == "key" else part.cost is not None for part in parts):
            continue
        raise ConfigurationError(
            f"task {task!r}: {short}= is no option of a task, and would do nothing; write {option}="
        )


Item: TypeAlias = tuple[AnyKey, tuple[Limit, ...], int]
"""A key, its limits and the cost of a call, as `try_acquire_all` takes them."""


class LimitsOfKey(NamedTuple):
    """Limits of a task that count under one key, as they are written."""

    limits: tuple[Limit, ...]
    has_own_key: bool = False
    """False: they count under `limit_key`."""
    key: Any = None
    cost: Any = None
    """None: `limit_cost`."""

    def shown(self) -> list[str]:
        """Return the limits for people, with a key of their own."""
        key = function_name(self.key) if callable(self.key) else self.key
        return [f"{limit} for {key}" if self.has_own_key else str(limit) for limit in self.limits]


def parse_task_limits(spec: object) -> tuple[LimitsOfKey, ...]:
    """Return the limits of a task by their keys. `spec` is what `parse_limits` takes, or a list
    that has `(key, limits)` or `(key, limits, cost)` for limits with a key of their own.
    """
    parts = list(spec) if isinstance(spec, (list, tuple)) else [spec]
    if len(parts) > 1 and (_is_one_pair(parts) or any(map(_is_surely_key, parts))):
        raise ConfigurationError(_pair_message(spec))
    keyed = [part for part in parts if isinstance(part, (list, tuple, Mapping))]
    plain: list[Any] = [part for part in parts if not isinstance(part, (list, tuple, Mapping))]
    found = [LimitsOfKey(parse_limits(plain))] if plain or not parts else []
    for part in keyed:
        if isinstance(part, Mapping) or not 2 <= len(part) <= 3 or reads_as_limit(part[0]):
            raise ConfigurationError(_pair_message(part))
        key, limits, *cost = part
        found.append(LimitsOfKey(parse_limits(limits), True, key, *cost))
    return tuple(found)


def parse_limits_of(owner: str, spec: object) -> tuple[LimitsOfKey, ...]:
    """Do as `parse_task_limits`; an error names the owner of the limits."""
    try:
        return parse_task_limits(spec)
    except ValueError as exc:
        raise ConfigurationError(f"{owner}: {exc}") from None


def _is_surely_key(value: object) -> bool:
    """Return whether `value`, which stands where a limit is wanted, can only be a key."""
    return callable(value) or isinstance(value, Key) or (isinstance(value, str) and "{" in value)


def _is_one_pair(parts: Sequence[Any]) -> bool:
    """Return whether a list of limits is a key that is a plain word, such as "mail", its limit, and
    possibly a cost.
    """
    word, limit = parts[:2]
    is_word = isinstance(word, str) and word and not re.search(r"[\d/;]|\bper\b", word)
    return len(parts) <= 3 and bool(is_word) and reads_as_limit(limit)


def _pair_message(written: object) -> str:
    return (
        f"limits={short_repr(written)}: limits with a key of their own are (key, limits) or "
        '(key, limits, cost) in a list, as in [("tenant:{tenant}", "2/second"), "10/second"]'
    )


class TaskCharges:
    """What a call of one task is charged: its limits by their keys. `key` and `cost` are those of
    the limits that have none of their own; `parts` is what `parse_task_limits` returns, and may be
    empty.

    Raises `ConfigurationError` for what could never work.
    """

    source = ""
    """The setting that has set the limits, for people."""

    def __init__(
        self,
        arguments: TaskArguments,
        parts: Sequence[LimitsOfKey],
        key: object,
        cost: object,
        log: logging.Logger,
    ) -> None:
        self.name = arguments.task
        self.parts = tuple(
            part._replace(
                key=part.key if part.has_own_key else key,
                cost=cost if part.cost is None else part.cost,
            )
            for part in parts
        )
        self._charges = [KeyAndCost(arguments, part, log) for part in self.parts]
        if key is not None and parts and all(part.has_own_key for part in parts):
            raise ConfigurationError(
                f"{arguments.subject}: limit_key={short_repr(key)} is for limits without a "
                "key, and each of these has one of its own"
            )
        windows: dict[Any, Limit] = {}
        for part in self.parts:
            for limit in part.limits:
                window = part.key or "{task}", limit.bucket_ms, limit.span
                if window in windows:
                    raise ConfigurationError(
                        f"{arguments.subject}: the limits '{windows[window]}' and '{limit}' of the "
                        f"key {short_repr(window[0])} count in one window; leave one out, or give "
                        "one of them another key"
                    )
                windows[window] = limit

    @property
    def limits(self) -> tuple[Limit, ...]:
        return tuple(limit for part in self.parts for limit in part.limits)

    def items(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], call: object = None
    ) -> tuple[Item, ...]:
        """Return what one call is charged. See `KeyAndCost.of`.

        Keys that are written differently may be the same for a call (a sender who is the receiver,
        too). Then it is charged once in a window, under the smaller limit.
        """
        items = [charge.of(args, kwargs, call) for charge in self._charges]
        if len(items) == 1:
            return tuple(items)
        windows: dict[Any, Item] = {}
        for key, limits, cost in items:
            for limit in limits:
                window = key, limit.bucket_ms, limit.span
                _, others, other_cost = windows.get(window, (key, (limit,), cost))
                smallest = min(limit, *others, key=lambda one: one.amount)
                most = min(max(cost, other_cost), smallest.amount)
                windows[window] = key, (smallest,), most
        return tuple(windows.values())

    def add_windows(self, windows: SharedWindows) -> None:
        """Add the limits to those of an application, under the keys that are templates."""
        for part in self.parts:
            if isinstance(part.key, str) and "{task}" not in part.key:
                advice = f'write the key "{{task}}:{part.key}" for a window of each task'
                windows.add(part.key, part.limits, f"task {self.name!r}", advice)


def keys_of(items: Sequence[Item]) -> AnyKey | tuple[AnyKey, ...]:
    """Return the key of a call; a tuple of them, if it has several."""
    keys = tuple(dict.fromkeys(key for key, _, _ in items))
    return keys[0] if len(keys) == 1 else keys


def acquire_all(limiter: Limiter, items: Sequence[Item], enqueue: bool = False) -> Decision:
    """Do as `acquire_all_async` with a limiter that has nothing to await."""
    return run_at_once(acquire_all_async(limiter, items, enqueue))


async def acquire_all_async(
    limiter: Limiter | AsyncLimiter, items: Sequence[Item], enqueue: bool = False
) -> Decision:
    """Do `limiter.try_acquire_all`. Keys on several nodes of a cluster are asked for in turn, and
    what the first have charged is given back if a later one refuses, or fails. Return a refusal;
    otherwise the decision that waits longer, or has fewer left. In shadow all keys are asked for in
    turn: a limit in shadow raises nothing that says where they lie.
    """
    others: Decision | None = None
    if len(items) == 1 or not is_in_shadow():
        try:
            decision: Decision = await result_of(limiter.try_acquire_all(items, enqueue))
            return decision
        except KeysOnSeveralNodes:
            pass
    first: Decision = await result_of(limiter.try_acquire_all(items[:1], enqueue))
    if not as_enforced(first)[0]:
        return first
    try:
        others = await acquire_all_async(limiter, items[1:], enqueue)
    finally:
        if others is None or not as_enforced(others)[0]:
            await result_of(limiter.refund(first))
    if not as_enforced(others)[0]:
        return others
    return max(first, others, key=lambda decision: (decision.wait, -decision.remaining))


def check_has_limits(task: str, options: Mapping[str, Any], place: str) -> None:
    """Raise `ConfigurationError` for a key or cost without limits; `place`: where to give these."""
    given = [name for name in TASK_OPTIONS if options.get(name) is not None]
    if given and "limits" not in given:
        raise ConfigurationError(f"task {task!r} has {' and '.join(given)} but no limits; {place}")


class TaskLimits(TaskCharges):
    """Which limits a task has, and under which key and for what cost a call of it counts, where
    the queue has no gate of its own.

    `limits` are those of `parse_task_limits`, `key` and `cost` those of `KeyAndCost`, and `own` and
    `injected` those of `TaskArguments`.
    Tasks with the same limits and the same key share their permits.

    Raises `ConfigurationError` for what could never work.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        limits: object,
        key: str | Callable[..., AnyKey] | None = None,
        cost: int | Callable[..., int] = 1,
        *,
        own: int = 0,
        injected: Collection[str] = (),
    ) -> None:
        if limits is None:
            raise ConfigurationError(f'task {name!r} has no limits; write limits="100/minute"')
        parts = parse_limits_of(f"task {name!r}", limits)
        for limit in (limit for part in parts for limit in part.limits):
            if limit.is_shaped:
                raise ConfigurationError(
                    f"task {name!r}: {str(limit)!r} is paced or warms up, and a worker starts a "
                    "task as soon as it is admitted; write a plain limit, with a short interval "
                    'for an even flow ("1/50ms")'
                )
        super().__init__(TaskArguments(name, function, own, injected), parts, key, cost, _log)

    def __repr__(self) -> str:
        return f"TaskLimits({self.name!r}, {'; '.join(map(str, self.limits))!r})"


def read_options(
    name: str,
    function: Callable[..., Any],
    options: Mapping[str, Any],
    *,
    injected: Collection[str] = (),
) -> TaskLimits | None:
    """Return the limits of the task `name` from its options; None if it has none.

    Raises `ConfigurationError` for wrong ones, and for a key or a cost without limits.
    """
    check_option_names(name, options)
    check_not_for_the_task(f"task {name!r}", options)
    check_has_limits(name, options, 'add limits, such as limits="100/minute"')
    limits, key, cost = (options.get(option) for option in TASK_OPTIONS)
    if limits is None:
        return None
    return TaskLimits(name, function, limits, key, 1 if cost is None else cost, injected=injected)


WhileStoreIsAway = Literal["hold", "run"]
"""What tasks do that the store has not decided: wait for it, or start without being counted."""

HOLD_S = 1.0
"""How long tasks are held after the limiter failed, before it is asked again."""
MAX_DELAY_S = 86_400.0
"""The longest delay: dramatiq takes less than a week, and a turn may be months away."""
MIN_DELAY_S = 0.001
"""The least delay of a refused call: its permits may be free by now, but were not taken."""
BROKER_RETRY_S = 1.0
"""How long to wait where the broker of a queue did not take a task back."""

T = TypeVar("T", bound="TaskLimits | None")


class _Gate:
    """Base class of both gates, which say whether a task may start now, and otherwise when to ask
    again: their limiters, and what follows when one fails.

    the limiter says      on_store_error   the task
    admitted                               starts
    refused                                waits for its turn
    it fails              "hold"           waits for a second, as all other tasks do
    it fails              "run"            starts, and was not counted
    it refuses this key   either           waits for a second; a mistake opens no limit, and does
                                           not concern the tasks of other keys

    All calls that are refused at once would be told the same time, and come back together. So a
    refused call takes a place in the virtual line of its limit (`waiting/waiting.py`), in the same
    script call, and its delay ends at its *turn*. A hint: who comes back asks like everyone else.

    `timeout` (seconds) bounds one exchange with the store; `clock` is as for `Limiter`. `observer`
    is told of tasks by their names (`queue_counts.py`), with `key_label` of their limit keys.
    """

    _pool_type: Callable[[Any, Options], Any]

    def __init__(
        self,
        store: Any,
        prefix: str = "distwindow",
        on_store_error: WhileStoreIsAway = "hold",
        timeout: float = 0.5,
        clock: ClockChoice = "server",
        time: Clock = SYSTEM,
        observer: Observer | None = None,
        key_label: Callable[[AnyKey], str] | None = None,
    ) -> None:
        if on_store_error not in get_args(WhileStoreIsAway):
            raise ConfigurationError(
                f'on_store_error={on_store_error!r} is neither "hold" nor "run"'
            )
        options = Options(prefix=prefix, timeout=timeout, clock=clock, time=time)
        self._limiters = type(self)._pool_type(store, options)
        # The limiters have no observer: they do not know the tasks.
        self._in_shadow = is_in_shadow()
        observed = replace(options, observer=observer, key_label=key_label, shadow=self._in_shadow)
        self._tally: Tally | None = self._limiters.observe(observed, "queue")
        self._held_here: dict[object, tuple[str, str, float]] = {}
        """The tasks that wait here: their names, why, and since when (monotonic seconds)."""
        if self._tally is not None:
            tell_waiting(self._tally, self._waiting)
        # In shadow the limiter answers all that fails, but for a refund.
        self._on_store_error = "run" if self._in_shadow else on_store_error
        self._time = time
        self._held_until = -math.inf
        """Until when the limiter is not asked, because it failed (monotonic seconds)."""
        self._failure_log = FailureLog(time.monotonic)
        self.tasks: dict[str, TaskLimits] = {}
        """Those that were added, by their names."""
        self._shared_windows = SharedWindows(_log)

    def add(self, task: T) -> T:
        """Create the limiter of `task`, and return it. Nothing is connected to."""
        if task is not None:
            self._limiter(task)
            task.add_windows(self._shared_windows)
            self.tasks[task.name] = task
        return task

    def _limiter(self, task: TaskLimits) -> Any:
        """Return a limiter for the calls of `task`: with its limits, if they have one key."""
        return self._limiters.get(task.parts[0].limits)

    def _waiting(self) -> list[WaitingTasks]:
        now = self._time.monotonic()
        held = list(self._held_here.values())
        return [WaitingTasks(task, reason, 1, now - began_at) for task, reason, began_at in held]

    def _unasked(self, task: TaskLimits, key: AnyKey, cost: int) -> DecidedTask:
        """Return what is counted of a task while the store is away."""
        result: Result = "allowed" if self._on_store_error == "run" else "refused"
        return DecidedTask(key, text_of(task.limits), cost, result, "store_down", "policy")

    def _failed(self, task: TaskLimits, items: Sequence[Item], exc: Exception) -> float:
        """Return the delay of a task after the limiter raised `exc`: 0.0 to start it."""
        if not isinstance(exc, StoreError):
            self._on_store_recovered()  # whoever refuses a key answers
            unlogged = self._failure_log.unlogged_before((task.name, type(exc).__name__))
            if unlogged is not None:
                _log.error(
                    "the limit key %s of task %r cannot be asked for (%s: %s); its tasks are "
                    "held%s",
                    short_repr(keys_of(items)), task.name, type(exc).__name__, exc,
                    f" ({unlogged} such failures were not logged)" if unlogged else "",
                )  # fmt: skip
            return 0.0 if self._in_shadow else HOLD_S
        begins = self._held_until == -math.inf
        self._held_until = self._time.monotonic() + HOLD_S
        runs = self._on_store_error == "run"
        if begins:
            _log.error(
                "asking the limits of task %r failed (%s: %s); tasks %s, and the next try is in "
                "%g s", task.name, type(exc).__name__, exc,
                "start without being counted" if runs else "are held", HOLD_S,
            )  # fmt: skip
        return 0.0 if runs else HOLD_S

    def _on_store_recovered(self) -> None:
        if self._held_until > -math.inf:
            self._held_until = -math.inf
            _log.warning("limits of tasks can be asked again")

    async def wait(
        self,
        task: TaskLimits,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        max_wait: float,
    ) -> float:
        """Wait for up to `max_wait` seconds until this call of `task` may start. Return 0.0 if it
        may, and was counted; otherwise, as soon as that is certain, in how many seconds to ask
        again. Raises no `Exception`.
        """
        began_at = self._time.monotonic()
        with self._waits_here(task, began_at) if max_wait > 0 else nullcontext():
            delay, asked = await self._ask(task, args, kwargs, max_wait)
        has_waited = max_wait > 0 and not delay
        waited = (self._time.monotonic() - began_at,) if has_waited else ()
        count_task(self._tally, task.name, asked, waited)
        return delay

    @contextmanager
    def _waits_here(self, task: TaskLimits, began_at: float) -> Iterator[Callable[[str], None]]:
        """Note that a task waits here during the block. Yield what is told of another reason."""
        if self._tally is None:
            yield lambda reason: None
            return
        token, tally = object(), self._tally

        def note(reason: str) -> None:
            self._held_here[token] = task.name, reason, began_at
            tally.level_changed()

        note("over_limit")
        try:
            yield note
        finally:
            del self._held_here[token]
            tally.level_changed()

    async def _ask(
        self,
        task: TaskLimits,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        max_wait: float,
    ) -> tuple[float, DecidedTask]:
        """Do as `wait`; return besides what is counted."""
        items, limiter = task.items(args, kwargs), self._limiter(task)
        key, _, cost = items[0]
        held_s = self._held_until - self._time.monotonic()
        if held_s > 0:
            delay = 0.0 if self._on_store_error == "run" else max(held_s, MIN_DELAY_S)
            return delay, self._unasked(task, key, cost)
        try:
            if len(items) > 1:
                decision = await self._wait_for_all(limiter, items, max_wait)
            else:
                decision = await _wait_for_one(limiter, key, cost, max_wait)
        except Exception as exc:
            delay = self._failed(task, items, exc)
            if isinstance(exc, StoreError):
                return delay, self._unasked(task, key, cost)
            limits = text_of(task.limits)
            return delay, DecidedTask(key, limits, cost, "error", "key_error", "store")
        self._on_store_recovered()
        return _delay(decision), decided_task(decision)

    async def _wait_for_all(self, limiter: Any, items: Sequence[Item], max_wait: float) -> Decision:
        """Decide a call with several keys, which has no queue in this process, within `max_wait`
        seconds.
        """
        ends_at = self._time.monotonic() + max_wait
        while True:
            decision = await acquire_all_async(limiter, items, enqueue=True)
            delay = _delay(decision)
            if not 0.0 < delay <= ends_at - self._time.monotonic():
                return decision
            await self._limiters.store.sleep(delay)


class TaskGate(_Gate):
    """Decides for workers of threads and processes. Safe to share between threads."""

    _pool_type = LimiterPool

    def delay(self, task: TaskLimits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        """Return 0.0 if this call of `task` may start now, and was counted; otherwise in how many
        seconds to ask again. Takes no longer than the timeout, and raises no `Exception`.
        """
        return run_at_once(self.wait(task, args, kwargs, 0.0))


class BlockingQueueLimits:
    """Base class of what limits a queue whose workers are threads or processes, which documents the
    arguments.
    """

    def __init__(
        self,
        store: Any,
        *,
        prefix: str = "distwindow",
        on_store_error: WhileStoreIsAway = "hold",
        timeout: float = 0.5,
        clock: ClockChoice = "server",
        observer: Observer | None = None,
        key_label: Callable[[AnyKey], str] | None = None,
    ) -> None:
        self._gate = TaskGate(
            store, prefix, on_store_error, timeout, clock, observer=observer, key_label=key_label
        )


class AsyncTaskGate(_Gate):
    """Decides for workers of tasks."""

    _pool_type = AsyncLimiterPool

    async def hold(
        self,
        task: TaskLimits,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        max_hold: float,
    ) -> float:
        """Do as `wait`, but wait on for `max_hold` seconds: for queues that cannot delay a task."""
        monotonic = self._time.monotonic
        began_at = monotonic()
        ends_at, has_counted = began_at + max_hold, False
        with self._waits_here(task, began_at) as note_reason:
            while True:
                wait_s = max(0.0, ends_at - monotonic())
                delay, asked = await self._ask(task, args, kwargs, wait_s)
                if not delay:
                    count_task(self._tally, task.name, asked, (monotonic() - began_at,))
                    return 0.0
                if not has_counted:
                    count_task(self._tally, task.name, asked)
                    has_counted = True
                note_reason(asked.reason)
                left = max(0.0, ends_at - monotonic())
                await self._limiters.store.sleep(min(delay, left))
                if delay > left:
                    return delay - left


async def _wait_for_one(limiter: Any, key: AnyKey, cost: int, max_wait: float) -> Decision:
    decision: Decision
    if max_wait > 0:
        with suppress(RateLimitExceeded):  # its `retry_after` is that of all who wait
            decision = await limiter.acquire(key, cost, timeout=max_wait)
            return decision
    decision = await result_of(limiter.try_acquire(key, cost, enqueue=True))
    return decision


def _delay(decision: Decision) -> float:
    """Return the delay of a call after it was decided: 0.0 to start it."""
    if decision.allowed:
        return 0.0
    return min(max(decision.retry_after, MIN_DELAY_S), MAX_DELAY_S)


def broker_failed(task: str, exc: BaseException) -> float:
    """Log that the broker of a queue did not take a task back. Return how long to wait before the
    next try, in seconds: there may be no other copy of the task, so there is always a next one.
    """
    _log.warning(
        "the broker did not take back %s (%s: %s); will retry in %g s",
        task, type(exc).__name__, exc, BROKER_RETRY_S,
    )  # fmt: skip
    return BROKER_RETRY_S
