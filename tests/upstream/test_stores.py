"""What the fleet knows of an upstream is the same in every store, and for callers at once: laws of
the two commands. `tests/stores/test_stores_agree.py` compares random histories of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
from redis.crc import key_slot

from distwindow import Key, Limit
from distwindow.ring.command import Command
from distwindow.ring.commands import Acquire, Read, charges_of
from distwindow.ring.key import AnyKey, ring_name_prefix
from distwindow.upstream.commands import (
    ASK_AGAIN,
    PAUSED,
    PROBE,
    SEND,
    SEND_ONE,
    Lower,
    PauseCommand,
    PauseReply,
    pause_name,
)
from distwindow.upstream.memory import FIRST_PAUSE_MS, MAX_STEPS, REMEMBERED_MS, STEP_MS
from tests.clock_and_stores import T0, Execute, blocking, fresh_key

PREFIX = "upstream-laws"
LIMIT = Limit(100, per=60)
CAP_MS = 600_000
CALLERS = 8


@pytest.fixture(scope="module", params=["memory", "redis", "cluster"])
def execute(request: pytest.FixtureRequest) -> Iterator[Execute]:
    kind = request.param
    url = "memory://" if kind == "memory" else request.getfixturevalue(f"{kind}_url")
    with blocking(url) as store:
        yield store


@pytest.fixture(scope="module")
def at_once() -> Iterator[Callable[[Execute, Sequence[Command[Any]]], list[Any]]]:
    """Return the replies to commands of which each is sent by a thread of its own, as far as that
    goes.
    """
    with ThreadPoolExecutor(CALLERS) as threads:
        yield lambda execute, commands: list(threads.map(execute, commands))


AtOnce = Callable[[Execute, Sequence[Command[Any]]], list[Any]]


class Window:
    """The windows of a new key."""

    def __init__(self, execute: Execute, *limits: Limit, key: AnyKey | None = None) -> None:
        self.execute, self.limits = execute, limits or (LIMIT,)
        self.key = key or fresh_key()

    def _charges(self, cost: int) -> Any:
        return charges_of(self.key, ring_name_prefix(PREFIX, self.key), self.limits, cost)

    def lower(self, used: int, reset_ms: int = 0, at_ms: int = 0) -> Lower:
        resets_ms = (reset_ms,) * len(self.limits)
        return Lower(self._charges(used), T0 + at_ms, resets_ms=resets_ms)

    def acquire(self, cost: int = 1) -> Acquire:
        return Acquire(self._charges(cost), T0)

    def used(self) -> list[int]:
        read = self.execute(Read(self._charges(1), T0))
        return [ring.used for ring in read.states]


def test_responses_at_once_that_say_the_same_are_counted_once(
    execute: Execute, at_once: AtOnce
) -> None:
    window = Window(execute)
    replies = at_once(execute, [window.lower(50)] * 50)
    assert sorted(reply.added for reply in replies) == [(0,)] * 49 + [(50,)]
    assert window.used() == [50]
    assert execute(window.lower(50)).added == (0,)
    assert sum(execute(window.acquire()).admitted for _ in range(60)) == 50


def test_a_window_is_lowered_and_never_raised(execute: Execute) -> None:
    window = Window(execute)
    for used, added in ((30, 30), (20, 0), (0, 0), (31, 1), (100, 69), (100, 0)):
        assert execute(window.lower(used)).added == (added,)


def test_a_window_is_never_above_its_limit(execute: Execute, at_once: AtOnce) -> None:
    limits = Limit(100, per=60), Limit(40, per=3600)
    window = Window(execute, *limits)
    commands: list[Command[Any]] = [
        window.lower(10**12),
        window.acquire(3),
        window.lower(70),
        window.acquire(1),
    ]
    at_once(execute, commands * 5)
    assert window.used() == [100, 40]
    assert execute(window.acquire()).admitted == 0


@pytest.mark.parametrize("bound", ["leap", "strict"])
@pytest.mark.parametrize("reset_ms", [1, 5_999, 6_000, 6_001, 30_000, 59_999, 60_000, 10**12])
def test_what_is_free_again_soon_counts_until_then(
    execute: Execute, bound: Any, reset_ms: int
) -> None:
    """For that time, rounded up to a bucket, and for a window at most."""
    window = Window(execute, Limit(100, per=60, bound=bound))
    assert execute(window.acquire(10)).admitted
    assert execute(window.lower(90, reset_ms, at_ms=8_000)).added == (80,)
    assert execute(window.lower(90, reset_ms, at_ms=8_000)).added == (0,)
    for at_ms in range(8_000, 90_000, 500):
        execute(window.lower(0, at_ms=at_ms))  # opens the bucket of that time
        if window.used()[0] < 80:
            break
    until_ms = min(reset_ms, 54_000 + 6_000 * (bound == "strict"))
    assert until_ms <= at_ms - 8_000 <= until_ms + 6_000


@pytest.mark.parametrize("seed", range(5))
def test_calls_and_responses_in_any_order(execute: Execute, at_once: AtOnce, seed: int) -> None:
    """Each response was true when it was sent: so many calls, of this fleet or of others, had been
    counted there. What is counted here is at least that, and at most that and the calls of here.
    """
    random, window = Random(seed), Window(execute)
    said = [random.randint(0, 100) for _ in range(20)]
    calls = [window.acquire() for _ in range(20)]
    commands: list[Command[Any]] = [*map(window.lower, said), *calls]
    random.shuffle(commands)
    replies = at_once(execute, commands)
    admitted = sum(
        reply.admitted
        for command, reply in zip(commands, replies, strict=True)
        if isinstance(command, Acquire)
    )
    (used,) = window.used()
    assert max(max(said), admitted) <= used <= min(100, max(said) + admitted)


# -- the pause -------------------------------------------------------------------------------------


class Upstream:
    """The pause of a new key. Each call of a method is another call of the fleet."""

    def __init__(self, execute: Execute, key: AnyKey | None = None) -> None:
        self.execute, self.now_ms, self._calls = execute, T0, 0
        self.key = key or fresh_key()

    def command(self, what: Any, call: str | None = None, **numbers: int) -> PauseCommand:
        if call is None:
            self._calls += 1
            call = f"call{self._calls}"
        name = pause_name(PREFIX, self.key)
        return PauseCommand((), self.now_ms, name=name, what=what, call=call, **numbers)

    def ask(self, call: str | None = None, ttl_ms: int = 30_000) -> PauseReply:
        reply: PauseReply = self.execute(self.command("ask", call, first_ms=ttl_ms))
        return reply

    def tell(self, given_ms: int, cap_ms: int = CAP_MS, jitter: int = 0) -> PauseReply:
        reply: PauseReply = self.execute(
            self.command("tell", first_ms=given_ms, second_ms=cap_ms, jitter=jitter)
        )
        return reply

    def asks(self, ttl_ms: int = 30_000) -> list[Command[Any]]:
        return [self.command("ask", first_ms=ttl_ms) for _ in range(CALLERS)]


@pytest.fixture
def upstream(execute: Execute) -> Upstream:
    return Upstream(execute)


def states(replies: Sequence[PauseReply]) -> list[int]:
    return sorted(reply.state for reply in replies)


ONE_PROBE = sorted([PROBE] + [ASK_AGAIN] * (CALLERS - 1))


def test_without_a_refusal_all_send(upstream: Upstream, at_once: AtOnce) -> None:
    assert states(at_once(upstream.execute, upstream.asks())) == [SEND] * CALLERS
    for what in ("ok", "free"):
        assert upstream.execute(upstream.command(what)).state == SEND


def test_nobody_sends_until_the_end_of_a_pause(upstream: Upstream, at_once: AtOnce) -> None:
    assert upstream.tell(171_000)[2:] == (171_000, 171_000)
    for passed_ms in (0, 170_999):
        upstream.now_ms = T0 + passed_ms
        replies = at_once(upstream.execute, upstream.asks())
        assert {reply[2:] for reply in replies} == {(171_000 - passed_ms, 171_000 - passed_ms)}
        assert states(replies) == [PAUSED] * CALLERS
    upstream.now_ms = T0 + 171_000
    assert states(at_once(upstream.execute, upstream.asks())) == ONE_PROBE


def test_where_the_probe_vanishes_the_next_one_probes(upstream: Upstream, at_once: AtOnce) -> None:
    upstream.tell(1000)
    upstream.now_ms += 1000
    assert states(at_once(upstream.execute, upstream.asks(ttl_ms=5000))) == ONE_PROBE
    upstream.now_ms += 4999
    assert states(at_once(upstream.execute, upstream.asks())) == [ASK_AGAIN] * CALLERS
    assert upstream.ask().wait_ms == 1
    upstream.now_ms += 1
    assert states(at_once(upstream.execute, upstream.asks())) == ONE_PROBE


def test_a_probe_without_an_answer_is_given_on(upstream: Upstream, at_once: AtOnce) -> None:
    upstream.tell(1000)
    upstream.now_ms += 1000
    assert upstream.ask("probe").state == PROBE
    assert upstream.ask("probe").state == PROBE  # whose reply was lost
    upstream.execute(upstream.command("free"))  # of another one
    assert upstream.ask().state == ASK_AGAIN
    upstream.execute(upstream.command("free", "probe"))
    assert states(at_once(upstream.execute, upstream.asks())) == ONE_PROBE


def test_what_is_told_later_does_not_shorten_a_pause(upstream: Upstream, at_once: AtOnce) -> None:
    upstream.tell(60_000)
    for given_ms in (0, 1, 59_999):
        assert upstream.tell(given_ms).wait_ms == 60_000
    assert upstream.tell(60_001).wait_ms == 60_001
    given = [1000, 90_000, 0, 30_000, 70_000, 2, 90_000, 5]
    commands = [upstream.command("tell", first_ms=ms, second_ms=CAP_MS) for ms in given]
    at_once(upstream.execute, commands)
    assert upstream.ask().wait_ms == 90_000


def test_no_pause_is_longer_than_the_cap_and_what_was_said_is_kept(upstream: Upstream) -> None:
    assert upstream.tell(277_403_000, jitter=100)[2:] == (CAP_MS, 277_403_000)
    upstream.now_ms += 1000
    assert upstream.ask()[2:] == (CAP_MS - 1000, 277_402_000)
    upstream.now_ms = T0 + CAP_MS
    assert upstream.ask("probe").state == PROBE


def test_a_pause_is_longer_by_its_jitter(upstream: Upstream) -> None:
    assert upstream.tell(171_000, jitter=100).wait_ms == 188_100


def test_pauses_whose_length_is_not_said_double_up_to_the_cap(upstream: Upstream) -> None:
    for wait_ms in (1000, 2000, 4000, 8000, 10_000, 10_000):
        assert upstream.tell(0, cap_ms=10_000).wait_ms == wait_ms
        assert upstream.tell(0, cap_ms=10_000).wait_ms == wait_ms  # of a call that was under way
        upstream.now_ms += wait_ms
        assert upstream.ask().state == PROBE
    upstream.now_ms += 30_000 + REMEMBERED_MS
    assert upstream.tell(0).wait_ms == FIRST_PAUSE_MS


def test_twice_as_many_return_in_each_step(upstream: Upstream, at_once: AtOnce) -> None:
    upstream.tell(1000)
    upstream.now_ms += 1000
    upstream.ask("probe")
    upstream.execute(upstream.command("ok", first_ms=T0))  # of a probe before the pause
    assert upstream.ask().state == ASK_AGAIN
    upstream.execute(upstream.command("ok", first_ms=upstream.now_ms))
    for step in range(6):
        asks = [each for _ in range(10) for each in upstream.asks()]
        replies = at_once(upstream.execute, asks)
        assert states(replies).count(SEND_ONE) == 2**step
        assert {reply.wait_ms for reply in replies if reply.state == ASK_AGAIN} == {STEP_MS}
        upstream.now_ms += STEP_MS
    upstream.now_ms += STEP_MS * MAX_STEPS
    assert states(at_once(upstream.execute, upstream.asks())) == [SEND] * CALLERS


def test_nobody_needs_to_ask_for_a_pause_to_be_forgotten(upstream: Upstream) -> None:
    upstream.tell(1000)
    upstream.now_ms += 1000 + REMEMBERED_MS - 1
    assert upstream.ask(ttl_ms=1).state == PROBE
    upstream.now_ms += 1 + REMEMBERED_MS
    assert upstream.ask().state == SEND


def test_a_pause_is_not_forgotten_while_somebody_asks(upstream: Upstream, at_once: AtOnce) -> None:
    """Or all of them would be sent at once, because no probe had its answer in time."""
    upstream.tell(1000)
    upstream.now_ms += 1000
    began_ms = upstream.now_ms
    for _ in range(20):
        assert states(at_once(upstream.execute, upstream.asks(ttl_ms=10_000))) == ONE_PROBE
        upstream.now_ms += 10_000
    # The first probe has lost its place long since. Its answer says all the same what it says.
    upstream.execute(upstream.command("ok", first_ms=began_ms))
    assert states(at_once(upstream.execute, upstream.asks())).count(SEND_ONE) == 1


def test_only_a_refusal_of_the_first_call_makes_the_next_pause_longer(upstream: Upstream) -> None:
    for _ in range(4):
        assert upstream.tell(0).wait_ms == FIRST_PAUSE_MS
        upstream.now_ms += FIRST_PAUSE_MS
        assert upstream.ask().state == PROBE
        upstream.execute(upstream.command("ok", first_ms=upstream.now_ms))
        assert upstream.ask().state == SEND_ONE
    assert upstream.tell(0).wait_ms == FIRST_PAUSE_MS
    upstream.now_ms += FIRST_PAUSE_MS
    assert upstream.ask().state == PROBE
    assert upstream.tell(0).wait_ms == 2 * FIRST_PAUSE_MS


def test_the_pause_of_one_key_is_no_others(execute: Execute) -> None:
    one, other = Upstream(execute), Upstream(execute)
    one.tell(60_000)
    assert (one.ask().state, other.ask().state) == (PAUSED, SEND)


@pytest.mark.parametrize(
    "key",
    [fresh_key(), Key("gpt", tag=fresh_key()), f"{{{fresh_key()}}}:é %"],
    ids=["plain", "tagged", "braces"],
)
def test_a_pause_is_in_the_slot_of_the_windows_of_its_key(execute: Execute, key: AnyKey) -> None:
    window, upstream = (
        Window(execute, LIMIT, Limit(1000, per=3600), key=key),
        Upstream(execute, key),
    )
    lower = window.lower(5)
    assert {key_slot(name) for name in [*lower.keys, *upstream.command("ask").keys]} == {
        key_slot(pause_name(PREFIX, key))
    }
    assert execute(lower).added == (5, 5)
    upstream.tell(1000)
    assert upstream.ask().state == PAUSED
