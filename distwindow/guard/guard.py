"""`Guard`, for threads, and `AsyncGuard`, for tasks: the rules of resources, and their entries."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..breaker import AsyncCircuitBreaker, CircuitBreaker
from ..breaker.rules import BreakerRule
from ..concurrency.concurrency import AsyncConcurrency, Concurrency
from ..errors import Blocked, ConfigurationError, closed_failure, short_repr
from ..lifecycle.connect import (
    check_url,
    is_opened,
    open_async_store,
    open_store,
    share_store,
    store_name,
)
from ..lifecycle.lifecycle import AsyncClosable, BlockingClosable
from ..limiter.entry import EXITED_IN_OTHER_THREAD
from ..limiter.limiter import AsyncLimiter, Limiter
from ..observer import UNOBSERVED, Observer, observer_of, tally_of
from ..ring.clock import SYSTEM, Clock
from ..ring.key import AnyKey
from ..ring.limit import Limit
from ..runtime.options import ClockChoice, Consistency, Options, check_origin
from ..runtime.worker import TASK_WORKER, THREAD_WORKER
from ..sentinel.rules import LIMIT_APP_DEFAULT, DegradeRule, FlowRule, Rule
from ..support import fork
from ..support.async_use import EnteredBlock, only_async_with, running_loop
from ..support.callables import function_name
from ..support.failure_types import ErrorTypes, FailureTypes, IgnoredErrors
from ..support.fork import register_after_fork
from .chain import (
    NO_CONTEXT,
    ChainSlot,
    Outcome,
    SlotAdapter,
    SlotStack,
    Steps,
    adapt_slot,
    current_context,
    kind_of,
    make_installed_slots,
    run_in_task,
    run_in_thread,
)
from .rules import AuthorityRule, SystemRule, breaker_rule_of, check_rules, limit_of, slots_of
from .rules_file import read_rules
from .slots import (
    AuthoritySlot,
    BreakerSlot,
    ConcurrencySlot,
    RateSlot,
    RelateSlot,
    rules_that_count,
)
from .system import PsutilSampler, SystemSampling, SystemSlot

if TYPE_CHECKING:
    from typing_extensions import Self


_DEFAULT_URL = "redis://localhost:6379/0"
"""That of the command line, too."""

_COUNTED_HERE = (AuthoritySlot, SystemSlot, RelateSlot)
"""The slots whose refusals nobody else counts."""
_ANY_LIMIT = Limit("1/second")

Chain = tuple[SlotAdapter, ...]


class BaseGuard:
    """Base class of `Guard` and `AsyncGuard`, which document the arguments."""

    _instead = "@guarded(guard, resource), or enter guard.entry(resource)"
    _shared = "store, prefix and rules share their limits"

    _clock: Clock
    _store: Any
    _worker: Any
    _limiter_class: Any
    _concurrency_class: Any
    _breaker_class: Any
    _open_store: Any
    _awaits_slots = False
    """True if slots may have coroutine functions."""

    def __init__(
        self,
        store: Any,
        rules: Iterable[Rule] = (),
        *,
        prefix: str = "distwindow",
        consistency: Consistency = "direct",
        sync_interval: float = 0.1,
        share: float | None = None,
        errors: ErrorTypes = Exception,
        ignore: IgnoredErrors = Blocked,
        slots: Iterable[Any] = (),
        installed_slots: bool = True,
        sampler: Callable[[], Any] | None = None,
        timeout: float = 0.25,
        clock: ClockChoice = "server",
        name: str | None = None,
        observer: Observer | None = None,
        metric_name: str | None = None,
        key_label: Callable[[AnyKey], str] | None = None,
        time: Clock = SYSTEM,
    ) -> None:
        options = Options(
            prefix=prefix, consistency=consistency, sync_interval=sync_interval, share=share,
            errors=errors, ignore=ignore, timeout=timeout, clock=clock, name=name, time=time,
            observer=observer_of(observer) or UNOBSERVED, metric_name=metric_name,
            key_label=key_label,
        )  # fmt: skip
        self._options = options
        self._rules = check_rules(rules)
        self._sampler = sampler
        self._failure_types = FailureTypes(options.errors, options.ignore)
        self._store_name = store_name(store)
        self._name = f"guard {options.prefix!r} at {self._store_name}"
        installed = make_installed_slots(self._checked_slot) if installed_slots else []
        self._slots = [*installed, *map(self._checked_slot, slots)]
        self._parts: dict[tuple[Any, Limit | BreakerRule | int], Any] = {}
        """Parts that the slots use, one for all rules that are equal but for their resource."""
        self._sampling: SystemSampling | None = None
        """Samples the machine for the `SystemRule`; None if that needs no samples."""
        self._is_closed = False
        self._store = self._open_store(store, options)
        self._owns_store = is_opened(self._store, store)
        self._make_chains()

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], store: Any = None, **options: Any) -> Self:
        """Return a guard with the rules of a TOML or JSON file (docs/howto/guard.md).

        The store is `store`, else the URL `store` in the file, else that in the environment
        variable DISTWINDOW_URL, else redis://localhost:6379/0. `options` are the other arguments.
        Raises `ConfigurationError`, which names the file, and as far as possible the rule and the
        field, for what cannot work.
        """
        content = read_rules(path)
        if store is None and content.store is not None:
            try:
                check_url(content.store)
            except ConfigurationError as exc:
                raise ConfigurationError(f"{os.fspath(path)}: store: {exc}") from exc
        if store is None:
            store = content.store or os.environ.get("DISTWINDOW_URL") or _DEFAULT_URL
        return cls(store, content.rules, **options)

    def _make_chains(self) -> None:
        """Create the chains of all resources that have rules, on the store that is open now."""
        self._clock = self._store.clock
        self._lent_store = share_store(self._store, self._store_name, owned=self._owns_store)
        self._common: list[Any] = list(self._slots)
        self._tally = tally_of(self._options, "limiter", self._clock.monotonic)
        of_resource: dict[str, list[Any]] = {}
        named: dict[str, set[str]] = {}
        for rule in self._rules:
            if isinstance(rule, FlowRule):
                named.setdefault(rule.resource, set()).add(rule.limit_app)
        # Those for origins are asked first, as in Sentinel.
        in_order: list[Any] = sorted(self._rules, key=_is_of_all_origins)
        for rule in in_order:
            if isinstance(rule, SystemRule):
                of_all = SystemSlot(rule, self._clock, self._sampling_of(rule))
                slot: ChainSlot = register_after_fork(of_all)
                self._common.append(slot)
            else:
                slot = self._slot_of(rule, named)
                of_resource.setdefault(rule.resource, []).append(slot)
            if self._tally is not None and isinstance(slot, _COUNTED_HERE):
                slot.tally = self._tally
                self._part(self._make_flushed_with, _ANY_LIMIT)
        for counting, limit in rules_that_count(self._rules, self.prefix):
            counter = RateSlot(counting, frozenset(), self._part(self._make_counter, limit))
            of_resource.setdefault(counting.resource, []).append(counter)
        self._chains = {
            name: _sorted([*slots, *self._common]) for name, slots in of_resource.items()
        }
        self._chain_of_others = _sorted(self._common)

    def _make_limiter(self, limit: Limit) -> Any:
        options = self._options
        return self._new_limiter(
            limit, consistency=options.consistency, sync_interval=options.sync_interval,
            share=options.share,
        )  # fmt: skip

    def _make_counter(self, limit: Limit) -> Any:
        """Return a limiter that counts at no cost of a call: those that lease count the unspent."""
        options = self._options
        consistency = "direct" if options.consistency == "direct" else "eventual"
        return self._new_limiter(
            limit, consistency=consistency, sync_interval=options.sync_interval, observer=UNOBSERVED
        )

    def _make_flushed_with(self, limit: Limit) -> Any:
        """Return a limiter that nobody asks, which tells the refusals that are counted here."""
        assert self._tally is not None
        limiter = self._new_limiter(limit, observer=UNOBSERVED)
        limiter.decider.policy.flush_source.add_first(self._tally)
        return limiter

    def _new_limiter(self, limit: Limit, **changes: Any) -> Any:
        """Return a limiter that asks the store at each call, but for `changes`."""
        options = self._options
        changes = {"observer": options.observer, **changes}
        return self._limiter_class(
            self._lent_store, limit, prefix=options.prefix, timeout=options.timeout,
            clock=options.clock, time=options.time, metric_name=options.metric_name,
            key_label=options.key_label, **changes,
        )  # fmt: skip

    def _make_concurrency(self, limit: int) -> Any:
        options = self._options
        return self._concurrency_class(
            self._lent_store, limit, prefix=options.prefix, timeout=2 * options.timeout,
            ttl=max(30.0, 4 * options.timeout), name=options.name, time=options.time,
            observer=options.observer, metric_name=options.metric_name, key_label=options.key_label,
        )  # fmt: skip

    def _make_breaker(self, rule: BreakerRule) -> Any:
        options = self._options
        return self._breaker_class(
            self._lent_store, rule, prefix=options.prefix, errors=options.errors,
            ignore=options.ignore, timeout=options.timeout, clock=options.clock, time=options.time,
            observer=options.observer, metric_name=options.metric_name,
        )  # fmt: skip

    def _sampling_of(self, rule: SystemRule) -> SystemSampling | None:
        """Return what samples the machine for `rule`; None if it needs no sample."""
        if not rule.needs_sample:
            return None
        sampler = PsutilSampler(self._clock) if self._sampler is None else self._sampler
        sampling = register_after_fork(SystemSampling(sampler, self._clock, self._name))
        self._worker.add_timer(sampling, self._clock)
        self._sampling = sampling
        return sampling

    def _slot_of(self, rule: Any, named: dict[str, set[str]]) -> ChainSlot:
        if isinstance(rule, AuthorityRule):
            return AuthoritySlot(rule)
        if isinstance(rule, DegradeRule):
            breaker_rule = breaker_rule_of(rule)
            return BreakerSlot(rule, self._part(self._make_breaker, breaker_rule))
        origins = frozenset(named[rule.resource])
        if rule.grade == "thread":
            return ConcurrencySlot(
                rule, origins, self._part(self._make_concurrency, slots_of(rule))
            )
        limit = limit_of(rule)
        if rule.strategy == "relate":
            return RelateSlot(rule, origins, self._part(self._new_limiter, limit))
        return RateSlot(rule, origins, self._part(self._make_limiter, limit))

    def _part(self, make: Callable[[Any], Any], setting: Limit | BreakerRule | int) -> Any:
        part = self._parts.get((make, setting))
        if part is None:
            part = self._parts[make, setting] = make(setting)
        return part

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store_name!r}, {len(self._rules)} rules)"

    @property
    def prefix(self) -> str:
        """The beginning of the names of everything in the store."""
        return self._options.prefix

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules."""
        return self._rules

    def _begin(self, resource: Any, origin: Any, cost: Any, context: Any) -> SlotStack:
        """Return a call and its chain. Raises for what no call can be."""
        if self._is_closed:
            raise closed_failure("guard")
        check_name("resource", resource)
        caller = "" if origin is None else check_origin(origin)
        if type(context) is not str:
            raise TypeError(f"context={short_repr(context)} is not a str")
        ambient = current_context()
        if ambient is not NO_CONTEXT:
            context, caller = context or ambient.name, caller or ambient.origin
        check_cost(cost)
        chain = self._chains.get(resource, self._chain_of_others)
        return SlotStack(chain, self._name, resource, caller, cost, context)

    def _checked_slot(self, slot: Any) -> Any:
        """Return `slot`. Raises `ConfigurationError` for what is none."""
        if isinstance(slot, type) or not all(
            callable(getattr(slot, method, None)) for method in ("enter", "exit")
        ):
            raise ConfigurationError(
                f"{short_repr(slot)} is no slot: it needs the methods enter(call) and "
                "exit(call, token, outcome); see ChainSlot"
            )
        for method in (slot.enter, slot.exit):
            if not self._awaits_slots and kind_of(method) == "coroutine":
                raise ConfigurationError(
                    f"{function_name(method)} is a coroutine function, which only AsyncGuard "
                    "awaits; give a Guard slots with plain functions"
                )
        return slot

    def _flushing(self) -> Steps:
        """Flush all parts, though one fails. Raises what the first one has raised."""
        failure: Exception | None = None
        if self._sampling is not None:
            self._sampling.record(self._sampling.run())
        for part in self._parts.values():
            try:
                yield part.flush()
            except Exception as exc:
                failure = failure or exc
        if failure is not None:
            raise failure

    def _closing(self, close: str) -> Steps:
        """Close all parts, and the store if it is the guard's, by their methods `close`."""
        self._is_closed = True
        if self._sampling is not None:
            yield self._worker.detach(self._sampling)
        for part in self._parts.values():
            yield getattr(part, close)()
        if self._owns_store:
            yield getattr(self._store, close)()

    def _outcome(self, admitted: bool, exc: BaseException | None, rt: float) -> Outcome:
        failed: bool | None = False
        if exc is not None or not admitted:
            failed = self._failure_types.failed(exc) if admitted else None
        # `Outcome(...)` takes several times as long.
        return tuple.__new__(Outcome, (admitted, exc, failed, rt))


