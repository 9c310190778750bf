"""The slots around a call, in Sentinel's order (`DefaultSlotChainBuilder`, behind `SphU.entry`).

    node selector -> cluster builder -> statistic -> flow -> degrade
                     the nodes          counts on     rules    circuit
                                        the way back           breakers

Not here: the slots for logs, authority, system load and default circuit breakers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, get_args

from ..errors import ConfigurationError, short_repr
from .circuit_breakers import BreakerState, CircuitBreakerBase
from .flow import TrafficShapingController
from .nodes import NodeConfig, StatisticNode, check_int
from .rules import (
    LIMIT_APP_DEFAULT,
    LIMIT_APP_OTHER,
    DegradeRule,
    FlowRule,
    Rule,
    breaker_of,
    controller_of,
)

EntryType = Literal["IN", "OUT"]


class CallNodes(NamedTuple):
    """The nodes that count a call, None where it has no such node.

    `default` is that of its context and resource, `cluster` that of the resource, `origin` that of
    the resource and the caller, `entry` that of all calls of type `"IN"`.
    """

    default: StatisticNode
    cluster: StatisticNode
    origin: StatisticNode | None
    entry: StatisticNode | None

    def present(self) -> list[StatisticNode]:
        """Return the nodes that are there."""
        return [node for node in self if node is not None]


@dataclass(frozen=True, slots=True)
class Call:
    """One call: `count` permits of `resource`, and who asks, where."""

    resource: str
    context: str
    origin: str
    entry_type: EntryType
    count: int
    prioritized: bool


class NodeRegistry:
    """Makes each node at the first call that needs it, with the same settings. Not locked."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self.entry = self._new()
        """Of all calls of type `"IN"`."""
        self.cluster: dict[str, StatisticNode] = defaultdict(self._new)
        """By resource."""
        self.default: dict[tuple[str, str], StatisticNode] = defaultdict(self._new)
        """By context and resource."""
        self.origin: dict[tuple[str, str], StatisticNode] = defaultdict(self._new)
        """By resource and origin."""

    def nodes_of(self, call: Call) -> CallNodes:
        """Return the nodes that count `call`; an empty origin has none."""
        default = self.default[call.context, call.resource]
        origin = self.origin[call.resource, call.origin] if call.origin else None
        entry = self.entry if call.entry_type == "IN" else None
        return CallNodes(default, self.cluster[call.resource], origin, entry)

    def _new(self) -> StatisticNode:
        return StatisticNode(**self._config._asdict())


BreakerObserver = Callable[[DegradeRule, BreakerState, BreakerState, float | None], object]
"""Called with the rule, the previous state, the new one, and the value that opened it or None."""


class DegradeSlot:
    """One circuit breaker for each degrade rule, asked in the given order. Not locked."""

    def __init__(self, rules: Iterable[DegradeRule]) -> None:
        self._observers: list[BreakerObserver] = []
        self._breakers: dict[str, list[tuple[DegradeRule, CircuitBreakerBase]]] = {}
        for rule in rules:
            breaker = breaker_of(rule)
            breaker.add_observer(partial(self._notify, rule))
            self._breakers.setdefault(rule.resource, []).append((rule, breaker))

    def add_observer(self, observer: BreakerObserver) -> None:
        """Call `observer` at each change of state of any breaker."""
        self._observers.append(observer)

    def check(self, resource: str, now: int) -> DegradeRule | None:
        """Return the rule whose breaker refuses a call at `now` (ms); None if all let it pass.

        If one refuses, the breakers that had made the call their probe are open again.
        """
        probed: list[CircuitBreakerBase] = []
        for rule, breaker in self._breakers.get(resource, ()):
            if not breaker.try_pass(now):
                for earlier in probed:
                    earlier.on_probe_blocked()
                return rule
            # A half-open breaker lets no other call pass than the probe.
            if breaker.state == "half_open":
                probed.append(breaker)
        return None

    def complete(self, resource: str, now: int, rt_ms: int, error: bool) -> None:
        """Note in every breaker of `resource` that a call ended at `now` (ms)."""
        for _, breaker in self._breakers.get(resource, ()):
            breaker.on_request_complete(now, rt_ms=rt_ms, error=error)

    def _notify(
        self, rule: DegradeRule, previous: BreakerState, new: BreakerState, value: float | None
    ) -> None:
        for observer in self._observers:
            observer(rule, previous, new, value)


class FlowCheck(NamedTuple):
    """The end of the check of a call, at `now` (ms): the rule that refused it, or None.

    `borrowed` is true if its pass was borrowed. That ends the whole chain, as Sentinel's
    `PriorityWaitException` does: no further rule or slot is asked.
    """

    refused_by: FlowRule | None
    borrowed: bool
    now: int


