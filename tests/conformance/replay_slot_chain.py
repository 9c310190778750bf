"""`slot_chain`: the slots behind Sentinel's SphU.entry."""

from __future__ import annotations

from collections.abc import Mapping

from distwindow.sentinel.circuit_breakers import BreakerState
from distwindow.sentinel.nodes import NodeConfig, StatisticNode
from distwindow.sentinel.rules import DegradeRule, FlowRule
from distwindow.sentinel.slot_chain import ChainEntry, SlotChain

from .replay import Args, figures

READ = (
    "pass_qps block_qps success_qps exception_qps avg_rt min_rt previous_pass_qps total_pass "
    "block_request total_success total_exception cur_thread_num waiting"
)
GRADES = ("slow_request_ratio", "error_ratio", "error_count")
BLOCK_TYPES: Mapping[type, str] = {FlowRule: "FlowException", DegradeRule: "DegradeException"}


def rule_of(fields: Args) -> FlowRule | DegradeRule:
    """The rule that a file lists."""
    rest = {name: value for name, value in fields.items() if name != "type"}
    return FlowRule(**rest) if fields["type"] == "flow" else DegradeRule(**rest)


class SlotChainReplay:
    """One chain, and the calls that are under way."""

    def __init__(self, params: Args) -> None:
        config = NodeConfig(
            params["second_sample_count"],
            params["second_interval_ms"],
            params["occupy_timeout_ms"],
            params["statistic_max_rt"],
        )
        self.chain = SlotChain(map(rule_of, params["rules"]), node_config=config)
        self.chain.add_breaker_observer(self._note)
        self.events: list[list[object]] = []
        self.entries: dict[int, ChainEntry] = {}
        # In the order of first use. A default node is read once a call has passed in it.
        self.resources: dict[str, None] = {}
        self.origins: dict[tuple[str, str], None] = {}
        self.passed: dict[tuple[str, str], None] = {}

    def _note(
        self, rule: DegradeRule, previous: BreakerState, new: BreakerState, value: float | None
    ) -> None:
        self.events.append([GRADES.index(rule.grade), previous.upper(), new.upper(), value])

    def _with_events(self, result: dict[str, object]) -> dict[str, object] | None:
        events, self.events = self.events, []
        if events:
            result["breaker_events"] = events
        return result or None

    def op_enter(self, now: int, args: Args) -> object:
        entry = self.chain.enter(
            now,
            args["resource"],
            context=args["context"],
            origin=args["origin"],
            entry_type=args["entry_type"],
            count=args["count"],
            prioritized=args["prioritized"],
        )
        self.entries[args["id"]] = entry
        self.resources[args["resource"]] = None
        if args["origin"]:
            self.origins[args["resource"], args["origin"]] = None
        return self._verdict(entry)

    def op_resume(self, now: int, args: Args) -> object:
        return self._verdict(self.entries[args["id"]].resume(now))

    def op_exit(self, now: int, args: Args) -> object:
        self.entries.pop(args["id"]).exit(now, error=args["error"])
        return self._with_events({})

    def _verdict(self, entry: ChainEntry) -> object:
        if entry.state == "waiting":
            return self._with_events({"result": "wait", "wait_ms": entry.wait_ms})
        if entry.blocked_by is not None:
            block_type = BLOCK_TYPES[type(entry.blocked_by)]
            return self._with_events({"result": "block", "block_type": block_type})
        self.passed[entry.call.context, entry.call.resource] = None
        return self._with_events({"result": "pass"})

    def op_read(self, now: int, args: Args) -> object:
        chain = self.chain
        return {
            "cluster": {name: figures_of(chain.cluster_node(name), now) for name in self.resources},
            "default": {
                f"{context}|{resource}": figures_of(chain.default_node(context, resource), now)
                for context, resource in self.passed
            },
            "origin": {
                f"{resource}|{origin}": figures_of(chain.origin_node(resource, origin), now)
                for resource, origin in self.origins
            },
            "entry_node": figures_of(chain.entry_node, now),
        }


def figures_of(node: StatisticNode | None, now: int) -> dict[str, object]:
    """A node as the traces of the chain write it."""
    assert node is not None
    return figures(node, READ, now)
