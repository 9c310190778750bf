"""The blocking Redis store: a connection per thread and node, calls of one key shared.

Threads that call one key at the same time share script calls. The first goes alone; those that
come while it is away gather, and go together as one call with `times`:

    t1  ask ----------> reply
    t2      gather .... ask x3 ----> reply, one part each
    t3        gather ..
    t4          gather
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

from ....core.clock import Clock
from ....core.decision import Decision, Source
from ....core.errors import ConfigurationError, DistwindowError, StoreTimeout
from ....core.interrupts import is_interruption
from ....operations.acquire import admitted, decide
from ....protocol.commands import Acquire, Command, Verdict, each_of
from ..attempts import Lost, Send, call
from ..outcome import broken, is_unknown, late
from ..timeouts import OutOfTime, within
from ..topology import ClusterPlace, Node, OnePlace, Place, Terms
from .call_sharing import Group, Member, Part
from .connection import Link

Reply = TypeVar("Reply")


_TRIPS = 3
"""Calls are shared only where so many round trips fit into the timeout: whoever joins waits for the
rest of the call ahead, and then for its own.
"""

_MOST_IDLE = 16
"""Connections that ended threads have left, and that are kept for new threads."""

_TOGETHER = 256
"""Commands of an exchange that are written at once: what is under way has to be done in time."""


class RedisStore:
    """A Redis server, primary or cluster. Safe to share between threads; survives `fork`.

    `find` names the place; it may connect (a cluster's map), so it is called with the first
    command, and again after it failed.
    """

    source: Source = "store"

    def __init__(self, find: Callable[[], Place], terms: Terms) -> None:
        self.clock: Clock = terms.clock
        self._monotonic = terms.clock.monotonic
        self._timeout = terms.timeout
        self._find = find
        self._terms = terms
        self._closed = False
        self.unknown_total = 0
        self._begin()

    def after_fork(self) -> None:
        """The child has its own connections, and locks that nobody holds."""
        self._finalizer()  # here only: the parent's connections go on
        self._begin()

    def _begin(self) -> None:
        self._place: Place | None = None
        self._mine = _Mine()
        self._links: dict[weakref.ref[_Token], dict[Node, Link]] = {}
        """The links of each thread, by its token."""
        self._ended: SimpleQueue[weakref.ref[_Token]] = SimpleQueue()
        """The tokens of threads that have ended."""
        self._idle: list[Link] = []
        """What ended threads have left for new ones."""
        self._finalizer = weakref.finalize(self, _close_all, self._links, self._idle)
        self._finalizer.atexit = False
        # Re-entrant, because a signal handler may call the limiter it has interrupted.
        self._lock = threading.RLock()
        self._rtt = 0.0
        """Seconds that the last call has taken."""
        self._away: dict[Acquire, float | Group] = {}
        """The deadline of a key's call that is under way, or the group that waits for it."""

    def attempt(self, command: Acquire, deadline: float | None = None) -> Decision:
        mine = self._mine
        if mine.busy:
            return decide(command, self._nested(command), "store")
        try:
            mine.busy = True
            return self._attempt(command, deadline)
        except BaseException as exc:
            self._count(exc)
            raise
        finally:
            mine.busy = False

    def execute(self, command: Command[Reply], deadline: float | None = None) -> Reply:
        mine = self._mine
        if mine.busy:
            return self._nested(command)
        try:
            mine.busy = True
            if deadline is None:
                deadline = self._monotonic() + self._timeout
            return self._alone(command, deadline)
        except BaseException as exc:
            self._count(exc)
            raise
        finally:
            mine.busy = False

    def exchange(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        """For each node one write and one wait, for so many commands at a time; each time with a
        deadline of its own where none is given.
        """
        answers: list[Any] = [None] * len(commands)
        away: set[Node] = set()
        mine = self._mine
        busy, links, direct = mine.busy, mine.links, mine.direct
        if busy:  # out of a signal handler, see `_nested`
            mine.links, mine.direct = {}, None
        try:
            mine.busy = True
            for node, batch in self._by_node(commands, answers, deadline):
                if node in away:
                    why = broken(node.name, "it did not answer just now", sent=False)
                    for number in batch:
                        answers[number] = why
                elif not self._pipeline(node, batch, commands, answers, deadline):
                    away.add(node)
        finally:
            mine.busy = busy
            if busy:
                self._end_nested(links, direct)
        return answers

    def _by_node(
        self, commands: Sequence[Command[Any]], answers: list[Any], deadline: float | None
    ) -> Iterator[tuple[Node, list[int]]]:
        """The numbers of the commands of each node, so many at a time."""
        nodes: dict[Node, list[int]] = {}
        for number, command in enumerate(commands):
            try:
                self._check_open()
                place = self._place or self._found(deadline or self._monotonic() + self._timeout)
                nodes.setdefault(place.node_of(command), []).append(number)
            except DistwindowError as exc:
                answers[number] = exc
        for node, numbers in nodes.items():
            for first in range(0, len(numbers), _TOGETHER):
                yield node, numbers[first : first + _TOGETHER]

    def _pipeline(
        self,
        node: Node,
        batch: list[int],
        commands: Sequence[Command[Any]],
        answers: list[Any],
        deadline: float | None,
    ) -> bool:
        """Have the commands of these numbers answered; is the node there?"""
        place = self._place
        assert place is not None
        if deadline is None:
            deadline = self._monotonic() + self._timeout
        sent = [commands[i] for i in batch]
        if self._terms.client_clock:
            now = self.clock.now_ms()
            sent = [c.at(now) if c.now_ms is None else c for c in sent]
        sends = [Send(node, command, deadline) for command in sent]
        try:
            raws = self._link(node).converse(sends, deadline)
        except DistwindowError as exc:
            raws = [exc] * len(batch)
        for number, command, send, raw in zip(batch, sent, sends, raws, strict=True):
            if isinstance(raw, DistwindowError):
                answers[number] = raw
                continue
            dialogue = call(command, place, self._terms, deadline, under_way=send)
            next(dialogue)
            try:
                answers[number] = self._drive(dialogue, raw, place, deadline)
            except DistwindowError as exc:
                answers[number] = exc
        return not isinstance(raws[-1], (Lost, DistwindowError))

    def _nested(self, command: Command[Reply]) -> Reply:
        """A call out of a signal handler, in the midst of another call of this thread: it must not
        touch the connections of that one, nor wait for it.
        """
        mine = self._mine
        links, direct = mine.links, mine.direct
        mine.links, mine.direct = {}, None
        try:
            return self._alone(command, self._monotonic() + self._timeout)
        except BaseException as exc:
            self._count(exc)
            raise
        finally:
            self._end_nested(links, direct)

    def _end_nested(self, links: dict[Node, Link], direct: Link | None) -> None:
        """Give the interrupted call its connections back, and close those of the nested one."""
        mine = self._mine
        opened = mine.links
        mine.links, mine.direct = links, direct
        for link in opened.values():
            link.close()

    def _count(self, exc: BaseException) -> None:
        if isinstance(exc, StoreTimeout):
            self._rtt = self._timeout
        if is_unknown(exc):
            with self._lock:
                self.unknown_total += 1

    def _attempt(self, command: Acquire, deadline: float | None) -> Decision:
        began = self._monotonic()
        if deadline is None:
            deadline = began + self._timeout
        if command.tell or self._rtt > self._timeout / _TRIPS or deadline - began < self._rtt * 2:
            part = self._ask(command, began, deadline)
            self._rtt = self._monotonic() - began
            return _decided(command, part)
        member: Member | None = None
        try:
            with self._lock:
                ahead = self._away.get(command)
                if ahead is None:
                    self._away[command] = deadline
            if ahead is not None:
                member = Member(deadline)
                if not self._join(command, member, began):
                    member = None
            if member is None:
                return _decided(command, self._ask(command, began, deadline))
            return _decided(command, self._gathered(command, member))
        except BaseException as exc:
            if member is not None and member.group is not None:
                self._leave(command, member, exc)
            raise
        finally:
            # Twice, where a signal handler raises in here: what is left away stops all others.
            if member is None or member.group is None:
                try:
                    self._hand_over(command, deadline)
                except BaseException:
                    self._hand_over(command, deadline)
                    raise

    def close(self) -> None:
        """Close all connections. Calls after this raise `ConfigurationError`."""
        with self._lock:
            self._closed = True
            self._mine = _Mine()  # so that no thread has a connection that it need not ask for
        _close_all(self._links, self._idle)
        self._finalizer.detach()
        if self._place is not None:
            _released(self._place)

    def _ask(self, command: Acquire, began: float, deadline: float) -> Part:
        """Make a call. On a connection that stands, with the usual reply (one ring, all admitted),
        this is all there is; whatever else comes is for `call` to judge.
        """
        link = self._mine.direct
        if link is None or not link.ready(began):
            return self._alone(command, deadline)
        clock = link.node.clock
        guard = clock.guard(clock.until_ms(deadline))
        raw = link.say(command.frame(guard), deadline)
        if type(raw) is list and len(raw) == 3 and raw[0] == guard and raw[1] >= 0:
            self._rtt = clock.learn(raw[2]) - began
            return raw[1], raw[2]
        place = self._place
        assert place is not None
        send = Send(link.node, command, deadline, guard=guard)
        dialogue = call(command, place, self._terms, deadline, under_way=send)
        next(dialogue)
        return self._drive(dialogue, raw, place, deadline)

    def _join(self, command: Acquire, member: Member, now: float) -> bool:
        """Gather behind the call ahead. False where there is none any more, or it should long be
        back, so that its caller must have been killed by a signal handler's exception, or its
        thread by the interpreter: the member's call is the one that is away then.
        """
        with self._lock:
            ahead = self._away.get(command)
            until = ahead.ahead if isinstance(ahead, Group) else ahead
            if ahead is None or until is None or now > until:
                self._away[command] = member.deadline
                return False
            if not isinstance(ahead, Group):
                ahead = self._away[command] = Group(until)
            ahead.join(member)
            return True

    def _gathered(self, command: Acquire, member: Member) -> Part:
        """As a member of a group: be its leader, or get one's part from whoever is."""
        group = member.group
        assert group is not None
        if member.wait(self._monotonic()):
            if group.leader is member:
                self._lead(command, group, member.deadline)
            return member.part()
        raise late("the store", self._timeout, sent=not self._leave(command, member, None))

    def _lead(self, command: Acquire, group: Group, deadline: float) -> None:
        """Make the call of a group that has gone, and deal the parts out."""
        began = self._monotonic()
        if began >= deadline:
            raise late("the store", self._timeout, sent=False)
        times = len(group.gone)
        shared = command.shared(times)
        group.asked = True
        part = self._ask(shared, began, deadline)
        costs = [charge.cost for charge in command.charges]
        if isinstance(part, Verdict):
            group.deal(each_of(part, times, costs))
        else:
            left, now = part
            group.deal([(left + costs[0] * after, now) for after in range(times - 1, -1, -1)])
        self._hand_over(command, deadline)

    def _leave(self, command: Acquire, member: Member, why: BaseException | None) -> bool:
        """A member ends without a part; True when it has surely not been asked for. What a leader
        leaves undone is done here.
        """
        group = member.group
        assert group is not None
        with self._lock:
            unsent = group.quit(member)
            heir = self._heir(command, member)
        if heir is not None:
            heir.wake()
        elif group.leader is member:
            group.fail(why)
            self._hand_over(command, member.deadline)
        return unsent

    def _heir(self, command: Acquire, leader: Member) -> Member | None:
        """Who leads in the place of a leader that leaves without having asked."""
        group, ahead = leader.group, self._away.get(command)
        assert group is not None
        if group.leader is not leader or group.asked or len(group.gone) < 2:
            return None
        heir = group.gone[1]
        if ahead is leader.deadline:
            self._away[command] = heir.deadline
        elif isinstance(ahead, Group) and ahead.ahead is leader.deadline:
            ahead.ahead = heir.deadline
        else:
            return None
        del group.gone[0]
        group.leader = heir
        return heir

    def _hand_over(self, command: Acquire, deadline: float) -> None:
        """The call of that deadline has returned: the group that gathered meanwhile may go."""
        with self._lock:
            ahead = self._away.get(command)
            if ahead is deadline:
                del self._away[command]
            elif isinstance(ahead, Group) and ahead.ahead is deadline:
                leader = ahead.go()
                if leader is None:
                    del self._away[command]
                else:
                    # Woken first: where a signal handler raises in between, this is done again.
                    leader.wake()
                    self._away[command] = leader.deadline

    def _alone(self, command: Command[Reply], deadline: float) -> Reply:
        self._check_open()
        place = self._place or self._found(deadline)
        return self._drive(call(command, place, self._terms, deadline), None, place, deadline)

    def _drive(
        self, dialogue: Generator[Send, Any, Reply], answer: Any, place: Place, deadline: float
    ) -> Reply:
        try:
            while True:
                send = dialogue.send(answer)
                if isinstance(place, ClusterPlace) and place.due():
                    threading.Thread(target=_refresh, args=(place,), daemon=True).start()
                answer = self._link(send.node).exchange(send, deadline)
        except StopIteration as end:
            if is_interruption(end):
                raise
            reply: Reply = end.value
            return reply

    def _found(self, deadline: float) -> Place:
        try:
            place = within(deadline - self._monotonic(), self._find, _released)
        except OutOfTime:
            raise late("the store", self._timeout, sent=False) from None
        with self._lock:
            kept = self._place = self._place or place  # another thread may have been first
        if kept is not place:
            _released(place)
        return kept

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigurationError("this limiter is closed; make a new one")

    def _link(self, node: Node) -> Link:
        mine = self._mine
        link = mine.links.get(node)
        if link is None:
            with self._lock:
                self._check_open()
                if mine.token is None:
                    token = _Token()
                    self._links[weakref.ref(token, self._ended.put)] = mine.own
                    mine.token = token
                link = mine.links[node] = self._left_over(node) or Link(node, self.clock)
            if isinstance(self._place, OnePlace) and not self._terms.client_clock:
                mine.direct = link
        return link

    def _left_over(self, node: Node) -> Link | None:
        """A link to `node` of a thread that has ended. Under the lock."""
        while not self._ended.empty():
            # In this order nothing is lost where a signal handler raises: at the worst a link stays
            # in `_links`, and is closed with the limiter.
            token = self._ended.get()
            self._idle += self._links.get(token, {}).values()
            self._links.pop(token, None)
            while len(self._idle) > _MOST_IDLE:
                self._idle[0].close()
                self._idle.pop(0)
        for link in self._idle:
            if link.node is node:
                self._idle.remove(link)
                return link
        return None


def _decided(command: Acquire, part: Part) -> Decision:
    if isinstance(part, Verdict):
        return decide(command, part, "store")
    left, now = part
    limit = command.charges[0].limit
    width = limit.bucket_ms
    return admitted(command, 0, left, limit.span * width - now % width, now, "store")


class _Token:
    """Kept by a thread alone, so that it goes when the thread ends. Its weak reference is told of
    that: by a call of C, as a destructor would be Python code, and Python drops what a signal
    handler raises in a destructor.
    """

    __slots__ = ("__weakref__",)


class _Mine(threading.local):
    """A thread's own links."""

    def __init__(self) -> None:
        self.busy = False
        """A call is under way."""
        self.links: dict[Node, Link] = {}
        self.own = self.links
        """`links`, but for calls out of a signal handler, which have others."""
        self.direct: Link | None = None
        """The one that all calls take, where there is one server."""
        self.token: _Token | None = None


def _close_all(threads: dict[Any, dict[Node, Link]], idle: list[Link]) -> None:
    """Close every link, as the limiter is closed, or nobody has it any more."""
    for links in list(threads.values()):
        for link in list(links.values()):
            link.close()
    for link in idle:
        link.close()


def _released(place: Place) -> None:
    if place.release is not None:
        place.release()


def _refresh(place: ClusterPlace) -> None:
    try:
        place.client.nodes_manager.initialize()
    except Exception:  # whatever it is: the map stays stale, and is tried again in a second
        return
    place.refreshed()