def check_name(what: str, name: object) -> None:
    """Raise unless `name` can be the name of a resource."""
    if type(name) is not str:
        raise TypeError(f"{what}={short_repr(name)} is not a str")
    if not name:
        raise ValueError(f"{what} must not be empty")


def check_cost(cost: object) -> None:
    """Raise unless `cost` can be the cost of a call."""
    # Not isinstance: True is not a cost.
    if type(cost) is not int or cost < 1:
        raise ValueError(f"cost={short_repr(cost)} is not a whole number of at least 1")


def _sorted(slots: list[Any]) -> Chain:
    in_order = sorted(slots, key=lambda slot: getattr(slot, "order", ChainSlot.order))
    return tuple(map(adapt_slot, in_order))


def _is_of_all_origins(rule: Rule) -> bool:
    return isinstance(rule, FlowRule) and rule.limit_app == LIMIT_APP_DEFAULT


class _BaseGuardEntry(EnteredBlock):
    """One entry, which is entered once and left once, in the same thread unless it is made with
    `any_thread`. Elsewhere that raises `RuntimeError` and frees nothing: the block may go on.
    """

    def __init__(
        self,
        guard: BaseGuard,
        slot_stack: SlotStack,
        any_thread: bool,
        sleep: Callable[[float], Any],
    ) -> None:
        self._guard = guard
        self._sleep = sleep
        self._call = slot_stack.call
        self._slot_stack = slot_stack
        self._state = "new"
        self._any_thread = any_thread
        self._thread_id = 0
        self._forks = 0
        """That of the process that has entered it."""
        self._began_at = 0.0
        self._marked_failed = False

    @property
    def resource(self) -> str:
        """The resource that is called."""
        return self._call.resource

    @property
    def origin(self) -> str:
        """The caller; empty if it is not known."""
        return self._call.origin

    def fail(self) -> None:
        """Count this call as failed, whatever its block raises: an HTTP status of 503, for
        example. Raises `RuntimeError` if the block has not begun, or has ended.
        """
        if self._state != "entered":
            raise self._misused("marked as failed")
        self._marked_failed = True

    def _misused(self, what: str) -> RuntimeError:
        why = "has not been entered" if self._state == "new" else "was left before"
        return RuntimeError(f"this entry of {short_repr(self.resource)} is {what}, but {why}")

    def _begin(self) -> None:
        if self._state != "new":
            raise RuntimeError(
                f"this entry of {short_repr(self.resource)} was entered before; call `entry` again "
                "for each block"
            )
        if self._guard._is_closed:
            raise closed_failure("guard")
        self._state = "entered"
        self._thread_id = threading.get_ident()
        self._forks = fork.forks
        self._began_at = self._guard._clock.monotonic()

    def _end(self, exc: BaseException | None) -> Any:
        """Return the steps that leave the slots at the end of the block."""
        if self._state != "entered":
            raise self._misused("left")
        if self._thread_id != threading.get_ident() and not self._any_thread:
            raise RuntimeError(
                f"this entry of {short_repr(self.resource)} {EXITED_IN_OTHER_THREAD}"
            )
        return self._leaving(True, exc)

    def _leaving(self, admitted: bool, exc: BaseException | None) -> Any:
        """Return the steps that leave the slots; if closed, another call's steps leave the rest."""
        self._state = "left"
        if self._forks != fork.forks:
            self._slot_stack.taken.clear()  # they are the parent's, which leaves them
        rt = self._guard._clock.monotonic() - self._began_at
        outcome = self._guard._outcome(admitted, exc, rt)
        if admitted and self._marked_failed:
            outcome = outcome._replace(failed=True)
        return self._slot_stack.leave(outcome)


