"""The states of a key whose calls threads share: every row of the table in `call_sharing.py`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest

from distwindow import Limit, StoreTimeout, StoreUnavailable
from distwindow.ring.commands import Acquire, charges_of
from distwindow.stores.redis import call_sharing
from distwindow.stores.redis.call_sharing import CallShare, CallSharing
from tests.interruptions import interrupt_at
from tests.servers.wait import until
from tests.stores.tables import rows_of

WAIT_S = 20.0


class Interruption(BaseException):
    """In place of what a signal handler raises."""


class ScriptCall(NamedTuple):
    """One script call that has been sent."""

    calls: int
    reply: SimpleQueue[CallShare | Interruption]


class Caller(threading.Thread):
    """Makes one call in a thread."""

    def __init__(self, key: Key, deadline: float, *, own_clock: bool) -> None:
        super().__init__(daemon=True)
        self._key = key
        self._deadline = deadline
        self._outcome: SimpleQueue[CallShare | BaseException] = SimpleQueue()
        self.clock: SimpleQueue[float | BaseException] | None = SimpleQueue() if own_clock else None
        """The time that this thread reads from the clock, in place of that of the key."""

    def run(self) -> None:
        key = self._key
        try:
            share = key.sharing.call(key.command, key.now, self._deadline, key.make_call)
        except BaseException as exc:  # `Interruption`, too, is an outcome
            self._outcome.put(exc)
        else:
            self._outcome.put(share)

    def outcome(self) -> CallShare | BaseException:
        return self._outcome.get(timeout=WAIT_S)


class Key:
    """A key in one of the states. The test answers its script calls and sets its clock."""

    def __init__(self, state: str, *, own_clock: bool = False) -> None:
        self.now = 0.0
        self.sharing = CallSharing(100.0, self._monotonic)
        self.command = Acquire(charges_of("k", b"p", [Limit("100/minute")], 1))
        self._sent: SimpleQueue[ScriptCall] = SimpleQueue()
        self.waiters: list[Caller] = []
        if state != "idle":
            self.first = self.begin()
            self.first_call = self.sent()
        if state == "gathering":
            self.add_waiter(own_clock=own_clock)

    def _monotonic(self) -> float:
        thread = threading.current_thread()
        if not isinstance(thread, Caller) or thread.clock is None:
            return self.now
        reading = thread.clock.get(timeout=WAIT_S)
        if isinstance(reading, BaseException):
            raise reading
        return reading

    def make_call(self, command: Acquire, began: float, deadline: float) -> CallShare:
        call = ScriptCall(command.calls, SimpleQueue())
        self._sent.put(call)
        reply = call.reply.get(timeout=WAIT_S)
        if isinstance(reply, Interruption):
            raise reply
        return reply

    def begin(self, deadline: float = 1000.0, *, own_clock: bool = False) -> Caller:
        caller = Caller(self, deadline, own_clock=own_clock)
        caller.start()
        return caller

    def add_waiter(self, *, own_clock: bool = False) -> Caller:
        """Begin a call that joins the group behind the call in flight."""
        before = self._waiting()
        caller = self.begin(own_clock=own_clock)
        self.waiters.append(caller)
        until(lambda: self._waiting() == before + 1, what="a waiter")
        return caller

    def sent(self) -> ScriptCall:
        """Return the next script call that is sent."""
        return self._sent.get(timeout=WAIT_S)

    def nothing_sent(self) -> bool:
        return self._sent.empty()

    def end_first(self) -> None:
        """Answer the call that was in flight at the start."""
        self.first_call.reply.put((99, 1))
        assert self.first.outcome() == (99, 1)

    def _waiting(self) -> int:
        call = self.sharing._in_flight.get(self.command)
        return 0 if call is None or call.next_group is None else len(call.next_group._waiting)

    def state(self) -> str:
        if self.command not in self.sharing._in_flight:
            return "idle"
        return "gathering" if self._waiting() else "in flight"


# Each of these brings about the event of its row, yields, and then checks what happens.


def made_alone(key: Key) -> Iterator[None]:
    caller = key.begin()
    call = key.sent()
    yield
    assert call.calls == 1
    call.reply.put((99, 1))
    assert caller.outcome() == (99, 1)


def waits_in_a_group(key: Key) -> Iterator[None]:
    key.add_waiter()
    yield
    assert key.nothing_sent()
    key.end_first()
    count = len(key.waiters)
    call = key.sent()
    assert call.calls == count
    call.reply.put((50, 2))
    shares = [(50 + later, 2) for later in range(count - 1, -1, -1)]
    assert [waiter.outcome() for waiter in key.waiters] == shares


def nobody_is_woken(key: Key) -> Iterator[None]:
    key.end_first()
    yield
    assert key.nothing_sent()


def leader_calls(key: Key) -> Iterator[None]:
    key.add_waiter()
    key.end_first()
    call = key.sent()
    yield
    assert call.calls == 2
    call.reply.put((97, 2))
    assert [waiter.outcome() for waiter in key.waiters] == [(98, 2), (97, 2)]


def only_waiter_times_out(key: Key) -> Iterator[None]:
    (waiter,) = key.waiters
    assert waiter.clock is not None
    waiter.clock.put(1000.0)  # this is its deadline, so it waits no longer
    outcome = waiter.outcome()
    yield
    assert isinstance(outcome, StoreTimeout)
    assert outcome.charged is False
    key.end_first()
    assert key.state() == "idle"
    assert key.nothing_sent()


def next_member_leads(key: Key) -> Iterator[None]:
    leader, member = key.add_waiter(own_clock=True), key.add_waiter()
    assert leader.clock is not None
    leader.clock.put(0.0)  # as it begins to wait
    leader.clock.put(Interruption())  # as it begins to lead
    key.end_first()
    assert isinstance(leader.outcome(), Interruption)
    call = key.sent()
    yield
    assert call.calls == 1
    behind = key.add_waiter()
    call.reply.put((98, 2))
    assert member.outcome() == (98, 2)
    key.sent().reply.put((97, 3))
    assert behind.outcome() == (97, 3)


def takes_the_place(key: Key) -> Iterator[None]:
    key.now = 2000.0
    caller = key.begin(deadline=3000.0)
    call = key.sent()
    yield
    assert call.calls == 1
    key.end_first()
    assert key.state() == "in flight", "the lost call has ended the one in its place"
    call.reply.put((98, 2))
    assert caller.outcome() == (98, 2)


def waiters_run_out_of_time(key: Key) -> Iterator[None]:
    (waiter,) = key.waiters
    assert waiter.clock is not None
    yield from takes_the_place(key)
    waiter.clock.put(1000.0)
    outcome = waiter.outcome()
    assert isinstance(outcome, StoreTimeout)
    assert outcome.charged is False
    assert key.state() == "idle"


ROW_CHECKS: dict[tuple[str, ...], Callable[[Key], Iterator[None]]] = {
    ("idle", "a call begins", "it is made alone"): made_alone,
    ("in flight", "a call begins", "it waits in a new group"): waits_in_a_group,
    ("gathering", "a call begins", "it joins the group"): waits_in_a_group,
    ("in flight", "the call ends", "nobody is woken"): nobody_is_woken,
    ("gathering", "the call ends", "the leader calls for its group"): leader_calls,
    ("gathering", "the only waiter's time is over", "it was surely not executed"): (
        only_waiter_times_out
    ),
    ("in flight", "the leader is interrupted early", "the next member leads"): next_member_leads,
    ("in flight", "a call begins too late", "it is made alone, in its place"): takes_the_place,
    ("gathering", "a call begins too late", "the waiters run out of time"): (
        waiters_run_out_of_time
    ),
}


@pytest.mark.parametrize(
    ("state", "event", "next_state", "effect"),
    rows_of(call_sharing),
    ids=[" / ".join(row[:2]) for row in rows_of(call_sharing)],
)
def test_row(state: str, event: str, next_state: str, effect: str) -> None:
    timed = {"the only waiter's time is over", "a call begins too late"}
    key = Key(state, own_clock=event in timed)
    assert key.state() == state
    check = ROW_CHECKS[state, event, effect](key)
    next(check)
    assert key.state() == next_state
    assert next(check, "over") == "over"


def test_every_check_is_a_row() -> None:
    assert {(state, event, effect) for state, event, _, effect in rows_of(call_sharing)} == set(
        ROW_CHECKS
    )


def test_a_member_whose_time_ends_once_its_group_was_sent_has_an_unknown_outcome() -> None:
    key = Key("gathering")
    member = key.add_waiter(own_clock=True)
    key.end_first()
    call = key.sent()
    assert member.clock is not None
    member.clock.put(1000.0)
    outcome = member.outcome()
    assert isinstance(outcome, StoreTimeout)
    assert outcome.charged is None
    call.reply.put((97, 2))
    assert key.waiters[0].outcome() == (98, 2)


def test_a_group_that_was_sent_is_not_led_again_when_its_leader_is_interrupted() -> None:
    key = Key("gathering")
    member = key.add_waiter()
    key.end_first()
    key.sent().reply.put(Interruption())
    assert isinstance(key.waiters[0].outcome(), Interruption)
    outcome = member.outcome()
    assert isinstance(outcome, StoreUnavailable)
    assert outcome.charged is None
    assert key.state() == "idle"
    assert key.nothing_sent()


def test_who_waits_behind_a_leader_that_is_interrupted_waits_behind_the_next() -> None:
    key = Key("in flight")
    leader, member = key.add_waiter(own_clock=True), key.add_waiter()
    assert leader.clock is not None
    leader.clock.put(0.0)  # as it begins to wait
    key.end_first()
    until(lambda: key.state() == "in flight", what="the leader's turn")
    behind = key.add_waiter()
    leader.clock.put(Interruption())  # as it begins to lead
    key.sent().reply.put((98, 2))
    assert member.outcome() == (98, 2)
    key.sent().reply.put((97, 3))
    assert behind.outcome() == (97, 3)


# -- a signal handler raises in the main thread ---------------------------------------------------


DEADLINE_S = 0.2


class YieldingLock:
    """A lock after whose release all other threads run first."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()
        time.sleep(0.01)  # the other threads run meanwhile


