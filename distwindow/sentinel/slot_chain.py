"""The slots around a call, in Sentinel's order (`DefaultSlotChainBuilder`, behind `SphU.entry`).

    node selector -> cluster builder -> statistic -> flow -> degrade
                     the nodes          counts on     rules    circuit
                                        the way back           breakers

Not here: the slots for logs, authority, system load and default circuit breakers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Literal, get_args

from ..core.errors import ConfigurationError, short_repr
from .call import Call, CallNodes, EntryType
from .checks import check_int
from .degrade_slot import BreakerObserver, DegradeSlot
from .flow_slot import FlowSlot
from .node_registry import NodeRegistry
from .rules import DegradeRule, FlowRule
from .statistic_node import NodeConfig, StatisticNode

DEFAULT_CONTEXT = "sentinel_default_context"

Rule = FlowRule | DegradeRule
EntryState = Literal["waiting", "passed", "blocked", "exited"]
# What a check of a call returns: the rule that refused it, and whether its pass was borrowed.
_Check = Generator[int, int, tuple[Rule | None, bool]]


class SlotChain:
    """The whole chain for any number of resources, in this process, without a store.

    `node_config` has the settings of all nodes. From the 6001st resource on (`max_resources`) calls
    are neither checked nor counted, as in Sentinel; `unchecked_total` is how many there were.
    Nodes of origins and contexts are not bounded.

    Times are in ms. Not locked. Raises `ConfigurationError` for a rule that is none, and for
    settings that cannot work.
    """

    __slots__ = ("_degrade", "_flow", "_nodes", "max_resources", "unchecked_total")

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
        "_check",
        "_degrade",
        "blocked_by",
        "call",
        "created",
        "nodes",
        "resume_at",
        "state",
        "wait_ms",
    )

    def __init__(
        self, degrade: DegradeSlot, call: Call, nodes: CallNodes | None, now: int, check: _Check
    ) -> None:
        self.call = call
        self.nodes = nodes
        self.created = now
        """When the call arrived, in ms."""
        self.state: EntryState = "waiting"
        self.wait_ms = 0
        self.blocked_by: Rule | None = None
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
        if self.nodes is None:
            self.state = "exited"
            return
        rt_ms, count = now - self.created, self.call.count
        self.state = "exited"
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