class GuardEntry(_BaseGuardEntry):
    """`with guard.entry(resource) as entry:`."""

    _written = "`with guard.entry(resource):`, which raises if refused"

    def __enter__(self) -> Self:
        self._begin()
        try:
            run_in_thread(self._slot_stack.enter(self._sleep))
        except BaseException as exc:
            run_in_thread(self._leaving(False, exc))
            raise
        return self

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        run_in_thread(self._end(exc))


@only_async_with
class AsyncGuardEntry(_BaseGuardEntry):
    """`async with guard.entry(resource) as entry:`, the same for tasks. If the task is cancelled
    while the entry is left, it is left to the end before `CancelledError` is raised.
    """

    _written = "`async with guard.entry(resource):`, which raises if refused"

    async def __aenter__(self) -> Self:
        self._begin()
        try:
            await run_in_task(self._slot_stack.enter(self._sleep))
        except BaseException as exc:
            await self._leave(False, exc)
            raise
        return self

    async def __aexit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        await self._leave(True, exc)

    async def _leave(self, admitted: bool, exc: BaseException | None) -> None:
        steps = self._end(exc) if admitted else self._leaving(False, exc)
        if isinstance(exc, GeneratorExit):
            self._leave_at_once(steps, admitted, exc)
        else:
            await _run_to_end(steps)

    def _leave_at_once(self, steps: Any, admitted: bool, exc: BaseException | None) -> None:
        """Leave without waiting, as the coroutine is being closed. An `exit` that would wait is
        closed at that place: what a slot of this package has to send is then sent by the worker.
        """
        while True:
            leaving = run_in_task(steps)
            try:
                leaving.send(None)
            except StopIteration:
                return
            finally:
                leaving.close()
            steps = self._leaving(admitted, exc)