class InterruptedKey(Key):
    """A key whose script calls are answered at once, and whose main thread is interrupted once."""

    def __init__(self) -> None:
        super().__init__("idle")
        sharing: Any = self.sharing
        sharing._lock = YieldingLock()
        self.before_reply: Callable[[], object] = lambda: None
        """Called by the main thread while its own script call is in flight."""

    def make_call(self, command: Acquire, began: float, deadline: float) -> CallShare:
        if threading.current_thread() is threading.main_thread():
            self.before_reply()
        return 50, 2

    def begin(self, deadline: float = DEADLINE_S, *, own_clock: bool = False) -> Caller:
        return super().begin(deadline, own_clock=own_clock)

    def call(self) -> CallShare:
        return self.sharing.call(self.command, self.now, self.now + DEADLINE_S, self.make_call)

    def check(self) -> None:
        """Check that every caller ends by its deadline, and that the next call is made."""
        for waiter in self.waiters:
            outcome = waiter.outcome()
            assert isinstance(outcome, (tuple, StoreUnavailable, StoreTimeout)), outcome
        self.now += 2 * DEADLINE_S
        assert self.call() == (50, 2)


def alone(key: InterruptedKey) -> None:
    """The call of the main thread is in flight, and two threads wait behind it."""
    key.before_reply = lambda: [key.add_waiter() for _ in range(2)]
    key.call()


