"""`RateLimits` and its limits, as all integrations with web frameworks have them.

What one limit does with one request is a coroutine, which raises what the framework is to handle.
In threads its limiter has answered already, so it awaits nothing, and `BlockingRateLimits.run`
takes it to its end in one step. `RequestLimit.decide_at_once` is a shorter way for the most
frequent request of tasks.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar, get_args

from ... import ConfigurationError, Decision, Limit, StoreError
from ...away.outages import Health
from ...away.policy import OnStoreError, check_options
from ...errors import DistwindowError, RateLimitExceeded, short_repr
from ...lifecycle.connect import store_name
from ...ring.clock import SYSTEM, Clock
from ...ring.decision import limits_in
from ...ring.key import AnyKey, Key, normalize_key
from ...ring.limit import LimitSpec, parse_limits
from ...runtime.options import ClockChoice, Consistency, Options
from ...support.async_use import only_async_with, result_of, running_loop
from ...support.callables import check_not_async, check_takes, function_name, stable_name
from ..limiter_pool import AsyncLimiterPool, LimiterPool
from ..shared_windows import SharedWindows
from .address import ClientAddress
from .fields import (
    Headers,
    LimitAnswer,
    Policies,
    PolicyNames,
    Unit,
    distinct,
    fields_to_set,
    problem,
)

if TYPE_CHECKING:
    from typing_extensions import Self

_LOG = logging.getLogger("distwindow")
T = TypeVar("T")
NOT_GIVEN: Any = object()
"""In the place of a key that is not replaced: None is one for the address of the client."""
_REFUSALS = (429, 503)
"""The statuses of refusals."""
MAX_REMEMBERED = 1000
"""How many distinct limits, and names with their limits, are kept of one limit."""


async def decided(steps: Awaitable[T], earlier: LimitedRequest) -> T:
    """Return what `RequestLimit.decide` does before a handler. If its task is cancelled meanwhile,
    as the client has gone, nothing is served, and what earlier limits charged is given back, too.
    """
    try:
        return await steps
    except asyncio.CancelledError:
        await earlier.serve_nothing()
        raise


class RateLimited(RateLimitExceeded):
    """A request was refused: `.decision`, `.retry_after`, and the response to send.

    `.status_code` is 429, or 503 where the store was away and `on_store_error` is "deny".
    `.headers` are the header fields by name, and `.problem` is the JSON body, of the media type
    `application/problem+json`. An integration raises a subclass that is also an exception of its
    framework.
    """

    def __init__(self, decision: Decision, answers: Sequence[LimitAnswer], unit: str) -> None:
        super().__init__(decision)
        self.problem = problem(distinct(answers)[-1], unit)
        self.status_code: int = self.problem["status"]
        self.headers = fields_to_set(answers, self.status_code, lambda name: None)

    def __str__(self) -> str:
        detail: str = self.problem["detail"]
        return detail  # without the key, as users of the application read it


class LimitedRequest(list["AskedLimit"]):
    """What was decided for one request, in the order of the framework: a list that an integration
    keeps with the request from its first limit on.
    """

    __slots__ = ("is_refused", "needs_response", "under_way")
    is_watched = True
    """True if who keeps it sees the response, and runs `settle`."""

    def __init__(self) -> None:
        self.needs_response = False
        """True if what the response is decides about a charge, so that `settle` has to be run."""
        self.is_refused = False
        """True once a refusal has been made the response, whatever its status is."""
        self.under_way: dict[asyncio.Event, Sequence[Question]] = {}
        """What tasks are asking for it now; each event is set when its call has ended."""

    def fields_to_set(self, status_code: int, get: Callable[[str], str | None]) -> dict[str, str]:
        """Return the header fields to set in the response, by name; see `fields.fields_to_set`.
        `get` returns the present value of a field, None where there is none.
        """
        return fields_to_set(self, status_code, get)

    async def settle(
        self, response: Any, status_code: int, own: Sequence[AskedLimit] | None = None
    ) -> None:
        """End the charges of this request, or `own` of them, once. Where `response` is a refusal,
        what was charged beside it is given back; otherwise `count_when` and `cost_after` decide.
        Where the application has caught a refusal, and the response has neither 429 nor 503, it
        has served the request: a 401 that cost nothing would be a password that cost nothing.

        To be run by `RateLimits.run` with the last part of `response`, or when it ends without.
        The store is told at once. Raises no `Exception`: what the functions raise is logged, and
        the charge stays.
        """
        self.needs_response = False
        was_refused = self.is_refused or (status_code in _REFUSALS and self.refusal() is not None)
        for each in [*(self if own is None else own)]:
            if each.settled:
                continue
            each.settled = True
            try:
                await each.limit.settle(each, response, was_refused=was_refused)
            except StoreError:
                pass  # what can be is sent with the next flush; the rest leaves with its bucket
            except Exception:
                _LOG.exception("the cost of a request could not be settled; it stays charged")
            each.arguments = ()

    async def serve_nothing(self) -> None:
        """Note that the request was cancelled while a limit was asked, so that all is given back:
        with the end of the response, or now, if nobody sees one.
        """
        self.is_refused = True
        self.needs_response = any(not each.settled for each in self)
        if self.needs_response and not self.is_watched:
            await asyncio.shield(self.settle(None, 0))

    def refusal(self) -> AskedLimit | None:
        """Return the last answer that is a refusal, if there is one."""
        return next((each for each in reversed(self) if not each.decision.allowed), None)


class UnwatchedRequest(LimitedRequest):
    """What was decided where nobody sees the response: a refusal is taken for it."""

    __slots__ = ()
    is_watched = False


class AskedLimit(LimitAnswer):
    """One limit that was asked for one request."""

    __slots__ = ("arguments", "limit", "limiter", "reservation", "settled")

    def __init__(
        self,
        decision: Decision,
        policies: Policies,
        limit: Any,
        limiter: Any,
        reservation: Any = None,
        arguments: tuple[Any, ...] = (),
    ) -> None:
        self.decision = decision
        self.policies = policies
        self.limit = limit
        """A `RequestLimit`, or `LimitsTogether`."""
        self.limiter = limiter
        self.reservation = reservation
        """What `count_when` and `cost_after` settle; None without them."""
        self.arguments = arguments
        """Of `cost_after`, or of that of each limit. With those of a framework the request is kept,
        which keeps this: without a need for it, each request would be left to the garbage
        collector.
        """
        self.settled = decision.charged is None
        """True from when its charge is given back or committed on, or if nothing was charged."""

    def questions(self) -> Sequence[Question]:
        """Return what was asked."""
        questions: Sequence[Question] = self.limit.questions_of(self)
        return questions


class Question(NamedTuple):
    """What a limit asks its store for one request."""

    limit: RequestLimit
    key: AnyKey
    limits: tuple[Limit, ...]
    cost: int
    policies: Policies
    limiter: Any
    arguments: tuple[Any, ...] = ()
    """Of the functions of the limit."""

    def is_above_limit(self) -> bool:
        """Return whether the cost can never be admitted."""
        smallest = min(limit.amount for limit in self.limits)
        return self.cost > smallest and self.limit.cost_after is None


class RequestLimit:
    """One limit of requests: what `RateLimits.limit` makes, which documents the arguments.

    An integration has a subclass that defines `name_of`.
    """

    takes_request = True
    """True if `key`, `cost`, `exempt` and `limits` are called with the request."""

    def __init__(
        self,
        rate_limits: BaseRateLimits[Any],
        limits: LimitSpec | Callable[..., Any],
        *,
        name: str | None = None,
        key: Callable[..., Any] | None = None,
        cost: int | Callable[..., Any] = 1,
        exempt: Callable[..., Any] | None = None,
        methods: Collection[str] | None = None,
        on_store_error: OnStoreError | None = None,
        count_when: Callable[..., Any] | None = None,
        cost_after: Callable[..., Any] | None = None,
        priority: bool = False,
        unit: Unit = "requests",
        override_defaults: bool = True,
    ) -> None:
        self.rate_limits = rate_limits
        self._methods = None if methods is None else _read_methods(methods)
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigurationError(f"name={short_repr(name)} is not the name of a limit, a str")
        self.name = name
        self.on_store_error = (
            rate_limits.on_store_error if on_store_error is None else on_store_error
        )
        self.count_when = count_when
        self.cost_after = cost_after
        functions = {
            "key": key, "cost": None if cost == 1 else cost, "exempt": exempt,
            "count_when": count_when, "cost_after": cost_after,
            "methods": None if methods is None else "|".join(sorted(self._methods or ())),
        }  # fmt: skip
        self.marks = "".join(
            f" {option}={stable_name(value) if callable(value) else value}"
            for option, value in functions.items()
            if value is not None
        )
        """What distinguishes it from others without a name."""
        self.settles = count_when is not None or cost_after is not None
        """True if the response decides about the charge."""
        for option, given in (("priority", priority), ("override_defaults", override_defaults)):
            if not isinstance(given, bool):
                raise ConfigurationError(f"{option}={short_repr(given)} is no bool")
        self.methods_without_default = self._methods if override_defaults else frozenset[str]()
        """The methods at which a route that has this limit has no default one; None for all."""
        self.priority = priority
        if priority and self.settles:
            raise ConfigurationError(
                "priority=True is not for a limit with count_when or cost_after: what they settle "
                "is reserved, and a reservation does not borrow; leave one of them out"
            )
        if unit not in get_args(Unit):
            raise ConfigurationError(
                f'unit={short_repr(unit)} is neither "requests" nor "content-bytes"'
            )
        self._unit = unit
        self._key = rate_limits.key_function(key)
        self._cost = cost
        self._exempt = exempt
        self._limiter: Any = None
        self._opened: object = None
        """What `rate_limits` had open when `_limiter` was taken from it."""
        self._limits: tuple[Limit, ...] | None = None
        """None where a function of the request returns them."""
        self._limits_of = limits
        self._dynamic: dict[Any, tuple[Limit, ...]] = {}
        self._named: dict[Any, tuple[str, Policies]] = {}
        """By name, and by the limits where these differ: the beginning of keys, and what fields
        say. Without a name of its own the limit is part of the beginning, so that two of one route
        have windows of their own.
        """
        arguments = 1 if self.takes_request else 0
        self._check_function("key", self._key, arguments)
        for option, function, count in (
            ("exempt", exempt, arguments),
            ("count_when", count_when, 1),
            ("cost_after", cost_after, arguments + 1),
        ):
            if function is not None:
                self._check_function(option, function, count)
        if callable(limits):
            self._check_function("limits", limits, arguments)
        else:
            self._limits = parse_limits(limits)
            shaped = next((each for each in self._limits if each.is_shaped), None)
            if shaped is not None and self.settles:
                raise ConfigurationError(
                    f"{str(shaped)!r} is paced or warms up, and count_when and cost_after cannot "
                    "change what it has promised to later requests; write a plain limit"
                )
            self._open_limiter(self._limits)
            if name is not None:
                advice = "give them names of their own"
                rate_limits.shared_windows.add(name, self._limits, "a limit of requests", advice)
                rate_limits.policy_names.add(
                    self, Policies(name, self._limits, unit, rate_limits.headers)
                )
        if callable(cost):
            self._check_function("cost", cost, arguments)
        else:
            self._check_fixed_cost(cost)
        only_asks = (
            exempt is None and methods is None and not (callable(cost) or priority or self.settles)
        )
        self._limits_at_once = self._limits if only_asks and self.takes_request else None
        """The limits that `decide_at_once` decides by; None where `decide` has to."""

    @property
    def text(self) -> str:
        """The limits as text; the name of the function that returns them, if there is one."""
        if self._limits is None:
            return function_name(self._limits_of)
        return "; ".join(map(str, self._limits))

    @property
    def text_in_keys(self) -> str:
        """The limits and their functions, which tell the keys of two limits without names apart."""
        of = stable_name(self._limits_of) if self._limits is None else self.text
        return f"{of}{self.marks}"

    # -- what an integration defines -----------------------------------------------------------

    def method_of(self, request: Any) -> str:
        """Return the method as which a request counts."""
        method: str = request.method
        return "GET" if method == "HEAD" else method

    def name_of(self, request: Any) -> str:
        """Return the name of the limit at `request` where it was given none: method and path
        template of the route. Raises `ConfigurationError` where these cannot be read.
        """
        raise NotImplementedError  # each framework has routes of its own

    # -- what an integration calls -------------------------------------------------------------

    async def decide(
        self,
        request: Any,
        earlier: LimitedRequest,
        cost: int | None = None,
        key: Any = NOT_GIVEN,
        limits: Any = NOT_GIVEN,
    ) -> Decision | None:
        """Decide about `request`, and add it to `earlier`, what was decided for it before. Return
        the decision; None if the request is not limited: it is exempt, or the limits are
        switched off. `cost`, `key` and `limits` replace those of the limit.

        To be run by `RateLimits.run`. If it is refused, what the earlier limits charged is given
        back, and the error of `RateLimits.error_type` is raised. Raises `StoreError` by
        `on_store_error="raise"`, and always `ConfigurationError`.
        """
        question = await self.question(request, cost, key, limits)
        if question is None:
            return None
        if earlier and (met := charged_before(earlier, question)) is not None:
            return met
        return await self.ask(question, earlier)

    async def ask(self, question: Question, earlier: LimitedRequest) -> Decision:
        """Ask the store, and conclude; see `decide`."""
        limiter, arguments = question.limiter, question.arguments
        clamp = self.cost_after is not None  # so that no guess refuses every request
        if question.is_above_limit():
            await conclude(earlier, never_admitted(question), self.rate_limits)  # which raises
        if not self.settles:
            decision = limiter.try_acquire(question.key, question.cost, self.priority)
            return await self._conclude(earlier, decision, question.policies, limiter)
        steps = limiter.try_reserve(question.key, question.cost, clamp=clamp)
        reservation = await result_of(steps)
        decision = reservation.decision
        if not decision.allowed:
            # What others give back is there at once: a refusal that is kept would not see it.
            limiter.decider.strategy.invalidate(decision.key)
        if decision.charged is None:  # there is nothing to settle
            arguments = ()
        else:
            earlier.needs_response = True
        return await self._conclude(
            earlier, decision, question.policies, limiter, reservation, arguments
        )

    async def question(
        self,
        request: Any,
        cost: int | None = None,
        key: Any = NOT_GIVEN,
        limits: Any = NOT_GIVEN,
    ) -> Question | None:
        """Return what to ask for `request`; see `decide`. None if it is not limited."""
        rate_limits = self.rate_limits
        if not rate_limits.enabled:
            return None
        if self._methods is not None and self.method_of(request) not in self._methods:
            return None
        arguments = (request,) if self.takes_request else ()
        if self._exempt is not None and await self._call("exempt", self._exempt, arguments):
            return None
        if key is NOT_GIVEN:
            key = self._key(*arguments)
        if type(key) is not str:
            key = await self._awaited("key", self._key, key)
        if key is None:  # a mistake of the client, such as a header left out, lets nobody pass
            key = rate_limits.client_address(*arguments)
        if self._limits is not None:
            limits = self._limits
        else:
            if limits is NOT_GIVEN:
                limits = await self._call("limits", self._limits_of, arguments)
            if limits is None:
                return None
            limits = self._parsed(limits)
        if cost is None:
            cost = self._cost  # type: ignore[assignment]  # checked where it is no function
            if callable(cost):
                cost = await self._call("cost", cost, arguments)
        assert cost is not None
        name = self.name or self.name_of(request)
        known_as = name if self._limits is not None else (name, limits)
        beginning, policies = self._named.get(known_as) or self._remember(known_as, name, limits)
        limiter = self._limiter
        if self._limits is None or rate_limits.opened is not self._opened:
            limiter = self._open_limiter(limits)
        full_key = self._full_key(beginning, key)
        return Question(self, full_key, limits, cost, policies, limiter, arguments)

    def decide_at_once(
        self, request: Any, earlier: LimitedRequest, key: Any = NOT_GIVEN
    ) -> Decision | Coroutine[Any, Any, Decision | None]:
        """Do `decide`, and return the decision where this process admits the request at once, which
        takes 40 % less time. In all other cases return a coroutine that does it: a limit with
        `priority`, or with a function besides `key`; a refusal, a wait, a question to the store.

        Unlike `AsyncLimiter`, it does not let other tasks run after some calls in a row: it is for
        requests that have a task each.
        """
        rate_limits, limits = self.rate_limits, self._limits_at_once
        if limits is None or not rate_limits.enabled:
            return self.decide(request, earlier, None, key)
        if key is NOT_GIVEN:
            key = self._key(request)
        if type(key) is not str:
            return self.decide(request, earlier, None, key)
        name = self.name or self.name_of(request)
        beginning, policies = self._named.get(name) or self._remember(name, name, limits)
        limiter = self._limiter
        if rate_limits.opened is not self._opened:
            limiter = self._open_limiter(limits)
        full_key = beginning + key
        if earlier and any(each.decision.key == full_key for each in earlier):
            return self.decide(request, earlier, None, key)  # which may be charged already
        decision: Any = limiter.decider.decide_locally(
            full_key, self._cost
        )  # as `try_acquire` begins
        # `.allowed` and `.wait`: a name takes three times as long as an index.
        if decision is not None and decision[0] and not decision[7]:
            earlier.append(AskedLimit(decision, policies, self, limiter))
            return decision  # type: ignore[no-any-return]
        if decision is None:
            decision = limiter.try_acquire(full_key, self._cost)
        return self._conclude(earlier, decision, policies, limiter)

    # -- internal ------------------------------------------------------------------------------

    async def _conclude(
        self,
        earlier: LimitedRequest,
        decision: Any,
        policies: Policies,
        limiter: Any,
        reservation: Any = None,
        arguments: tuple[Any, ...] = (),
    ) -> Decision:
        """Add an answer to `earlier`, and raise or wait as it says. The `decision` of an
        `AsyncLimiter` is awaited.
        """
        if type(decision) is not Decision:  # `result_of`, without a call of Python
            decision = await decision
        asked = AskedLimit(decision, policies, self, limiter, reservation, arguments)
        await conclude(earlier, asked, self.rate_limits)
        return decision  # type: ignore[no-any-return]  # a `Decision` by now

    def questions_of(self, asked: AskedLimit) -> Sequence[Question]:
        """Return what `asked`, which was charged, has asked for."""
        charged = asked.decision.charged or ()
        of, limits = charged[0], tuple(limits_in(charged))
        return [Question(self, of.key, limits, of.cost, asked.policies, asked.limiter)]

    def refusal(self, earlier: LimitedRequest, asked: AskedLimit) -> Exception:
        """Return the error for `asked`, an answer in `earlier` that is a refusal by this limit."""
        others = [each for each in earlier if each is not asked]
        counted = self._counted(asked.decision)
        return self.rate_limits.error_type(asked.decision, [*others, asked], counted)

    def _open_limiter(self, limits: tuple[Limit, ...]) -> Any:
        """Return the limiter for `limits`, of the present opening of `rate_limits`."""
        # Another thread may close `rate_limits` meanwhile, or come here with other limits.
        opened = self.rate_limits.opened
        limiter = self._limiter = opened.get(limits, self.on_store_error)
        self._opened = opened
        return limiter

    def _counted(self, decision: Decision) -> str:
        """Return what the limit counts, in words."""
        if self._unit == "content-bytes":
            return "bytes"
        has_costs = self._cost != 1 or self.cost_after is not None
        return "units" if has_costs else _counted_by(decision)

    async def settle(self, asked: AskedLimit, response: Any, *, was_refused: bool) -> None:
        """End the charge of one request; see `LimitedRequest.settle`."""
        if asked.reservation is not None:
            actual = await self.actual(asked.decision.cost, asked.arguments, response, was_refused)
            await result_of(asked.reservation.commit(actual, now=True))
        elif was_refused:
            await result_of(asked.limiter.refund(asked.decision))

    async def actual(
        self, cost: int, arguments: tuple[Any, ...], response: Any, was_refused: bool
    ) -> int:
        """Return what a request has cost. `count_when` sees refusals, too; without it they cost
        nothing.
        """
        if self.count_when is None:
            if was_refused:
                return 0
        elif not await self._call("count_when", self.count_when, (response,)):
            return 0
        if self.cost_after is None:
            return cost
        actual: int = await self._call("cost_after", self.cost_after, (*arguments, response))
        return actual

    async def _call(self, option: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        return await self._awaited(option, function, function(*arguments))

    async def _awaited(self, option: str, function: Any, value: Any) -> Any:
        """Return what `function` has returned, awaited where it is to be."""
        if hasattr(value, "__await__"):
            if not self.rate_limits.awaits:
                if hasattr(value, "close"):
                    value.close()  # or it would warn that it was never awaited
                raise ConfigurationError(
                    f"{option}={function_name(function)} has returned what must be awaited, and "
                    "nothing is awaited here; write a plain function"
                )
            value = await value
        return value

    def _parsed(self, spec: Any) -> tuple[Limit, ...]:
        """Return the limits that a function has returned."""
        try:
            known = spec if isinstance(spec, (str, Limit)) else tuple(spec)
            if known in self._dynamic:
                return self._dynamic[known]
            limits = parse_limits(spec)
        except (TypeError, ConfigurationError) as exc:
            raise ConfigurationError(
                f"limits={function_name(self._limits_of)} has returned {short_repr(spec)}: {exc}"
            ) from None
        if len(self._dynamic) >= MAX_REMEMBERED:
            self._dynamic.clear()
        self._dynamic[known] = limits
        return limits

    def _remember(
        self, known_as: object, name: str, limits: tuple[Limit, ...]
    ) -> tuple[str, Policies]:
        """Return what is the same for all requests at `name` with these limits, and keep it."""
        self.rate_limits.log_shared_names(name)
        if len(self._named) >= MAX_REMEMBERED:
            self._named.clear()  # the path of a mount may have parameters
        window = name if self.name else f"{name} {self.text_in_keys}"
        # So that no key of one limit is one of another.
        beginning = f"{window.replace('%', '%25').replace(':', '%3A')}:"
        policies = Policies(name, limits, self._unit, self.rate_limits.headers)
        self.rate_limits.policy_names.add(self, policies)
        named = self._named[known_as] = beginning, policies
        return named

    def _full_key(self, beginning: str, key: Any) -> AnyKey:
        """Return the key of the ring: the name of the limit, then the key of the request."""
        if isinstance(key, str):
            return f"{beginning}{key}"  # of a subclass, `+` may be something else
        if isinstance(key, bytes):
            return beginning.encode() + key
        if isinstance(key, Key):
            resource = self._full_key(beginning, key.resource)
            return Key(resource, key.tag)  # type: ignore[arg-type]  # of str or bytes, no Key
        raise ConfigurationError(
            f"key={function_name(self._key)}: the key of a request is {short_repr(key)}; return a "
            "str, bytes or a Key; or None for the address of the client"
        )

    def _check_function(self, option: str, function: Any, count: int) -> None:
        if not callable(function):
            raise ConfigurationError(f"{option}={short_repr(function)} is not a function")
        if not self.rate_limits.awaits:
            check_not_async(option, function)
        check_takes(option, function, count)

    def _check_fixed_cost(self, cost: object) -> None:
        if isinstance(cost, bool) or not isinstance(cost, int) or cost < 1:
            raise ConfigurationError(
                f"cost={short_repr(cost)} is neither a whole number of at least 1 nor a function"
            )
        smallest = min((limit.amount for limit in self._limits or ()), default=cost)
        if cost > smallest and self.cost_after is None:
            raise ConfigurationError(
                f"cost={cost} can never be admitted: the smallest limit is {smallest}"
            )


def _counted_by(decision: Decision) -> str:
    """Return what a limit counts of which only this decision is known: of a cost above 1 it is
    something else than requests, such as tokens.
    """
    return "requests" if decision.cost == 1 else "units"


def never_admitted(question: Question) -> AskedLimit:
    """Return the refusal of a cost above the limit, which no store has to decide."""
    smallest = min(question.limits, key=lambda limit: limit.amount)
    decision = Decision(
        False, question.key, question.cost, smallest, 0, math.inf, math.inf, 0.0, "over_limit",
        "local", 0,
    )  # fmt: skip
    return AskedLimit(decision, question.policies, question.limit, question.limiter)


async def conclude(earlier: LimitedRequest, asked: AskedLimit, rate_limits: Any) -> None:
    """Add an answer to `earlier`, and raise or wait as it says."""
    earlier.append(asked)
    if asked.decision.allowed:
        if asked.decision.wait > 0:  # borrowed, or paced: it begins later
            await result_of(rate_limits.sleep(asked.decision.wait))
        return
    if not earlier.is_watched:
        earlier.is_refused = True
        await earlier.settle(None, 0)
    elif any(not each.settled for each in earlier):
        earlier.needs_response = True  # the response says whether it is one
    # No variable has it: its traceback has this frame, and would be left to the garbage collector.
    raise asked.limit.refusal(earlier, asked)


_METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"]
"""The usual ones. Others are allowed if they are not written much like one of these."""


def _read_methods(methods: Any) -> frozenset[str]:
    if isinstance(methods, (str, bytes)) or not all(isinstance(each, str) for each in methods):
        raise ConfigurationError(
            f'methods={short_repr(methods)} is not a list of methods, such as ["POST", "PUT"]'
        )
    for each in methods:
        likely = get_close_matches(each.upper(), _METHODS, 1)
        if likely and each.upper() not in _METHODS:
            raise ConfigurationError(f"methods has {each!r}; write {likely[0]!r}")
    names = frozenset("GET" if each.upper() == "HEAD" else each.upper() for each in methods)
    if not names:
        raise ConfigurationError("methods=[] limits nothing; leave it out to limit all methods")
    return names


def charged_before(
    earlier: LimitedRequest, question: Question, again: bool = False
) -> Decision | None:
    """Return the decision that has charged this request in the window of `question` already: it is
    charged once, however many limits look at it. None if none has, or if its limit is asked `again`
    for another part of the request.

    Raises `ConfigurationError` for limits that differ, and have one window.
    """
    for each in earlier:
        if not each.decision.charged:
            continue
        for part in each.questions():
            if is_charged_once(question, part, again):
                return each.decision
    return None


def is_charged_once(question: Question, other: Question, again: bool) -> bool:
    """Return whether one charge will do for both; see `charged_before`."""
    return not (again and other.limit is question.limit) and is_same_question(question, other)


def is_same_question(question: Question, other: Question) -> bool:
    """Return whether both ask for the same. Raises `ConfigurationError` for limits that differ, and
    have one window.
    """
    one, two = question.limit, other.limit
    if one.rate_limits.namespace != two.rate_limits.namespace:
        return False
    if normalize_key(question.key) != normalize_key(other.key):
        return False
    windows = [{(each.bucket_ms, each.span) for each in of.limits} for of in (question, other)]
    if windows[0].isdisjoint(windows[1]):
        return False
    differs = question.limits != other.limits or question.cost != other.cost
    if differs or (one.count_when, one.cost_after) != (two.count_when, two.cost_after):
        raise two_limits_of_one_window(question.policies)
    return True


def two_limits_of_one_window(policies: Policies) -> ConfigurationError:
    """Return the error for two limits that differ, of one request and one window."""
    names = ", ".join(map(short_repr, policies.names.values()))
    return ConfigurationError(
        f"two limits of this request that differ have the name {names} and one interval, so they "
        "count in one window, and it would be charged twice; give each a name of its own: "
        'limit("100/minute", name="all"), limit("5/minute", name="search")'
    )


DefaultLimits: TypeAlias = "LimitSpec | Callable[..., Any] | Mapping[str, Any]"
"""What `RateLimits` takes as `default_limits`."""
_START_S = 3.0
"""Seconds for which a start that needs the store asks until it answers: to connect for the first
time may take longer than a call may wait."""
_START_PAUSE_S = 0.1
_ANY_LIMIT = (Limit("1/second"),)
"""For what concerns the store, and no limit."""
R = TypeVar("R")


class MakesLimits(Generic[R]):
    """Has `limit`, which returns a `limit_type`: what it makes limits is its first argument."""

    limit_type: Callable[..., R]
    """What the integration has for one limit."""

    def limit(
        self,
        limits: LimitSpec | Callable[..., Any],
        *,
        name: str | None = None,
        key: Callable[..., Any] | None = None,
        cost: int | Callable[..., Any] = 1,
        exempt: Callable[..., Any] | None = None,
        methods: Collection[str] | None = None,
        on_store_error: OnStoreError | None = None,
        count_when: Callable[..., Any] | None = None,
        cost_after: Callable[..., Any] | None = None,
        priority: bool = False,
        unit: Unit = "requests",
        override_defaults: bool = True,
    ) -> R:
        """Return one limit, for the place where the framework has such things.

        `limits` is one limit or several, of which all must admit, or a function of the request
        that returns them, or None for no limit. `name` is what header fields call it, and the
        beginning of its keys: limits with one name are one limit, and have to be equal. Without it,
        each limit of each route holds by itself. `key` is a function of the request that returns a
        `str`, `bytes` or `Key`, or None for the address of the client, which is the default.
        `cost` is a whole number, or a function of the request. `exempt` is a function of the
        request: where it returns true, nothing else is asked. `methods` are those that are limited,
        such as ["POST", "PUT"]; HEAD counts as GET. `on_store_error` replaces that of the object.
        `count_when` is a function of the response: the cost is charged before, and given back after
        a response for which it returns false. `cost_after` is a function of the request and the
        response that returns the real cost: `cost`, or the limit if that is less, is reserved
        before. `priority` is that of `Limiter.try_acquire`. `unit` is what the limit counts:
        "requests" or "content-bytes". `override_defaults` says whether it takes the place of the
        `default_limits` at its route, for its methods. Raises `ConfigurationError` for what can
        never work.
        """
        return self.limit_type(
            self, limits, name=name, key=key, cost=cost, exempt=exempt, methods=methods,
            on_store_error=on_store_error, count_when=count_when, cost_after=cost_after,
            priority=priority, unit=unit, override_defaults=override_defaults,
        )  # fmt: skip


class BaseRateLimits(MakesLimits[R]):
    """The limits of one application, on one connection: base class of `AsyncRateLimits` and
    `BlockingRateLimits`, of which an integration has a subclass.

    `on_store_error` is what a request gets that the store has not decided, and a limit may name
    its own: `"allow"` (it is served, without header fields), `"deny"` (503), `"raise"` (the
    `StoreError` goes to the framework), `"local"` (the share of this process decides). A
    `ConfigurationError`, such as a wrong password, is always raised: a mistake is no outage.
    `trusted_proxies` are the addresses and networks of proxies whose `X-Forwarded-For` is believed
    (`ClientAddress`). `headers` says which header fields responses get: `"ietf"`,
    `"x-ratelimit"`, `"both"`, `"none"`. Without `enabled` nothing is asked, and no field is
    written. `store`, `prefix`, `timeout`, `clock`, `consistency`, `share`, `max_local_keys` and
    `name` are as for `Limiter`. With `require` the application does not start while the store
    cannot be asked, whatever `on_store_error` says. Without a `prefix`, which is "distwindow"
    then, names such as "GET /search" are those of other applications on the store, too; that is
    logged once. `default_limits` are the limits of each route that has none of its own, in FastAPI
    and Flask: as for `limit`, or a dict of its arguments. Each route has windows of its own.

    After it was closed, the next request opens it again: a test starts an application many times.
    """

    address_type: type[ClientAddress]
    """The integration's subclass of `ClientAddress`."""
    error_type: Callable[[Decision, Sequence[LimitAnswer], str], Exception] = RateLimited
    """What is raised for a refusal; a subclass of `RateLimited`, with its arguments."""
    awaits: ClassVar[bool]
    """True if `key`, `cost`, `exempt` and `limits` may be coroutine functions."""
    sleep: Callable[[float], Any]
    """Sleeps for some seconds by the clock of the store; to be awaited if `awaits`."""
    knows_routes: ClassVar[bool] = False
    """True if there may be `default_limits`."""
    _pool_type: Callable[[Any, Options], Any]

    def __init__(
        self,
        store: Any,
        *,
        on_store_error: OnStoreError = NOT_GIVEN,
        prefix: str | None = None,
        timeout: float = 0.25,
        clock: ClockChoice = "server",
        consistency: Consistency = "direct",
        share: float | None = None,
        max_local_keys: int = 100_000,
        trusted_proxies: Sequence[str] = (),
        headers: Headers = "ietf",
        enabled: bool = True,
        require: bool = False,
        name: str | None = None,
        default_limits: DefaultLimits | None = None,
        time: Clock = SYSTEM,
    ) -> None:
        if default_limits is not None and not self.knows_routes:
            raise ConfigurationError(
                "default_limits are for the routes of FastAPI and Flask; here, a limit of all "
                'requests is RateLimitMiddleware(app, rate_limits, "100/minute")'
            )
        if headers not in get_args(Headers):
            raise ConfigurationError(
                f'headers={short_repr(headers)} is none of "ietf", "x-ratelimit", "both", "none"'
            )
        if not isinstance(enabled, bool):  # "false" of an environment would be true
            raise ConfigurationError(f"enabled={short_repr(enabled)} is neither True nor False")
        if not isinstance(require, bool):
            raise ConfigurationError(f"require={short_repr(require)} is neither True nor False")
        if on_store_error is NOT_GIVEN:
            raise ConfigurationError(
                "on_store_error says what requests get while the store does not answer, and has no "
                'default: "allow" (they are served), "deny" (503), "raise" (StoreError), or '
                '"local" (by the share of this process)'
            )
        self.on_store_error: Any = on_store_error
        self.headers: Headers = headers
        self.enabled = enabled
        self._require = require
        self.client_address = self.address_type(trusted_proxies)
        """The address of the client of a request, by `trusted_proxies`: for key functions."""
        self._given_store = store
        self._options = Options(
            prefix="distwindow" if prefix is None else prefix, timeout=timeout, clock=clock,
            consistency=consistency, name=name, max_local_keys=max_local_keys, time=time,
            on_store_error=on_store_error, share=share,
            on_unknown="local",  # a limit may have a share, whatever `on_store_error` is here
        )  # fmt: skip
        check_options(self._options)
        is_here = store_name(store).lower().startswith("memory")
        self._has_own_names = prefix is not None or is_here
        self.shared_windows = SharedWindows(_LOG)
        self.policy_names = PolicyNames()
        self.namespace: object = (store_name(store), self._options.prefix)
        """The store and the prefix: limits of one name are one limit in it."""
        self.opened = self._open()
        """The limiters, from one closing to the next."""
        self.default_limit: R | None = None
        """The limit of each route that has none of its own."""
        if default_limits is not None:
            if isinstance(default_limits, Mapping):
                self.default_limit = self.limit(**default_limits)
            else:
                self.default_limit = self.limit(default_limits)

    @property
    def is_required(self) -> bool:
        """True if the application does not start without its store."""
        return self._require and self.enabled

    def key_function(self, key: Callable[..., Any] | None) -> Callable[..., Any]:
        """Return the function for `key`: that of this object for the default."""
        return self.client_address if key is None else key

    def refusal_of(self, exceeded: RateLimitExceeded) -> Any:
        """Return the error of `error_type` for what a limiter has raised in a handler. Its fields
        name the limit, and not the key.
        """
        if isinstance(exceeded, RateLimited):
            return exceeded
        limit = exceeded.decision.limit
        policies = Policies(str(limit), (limit,), "requests", self.headers)
        answers = [LimitAnswer(exceeded.decision, policies)]
        return type(self).error_type(exceeded.decision, answers, _counted_by(exceeded.decision))

    def health(self) -> Health:
        """Return what is known of the store, without asking it: `Limiter.health`."""
        health: Health = self._any_limiter().health()
        return health

    def _pause_of_start(self, exc: DistwindowError, began_at: float) -> float | None:
        """Return the seconds until a start asks the store again, which failed it with `exc`. None:
        it goes on without, and that is logged. Raises the error of a start that needs the store.
        """
        if not self.is_required:
            _LOG.error("limits of requests are not enforced now: %s", exc)
            return None
        is_late = self._options.time.monotonic() - began_at >= _START_S
        if is_late or not isinstance(exc, StoreError):
            kind = type(exc) if isinstance(exc, StoreError) else ConfigurationError
            raise kind(f"limits of requests cannot be enforced, and require=True: {exc}") from exc
        return _START_PAUSE_S

    def _any_limiter(self) -> Any:
        return self.opened.get(_ANY_LIMIT, self.on_store_error)

    def log_shared_names(self, name: str) -> None:
        """Log once with whom a limit of this name is shared, if no prefix was given."""
        if not self._has_own_names:
            self._has_own_names = True
            _LOG.warning(
                "the limit %r is one with the limit of that name of each application that uses %s "
                'without a prefix; give each a prefix of its own: RateLimits(..., prefix="shop"), '
                'or prefix="distwindow" to share them',
                name, store_name(self._given_store),
            )  # fmt: skip

    def __repr__(self) -> str:
        shown = store_name(self._given_store)
        return f"{type(self).__name__}({shown!r}, on_store_error={self.on_store_error!r})"

    def _open(self) -> Any:
        return type(self)._pool_type(self._given_store, self._options)


