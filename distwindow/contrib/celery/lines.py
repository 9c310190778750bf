"""The limited tasks that wait in a worker: what waits where, in which order, until when.

There is a line for each task name and limit key (or keys, if the task has several), in the order
of priority, and of arrival within a priority. Only the first task of a line asks the limiter, so
a line costs one call per permit and one per refusal, however long it is. (What is sent back for
want of room may cost one more: see `Gate._turn_s`.) Nothing here knows Celery, and time is an
argument.

    state of a line   what it waits for            leaves it by
    ready             its turn to ask              pop_ready    -> asking
    asking            a slot of the pool, then     ask_again    -> ready
                      the limiter's answer         wait, wait_for, wait_behind -> waiting
    waiting           the moment that the limiter  advance      -> ready
                      has named                    stop_waiting -> ready
    gone              nothing: its last task has left, or `clear` was called

An empty line is gone in every state. The next task of that name and key makes a new line.

Lines may have a limit in common: one for all tenants beside one for each. Thousands of them would
ask when it has one permit again. So a limit that is used up has a line of lines, `UsedUp`, of
which only the first asks when its moment comes, and the next one when that has its answer.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from ...ring.clock import NEVER
from ...ring.key import AnyKey
from ...ring.limit import Limit
from ..tasks import Item, keys_of

T = TypeVar("T")

_MOST_LEFT = 8
"""So many more tasks than twice those of a line are kept in it after they have left."""
_FIRST = -math.inf
"""The rank of the task whose permits are counted: none is put before it."""
_SPARE = 64
"""How many cancelled moments are kept beyond as many as there are live ones."""

State = Literal["ready", "asking", "waiting", "gone"]


class TaskQueues(Generic[T]):
    """All lines of one worker. Not safe to share between threads."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, AnyKey | tuple[AnyKey, ...]], TaskQueue[T]] = {}
        self._ready: deque[TaskQueue[T]] = deque()
        self._used_up: dict[Permits, UsedUp[T]] = {}
        self._due: Schedule[TaskQueue[T] | UsedUp[T]] = Schedule()
        self._kept_until: Schedule[ParkedTask[T]] = Schedule()
        self.size = 0
        """The number of tasks in all lines."""

    def __iter__(self) -> Iterator[TaskQueue[T]]:
        return iter(list(self._lines.values()))

    def __len__(self) -> int:
        return len(self._lines)

    def add(
        self, task: str, item: T, items: Sequence[Item], kept_until_s: float, rank: float = 0
    ) -> ParkedTask[T]:
        """Put a task into its line, behind those of its rank. It is overdue at `kept_until_s`, and
        `items` is what it is charged.
        """
        key = keys_of(items)
        line = self._lines.get((task, key))
        if line is None:
            line = self._lines[task, key] = TaskQueue(task, key)
            self._ready.append(line)
        if line.entries and line.entries[-1].items == items:
            items = line.entries[-1].items  # one copy for the many that cost the same
        entry = ParkedTask(line, item, items, kept_until_s, rank)
        line.entries.insert(bisect_right(line.entries, rank, key=lambda one: one.rank), entry)
        line.size += 1
        self.keep_until(entry, kept_until_s)
        self.size += 1
        return entry

    def pop_ready(self) -> TaskQueue[T] | None:
        """Return the line whose turn it is to ask, if there is one. Lines take turns."""
        while self._ready:
            line = self._ready.popleft()
            if line.state == "ready":
                line.state = "asking"
                return line
        return None

    def remove(self, entry: ParkedTask[T]) -> None:
        """Take a task out of its line, wherever it stands."""
        if entry.left:
            return
        entry.left = True
        self._kept_until.cancel(entry)
        self.size -= 1
        line = entry.line
        line.size -= 1
        if len(line.entries) > 2 * line.size + _MOST_LEFT:
            line.entries = [entry for entry in line.entries if not entry.left]
        if line.head is None:
            self._drop(line)

    def ask_again(self, line: TaskQueue[T]) -> None:
        """Return a line that was asking to those that are ready, behind the other lines."""
        if line.state == "asking":
            self._make_ready(line)

    def _make_ready(self, line: TaskQueue[T]) -> None:
        line.state = "ready"
        self._ready.append(line)

    def wait(self, line: TaskQueue[T], until_s: float) -> None:
        """Put a line that was asking among those that wait, for a moment of its own."""
        self.has_answer(line)
        line.state = "waiting"
        self._due.set(line, until_s)

    def use_up(self, permits: Permits, until_s: float) -> None:
        """Note that these permits are not there before `until_s`."""
        used_up = self._used_up.get(permits)
        if used_up is None:
            used_up = self._used_up[permits] = UsedUp(permits)
        used_up.until_s, used_up.has_come = until_s, False
        self._due.set(used_up, until_s)

    def is_waited_for(self, permits: Permits) -> bool:
        """True if these permits are used up, or were, and lines have not all asked again."""
        return permits in self._used_up

    def wait_for(self, line: TaskQueue[T], permits: Permits) -> None:
        """Put a line that was asking before the others that wait for what is used up."""
        self.has_answer(line)
        self._join(line, self._used_up[permits])
        self._used_up[permits].lines.move_to_end(line, last=False)

    def wait_behind(self, line: TaskQueue[T], items: Sequence[Item]) -> float | None:
        """Put a line that was asking behind the others that wait for permits which its first task
        needs. Return when these are there again; None if none are used up, and it may ask.
        """
        for key, limits, cost in items:
            for limit in limits:
                used_up = self._used_up.get(Permits(key, limit, cost))
                if used_up is not None and used_up is not line.used_up:
                    self.has_answer(line)
                    self._join(line, used_up)
                    return used_up.until_s
        return None

    def has_answer(self, line: TaskQueue[T]) -> None:
        """Let the next one ask of the lines that wait for the same, if this one has asked first."""
        used_up, line.used_up = line.used_up, None
        if used_up is not None and used_up.has_come:
            self._let_first_ask(used_up)

    def _join(self, line: TaskQueue[T], used_up: UsedUp[T]) -> None:
        line.state = "waiting"
        line.used_up = used_up
        used_up.lines[line] = None

    def _let_first_ask(self, used_up: UsedUp[T]) -> None:
        if not used_up.lines:
            del self._used_up[used_up.permits]
            return
        line, _ = used_up.lines.popitem(last=False)
        self._make_ready(line)

    def park(self, line: TaskQueue[T]) -> list[ParkedTask[T]]:
        """Mark all tasks of `line` as parked, and return those that were not."""
        newly = [entry for entry in line.entries if not (entry.parked or entry.left)]
        for entry in newly:
            entry.parked = True
        return newly

    def advance(self, now_s: float) -> None:
        """Move the lines to those that are ready whose moment has come by `now_s`."""
        while (due := self._due.pop_due(now_s)) is not None:
            if isinstance(due, UsedUp):
                due.has_come = True
                self._let_first_ask(due)
            else:
                self._make_ready(due)

    def stop_waiting(self, line: TaskQueue[T]) -> None:
        """Move a line to those that are ready, if it waits."""
        if line.state == "waiting":
            self._cancel_wait(line)
            self._make_ready(line)

    def _cancel_wait(self, line: TaskQueue[T]) -> None:
        if line.used_up is None:
            self._due.cancel(line)
        else:
            del line.used_up.lines[line]
            line.used_up = None

    @property
    def any_ready(self) -> bool:
        """True if a line may ask now; at times also if the last one has just gone."""
        return bool(self._ready)

    def pop_overdue(self, now_s: float) -> ParkedTask[T] | None:
        """Return a task that may be kept no longer, if there is one. It stays in its line until
        `remove`; `keep_until` names another moment.
        """
        return self._kept_until.pop_due(now_s)

    def keep_until(self, entry: ParkedTask[T], at_s: float) -> None:
        """Set the time at which `entry` is overdue to `at_s`; never, if that is infinite."""
        if not entry.left and at_s < math.inf:
            self._kept_until.set(entry, at_s)

    def next_s(self) -> float:
        """Return when `advance` or `pop_overdue` will have something to do; `NEVER` if nothing."""
        return min(self._due.next_s(), self._kept_until.next_s())

    def clear(self) -> list[T]:
        """Drop all tasks, and return them."""
        dropped = []
        for line in self._lines.values():
            line.state = "gone"
            dropped += [entry.item for entry in line.entries if not entry.left]
            for entry in line.entries:
                entry.left = True
        self._lines, self._ready, self._used_up = {}, deque(), {}
        self._due, self._kept_until = Schedule(), Schedule()
        self.size = 0
        return dropped

    def _drop(self, line: TaskQueue[T]) -> None:
        if line.state == "waiting":
            self._cancel_wait(line)
        else:
            self.has_answer(line)
        line.state = "gone"
        del self._lines[line.task, line.key]


