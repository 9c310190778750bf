"""The options of a task that say what its calls count: their checks, and the key and the cost of
each call. Shared by all integrations with task queues, Celery's included.
"""

from __future__ import annotations

import inspect
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..callables import FunctionArguments, KeyTemplate, check_not_async
from ..core.errors import ConfigurationError, short_repr
from ..core.key import AnyKey, Key, encode_key
from ..core.limit import Limit
from ..operations.command_cache import check_cost
from .failure_log import FailureLog

TASK_OPTIONS = ("limits", "limit_key", "limit_cost")
"""The options of a task, which have the same names for all queues."""
_OUR_NAMES = re.compile(r"limit|limits?_.*|distwindow_.*")
REPORT_EVERY_S = 60.0
"""How long a worker does not log a kind of failure of an option again."""


class TaskArguments(FunctionArguments):
    """The parameters of a task's function; `own` and `injected` are those that the queue fills.
    Templates may name `{task}`, the task's name.
    """

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
    """`limit_key` and `limit_cost` of one task.

    `key` is a template over the task's arguments (`"tenant:{tenant}"`), or a function that is given
    the arguments of a call, with defaults; None: all calls count under the task's name. `cost` is a
    whole number of permits, or a function of the arguments. `limits` are the limits that the
    options give.

    Raises `ConfigurationError` for what could never work.
    """

    def __init__(
        self,
        arguments: TaskArguments,
        key: object,
        cost: object,
        limits: Sequence[Limit],
        log: logging.Logger,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._arguments = arguments
        self._key: Callable[..., Any] | KeyTemplate | None
        self._cost = cost
        self._log = log
        self._failures = FailureLog(REPORT_EVERY_S, monotonic)
        if isinstance(key, str):
            if not key:
                raise ConfigurationError(
                    f"{arguments.subject}: limit_key is empty; write a template such as "
                    '"tenant:{tenant}", or leave it out to count all calls together'
                )
            shown = f"{arguments.subject}: limit_key={short_repr(key)}"
            template = self._key = KeyTemplate(key, arguments, shown)
            words = set(re.findall(r"\w+", key)) if template.is_fixed else set()
            unfilled = [name for name in arguments.names if name in words]
            if unfilled:
                log.warning(
                    "task %r: limit_key=%r names no argument in braces, so all calls count under "
                    "one key; write {%s} where its value is meant",
                    *(arguments.task, key, unfilled[0]),
                )
        elif callable(key):
            arguments.check_callable("limit_key", key)
            self._key = key
        elif key is None:
            self._key = None
        else:
            raise ConfigurationError(
                f"task {arguments.task!r}: limit_key={short_repr(key)} is neither a template such "
                'as "tenant:{tenant}" nor a function of the task\'s arguments'
            )
        if callable(cost):
            arguments.check_callable("limit_cost", cost)
        else:
            self._check_fixed_cost(cost, limits)

    def of(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], smallest: int, call: object = None
    ) -> tuple[AnyKey, int]:
        """Return the key and the cost of one call. `smallest` is the amount of the task's smallest
        limit now; a call whose cost is above it must be charged `smallest`. `call` is an id of the
        call, for the log.

        A call whose key cannot be computed counts under the task's name, and one whose cost cannot
        be computed costs `smallest`: a mistake opens no limit and loses no call. The task itself
        says what is wrong with its arguments. Each kind of failure is logged once in
        `REPORT_EVERY_S`.
        """
        task = self._arguments.task
        key: AnyKey = task
        cost = smallest
        if self._key is not None:
            try:
                key = self._computed_key(args, kwargs)
            except Exception as exc:
                self._report("limit_key", f"count under {task!r}", call, exc)
        try:
            if callable(self._cost):
                cost = self._computed_cost(args, kwargs)
            else:
                assert isinstance(self._cost, int)
                cost = self._cost
            check_cost(cost, smallest)
        except Exception as exc:
            self._report("limit_cost", f"cost the whole limit, {smallest}", call, exc)
        return key, cost

    def _computed_key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AnyKey:
        compute = self._key
        if isinstance(compute, KeyTemplate):
            key: Any = compute.fill(args, kwargs)
        else:
            assert compute is not None
            bound = self._arguments.bind(args, kwargs)
            key = compute(*bound.args, **bound.kwargs)
        if not isinstance(key, Key):
            encode_key(key)  # raises for what is no key
        valid: AnyKey = key
        return valid

    def _computed_cost(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        assert callable(self._cost)
        bound = self._arguments.bind(args, kwargs)
        cost: Any = self._cost(*bound.args, **bound.kwargs)
        if isinstance(cost, bool) or not isinstance(cost, int) or cost < 1:
            raise ValueError(f"it returned {short_repr(cost)}, which is no whole number above 0")
        return cost

    def _check_fixed_cost(self, cost: object, limits: Sequence[Limit]) -> None:
        task = self._arguments.task
        if isinstance(cost, bool) or not isinstance(cost, int) or cost < 1:
            raise ConfigurationError(
                f"task {task!r}: limit_cost={short_repr(cost)} is neither a whole number of at "
                "least 1 nor a function of the task's arguments"
            )
        smallest = min((limit.amount for limit in limits), default=cost)
        if cost > smallest:
            raise ConfigurationError(
                f"task {task!r}: limit_cost={cost} can never be admitted: the smallest limit is "
                f"{smallest}"
            )

    def _report(self, option: str, instead: str, call: object, exc: Exception) -> None:
        unlogged = self._failures.unlogged_before((option, type(exc).__name__))
        if unlogged is None:
            return
        self._log.error(
            "%s of task %r failed for %s (%s: %s)%s; such calls %s instead. Correct the option, or "
            "what calls the task with such arguments; this worker logs it again in %.0f s at the "
            "earliest",
            option, self._arguments.task, "a call" if call is None else f"the call {call}",
            type(exc).__name__, exc,
            f", and for {unlogged} other calls since this was logged last" if unlogged else "",
            instead, REPORT_EVERY_S,
        )  # fmt: skip


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


def check_has_limits(task: str, options: Mapping[str, Any], place: str) -> None:
    """Raise `ConfigurationError` for a key or a cost without limits. `place` says where to give
    these.
    """
    given = [name for name in TASK_OPTIONS if options.get(name) is not None]
    if given and "limits" not in given:
        raise ConfigurationError(f"task {task!r} has {' and '.join(given)} but no limits; {place}")
