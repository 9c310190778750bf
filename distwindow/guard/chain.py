"""The chain of slots that a guarded call goes through.

    the slots' `enter`, in order       authority, system, flow, breakers
    the block
    the slots' `exit`, in reverse      of each slot whose `enter` has returned

If a slot refuses the call, or the caller is cancelled before the block begins, the slots before it
are left with an outcome that was not admitted, and give back what they took.

The slots of this package are generators: they yield what their limiter or breaker has returned,
and are sent the result. That is the result itself in a thread, and is awaited first in a task.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from types import CoroutineType, GeneratorType
from typing import Any, NamedTuple, TypeAlias

from ..core.errors import Blocked, ConfigurationError, DistwindowError, short_repr

LOG = logging.getLogger("distwindow")

Steps: TypeAlias = "Generator[Any, Any, Any]"


class GuardCall:
    """One call on its way through the chain."""

    __slots__ = ("context", "cost", "origin", "resource", "wait")

    def __init__(self, resource: str, origin: str, cost: int, context: str = "") -> None:
        self.resource = resource
        self.origin = origin
        """Who calls; empty if that is not known."""
        self.cost = cost
        self.context = context
        """The entrance from which it comes (`call_context`); empty if that is not known."""
        self.wait = 0.0
        """Seconds for which the slot that was just entered holds the call back."""


class Outcome(NamedTuple):
    """How a call ended."""

    admitted: bool
    """False: the block never began, because a later slot refused the call or raised, or because
    the caller was cancelled. Give back what was taken.
    """
    error: BaseException | None
    """What the block raised, or what ended the call before it."""
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
    order: int = 500
    """Where the slot stands: slots are entered from the lowest to the highest, and those of equal
    order as they were given. Authority has 100, system 200, flow 300, breakers 400.
    """

    def enter(self, call: GuardCall) -> Any:
        """Let `call` through, or raise a `Blocked`. Return a token for `exit`. For `AsyncGuard`
        this may be a coroutine function.
        """
        return None

    def exit(self, call: GuardCall, token: Any, outcome: Outcome) -> Any:
        """Note how `call` ended. Called once for each `enter` that has returned."""
        return None


class Entered:
    """The slots that one call has entered, and has still to leave. One logic for both worlds: its
    generators yield results that are awaited in tasks.
    """

    __slots__ = ("_call", "_chain", "_name", "_taken")

    def __init__(self, chain: tuple[Any, ...], call: GuardCall, name: str) -> None:
        self._chain = chain
        self._call = call
        self._name = name
        self._taken: list[tuple[Any, Any]] = []

    def enter(self, sleep: Any) -> Steps:
        """Enter all slots, in order. `sleep(seconds)` waits."""
        for slot in self._chain:
            try:
                token = slot.enter(self._call)
                if token.__class__ is GeneratorType:
                    token = yield from token
                elif token is not None and is_awaitable(token):
                    token = yield token
            except Blocked as exc:
                if exc.rule is None:
                    exc.rule = getattr(slot, "rule", None)
                raise
            self._taken.append((slot, token))
            if self._call.wait:
                # After the slot is noted as taken: a wait that is cancelled gives it back.
                wait, self._call.wait = self._call.wait, 0.0
                yield sleep(wait)

    def leave(self, outcome: Outcome) -> Steps:
        """Leave all slots that were entered, in reverse. The others are left though one fails.

        What the store does not take is logged: the work is done, and its result must not be lost.
        """
        failure: BaseException | None = None
        while self._taken:
            slot, token = self._taken.pop()
            try:
                result = slot.exit(self._call, token, outcome)
                if result.__class__ is GeneratorType:
                    yield from result
                elif result is not None and is_awaitable(result):
                    yield result
            except DistwindowError as exc:
                LOG.warning(
                    "the end of an entry on %s of %s was not recorded by %s: %s",
                    short_repr(self._call.resource), self._name, type(slot).__name__, exc,
                )  # fmt: skip
            except BaseException as exc:
                failure = failure or exc
        if failure is not None:
            raise failure


def is_awaitable(result: Any) -> bool:
    """True for what `await` takes. `inspect.isawaitable` takes ten times as long, because it knows
    coroutines of Python 3.4, too.
    """
    return hasattr(result.__class__, "__await__")


def run_in_thread(steps: Steps) -> Any:
    """Drive `steps` in this thread, and return their value."""
    try:
        result = next(steps)
        while True:
            if result.__class__ is CoroutineType:
                result.close()
                raise ConfigurationError(
                    "a slot of this Guard is a coroutine function, which only AsyncGuard awaits"
                )
            result = steps.send(result)
    except StopIteration as end:
        return end.value


async def run_in_task(steps: Steps) -> Any:
    """Drive `steps` in this task: each yielded awaitable is awaited. Return their value."""
    try:
        result = next(steps)
        while True:
            try:
                value = await result if is_awaitable(result) else result
            except BaseException as exc:
                result = steps.throw(exc)
            else:
                result = steps.send(value)
    except StopIteration as end:
        return end.value