async def _run_to_end(steps: Any) -> None:
    """Drive `steps` to their end, even if this task is cancelled meanwhile."""
    leaving = running_loop().create_task(run_in_task(steps))
    try:
        await asyncio.shield(leaving)
    except asyncio.CancelledError:
        while not leaving.done():
            try:
                await asyncio.wait([leaving])  # each of its exchanges has a deadline
            except asyncio.CancelledError:
                continue
        raise


class AsyncGuard(BaseGuard, AsyncClosable):
    """`Guard` for tasks: the same names and arguments, awaited where there is I/O."""

    _awaits_slots = True
    _worker = TASK_WORKER
    _limiter_class, _concurrency_class = AsyncLimiter, AsyncConcurrency
    _breaker_class = AsyncCircuitBreaker
    _open_store = staticmethod(open_async_store)

    def entry(
        self,
        resource: str,
        origin: str | None = None,
        cost: int = 1,
        *,
        context: str = "",
        any_thread: bool = False,
    ) -> AsyncGuardEntry:
        """See `Guard.entry`; `async with`."""
        slot_stack = self._begin(resource, origin, cost, context)
        return AsyncGuardEntry(self, slot_stack, any_thread, self._store.sleep)

    async def flush(self) -> None:
        """See `Guard.flush`."""
        await run_in_task(self._flushing())

    async def _close(self) -> None:
        await run_in_task(self._closing("aclose"))


