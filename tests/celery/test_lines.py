"""The lines of waiting tasks against a model that keeps plain lists."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from distwindow import Limit
from distwindow.contrib.celery.lines import ParkedTask, Permits, Schedule, TaskQueue, TaskQueues
from distwindow.ring.clock import NEVER

NAMES = [("fetch", "a"), ("fetch", "b"), ("send", "a")]
Name = tuple[str, str]
LIMITS = (Limit("5/second"),)


def name_of(line: TaskQueue[int]) -> Name:
    assert isinstance(line.key, tuple)
    return line.task, str(line.key[0])


class LinesAgainstAModel(RuleBasedStateMachine):
    """The model: a list of numbers for each name, in which state it is, and until when. All have
    the key "all" beside their own; what is used up is a list of names, and until when.
    """

    @initialize()
    def begin(self) -> None:
        self.lines: TaskQueues[int] = TaskQueues()
        self.now_s = 0.0
        self.number = 0
        self.entries: dict[int, ParkedTask[int]] = {}
        self.queues: dict[Name, list[int]] = {}
        self.states: dict[Name, str] = {}
        self.until: dict[Name, float] = {}
        self.used_up: dict[str, list[Name]] = {}
        self.used_up_until: dict[str, float] = {}
        self.asks_first: dict[str, Name] = {}
        self.kept_until: dict[int, float] = {}
        self.asking: dict[Name, TaskQueue[int]] = {}
        self.left: list[int] = []

    @rule(
        name=st.sampled_from(NAMES),
        kept_s=st.sampled_from([3.0, 20.0, float("inf")]),
        rank=st.sampled_from([0, 0, 0, 3, 9]),
    )
    def add(self, name: Name, kept_s: float, rank: int) -> None:
        items = [(key, LIMITS, 1) for key in (name[1], "all")]
        entry = self.lines.add(name[0], self.number, items, self.now_s + kept_s, rank)
        self.entries[self.number] = entry
        queue = self.queues.setdefault(name, [])
        queue.append(self.number)
        queue.sort(key=lambda number: self.entries[number].rank)  # stable: by arrival in a rank
        self.states.setdefault(name, "ready")
        self.kept_until[self.number] = self.now_s + kept_s
        self.number += 1

    @rule()
    def pop_ready(self) -> None:
        line = self.lines.pop_ready()
        if line is None:
            assert "ready" not in self.states.values()
            return
        name = name_of(line)
        assert self.states[name] == "ready"
        head = line.head
        assert head is not None
        assert head.item == self.queues[name][0]
        self.states[name] = "asking"
        self.asking[name] = line

    @precondition(lambda self: self.asking)
    @rule(data=st.data(), wait_s=st.sampled_from([None, 0.0, 1.0, 7.0]))
    def answer(self, data: st.DataObject, wait_s: float | None) -> None:
        """The first task of a line starts, or the line waits."""
        name = data.draw(st.sampled_from(sorted(self.asking)))
        line = self.asking.pop(name)
        head = line.head
        assert head is not None
        if wait_s is None:
            self.remove(name, head)
            self.lines.has_answer(line)
            self.lines.ask_again(line)
            if name in self.states:
                self.has_answer(name)
                self.states[name] = "ready"
        else:
            if wait_s == 7.0:
                head.admit()  # under a paced limit: it stays the first
            self.lines.wait(line, self.now_s + wait_s)
            self.has_answer(name)
            self.lines.park(line)
            self.states[name] = "waiting"
            self.until[name] = self.now_s + wait_s

    @precondition(lambda self: self.asking)
    @rule(data=st.data(), is_common=st.booleans(), wait_s=st.sampled_from([0.0, 1.0, 7.0]))
    def refuse(self, data: st.DataObject, is_common: bool, wait_s: float) -> None:
        """A limit refuses the first task of a line: its own, or that of all."""
        name = data.draw(st.sampled_from(sorted(self.asking)))
        line, key = self.asking.pop(name), "all" if is_common else name[1]
        permits = Permits(key, LIMITS[0], 1)
        self.lines.use_up(permits, self.now_s + wait_s)
        self.lines.wait_for(line, permits)
        self.used_up.setdefault(key, [])
        self.used_up_until[key] = self.now_s + wait_s
        self.has_answer(name)
        self.used_up[key].insert(0, name)
        self.states[name] = "waiting"
        assert self.lines.is_waited_for(permits)

    @precondition(lambda self: self.asking)
    @rule(data=st.data())
    def wait_behind(self, data: st.DataObject) -> None:
        """A line waits for what is known to be used up, behind others, and does not ask."""
        name = data.draw(st.sampled_from(sorted(self.asking)))
        line = self.asking[name]
        until_s = self.lines.wait_behind(line, self.entries[self.queues[name][0]].items)
        behind = [
            key
            for key in (name[1], "all")
            if key in self.used_up and self.asks_first.get(key) != name
        ]
        assert (until_s is not None) == bool(behind)
        if behind:
            assert until_s == self.used_up_until.get(behind[0], until_s)
            del self.asking[name]
            self.has_answer(name)
            self.used_up[behind[0]].append(name)
            self.states[name] = "waiting"

    def has_answer(self, name: Name) -> None:
        for key in [key for key, first in self.asks_first.items() if first == name]:
            del self.asks_first[key]
            if key not in self.used_up_until:
                self.let_first_ask(key)

    def let_first_ask(self, key: str) -> None:
        if not self.used_up[key]:
            del self.used_up[key]
            return
        first = self.asks_first[key] = self.used_up[key].pop(0)
        self.states[first] = "ready"

    def end_wait(self, name: Name) -> None:
        self.until.pop(name, None)
        for waiting in self.used_up.values():
            if name in waiting:
                waiting.remove(name)

    def remove(self, name: Name, entry: ParkedTask[int]) -> None:
        self.lines.remove(entry)
        self.left.append(entry.item)
        self.queues[name].remove(entry.item)
        self.kept_until.pop(entry.item, None)
        if not self.queues[name]:
            del self.queues[name], self.states[name]
            self.end_wait(name)
            self.asking.pop(name, None)
            self.has_answer(name)

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 5.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.lines.advance(self.now_s)
        for name, until_s in list(self.until.items()):
            if until_s <= self.now_s:
                del self.until[name]
                self.states[name] = "ready"
        for key, until_s in list(self.used_up_until.items()):
            if until_s <= self.now_s:
                del self.used_up_until[key]
                self.let_first_ask(key)

    @rule(send=st.booleans())
    def pop_overdue(self, send: bool) -> None:
        entry = self.lines.pop_overdue(self.now_s)
        overdue = {n for n, at_s in self.kept_until.items() if at_s <= self.now_s}
        if entry is None:
            assert not overdue
            return
        assert entry.item in overdue
        if send:
            self.remove(name_of(entry.line), entry)
        else:
            self.lines.keep_until(entry, self.now_s + 5.0)
            self.kept_until[entry.item] = self.now_s + 5.0

    @precondition(lambda self: self.queues)
    @rule(data=st.data())
    def stop_waiting(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.queues)))
        self.lines.stop_waiting(self.entries[self.queues[name][0]].line)
        if self.states[name] == "waiting":
            self.end_wait(name)
            self.states[name] = "ready"

    @rule()
    def clear(self) -> None:
        lines, dropped = list(self.lines), self.lines.clear()
        assert sorted(dropped) == sorted(n for queue in self.queues.values() for n in queue)
        assert all(line.state == "gone" for line in lines)
        assert all(entry.left for entry in self.entries.values())
        self.begin()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "lines"):
            return
        assert self.lines.size == sum(map(len, self.queues.values()))
        found = {name_of(line): line for line in self.lines}
        assert {name: line.state for name, line in found.items()} == self.states
        for name, line in found.items():
            waiting = [entry.item for entry in line.entries if not entry.left]
            assert waiting == self.queues[name]
        assert len(self.left) == len(set(self.left))
        assert {permits.key for permits in self.lines._used_up} == self.used_up.keys()
        shown = {name: line.shown_limit for name, line in found.items() if line.state == "waiting"}
        for key, names in self.used_up.items():
            assert key in self.used_up_until or key in self.asks_first  # somebody lets them ask
            assert {shown.pop(name) for name in names} <= {f"5/second for {key}"}
        assert set(shown.values()) <= {None}
        moments = [*self.until.values(), *self.used_up_until.values()]
        moments += [at_s for at_s in self.kept_until.values() if at_s < 1e300]
        assert self.lines.next_s() == min(moments, default=NEVER)


TestLines = LinesAgainstAModel.TestCase
TestLines.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("ends", ["refused by another limit", "waits for the store", "gone"])
def test_the_next_line_asks_when_the_first_has_its_answer(ends: str) -> None:
    lines: TaskQueues[str] = TaskQueues()
    of_all, entries = Permits("all", LIMITS[0], 1), {}
    for key in "abc":
        entries[key] = lines.add("fetch", key, [(key, LIMITS, 1), ("all", LIMITS, 1)], 99.0)
        line = lines.pop_ready()
        assert line is not None
        if key == "a":
            lines.use_up(of_all, 1.0)
            lines.wait_for(line, of_all)
        else:
            assert lines.wait_behind(line, entries[key].items) == 1.0
    assert lines.pop_ready() is None
    lines.advance(1.0)
    first = lines.pop_ready()
    assert first is entries["a"].line
    assert lines.pop_ready() is None  # while that one asks
    if ends == "gone":
        lines.remove(entries["a"])
    elif ends == "waits for the store":
        lines.wait(first, 9.0)
    else:
        lines.use_up(Permits("a", LIMITS[0], 1), 9.0)
        lines.wait_for(first, Permits("a", LIMITS[0], 1))
    assert lines.pop_ready() is entries["b"].line
    assert lines.pop_ready() is None


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["set", "cancel", "pop"]), st.integers(0, 5), st.integers(0, 9)),
        max_size=400,
    )
)
def test_a_schedule_is_a_dict_of_moments_and_stays_small(
    history: list[tuple[str, int, int]],
) -> None:
    items = [object() for _ in range(6)]
    schedule: Schedule[object] = Schedule()
    model: dict[int, int] = {}
    for action, item, at_s in history:
        if action == "set":
            schedule.set(items[item], at_s)
            model[item] = at_s
        elif action == "cancel":
            schedule.cancel(items[item])
            model.pop(item, None)
        else:
            found = schedule.pop_due(at_s)
            due = {n: moment for n, moment in model.items() if moment <= at_s}
            assert (found is None) == (not due)
            if found is not None:
                number = items.index(found)
                assert model.pop(number) == min(due.values())
        assert schedule.next_s() == min(model.values(), default=NEVER)
        assert len(schedule) == len(model)
        assert len(schedule._heap) <= 2 * 6 + 64 + 1