@dataclass(slots=True, eq=False, repr=False)
class TaskQueue(Generic[T]):
    """The tasks of one name and one key, or the same keys."""

    task: str
    key: AnyKey | tuple[AnyKey, ...]
    used_up: UsedUp[T] | None = None
    """What it waits for, or asks for as the first of those that have waited."""
    state: State = "ready"
    entries: list[ParkedTask[T]] = field(default_factory=list)
    """In their order; some have left already."""
    size: int = 0
    """The number of those that have not left."""
    began_s: float | None = None
    """When the line was refused for the first time."""
    started: int = 0
    failures: int = 0
    """How many asks in a row have failed, though the store answers."""
    waits_for_store: bool = False
    """True if the store did not answer when it asked."""
    next_turn_s: float = 0.0
    """Until when the tasks that were sent back have turns."""

    @property
    def shown_key(self) -> str:
        """The key for people."""
        return ", ".join(map(str, self.key)) if isinstance(self.key, tuple) else str(self.key)

    @property
    def shown_limit(self) -> str | None:
        """The limit that is used up, and its key, for people; None if it waits for none."""
        if self.used_up is None:
            return None
        key, limit, _ = self.used_up.permits
        return f"{limit} for {key!s}"

    @property
    def head(self) -> ParkedTask[T] | None:
        """The first task; None if all have left."""
        entries = self.entries
        left = 0
        while left < len(entries) and entries[left].left:
            left += 1
        del entries[:left]
        return entries[0] if entries else None

    @property
    def last_with_room(self) -> ParkedTask[T] | None:
        """The last task that is to stay, and may still be sent back; None if there is none."""
        with_room = (one for one in reversed(self.entries) if one.has_room and not one.left)
        last = next(with_room, None)
        return None if last is None or last.admitted else last


