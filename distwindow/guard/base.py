"""What `Guard` and `AsyncGuard` share: rules to chains, and checks of arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from .._fork import register_after_fork
from ..callables import function_name
from ..connect import ClockChoice, Consistency, check_sync, check_url, store_name
from ..core.breaker_rules import BreakerRule
from ..core.clock import Clock
from ..core.errors import ConfigurationError, closed_failure, short_repr
from ..core.limit import Limit
from ..entry_options import check_origin
from ..failure_types import ErrorTypes, FailureTypes
from ..protocol.keys import check_prefix
from ..rules import AuthorityRule, DegradeRule, FlowRule, Rule, SystemRule
from ..rules.file import read_rules
from ..rules.fleet import breaker_rule_of, limit_of, slots_of
from ..rules.together import check_rules
from ..sentinel.rules import LIMIT_APP_DEFAULT
from ..worker.flush_job import FlushJob
from .chain import ChainLink, ChainSlot, GuardCall, Outcome, is_coroutine_function, link_of
from .context import NO_CONTEXT, current_context
from .installed_slots import make_installed_slots
from .related import RelateSlot, rules_that_count
from .slots import AuthoritySlot, BreakerSlot, ConcurrencySlot, FlowSlot
from .system_sampling import PsutilSampler, SystemSampling
from .system_slot import SystemSlot

if TYPE_CHECKING:
    from typing_extensions import Self

_DEFAULT_URL = "redis://localhost:6379/0"
"""That of the command line, too."""

Chain = tuple[ChainLink, ...]


class GuardOptions(NamedTuple):
    """The arguments of a guard beyond store and rules. Times are in seconds."""

    prefix: str
    consistency: Consistency
    sync_interval: float
    share: float | None
    errors: ErrorTypes
    ignore: ErrorTypes
    slots: Iterable[Any]
    installed_slots: bool
    sampler: Callable[[], Any] | None
    timeout: float
    clock: ClockChoice
    name: str | None
    time: Clock


class Parts(NamedTuple):
    """Makes the limiters, concurrency limits and breakers of one world, on the guard's store."""

    limiter: Callable[[Limit], Any]
    counter: Callable[[Limit], Any]
    """Makes a limiter that counts at no cost of a call where the guard's limiters lease permits:
    these would count what is not spent."""
    reader: Callable[[Limit], Any]
    """Makes a limiter that asks the store, whatever the guard's `consistency`."""
    concurrency: Callable[[int], Any]
    breaker: Callable[[BreakerRule], Any]
    sample: Callable[[SystemSampling], FlushJob]
    """Has the worker sample."""


