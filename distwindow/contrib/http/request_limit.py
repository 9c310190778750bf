"""One limit of requests, as all integrations with web frameworks have it, and what it has decided
for one request.

What it does with a request is a coroutine, which raises what the framework is to handle. In threads
its limiter has answered already, so it awaits nothing, and `BlockingRateLimits.run` takes it to its
end in one step.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

from ... import ConfigurationError, Decision, Limit, StoreError
from ...away.policy import OnStoreError
from ...errors import RateLimitExceeded, short_repr
from ...observer import Tally
from ...ring.decision import limits_in
from ...ring.key import AnyKey, Key, normalize_key
from ...ring.limit import LimitSpec, parse_limits
from ...rules.shadow import is_in_shadow, log_mistake
from ...support.async_use import result_of
from ...support.callables import check_not_async, check_takes, function_name, stable_name
from .counts import count_failed, count_one
from .fields import LimitAnswer, Policies, Unit, distinct, fields_to_set, problem

if TYPE_CHECKING:
    from .rate_limits import BaseRateLimits

_LOG = logging.getLogger("distwindow")
T = TypeVar("T")
NOT_GIVEN: Any = object()
"""In the place of a key that is not replaced: None is one for the address of the client."""
_REFUSALS = (429, 503)
"""The statuses of refusals."""
MAX_REMEMBERED = 1000
"""How many names with their limits are kept of one limit, and limits that functions return."""
_parse_limits = functools.lru_cache(MAX_REMEMBERED)(parse_limits)


class RequestLimit:
    """One limit of requests: what `RateLimits.limit` makes, which documents the arguments."""

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
        shadow: bool = False,
    ) -> None:
        self.rate_limits = rate_limits
        self.shadow = is_in_shadow(shadow)
        self._methods = None if methods is None else _read_methods(methods)
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigurationError(f"name={short_repr(name)} is not the name of a limit, a str")
        self.name = name
        of_all = rate_limits.on_store_error
        self.on_store_error = of_all if on_store_error is None else on_store_error
        self.count_when, self.cost_after = count_when, cost_after
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
        self.settles = count_when is not None or cost_after is not None  # after the response
        for option, given in (("priority", priority), ("override_defaults", override_defaults)):
            if not isinstance(given, bool):
                raise ConfigurationError(f"{option}={short_repr(given)} is no bool")
        overrides = override_defaults and self.shadow != "limit"
        self.methods_without_default = self._methods if overrides else frozenset[str]()
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
        self._unit, self._cost, self._exempt = unit, cost, exempt
        self._key = rate_limits.key_function(key)
        self._limiter: Any = None
        self._opened: object = None  # what `rate_limits` had open when `_limiter` was taken
        self._limits: tuple[Limit, ...] | None = None  # of a function: None
        self._limits_of = limits
        self._named: dict[Any, tuple[str, Policies]] = {}
        """By name, and limits where these differ: the beginning of keys, and what fields say."""
        arguments = 1 if self.takes_request else 0
        for option, function, takes in (
            ("key", self._key, arguments), ("exempt", exempt, arguments),
            ("count_when", count_when, 1), ("cost_after", cost_after, arguments + 1),
            ("limits", limits if callable(limits) else None, arguments),
            ("cost", cost if callable(cost) else None, arguments),
        ):  # fmt: skip
            if function is not None:
                self._check_function(option, function, takes)
        if not callable(limits):
            self._limits = parse_limits(limits)
            shaped = next((each for each in self._limits if each.is_shaped), None)
            if shaped is not None and self.settles:
                raise ConfigurationError(
                    f"{str(shaped)!r} is paced or warms up, and count_when and cost_after cannot "
                    "change what it has promised to later requests; write a plain limit"
                )
            self._open_limiter(self._limits)
            if name is not None and not self.shadow:
                advice = "give them names of their own"
                rate_limits.shared_windows.add(name, self._limits, "a limit of requests", advice)
                rate_limits.policy_names.add(
                    self, Policies(name, self._limits, unit, rate_limits.headers)
                )
        if not callable(cost):
            self._check_fixed_cost(cost)
        only_asks = (
            exempt is None
            and methods is None
            and not (callable(cost) or priority or self.settles or self.shadow)
        )
        self._limits_at_once = self._limits if only_asks and self.takes_request else None
        """The limits that `decide_at_once` decides by; None where `decide` has to."""

    @property
    def text(self) -> str:
        """The limits as text; the name of the function that returns them, if there is one."""
        if self._limits is None:
            return function_name(self._limits_of)
        return "; ".join(map(str, self._limits))

    def method_of(self, request: Any) -> str:
        """Return the method as which a request counts."""
        return "GET" if request.method == "HEAD" else str(request.method)

    def name_of(self, request: Any) -> str:
        """Return the name where none was given: method and path template of the route."""
        raise NotImplementedError  # each framework has routes of its own

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
        if self.shadow:
            await self.decide_in_shadow(request, earlier, cost=cost, key=key, limits=limits)
            return None
        question = await self.question(request, cost, key, limits)
        if question is None:
            return None
        if earlier and (met := charged_before(earlier, question)) is not None:
            return met
        return await self.ask(question, earlier)

    async def decide_in_shadow(
        self, request: Any, earlier: LimitedRequest, again: bool = False, **options: Any
    ) -> None:
        """Decide about `request` without a consequence; what is wrong is logged."""
        try:
            if self.settles and not earlier.is_watched:
                raise ConfigurationError("nothing shows count_when and cost_after the response")
            if earlier.is_refused_in_shadow:
                return  # as no limit is asked after a refusal
            question = await self.question(request, **options)
            if question is None:
                return
            await earlier.others_ended([question], again)
            if charged_before(earlier.in_shadow, question, again) is not None:
                return
            with earlier.asking([question]):
                decision = await self.ask(question, earlier)
            if decision.reason == "shadow" and not decision.charged:
                earlier.is_refused_in_shadow = True
            if earlier.is_refused_in_shadow:  # by this one, or by one that was asked meanwhile
                for asked in earlier.in_shadow:
                    if not asked.settled:
                        asked.settled = True
                        await asked.limit.give_back(asked)
        except Exception as exc:
            log_mistake(exc, f"limit {self.name or self.text}")

    async def ask(self, question: Question, earlier: LimitedRequest) -> Decision:
        """Ask the store, and conclude; see `decide`."""
        limiter, arguments = question.limiter, question.arguments
        clamp = self.cost_after is not None  # so that no guess refuses every request
        if question.is_above_limit():  # which no store has to decide
            smallest = min(question.limits, key=lambda limit: limit.amount)
            decision = Decision(
                False, question.key, question.cost, smallest, 0, math.inf, math.inf, 0.0,
                "over_limit", "local", 0,
            )  # fmt: skip
            await self._conclude(earlier, decision, question.policies, limiter)  # which raises
        try:
            if self.settles:
                steps = limiter.try_reserve(question.key, question.cost, clamp=clamp)
            else:
                steps = limiter.try_acquire(question.key, question.cost, self.priority)
            answer: Any = await result_of(steps)
        except StoreError:
            count_failed(question)
            raise
        if not self.settles:
            return await self._conclude(earlier, answer, question.policies, limiter)
        reservation = answer
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
        takes 40 % less time. In all other cases return a coroutine that does it.

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
        # As `try_acquire` begins.
        decision: Any = limiter.decider.decide_locally(full_key, self._cost)
        # `.allowed` and `.wait`: a name takes three times as long as an index.
        if decision is not None and decision[0] and not decision[7]:
            earlier.append(AskedLimit(decision, policies, self, limiter))
            tally = rate_limits.opened.tally
            if tally is not None:
                name, limit = policies.given[0], decision[3]
                count_one(tally, self, decision, name, limit, decision[2], 1)
            return decision  # type: ignore[no-any-return]
        if decision is None:
            decision = limiter.try_acquire(full_key, self._cost)
        return self._conclude(earlier, decision, policies, limiter, key=full_key)

    async def _conclude(
        self,
        earlier: LimitedRequest,
        decision: Any,
        policies: Policies,
        limiter: Any,
        reservation: Any = None,
        arguments: tuple[Any, ...] = (),
        key: AnyKey = "",
    ) -> Decision:
        """Do `conclude` for an answer: that of an `AsyncLimiter` is awaited, for `key`."""
        if type(decision) is not Decision:  # `result_of`, without a call of Python
            try:
                decision = await decision
            except StoreError:
                cost: Any = self._cost  # no function, where this is awaited here
                count_failed(Question(self, key, policies.given[1], cost, policies, limiter))
                raise
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
        limiter = self._limiter = opened.get(limits, self.on_store_error, self.shadow == "limit")
        self._opened = opened
        return limiter

    def _counted(self, decision: Decision) -> str:
        """Return what the limit counts, in words."""
        if self._unit == "content-bytes":
            return "bytes"
        has_costs = self._cost != 1 or self.cost_after is not None
        return "units" if has_costs else counted_by(decision)

    async def settle(self, asked: AskedLimit, response: Any, *, was_refused: bool) -> None:
        """End the charge of one request; see `LimitedRequest.settle`."""
        actual = 0
        if asked.reservation is not None:
            actual = await self.actual(asked.decision.cost, asked.arguments, response, was_refused)
        if was_refused and not actual:
            await self.give_back(asked)
        elif asked.reservation is not None:
            await result_of(asked.reservation.commit(actual, now=True))

    async def give_back(self, asked: AskedLimit) -> None:
        """Give back what a request was charged that another limit has refused."""
        tally = self.rate_limits.opened.tally
        if tally is not None:
            self.count(tally, asked, -1)
        if asked.reservation is not None:
            await result_of(asked.reservation.commit(0, now=True))
        else:
            await result_of(asked.limiter.refund(asked.decision))

    def count(self, tally: Tally, asked: AskedLimit, calls: int = 1) -> None:
        """Count what was decided; with -1, take it back, as another limit has refused."""
        decision = asked.decision
        name = asked.policies.given[0]
        count_one(tally, self, decision, name, decision[3], decision[2], calls)

    async def actual(
        self, cost: int, arguments: tuple[Any, ...], response: Any, was_refused: bool
    ) -> int:
        """Return what a request has cost; a refusal nothing, unless `count_when` counts it."""
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
            if isinstance(spec, (str, Limit)):
                return _parse_limits(spec)
            return _parse_limits(tuple(spec)) if isinstance(spec, list) else parse_limits(spec)
        except (TypeError, ConfigurationError) as exc:
            raise ConfigurationError(
                f"limits={function_name(self._limits_of)} has returned {short_repr(spec)}: {exc}"
            ) from None

    def _remember(
        self, known_as: object, name: str, limits: tuple[Limit, ...]
    ) -> tuple[str, Policies]:
        """Return what is the same for all requests at `name` with these limits, and keep it."""
        self.rate_limits.log_shared_names(name)
        if len(self._named) >= MAX_REMEMBERED:
            self._named.clear()  # the path of a mount may have parameters
        # Without names, the limits and their functions tell the windows of one route apart.
        of = stable_name(self._limits_of) if self._limits is None else self.text
        window = name if self.name else f"{name} {of}{self.marks}"
        # So that no key of one limit is one of another.
        beginning = f"{window.replace('%', '%25').replace(':', '%3A')}:"
        policies = Policies(name, limits, self._unit, self.rate_limits.headers)
        if not self.shadow:
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
            "str, bytes or a Key; or None, which counts as without key="
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
        if cost > smallest and self.cost_after is None and not self.shadow:
            raise ConfigurationError(
                f"cost={cost} can never be admitted: the smallest limit is {smallest}"
            )


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
    """What was decided for one request, in order: kept with it from its first limit on."""

    __slots__ = (
        "in_shadow", "is_refused", "is_refused_in_shadow", "needs_response", "under_way",
    )  # fmt: skip
    is_watched = True
    """True if who keeps it sees the response, and runs `settle`."""

    def __init__(self) -> None:
        self.needs_response = False
        """True if what the response is decides about a charge, so that `settle` has to be run."""
        self.is_refused = False  # until a refusal is the response, whatever its status is
        self.in_shadow: Sequence[AskedLimit] = ()
        """The answers of limits in shadow, whose charges the response may decide about."""
        self.is_refused_in_shadow = False  # until one of them would have refused the request
        self.under_way: dict[asyncio.Event, Sequence[Question]] = {}
        """What tasks are asking for it now; each event is set when its call has ended."""

    async def others_ended(self, questions: Sequence[Question], again: bool) -> None:
        """Wait until no other task asks one of `questions`: one charge will do for both."""
        while (ended := self._asking_the_same(questions, again)) is not None:
            await ended.wait()

    def _asking_the_same(self, questions: Sequence[Question], again: bool) -> asyncio.Event | None:
        for ended, others in self.under_way.items():
            pairs = itertools.product(questions, others)
            if any(is_charged_once(question, other, again) for question, other in pairs):
                return ended
        return None

    @contextmanager
    def asking(self, questions: Sequence[Question]) -> Iterator[None]:
        """Have other tasks wait which ask one of `questions` during the block."""
        ended = asyncio.Event()
        self.under_way[ended] = questions
        try:
            yield
        finally:
            del self.under_way[ended]
            ended.set()

    def fields_to_set(self, status_code: int, get: Callable[[str], str | None]) -> dict[str, str]:
        """See `fields.fields_to_set`."""
        return fields_to_set(self, status_code, get)

    async def settle(
        self, response: Any, status_code: int, own: Sequence[AskedLimit] | None = None
    ) -> None:
        """End the charges of this request, or `own` of them, once. Where `response` is a refusal,
        what was charged beside it is given back; otherwise `count_when` and `cost_after` decide.
        Where the application has caught a refusal, and the response has neither 429 nor 503, it
        has served the request: a 401 that cost nothing would be a password that cost nothing.

        To be run by `RateLimits.run` with the last part of `response`, or when it ends without.
        Raises no `Exception`: what the functions raise is logged, and the charge stays.
        """
        self.needs_response = False
        was_refused = self.is_refused or (status_code in _REFUSALS and self.refusal() is not None)
        for each in self.charges() if own is None else own:
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

    def charges(self) -> list[AskedLimit]:
        """Return what is still to be settled, of limits in shadow, too."""
        return [each for each in (*self, *self.in_shadow) if not each.settled]

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
        self.limit = limit  # a `RequestLimit`, or `LimitsTogether`
        self.limiter = limiter
        self.reservation = reservation  # what `count_when` and `cost_after` settle
        self.arguments = arguments
        """Of `cost_after`, or of that of each limit. Where it is not needed it is empty: a request
        that is in it keeps this, and would be left to the garbage collector.
        """
        self.settled = decision.charged is None
        """True from when its charge is given back or committed on, or if nothing was charged."""


class Question(NamedTuple):
    """What a limit asks its store for one request."""

    limit: RequestLimit
    key: AnyKey
    limits: tuple[Limit, ...]
    cost: int
    policies: Policies
    limiter: Any
    arguments: tuple[Any, ...] = ()  # of the functions of the limit

    def is_above_limit(self) -> bool:
        """Return whether the cost can never be admitted."""
        smallest = min(limit.amount for limit in self.limits)
        return self.cost > smallest and self.limit.cost_after is None and not self.limit.shadow


async def conclude(earlier: LimitedRequest, asked: AskedLimit, rate_limits: Any) -> None:
    """Add an answer to `earlier`, and raise or wait as it says."""
    if asked.limit.shadow:
        earlier.in_shadow = (*earlier.in_shadow, asked)
    else:
        earlier.append(asked)
    tally = rate_limits.opened.tally
    if tally is not None:
        name = asked.policies.given[0]
        if asked.decision.wait > 0:
            tally.waited(asked.decision, asked.decision.wait, name)
        asked.limit.count(tally, asked)
        if not asked.limit.shadow:
            tally.in_request(asked.decision, name)
    if asked.decision.allowed:
        if asked.decision.wait > 0:  # borrowed, or paced: it begins later
            await result_of(rate_limits.sleep(asked.decision.wait))
        return
    if not earlier.is_watched:
        earlier.is_refused = True
        await earlier.settle(None, 0)
    elif earlier.charges():
        earlier.needs_response = True  # the response says whether it is one
    # No variable has it: its traceback has this frame, and would be left to the garbage collector.
    raise asked.limit.refusal(earlier, asked)


def charged_before(
    earlier: Sequence[AskedLimit], question: Question, again: bool = False
) -> Decision | None:
    """Return the decision that has charged this request in the window of `question` already: it is
    charged once, however many limits look at it. None if none has, or if its limit is asked `again`
    for another part of the request.

    Raises `ConfigurationError` for limits that differ, and have one window.
    """
    for each in earlier:
        if not each.decision.charged:
            continue
        for part in each.limit.questions_of(each):
            if is_charged_once(question, part, again):
                return each.decision
    return None


def is_charged_once(question: Question, other: Question, again: bool) -> bool:
    """Return whether one charge will do for both; see `charged_before`."""
    return not (again and other.limit is question.limit) and is_same_question(question, other)


def is_same_question(question: Question, other: Question) -> bool:
    """Return whether both ask for the same; see `charged_before`."""
    one, two = question.limit, other.limit
    if (one.rate_limits.namespace, one.shadow) != (two.rate_limits.namespace, two.shadow):
        return False
    if normalize_key(question.key) != normalize_key(other.key):
        return False
    windows = [{(each.bucket_ms, each.span) for each in of.limits} for of in (question, other)]
    if windows[0].isdisjoint(windows[1]):
        return False
    differs = question.limits != other.limits or question.cost != other.cost
    if differs or (one.count_when, one.cost_after) != (two.count_when, two.cost_after):
        names = ", ".join(map(short_repr, question.policies.names.values()))
        raise ConfigurationError(
            f"two limits of this request that differ have the name {names} and one interval, so "
            "they count in one window, and it would be charged twice; give each a name of its own: "
            'limit("100/minute", name="all"), limit("5/minute", name="search")'
        )
    return True


async def decided(steps: Awaitable[T], earlier: LimitedRequest) -> T:
    """Return what `RequestLimit.decide` does before a handler. If its task is cancelled meanwhile,
    as the client has gone, nothing is served, and what earlier limits charged is given back, too.
    """
    try:
        return await steps
    except asyncio.CancelledError:
        earlier.is_refused = True
        earlier.needs_response = bool(earlier.charges())
        if earlier.needs_response and not earlier.is_watched:
            await asyncio.shield(earlier.settle(None, 0))
        raise


def counted_by(decision: Decision) -> str:
    """Return what a limit counts by a decision: a cost above 1 is of tokens, say."""
    return "requests" if decision.cost == 1 else "units"


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