class Guard(BaseGuard, BlockingClosable):
    """Sentinel's rules around calls, decided for the whole fleet. Safe to share between threads;
    survives `fork`.

        guard = Guard("redis://localhost:6379/0", [FlowRule("GET:/orders", 100)])
        with guard.entry("GET:/orders", origin="app-a"):
            answer()

    `store` is what a `Limiter` takes. `rules` are `FlowRule`, `DegradeRule`, `AuthorityRule` and
    `SystemRule` objects; a resource without rules passes. A call is refused by the first slot that
    refuses it: authority, system, flow, breakers, in this order; what the slots before have taken
    is given back.

    `errors` are the exceptions that count as failures of a block, for breakers and statistics;
    `ignore` are those that say nothing (by default refusals, as in Sentinel's `Tracer`).

    `slots` are slots of your own (`ChainSlot`), which stand where their `order` says. Installed
    packages add theirs (entry points `distwindow.slots`), unless `installed_slots=False`.

    `sampler` returns the load and the CPU usage (0 to 1) of the machine for a `SystemRule`; by
    default psutil does (extra `system`). It is called when the guard is made, and then once
    a second by the background worker while calls are made, never in a call.

    `consistency` is that of the flow rules with the grade `"qps"`, with `sync_interval` (seconds)
    and `share` (0 to 1) for `"eventual"`, as in `Limiter`; so are `prefix`, `timeout` (seconds),
    `clock`, `name`, `observer`, `metric_name`, `key_label` and `time`. The limits and breakers of
    the rules have this observer, which is told besides how many calls other rules refuse. An entry
    that a later rule refuses was admitted by the earlier ones, and counts for each. Raises
    `ConfigurationError` for rules and arguments that can never work; nothing is connected to before
    the first call.
    """

    _worker = THREAD_WORKER
    _limiter_class, _concurrency_class = Limiter, Concurrency
    _breaker_class = CircuitBreaker
    _open_store = staticmethod(open_store)

    def entry(
        self,
        resource: str,
        origin: str | None = None,
        cost: int = 1,
        *,
        context: str = "",
        any_thread: bool = False,
    ) -> GuardEntry:
        """Return a context manager for one call of `resource` by `origin` (1 to 128 characters;
        None for a call without one): raises a `Blocked` at
        the beginning of its block if a rule refuses the call, and records how the block ends.
        `fail()` of the object that `as` gives counts it as failed though it raises nothing.

        `context` is the entrance from which the call comes, for flow rules with the strategy
        `"chain"`; by default that of `call_context`, which has an origin, too.

        The entry is left in the thread that has entered it, or in any with `any_thread`; else
        `RuntimeError` is raised. `cost` is the number of permits that flow rules count. A cost that
        no window of a flow rule admits (above its `count`; with a warm-up, above what a cold
        resource admits) is a `ValueError`; a `SystemRule` refuses a cost above its `qps` each time.
        A `StoreError` is raised where the store does not answer a flow rule.
        """
        slot_stack = self._begin(resource, origin, cost, context)
        return GuardEntry(self, slot_stack, any_thread, self._clock.sleep)

    def flush(self) -> None:
        """Send now what was counted in this process, and sample the machine if a `SystemRule`
        needs that; with a clock of one's own (`time=`) nothing else does. Raises what the first of
        the guard's limiters and breakers raised, when all have tried.
        """
        run_in_thread(self._flushing())

    def _close(self) -> None:
        run_in_thread(self._closing("close"))