class FlowSlot:
    """The flow rules of all resources, each with its controller.

    Of several rules of a resource those with the `limit_app` `"default"` are asked last, the others
    in the given order. The first that refuses ends the check.
    """

    def __init__(
        self, rules: Iterable[FlowRule], cluster_nodes: Mapping[str, StatisticNode]
    ) -> None:
        self._cluster_nodes = cluster_nodes
        self._rules: dict[str, list[tuple[FlowRule, TrafficShapingController]]] = {}
        for rule in sorted(rules, key=lambda rule: rule.limit_app == LIMIT_APP_DEFAULT):
            self._rules.setdefault(rule.resource, []).append((rule, controller_of(rule)))
        # Rules for `"other"` are about the origins that are not among these.
        self._named_origins = {
            resource: frozenset(rule.limit_app for rule, _ in of)
            for resource, of in self._rules.items()
        }

    def check(self, call: Call, nodes: CallNodes, now: int) -> Generator[int, int, FlowCheck]:
        """Yield each wait of `call` in ms, and be sent the time (ms) after it."""
        for rule, controller in self._rules.get(call.resource, ()):
            node = self._node_of(rule, call, nodes)
            if node is None:
                continue
            result = controller.can_pass(now, node, call.count, call.prioritized)
            if not result:
                return FlowCheck(rule, False, now)
            if result.wait_ms:
                now = yield result.wait_ms
            if result.borrowed:
                return FlowCheck(None, True, now)
        return FlowCheck(None, False, now)

    def _node_of(self, rule: FlowRule, call: Call, nodes: CallNodes) -> StatisticNode | None:
        """Return the node by which `rule` decides about `call`; None if it is not about it."""
        app = rule.limit_app
        if app == LIMIT_APP_DEFAULT:
            own: StatisticNode | None = nodes.cluster
        elif app == LIMIT_APP_OTHER:
            own = None if call.origin in self._named_origins[call.resource] else nodes.origin
        elif app == call.origin:
            own = nodes.origin
        else:
            return None
        if own is None or rule.strategy == "direct":
            return own
        if rule.strategy == "relate":
            return self._cluster_nodes.get(rule.ref_resource or "")
        return nodes.default if rule.ref_resource == call.context else None


DEFAULT_CONTEXT = "sentinel_default_context"

CallRule = FlowRule | DegradeRule
"""A rule that this chain applies."""
EntryState = Literal["waiting", "passed", "blocked", "exited"]
# What a check of a call returns: the rule that refused it, and whether its pass was borrowed.
_Check = Generator[int, int, tuple[CallRule | None, bool]]


class SlotChain:
    """The whole chain for any number of resources, in this process, without a store.

    `node_config` has the settings of all nodes. From the 6001st resource on (`max_resources`) calls
    are neither checked nor counted, as in Sentinel; `unchecked_total` is how many there were.
    Nodes of origins and contexts are not bounded.

    Times are in ms. Not locked. Raises `ConfigurationError` for a rule that is none, and for
    settings that cannot work.
    """

    def __init__(
        self,
        rules: Iterable[Rule],
        *,
        node_config: NodeConfig | None = None,
        max_resources: int = 6000,
    ) -> None:
        rules = list(rules)
        for rule in rules:
            if not isinstance(rule, (FlowRule, DegradeRule)):
                raise ConfigurationError(
                    f"rules must be FlowRule and DegradeRule, not {short_repr(rule)}"
                )
        check_int("max_resources", max_resources, 1)
        self._nodes = NodeRegistry(node_config or NodeConfig())
        flow_rules = [rule for rule in rules if isinstance(rule, FlowRule)]
        self._flow = FlowSlot(flow_rules, self._nodes.cluster)
        self._degrade = DegradeSlot(rule for rule in rules if isinstance(rule, DegradeRule))
        self.max_resources = max_resources
        self.unchecked_total = 0

    def enter(
        self,
        now: int,
        resource: str,
        *,
        context: str = DEFAULT_CONTEXT,
        origin: str = "",
        entry_type: EntryType = "OUT",
        count: int = 1,
        prioritized: bool = False,
    ) -> ChainEntry:
        """Ask every slot about a call of `resource` at `now` (ms); never raises because of a rule.

        The entry's `state` says what came of it. `"passed"`: make the call, then `entry.exit`.
        `"blocked"`: do not make it. `"waiting"`: wait `entry.wait_ms`, then `entry.resume`.
        Raises `ConfigurationError` for a negative time or count, an empty name or another type.
        """
        check_int("now", now, 0)
        check_int("count", count, 0)
        for name, value in (("resource", resource), ("context", context)):
            if type(value) is not str or not value:
                raise ConfigurationError(f"{name} must be a name, not {value!r}")
        if type(origin) is not str:
            raise ConfigurationError(f"origin must be a name or empty, not {origin!r}")
        if entry_type not in get_args(EntryType):
            raise ConfigurationError(f"entry_type must be 'IN' or 'OUT', not {entry_type!r}")
        call = Call(resource, context, origin, entry_type, count, bool(prioritized))
        clusters = self._nodes.cluster
        if resource not in clusters and len(clusters) >= self.max_resources:
            self.unchecked_total += 1
            return ChainEntry(self._degrade, call, None, now, _unchecked())
        nodes = self._nodes.nodes_of(call)
        return ChainEntry(self._degrade, call, nodes, now, self._check(call, nodes, now))

    def add_breaker_observer(self, observer: BreakerObserver) -> None:
        """Call `observer(rule, previous, new, value)` at each change of a breaker's state."""
        self._degrade.add_observer(observer)

    @property
    def entry_node(self) -> StatisticNode:
        """The node of all calls of type `"IN"`."""
        return self._nodes.entry

    def cluster_node(self, resource: str) -> StatisticNode | None:
        """Return the node of `resource`; None before its first call."""
        return self._nodes.cluster.get(resource)

    def default_node(self, context: str, resource: str) -> StatisticNode | None:
        """Return the node of `resource` in `context`; None before its first call."""
        return self._nodes.default.get((context, resource))

    def origin_node(self, resource: str, origin: str) -> StatisticNode | None:
        """Return the node of the calls of `resource` by `origin`; None before the first."""
        return self._nodes.origin.get((resource, origin))

    def _check(self, call: Call, nodes: CallNodes, now: int) -> _Check:
        """Yield each wait in ms and be sent the time after it; return how the check ended."""
        flow = yield from self._flow.check(call, nodes, now)
        if flow.refused_by is not None or flow.borrowed:
            return flow.refused_by, flow.borrowed
        return self._degrade.check(call.resource, flow.now), False


