"""Laws of the slot chain: every node counts what it should, whatever callers do wrong."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distwindow.errors import ConfigurationError
from distwindow.sentinel.nodes import StatisticNode
from distwindow.sentinel.rules import DegradeRule, FlowRule
from distwindow.sentinel.slot_chain import CallRule, ChainEntry, SlotChain

ORIGIN = 1_700_000_000_000

flow_rules = st.builds(
    FlowRule,
    st.sampled_from(["a", "b"]),
    st.sampled_from([0.0, 1.0, 3.0, 7.5]),
    grade=st.sampled_from(["qps", "qps", "thread"]),
    limit_app=st.sampled_from(["default", "app", "other"]),
)
paced_rules = st.builds(
    FlowRule,
    st.sampled_from(["a", "b"]),
    st.sampled_from([3.0, 10.0, 30.0]),
    control_behavior=st.just("rate_limiter"),
    max_queueing_time_ms=st.sampled_from([0, 200, 900]),
)
degrade_rules = st.builds(
    DegradeRule,
    st.sampled_from(["a", "b"]),
    st.just(0.5),
    grade=st.sampled_from(["error_ratio", "error_count"]),
    time_window_s=st.just(1),
    min_request_amount=st.integers(1, 3),
)
rules = st.lists(st.one_of(flow_rules, paced_rules, degrade_rules), max_size=5)
calls = st.fixed_dictionaries(
    {
        "resource": st.sampled_from(["a", "b"]),
        "context": st.sampled_from(["web", "batch"]),
        "origin": st.sampled_from(["", "app", "another"]),
        "entry_type": st.sampled_from(["IN", "OUT"]),
        "count": st.integers(1, 3),
        "prioritized": st.booleans(),
    }
)
# After a gap, a new call, or an operation on an entry: also one that it does not allow.
actions = st.lists(
    st.tuples(
        st.integers(0, 300),
        st.one_of(calls, st.tuples(st.sampled_from(["resume", "exit"]), st.integers(0, 30))),
        st.booleans(),
    ),
    max_size=40,
)


class Recount:
    """What each node should have counted in a minute, from the outcomes of the calls."""

    def __init__(self) -> None:
        self.running: Counter[object] = Counter()
        self.blocked: Counter[object] = Counter()
        self.success: Counter[object] = Counter()
        self.errors: Counter[object] = Counter()

    def outcome(self, entry: ChainEntry) -> None:
        for node in nodes_of(entry):
            if entry.state == "passed":
                self.running[node] += 1
            elif entry.state == "blocked":
                self.blocked[node] += entry.call.count

    def exit(self, entry: ChainEntry, error: bool) -> None:
        for node in nodes_of(entry):
            self.running[node] -= 1
            self.success[node] += entry.call.count
            self.errors[node] += entry.call.count if error else 0


def nodes_of(entry: ChainEntry) -> list[tuple[str, ...]]:
    call = entry.call
    nodes: list[tuple[str, ...]] = [("cluster", call.resource)]
    nodes.append(("default", call.context, call.resource))
    if call.origin:
        nodes.append(("origin", call.resource, call.origin))
    if call.entry_type == "IN":
        nodes.append(("entry",))
    return nodes


def find(chain: SlotChain, name: tuple[str, ...]) -> StatisticNode:
    kind, *key = name
    finders = {
        "cluster": chain.cluster_node,
        "default": chain.default_node,
        "origin": chain.origin_node,
        "entry": lambda: chain.entry_node,
    }
    node = finders[kind](*key)  # type: ignore[operator]
    assert isinstance(node, StatisticNode)
    return node


@given(rules, actions)
def test_every_node_counts_each_outcome_once_and_no_wrong_operation(
    listed: list[CallRule], history: list[tuple[int, object, bool]]
) -> None:
    chain, recount = SlotChain(listed), Recount()
    entries: list[ChainEntry] = []
    now, seen = ORIGIN, set[tuple[str, ...]]()
    for gap, action, error in history:
        now += gap
        if isinstance(action, dict):
            entry = chain.enter(now, **action)
            entries.append(entry)
            seen.update(nodes_of(entry))
            recount.outcome(entry)
        elif isinstance(action, tuple) and entries:
            operation, index = action
            entry = entries[index % len(entries)]
            state = entry.state
            if operation == "resume":
                if state == "waiting" and now >= entry.resume_at:
                    entry.resume(now)
                    recount.outcome(entry)
                else:
                    with pytest.raises(ConfigurationError, match=r"the call of '[ab]'"):
                        entry.resume(now)
                    assert entry.state == state
            elif state == "passed":
                entry.exit(now, error=error)
                recount.exit(entry, error)
            else:
                with pytest.raises(ConfigurationError, match="cannot exit the call of"):
                    entry.exit(now, error=error)
                assert entry.state == state
        for name in seen:
            node = find(chain, name)
            assert node.cur_thread_num == recount.running[name] >= 0
            assert node.block_request(now) == recount.blocked[name]
            assert node.total_success(now) == recount.success[name]
            assert node.total_exception(now) == recount.errors[name]


@given(st.lists(st.one_of(flow_rules, degrade_rules), max_size=5), st.lists(calls, max_size=30))
def test_a_refusal_names_a_rule_of_the_resource_and_no_rate_is_exceeded(
    listed: list[CallRule], asked: list[dict[str, object]]
) -> None:
    # Without priority, because what is borrowed comes on top of the rate of its window.
    chain = SlotChain(listed)
    for call in asked:
        call = {**call, "prioritized": False}
        entry = chain.enter(ORIGIN, **call)  # type: ignore[arg-type]
        own = [rule for rule in listed if rule.resource == call["resource"]]
        if entry.blocked_by is not None:
            assert entry.blocked_by in own
            assert not entry
        else:
            assert entry
            entry.exit(ORIGIN)
            for rule in own:
                if isinstance(rule, FlowRule) and rule.grade == "qps":
                    if rule.limit_app == "default":
                        node = chain.cluster_node(rule.resource)
                    elif rule.limit_app == "app" == call["origin"]:
                        node = chain.origin_node(rule.resource, "app")
                    else:
                        continue
                    assert node is not None
                    assert node.pass_qps(ORIGIN) <= rule.count


def test_a_call_that_waits_is_counted_after_its_wait_and_cannot_go_on_before() -> None:
    chain = SlotChain([FlowRule("a", 10, control_behavior="rate_limiter")])
    assert chain.enter(ORIGIN, "a")
    entry = chain.enter(ORIGIN, "a")
    assert (entry.state, entry.wait_ms, bool(entry)) == ("waiting", 100, False)
    node = chain.cluster_node("a")
    assert node is not None
    with pytest.raises(ConfigurationError, match=f"waits until {ORIGIN + 100} ms"):
        entry.resume(ORIGIN + 99)
    assert node.total_pass(ORIGIN + 99) == 1
    assert entry.resume(ORIGIN + 100) is entry
    assert (entry.state, node.total_pass(ORIGIN + 100)) == ("passed", 2)
    entry.exit(ORIGIN + 130)
    # The wait is part of the response time.
    assert node.min_rt(ORIGIN + 130) == 130


def test_rules_for_a_named_origin_are_asked_before_those_for_all() -> None:
    everyone = FlowRule("a", 0)
    named = [FlowRule("a", 0, limit_app="app"), FlowRule("a", 0, limit_app="other")]
    chain = SlotChain([everyone, *named])
    asked = [chain.enter(ORIGIN, "a", origin=origin) for origin in ("app", "another", "")]
    assert [entry.blocked_by for entry in asked] == [*named, everyone]
    # These two names are no origins: a caller that has one is like a caller without.
    for origin in ("default", "other"):
        assert chain.enter(ORIGIN, "a", origin=origin).blocked_by == everyone


def test_a_breaker_is_asked_after_the_wait_of_a_paced_call() -> None:
    degrade = DegradeRule("a", 0, grade="error_count", time_window_s=1, min_request_amount=1)
    pace = FlowRule("a", 2, control_behavior="rate_limiter", max_queueing_time_ms=1000)
    chain = SlotChain([pace, degrade])
    chain.enter(ORIGIN, "a").exit(ORIGIN, error=True)
    waiting = [chain.enter(ORIGIN + 10, "a") for _ in range(2)]
    assert [entry.resume_at - ORIGIN for entry in waiting] == [500, 1000]
    assert waiting[0].resume(ORIGIN + 500).blocked_by == degrade
    assert waiting[1].resume(ORIGIN + 1000).state == "passed"  # the probe


def test_a_borrowed_pass_leaves_the_chain_past_an_open_breaker() -> None:
    degrade = DegradeRule("a", 0, grade="error_count", time_window_s=9, min_request_amount=1)
    chain = SlotChain([FlowRule("a", 1), degrade])
    heard: list[object] = []
    chain.add_breaker_observer(lambda *change: heard.append(change))
    chain.enter(ORIGIN, "a").exit(ORIGIN, error=True)
    assert heard == [(degrade, "closed", "open", 1.0)]
    assert chain.enter(ORIGIN + 501, "a").blocked_by == FlowRule("a", 1)
    entry = chain.enter(ORIGIN + 501, "a", prioritized=True)
    assert entry.state == "waiting"
    assert entry.resume(ORIGIN + 1000).state == "passed"
    assert chain.enter(ORIGIN + 2000, "a").blocked_by == degrade


def test_resources_above_the_bound_are_neither_checked_nor_counted_but_told() -> None:
    chain = SlotChain([FlowRule("b", 0)], max_resources=1)
    assert chain.enter(ORIGIN, "a")
    entry = chain.enter(ORIGIN, "b", entry_type="IN")
    assert entry
    entry.exit(ORIGIN)
    assert entry.state == "exited"
    assert chain.cluster_node("b") is None
    assert chain.entry_node.total_success(ORIGIN) == 0
    assert chain.unchecked_total == 1
