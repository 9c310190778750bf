"""The chain of slots of a `Guard`, as in Sentinel's `SphU.entry`: built in, or the program's.

    the slots' `enter`, in order       authority, system, flow, breakers
    the block
    the slots' `exit`, in reverse      of each slot whose `enter` has returned

If a slot refuses the call, or the caller is cancelled before the block begins, the slots before
it are left with an outcome that was not admitted, and give back what they took.

The slots of this package are generators: they yield what their limiter or breaker has returned,
and are sent the result. That is the result itself in a thread, and is awaited first in a task.
`RateSlot`, which nearly every call meets, is none: `enter` returns the question, and `_settle` is
given the answer.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import CoroutineType
from typing import Any, NamedTuple, TypeAlias

from ..errors import (
    AuthorityDenied,
    Blocked,
    ConfigurationError,
    DistwindowError,
    RateLimitExceeded,
    SystemOverloaded,
    short_repr,
)
from ..observer import Tally
from ..runtime.options import check_origin

LOG = logging.getLogger("distwindow")

Steps: TypeAlias = "Generator[Any, Any, Any]"


class GuardCall:
    """One call on its way through the chain."""

    __slots__ = ("context", "cost", "origin", "resource", "wait")

    def __init__(self, resource: str, origin: str, cost: int, context: str = "") -> None:
        self.resource = resource
        self.origin = origin
        """The caller; empty if that is not known."""
        self.cost = cost
        self.context = context
        """The entrance from which it comes (`call_context`); empty if that is not known."""
        self.wait = 0.0
        """Seconds for which the slot that was just entered holds the call back."""


class Outcome(NamedTuple):
    """The end of a call."""

    admitted: bool
    """False: the block never began, because a later slot refused the call or raised, or because
    the caller was cancelled. Give back what was taken.
    """
    error: BaseException | None
    """The exception that the block raised, or that ended the call before it."""
    failed: bool | None
    """Whether the block failed, by the guard's `errors` and `ignore`; None if its end says nothing,
    or if the call was not admitted.
    """
    rt: float
    """Seconds from the beginning of the entry to its end, waits included."""


class ChainSlot:
    """The base class of slots; a slot of your own need not have it, but the two methods.

    A slot is shared by all threads. What it has to remember of a call is the token.
    """

    rule: object | None = None
    """The rule that refusals name."""
    tally: Tally | None = None
    """What adds up the refusals of a slot that nobody else counts."""
    _settle: Callable[[GuardCall, Any], Any] | None = None
    """Given the answer to the question that `enter` has returned; returns the token."""
    order: int = 500
    """Where the slot stands: slots are entered from the lowest to the highest, and those of equal
    order as they were given. Authority has 100, system 200, flow 300, flow of grade "thread" 310,
    breakers 400.
    """

    def enter(self, call: GuardCall) -> Any:
        """Admit `call`, or raise a `Blocked`. Return a token for `exit`, of any type. For
        `AsyncGuard` this may be a coroutine function; a `Guard` with such a slot is an error.
        """
        return None

    def exit(self, call: GuardCall, token: Any, outcome: Outcome) -> Any:
        """Note how `call` ended. Called once for each `enter` that has returned.

        What it raises reaches the caller in place of the block's result or exception (which is its
        `__context__`), when the other slots are left. Errors of distwindow are logged instead.
        """
        return None


class SlotAdapter(NamedTuple):
    """A slot, and the kinds of its methods, by the functions: a token may be a generator, too."""

    slot: Any
    enter_kind: str | None
    """"steps" (a generator function), "coroutine", or "question": its answer is settled."""
    exit_kind: str | None
    has_exit: bool
    """False for a slot that has nothing to leave."""


def adapt_slot(slot: Any) -> SlotAdapter:
    return SlotAdapter(
        slot,
        "question" if getattr(slot, "_settle", None) else kind_of(slot.enter),
        kind_of(slot.exit),
        getattr(slot.exit, "__func__", None) is not ChainSlot.exit,
    )


def kind_of(method: Any) -> str | None:
    """Return the kind of a function, or of the `__call__` of an object: see `SlotAdapter`."""
    for function in (method, getattr(method, "__call__", None)):  # noqa: B004  # not whether
        if inspect.isgeneratorfunction(function):
            return "steps"
        if inspect.iscoroutinefunction(function):
            return "coroutine"
    return None


class SlotStack:
    """The slots that one call has entered, and has still to leave. One logic for both worlds: its
    generators yield results that are awaited in tasks.

    A coroutine may be closed in between. Then `leave`, called again, leaves what is in `taken`.
    """

    __slots__ = ("_chain", "_name", "call", "taken")

    def __init__(
        self, chain: tuple[SlotAdapter, ...], name: str, resource: str, *call: Any
    ) -> None:
        """`name` is that of the guard; `resource` and `call` are what `GuardCall` takes."""
        self._chain = chain
        self.call = GuardCall(resource, *call)
        self._name = name
        self.taken: list[tuple[SlotAdapter, Any]] = []

    def enter(self, sleep: Any) -> Steps:
        """Enter all slots, in order. `sleep(seconds)` waits."""
        for adapter in self._chain:
            slot, kind, _, has_exit = adapter
            try:
                token = slot.enter(self.call)
                if kind == "question":
                    if hasattr(token.__class__, "__await__"):  # in a task
                        token = yield token
                    token = slot._settle(self.call, token)
                elif kind == "steps":
                    token = yield from token
                elif kind is not None or token.__class__ is CoroutineType:
                    token = yield token
            except Blocked as exc:
                if exc.rule is None:
                    exc.rule = getattr(slot, "rule", None)
                tally = getattr(slot, "tally", None)
                if tally is not None:
                    count_refused(tally, self.call, exc)
                raise
            if has_exit:
                self.taken.append((adapter, token))
            if self.call.wait:
                # After the slot is noted as taken: a wait that is cancelled gives it back.
                wait, self.call.wait = self.call.wait, 0.0
                yield sleep(wait)

    def leave(self, outcome: Outcome) -> Steps:
        """Leave all slots that were entered, in reverse. The others are left though one fails.

        What the store does not take is logged: the work is done, and its result must not be lost.
        """
        failure: BaseException | None = None
        while self.taken:
            (slot, _, kind, _), token = self.taken.pop()
            try:
                result = slot.exit(self.call, token, outcome)
                if kind == "steps":
                    yield from result
                elif kind is not None or result.__class__ is CoroutineType:
                    yield result
            except GeneratorExit:  # by `close`: what `exit` goes on to do needs nobody to wait
                raise
            except DistwindowError as exc:
                LOG.warning(
                    "the end of an entry on %s of %s was not recorded by %s: %s",
                    short_repr(self.call.resource), self._name, type(slot).__name__, exc,
                )  # fmt: skip
            except BaseException as exc:
                failure = failure or exc
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # it refers to this frame: in a cycle, the tokens would live on


def run_in_thread(steps: Steps) -> Any:
    """Drive `steps` in this thread, and return their value."""
    try:
        result = next(steps)
        while True:
            if result.__class__ is CoroutineType:
                result.close()
                result = steps.throw(
                    ConfigurationError(
                        "a slot of this Guard has returned a coroutine, which only AsyncGuard "
                        "awaits"
                    )
                )
            else:
                result = steps.send(result)
    except StopIteration as end:
        return end.value


async def run_in_task(steps: Steps) -> Any:
    """Drive `steps` in this task: each yielded awaitable is awaited. Return their value."""
    try:
        result = next(steps)
        while True:
            try:
                # `inspect.isawaitable` takes ten times as long: it knows those of Python 3.4, too.
                value = await result if hasattr(result.__class__, "__await__") else result
            except BaseException as exc:
                result = steps.throw(exc)
            else:
                result = steps.send(value)
    except StopIteration as end:
        return end.value


@dataclass(slots=True)
class CallContext:
    """The entrance of the calls of a thread or task, and who calls; empty if that is not known."""

    name: str
    origin: str


NO_CONTEXT = CallContext("", "")

_context: ContextVar[CallContext] = ContextVar("distwindow_context", default=NO_CONTEXT)
current_context = _context.get
"""Return the context of this thread or task."""


@contextmanager
def call_context(name: str, origin: str | None = None) -> Iterator[None]:
    """Set where the entries of guards inside the block, in this thread or task and in tasks that it
    creates, come from: the entrance `name` and from `origin`, unless they say otherwise.

        with call_context("GET:/checkout", origin="app-a"):
            with guard.entry("payments"): ...

    `FlowRule(strategy="chain", ref_resource=name)` counts these entries alone. The outermost
    context holds: one inside it has no effect, as in Sentinel (`ContextUtil.trueEnter`). Raises
    `TypeError` and `ValueError` for what is no name.

    A block that is left in another thread or task than it was entered in, as a framework does with
    generators, has an effect only where it was entered, and only until it is left.
    """
    caller = check_origin(origin)
    if type(name) is not str:
        raise TypeError(f"name={short_repr(name)} is not a str")
    if not name:
        raise ValueError("name must not be empty")
    if _context.get().name:
        yield
        return
    context = CallContext(name, caller)
    token = _context.set(context)
    try:
        yield
    finally:
        try:
            _context.reset(token)
        except ValueError:  # it was set for another thread or task: empty it there
            context.name = context.origin = ""


GROUP = "distwindow.slots"


def make_installed_slots(checked: Callable[[Any], Any]) -> list[Any]:
    """Return a new slot of each entry point, in the order of their names.

    An entry point names a class, or a function, that is called without arguments. Raises
    `ConfigurationError`, which names the entry point, for one that fails or gives what is no slot:
    `checked` raises for that, and else returns the slot.
    """
    slots = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        try:
            slots.append(checked(point.load()()))
        except (Exception, SystemExit) as exc:
            raise ConfigurationError(
                f"the slot {point.name!r} of the entry points {GROUP!r} ({point.value}) cannot be "
                f"made: {type(exc).__name__}: {exc}; mend or remove the package that has it, or "
                "give installed_slots=False"
            ) from exc
    return slots


def count_refused(tally: Tally, call: GuardCall, refused: Blocked, *, shadow: bool = False) -> None:
    """Count a call that a slot has refused, or would have, whose refusals nobody else counts.

    slot            limit               reason        source
    AuthoritySlot   "allow app-a"       "authority"   "local"
    SystemSlot      "qps 100"           "system"      "local"
    RelateSlot      the related limit   of the decision that was looked at
    """
    limit, reason, source = "", "", "local"
    if isinstance(refused, RateLimitExceeded):
        decision = refused.decision
        limit, source = str(decision.limit), decision.source
        reason = "over_limit" if shadow else decision.reason
    elif isinstance(refused, SystemOverloaded):
        limit, reason = f"{refused.field} {refused.threshold:g}", "system"
    elif isinstance(refused, AuthorityDenied):
        rule = refused.rule
        limit = f"{getattr(rule, 'strategy', '')} {getattr(rule, 'limit_app', '')}"
        reason = "authority"
    tally.counted(call.resource, limit, "refused", reason, source, 1, call.cost, shadow=shadow)