@dataclass(slots=True, eq=False, repr=False)
class ParkedTask(Generic[T]):
    """One task in a line."""

    line: TaskQueue[T]
    item: T
    items: Sequence[Item]
    """What it is charged."""
    kept_until_s: float
    rank: float
    """Its place in the line: the smallest is first."""
    parked: bool = False
    """True once its line has waited for its limit."""
    has_room: bool = True
    """False if it is to be sent back because there are too many."""
    left: bool = False
    expires_s: float = math.inf
    """When it is to be looked at because it expires."""

    @property
    def admitted(self) -> bool:
        """True if its permits are counted, and only the moment of a paced limit is to come."""
        return self.rank == _FIRST

    def cost_of(self, permits: Permits) -> int:
        """Return its cost under the limit of `permits`."""
        return next(
            cost
            for key, limits, cost in self.items
            if key == permits.key and permits.limit in limits
        )

    def admit(self) -> None:
        """Keep it the first of its line, as which it was admitted."""
        self.rank = _FIRST


class Permits(NamedTuple):
    """So many permits of a limit of one key."""

    key: AnyKey
    limit: Limit
    cost: int


@dataclass(slots=True, eq=False, repr=False)
class UsedUp(Generic[T]):
    """Permits that are not there before a moment comes, and the lines that wait for them. It exists
    until its moment has come, and then as long as one of its lines is ready or asks.
    """

    permits: Permits
    until_s: float = 0.0
    has_come: bool = False
    """True: `until_s` is over, and the first of the lines asks."""
    lines: OrderedDict[TaskQueue[T], None] = field(default_factory=OrderedDict)


class Schedule(Generic[T]):
    """At most one moment for each item, in seconds of any monotonic clock. A cancelled moment stays
    in the heap until it comes, or until such moments are more than half of the heap: then the heap
    is built again without them.
    """

    def __init__(self) -> None:
        self._heap: list[list[Any]] = []
        """Moments, each with a number, so that no two are equal, and the item; None: cancelled."""
        self._moments: dict[T, list[Any]] = {}
        """Those of the heap that are not cancelled."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._moments)

    def set(self, item: T, at_s: float) -> None:
        """Set the one time at which `item` is due to `at_s`."""
        self.cancel(item)
        moment = self._moments[item] = [at_s, next(self._numbers), item]
        heapq.heappush(self._heap, moment)

    def cancel(self, item: T) -> None:
        moment = self._moments.pop(item, None)
        if moment is not None:
            moment[2] = None  # a request may be large
        if len(self._heap) > 2 * len(self._moments) + _SPARE:
            self._heap = sorted(self._moments.values())

    def pop_due(self, now_s: float) -> T | None:
        """Remove and return the item whose moment came first, if it has come by `now_s`."""
        if self.next_s() > now_s:
            return None
        item: T = heapq.heappop(self._heap)[2]
        del self._moments[item]
        return item

    def next_s(self) -> float:
        """Return the first moment; `NEVER` if nothing is scheduled."""
        while self._heap and self._heap[0][2] is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else NEVER