def _unchecked() -> _Check:
    return None, False
    yield  # a generator that yields nothing


class ChainEntry:
    """One call in a `SlotChain`; true if it has passed and has not ended.

    | `state` | means | what may follow |
    |---|---|---|
    | `"waiting"` | it has to wait `wait_ms` first | `resume` |
    | `"passed"` | it may run | `exit` |
    | `"blocked"` | `blocked_by`, a rule, refused it | nothing |
    | `"exited"` | it has ended | nothing |

    A call that is abandoned while it waits is counted nowhere, but its place in the queue, or the
    pass that it borrowed, is spent, as in Sentinel. Not locked.
    """

    __slots__ = (
        "_check", "_degrade", "blocked_by", "call", "created", "nodes", "resume_at", "state",
        "wait_ms",
    )  # fmt: skip

    def __init__(
        self, degrade: DegradeSlot, call: Call, nodes: CallNodes | None, now: int, check: _Check
    ) -> None:
        self.call = call
        self.nodes = nodes
        self.created = now
        """When the call arrived, in ms."""
        self.state: EntryState = "waiting"
        self.wait_ms = 0
        self.blocked_by: CallRule | None = None
        self._degrade = degrade
        self._check = check
        self.resume_at = now
        """When the wait is over, in ms."""
        self._advance(now, partial(next, check))

    def __bool__(self) -> bool:
        return self.state == "passed"

    def resume(self, now: int) -> ChainEntry:
        """Go on at `now` (ms), when the wait is over; returns this entry, which may wait again.

        Raises `ConfigurationError` before the wait is over, and unless the call waits.
        """
        check_int("now", now, 0)
        self._expect("waiting", "resume")
        if now < self.resume_at:
            raise ConfigurationError(
                f"{self._name()} waits until {self.resume_at} ms, it is {now} ms"
            )
        self._advance(now, partial(self._check.send, now))
        return self

    def exit(self, now: int, *, error: bool = False) -> None:
        """Record that the call ended at `now` (ms), by an exception if `error`.

        The response time is counted from its arrival, so that waiting is included. Raises
        `ConfigurationError`, and counts nothing, unless the call has passed and has not ended.
        """
        check_int("now", now, 0)
        self._expect("passed", "exit")
        self.state = "exited"
        if self.nodes is None:
            return
        rt_ms, count = now - self.created, self.call.count
        for node in self.nodes.present():
            node.add_rt_and_success(now, rt_ms, count)
            node.decrease_thread_num()
            if error:
                node.increase_exception_qps(now, count)
        self._degrade.complete(self.call.resource, now, rt_ms, bool(error))

    def _advance(self, now: int, step: Callable[[], int]) -> None:
        """Run the check until it waits or ends, and count how it ended."""
        try:
            self.wait_ms = step()
            self.resume_at = now + self.wait_ms
        except StopIteration as end:
            self.blocked_by, borrowed = end.value
            self.state = "passed" if self.blocked_by is None else "blocked"
            self._count(now, borrowed)

    def _count(self, now: int, borrowed: bool) -> None:
        """Count the verdict (Sentinel `StatisticSlot`)."""
        count = self.call.count
        for node in () if self.nodes is None else self.nodes.present():
            if self.state == "blocked":
                node.increase_block_qps(now, count)
                continue
            node.increase_thread_num()
            # The node that lent a borrowed pass has counted it, and the others never do.
            if not borrowed:
                node.add_pass_request(now, count)

    def _expect(self, state: EntryState, operation: str) -> None:
        if self.state != state:
            raise ConfigurationError(f"cannot {operation} {self._name()}: {_REASONS[self.state]}")

    def _name(self) -> str:
        return f"the call of {short_repr(self.call.resource)}"


_REASONS: dict[EntryState, str] = {
    "waiting": "it waits; call resume when its wait is over",
    "passed": "it has passed; call exit when it has ended",
    "blocked": "it was blocked, so it never ran",
    "exited": "it has exited already",
}