class BaseGuard:
    """What `Guard` and `AsyncGuard` share. They document the arguments."""

    _instead = "@guarded(guard, resource), or enter guard.entry(resource)"

    _clock: Clock
    _awaits_slots = False
    """True if slots may have coroutine functions."""

    def __init__(self, store: Any, rules: Iterable[Rule], options: GuardOptions) -> None:
        self._prefix = check_prefix(options.prefix)
        check_sync(options.consistency, options.sync_interval, options.share)
        self._rules = check_rules(rules)
        self._sampler = options.sampler
        self._failure_types = FailureTypes(options.errors, options.ignore)
        self._store_name = store_name(store)
        self._name = f"guard {options.prefix!r} at {self._store_name}"
        installed = make_installed_slots(self._checked_slot) if options.installed_slots else []
        self._slots = [*installed, *map(self._checked_slot, options.slots)]
        self._parts: dict[tuple[Any, Limit | BreakerRule | int], Any] = {}
        """What the slots use, one for all rules that are equal but for their resource."""
        self._sampling_job: FlushJob | None = None
        """That of the `SystemRule`, if it needs samples of the machine."""
        self._is_closed = False

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
        make: Any = cls
        guard: Self = make(store, content.rules, **options)
        return guard

    def _make_chains(self, parts: Parts) -> None:
        """Make the chains of all resources that have rules."""
        self._common: list[Any] = list(self._slots)
        of_resource: dict[str, list[Any]] = {}
        named: dict[str, set[str]] = {}
        for rule in self._rules:
            if isinstance(rule, FlowRule):
                named.setdefault(rule.resource, set()).add(rule.limit_app)
        for rule in _in_order(self._rules):
            if isinstance(rule, SystemRule):
                slot = SystemSlot(rule, self._clock, self._sampling_of(rule, parts))
                self._common.append(register_after_fork(slot))
                continue
            of_resource.setdefault(rule.resource, []).append(self._slot_of(rule, named, parts))
        for counting, limit in rules_that_count(self._rules, self._prefix):
            counter = FlowSlot(counting, frozenset(), self._part(parts.counter, limit))
            of_resource.setdefault(counting.resource, []).append(counter)
        self._chains = {
            name: _sorted([*slots, *self._common]) for name, slots in of_resource.items()
        }
        self._chain_of_others = _sorted(self._common)

    def _sampling_of(self, rule: SystemRule, parts: Parts) -> SystemSampling | None:
        """Return what samples the machine for `rule`; None if it needs no sample."""
        if not rule.needs_sample:
            return None
        sampler = PsutilSampler(self._clock) if self._sampler is None else self._sampler
        sampling = register_after_fork(SystemSampling(sampler, self._clock))
        self._sampling_job = parts.sample(sampling)
        return sampling

    def _slot_of(self, rule: Any, named: dict[str, set[str]], parts: Parts) -> ChainSlot:
        if isinstance(rule, AuthorityRule):
            return AuthoritySlot(rule)
        if isinstance(rule, DegradeRule):
            breaker_rule = breaker_rule_of(rule)
            return BreakerSlot(rule, self._part(parts.breaker, breaker_rule))
        origins = frozenset(named[rule.resource])
        if rule.grade == "thread":
            return ConcurrencySlot(rule, origins, self._part(parts.concurrency, slots_of(rule)))
        limit = limit_of(rule)
        if rule.strategy == "relate":
            return RelateSlot(rule, origins, self._part(parts.reader, limit))
        return FlowSlot(rule, origins, self._part(parts.limiter, limit))

    def _part(self, make: Callable[[Any], Any], setting: Limit | BreakerRule | int) -> Any:
        part = self._parts.get((make, setting))
        if part is None:
            part = self._parts[make, setting] = make(setting)
        return part

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store_name!r}, {len(self._rules)} rules)"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise `TypeError` for `pickle` and `copy`."""
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied, as it holds connections, locks "
            "and counts; make one in each process: all with the same store, prefix and rules share "
            "their limits"
        )

    @property
    def prefix(self) -> str:
        """The beginning of the names of everything in the store."""
        return self._prefix

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules."""
        return self._rules

    def _begin(
        self, resource: Any, origin: Any, cost: Any, context: Any
    ) -> tuple[Chain, GuardCall]:
        """Return the chain of a call, and the call. Raises for what no call can be."""
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
        return chain, GuardCall(resource, caller, cost, context)

    def _checked_slot(self, slot: Any) -> Any:
        return _checked_slot(slot, self._awaits_slots)

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
    return tuple(map(link_of, in_order))


def _in_order(rules: tuple[Rule, ...]) -> list[Any]:
    """Return the rules in the order in which the slots of one kind are asked: rules for origins
    before those for all callers, as in Sentinel.
    """
    return sorted(
        rules,
        key=lambda rule: isinstance(rule, FlowRule) and rule.limit_app == LIMIT_APP_DEFAULT,
    )


def _checked_slot(slot: Any, may_await: bool) -> Any:
    if isinstance(slot, type) or not all(
        callable(getattr(slot, method, None)) for method in ("enter", "exit")
    ):
        raise ConfigurationError(
            f"{short_repr(slot)} is no slot: it needs the methods enter(call) and "
            "exit(call, token, outcome); see ChainSlot"
        )
    for method in (slot.enter, slot.exit):
        if not may_await and is_coroutine_function(method):
            raise ConfigurationError(
                f"{function_name(method)} is a coroutine function, which only AsyncGuard awaits; "
                "give a Guard slots with plain functions"
            )
    return slot