@only_async_with
class AsyncRateLimits(BaseRateLimits[R]):
    """`BaseRateLimits` for tasks. `async with rate_limits:` asks the store once, so that a log line
    says if limits are not enforced, and closes it at its end.
    """

    awaits = True
    _pool_type = AsyncLimiterPool

    def run(self, steps: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Return what a limit does with a request, to be awaited."""
        return steps

    async def sleep(self, seconds: float) -> None:
        await self.opened.store.sleep(seconds)

    async def check_store(self) -> None:
        """Ask the store once, whatever `on_store_error` says. Raises `StoreError` if it does not
        answer, and `ConfigurationError` for what will never work, such as a wrong password.
        """
        await self._any_limiter().stats("start")

    async def start(self) -> None:
        """Ask the store at the start of an application. With `require` this raises what
        `check_store` raises, or after 3 s without an answer; otherwise it is logged.
        """
        began_at = self._options.time.monotonic()
        while True:
            try:
                return await self.check_store()
            except DistwindowError as exc:
                pause = self._pause_of_start(exc, began_at)
            if pause is None:
                return None
            await self.sleep(pause)

    async def aclose(self) -> None:
        """Send what was counted, give back what is held, and close the connection. The next
        request opens it again.
        """
        closed, self.opened = self.opened, self._open()
        await closed.aclose()

    async def __aenter__(self) -> Self:
        running_loop()
        for limiter in self.opened.all():
            limiter.decider.policy.announce()
        if self.enabled:
            try:
                await self.start()
            except BaseException:  # nobody else would close it
                await self.aclose()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class BlockingRateLimits(BaseRateLimits[R]):
    """`BaseRateLimits` for threads. Safe to share between threads; survives `fork`."""

    awaits = False
    _pool_type = LimiterPool

    def run(self, steps: Coroutine[Any, Any, T]) -> T:
        """Run what a limit does with a request."""
        under_way, this_call = self.opened.under_way, object()
        under_way.add(this_call)
        try:
            steps.send(None)
        except StopIteration as end:
            value: T = end.value
            return value
        finally:
            under_way.discard(this_call)
        steps.close()
        raise ConfigurationError(
            "a function that is not asynchronous has returned what waits for an event loop, and "
            "there is none here; write `async def`, or return the answer"
        )

    def sleep(self, seconds: float) -> None:
        self.opened.store.clock.sleep(seconds)

    def check_store(self) -> None:
        """See `AsyncRateLimits.check_store`."""
        self._any_limiter().stats("start")

    def start(self) -> None:
        """Ask the store at the start of an application with `require`, and raise as
        `AsyncRateLimits.start`.
        """
        if not self.is_required:
            return None
        began_at = self._options.time.monotonic()
        try:
            while True:
                try:
                    return self.check_store()
                except DistwindowError as exc:
                    pause = self._pause_of_start(exc, began_at)
                self.sleep(pause or 0.0)
        except BaseException:  # nobody else would close it
            self.close()
            raise

    def close(self) -> None:
        """Send what was counted, give back what is held, and close the connections, once the calls
        of other threads have their answers. The next request opens them again.
        """
        closed, self.opened = self.opened, self._open()
        closed.close()
