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
from collections.abc import Callable
from typing import Any, TypeVar

from ...core.clock import Clock
from ...core.decision import Source
from ...core.errors import ConfigurationError
from ...wire.command import Acquire, Command, Verdict, each_of
from .call import Send, call
from .group import Group, Member
from .link import Link
from .outcome import late
from .patience import OutOfTime, within
from .place import ClusterPlace, Node, Place, Terms

Reply = TypeVar("Reply")


class RedisStore:
    """A Redis server, primary or cluster. Safe to share between threads; survives `fork`.

    `find` names the place; it may connect (a cluster's map), so it is called with the first
    command, and again after it failed.
    """

    source: Source = "store"

    def __init__(self, find: Callable[[], Place], terms: Terms) -> None:
        self.clock: Clock = terms.clock
        self._find = find
        self._terms = terms
        self._place: Place | None = None
        self._closed = False
        self.after_fork()

    def after_fork(self) -> None:
        """The child has its own connections, and locks that nobody holds."""
        self._local = threading.local()
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()  # a thread's end closes its own
        self._lock = threading.Lock()
        self._away: dict[Acquire, Group | None] = {}

    def execute(self, command: Command[Reply]) -> Reply:
        deadline = self.clock.monotonic() + self._terms.timeout
        if type(command) is Acquire and not command.tell:
            return self._together(command, deadline)  # type: ignore[return-value]  # a Verdict is its Reply
        return self._alone(command, deadline)

    def close(self) -> None:
        """Close all connections. Calls after this raise `ConfigurationError`."""
        self._closed = True
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close()

    def _together(self, command: Acquire, deadline: float) -> Verdict:
        with self._lock:
            if command not in self._away:
                self._away[command] = group = None
            else:
                group = self._away[command]
                if group is None:
                    group = self._away[command] = Group()
                member = group.join(deadline)
        if group is None:
            try:
                return self._alone(command, deadline)
            finally:
                self._come_back(command)
        return self._gathered(command, group, member)

    def _gathered(self, command: Acquire, group: Group, member: Member) -> Verdict:
        """As a member of a group: be its leader, or get one's part from whoever is."""
        woken = unsent = False
        try:
            woken = member.wait(self.clock.monotonic())
        finally:
            if not woken:  # out of time, or a signal handler raised
                with self._lock:
                    unsent = group.quit(member)
                if member.rank == 0:
                    self._come_back(command)
        if not woken:
            raise late("the store", self._terms.timeout, sent=not unsent)
        if member.rank == 0:
            try:
                times = len(group.gone)
                shared = command.shared(times) if times > 1 else command
                verdict = self._alone(shared, member.deadline)
                group.deal(each_of(verdict, times, [c.cost for c in command.charges]))
            except BaseException as exc:
                group.fail(exc)
                raise
            finally:
                self._come_back(command)
        return member.verdict()

    def _come_back(self, command: Acquire) -> None:
        """A call has returned: the group that gathered meanwhile may go."""
        with self._lock:
            group = self._away.get(command)
            if group is not None and group.go():
                self._away[command] = None
            else:
                self._away.pop(command, None)

    def _alone(self, command: Command[Reply], deadline: float) -> Reply:
        if self._closed:
            raise ConfigurationError("this limiter is closed; make a new one")
        place = self._place or self._found(deadline)
        dialogue = call(command, place, self._terms, deadline)
        try:
            send = next(dialogue)
            while True:
                send = dialogue.send(self._exchange(send, place, deadline))
        except StopIteration as end:
            reply: Reply = end.value
            return reply

    def _found(self, deadline: float) -> Place:
        try:
            place = within(deadline - self.clock.monotonic(), self._find, lambda place: None)
        except OutOfTime:
            raise late("the store", self._terms.timeout, sent=False) from None
        self._place = place
        return place

    def _exchange(self, send: Send, place: Place, deadline: float) -> Any:
        if isinstance(place, ClusterPlace) and place.due():
            threading.Thread(target=_refresh, args=(place,), daemon=True).start()
        return self._link(send.node).exchange(send, deadline)

    def _link(self, node: Node) -> Link:
        links: dict[Node, Link] | None = getattr(self._local, "links", None)
        if links is None:
            links = self._local.links = {}
        link = links.get(node)
        if link is None:
            link = links[node] = Link(node, self.clock)
            with self._lock:
                self._links.add(link)
        return link


def _refresh(place: ClusterPlace) -> None:
    try:
        place.client.nodes_manager.initialize()
    except Exception:  # whatever it is: the map stays stale, and is tried again in a second
        return
    place.refreshed()