def leading(key: InterruptedKey) -> None:
    """The main thread waits, with a member behind it, then leads, and another thread waits."""
    in_flight: SimpleQueue[CallShare] = SimpleQueue()
    ended = threading.Event()

    def first() -> None:
        def make_call(command: Acquire, began: float, deadline: float) -> CallShare:
            in_flight.put((99, 1))
            until(lambda: ended.is_set() or key._waiting())
            key.waiters.append(key.begin())
            until(lambda: ended.is_set() or key._waiting() == 2)
            return 99, 1

        key.sharing.call(key.command, key.now, DEADLINE_S, make_call)

    thread = threading.Thread(target=first)
    thread.start()
    in_flight.get(timeout=WAIT_S)
    key.before_reply = key.add_waiter
    try:
        key.call()
    finally:
        ended.set()
        thread.join(WAIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [alone, leading])
def test_after_an_interrupted_caller_no_caller_waits_beyond_its_deadline(
    scenario: Callable[[InterruptedKey], None],
) -> None:
    """This holds wherever a signal handler raises in the code of call sharing."""
    places: int = 0
    interrupted: str | None = ""
    while interrupted is not None:
        places += 1
        key = InterruptedKey()
        interrupted = interrupt_at(places, partial(scenario, key), call_sharing.__name__)
        key.before_reply = lambda: None
        key.check()
    assert places > 8
