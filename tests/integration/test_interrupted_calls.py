"""An exception that a signal handler raises during a call reaches the caller unchanged, whatever
its type.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty
from types import FrameType
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from distwindow import AsyncLimiter, Limiter, StoreError, StoreTimeout
from distwindow.consistency.demand import Demand
from distwindow.core.decision import Decision
from distwindow.protocol.commands import Acquire, Command
from distwindow.store.memory import MemoryStore
from distwindow.store.redis.blocking.call_sharing import CallGroup, InFlightCall, Waiter
from tests.integration.harness import admin, used
from tests.servers import Proxy, until_async
from tests.servers.proxy import Delay, Pass, Silent
from tests.servers.wait import until

PLENTY = "1000000/day"
SCRIPT = b"EVALSHA"


@contextmanager
def raised_after(seconds: float, exception: BaseException) -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        raise exception

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def key_state(limiter: Any) -> Any:
    """Return the state of "k" in a leased limiter, made now if its calls were too few for one."""
    command = limiter._command_cache.acquire_command("k")
    return limiter._strategy._state_or_new(command)


class HighDemand(Demand):
    """Estimates a constant high demand, so that the next call fetches a lease on slow machines,
    too.
    """

    def needed(self, now: float, seconds: float) -> int:
        return 50


def subclass(kind: type[BaseException]) -> BaseException:
    """Return an exception of the application, whose base class the library may catch for its own
    reasons.
    """
    made: type[BaseException] = type("SoftTimeLimitExceeded", (kind,), {})
    return made("too slow")


KINDS = [Exception, TimeoutError, OSError, RuntimeError, RedisTimeoutError, RedisConnectionError,
         StoreTimeout, KeyboardInterrupt, KeyError, TypeError, ValueError, IndexError, Empty,
         BlockingIOError]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_arrives_unchanged_while_connecting(
    proxy: Proxy, prefix: str, kind: type[BaseException]
) -> None:
    expected = subclass(kind)
    with Limiter(proxy.url, PLENTY, prefix=prefix, timeout=5) as limiter:
        with proxy.inject(Silent()), raised_after(0.05, expected):
            with pytest.raises(kind) as caught:
                limiter.try_acquire("k")
        assert caught.value is expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["direct", "leased"])
def test_an_exception_arrives_unchanged_while_a_reply_is_awaited(
    proxy: Proxy, prefix: str, kind: type[BaseException], mode: Any
) -> None:
    expected = subclass(kind)
    with Limiter(proxy.url, PLENTY, prefix=prefix, timeout=5, consistency=mode) as limiter:
        limiter.try_acquire("k")
        with proxy.inject(Delay(only=SCRIPT, replies=0.3)), raised_after(0.05, expected):
            with pytest.raises(kind) as caught:
                limiter.try_acquire("k")
        assert caught.value is expected
        assert limiter.try_acquire("k")


def endless(limiter: Limiter) -> None:
    while True:
        limiter.try_acquire("k")


def test_an_exception_arrives_unchanged_over_tls(tls_url: str, prefix: str) -> None:
    expected = subclass(TimeoutError)
    with Limiter(tls_url, PLENTY, prefix=prefix, timeout=5) as limiter:
        with raised_after(0.05, expected), pytest.raises(TimeoutError) as caught:
            endless(limiter)
        assert caught.value is expected
        assert limiter.try_acquire("k")


def test_a_slow_connection_is_taken_over_after_an_interruption(proxy: Proxy, prefix: str) -> None:
    """The interrupted caller was waiting for a thread that connects; the next caller waits for the
    same one.
    """
    with Limiter(proxy.url, PLENTY, prefix=prefix, timeout=5) as limiter:
        for _ in range(5):
            with proxy.inject(Delay(replies=0.1)), raised_after(0.03, subclass(Exception)):
                with pytest.raises(Exception, match="too slow"):
                    limiter.try_acquire("k")
        assert limiter.try_acquire("k")


def test_members_get_their_shares_of_a_reply_that_has_arrived() -> None:
    """The leader is interrupted while it hands out the shares."""
    group, members = CallGroup(), [Waiter(InFlightCall(5.0)) for _ in range(3)]
    for member in members:
        group.join(member)
    assert group.close() is members[0]
    group.sent = True
    group._shares = [(7, 1), (6, 1), (5, 1)]
    group.fail(KeyboardInterrupt())
    assert [member.share() for member in members] == [(7, 1), (6, 1), (5, 1)]
    assert members[1].wait(0.0)


# -- tasks whose exceptions are kept --------------------------------------------------------------


async def test_after_a_cancelled_fetch_no_caller_is_left_waiting(proxy: Proxy, prefix: str) -> None:
    kept: list[BaseException] = []
    async with AsyncLimiter(
        proxy.url, PLENTY, prefix=prefix, consistency="leased", timeout=2, flush_interval=600
    ) as limiter:
        for _ in range(5):
            await limiter.try_acquire("k")
        strategy: Any = limiter._strategy
        state = key_state(limiter)
        strategy._refunds.queue_unspent(state)
        state.demand = HighDemand(time.monotonic())
        with proxy.inject(Delay(only=SCRIPT, replies=0.3)):
            task = asyncio.ensure_future(_acquire(limiter))
            await until_async(lambda: state.lease_fetch is not None)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError as exc:
                kept.append(exc)
            assert state.lease_fetch is None
        await asyncio.wait_for(limiter.try_acquire("k"), 1)
    assert kept


async def _acquire(limiter: AsyncLimiter) -> Decision:
    return await limiter.try_acquire("k")


# -- leases whose caller has left -----------------------------------------------------------------


@pytest.mark.parametrize("timeout", [2.0, 0.1])
async def test_a_lease_that_arrives_after_its_caller_has_left_is_kept_or_refunded(
    proxy: Proxy, prefix: str, timeout: float
) -> None:
    """The caller is cancelled or times out; the permits beyond those of the caller are not lost."""
    returned = unknown = 0
    async with AsyncLimiter(
        proxy.url, PLENTY, prefix=prefix, consistency="leased", timeout=timeout, flush_interval=600
    ) as limiter:
        strategy: Any = limiter._strategy
        for _ in range(300):
            returned += bool(await limiter.try_acquire("k"))
        state = key_state(limiter)
        strategy._refunds.queue_unspent(state)
        await limiter.flush()
        state.demand = HighDemand(time.monotonic())
        assert not state.permits_left
        before = proxy.affected
        with proxy.inject(Delay(only=SCRIPT, replies=0.15)):
            task = asyncio.ensure_future(_acquire(limiter))
            await until_async(lambda: proxy.affected > before, what="the request is sent")
            assert state.lease_fetch is not None
            if timeout > 1:
                task.cancel()
            try:
                returned += bool(await task)
            except (asyncio.CancelledError, StoreError):
                unknown += 1
            await until_async(lambda: state.permits_left > 0)
    with admin(proxy.url) as server:
        assert returned <= used(server, prefix) <= returned + unknown
    assert unknown == 1


def test_a_lease_that_arrives_while_the_limiter_closes_is_refunded(
    proxy: Proxy, prefix: str
) -> None:
    limiter = Limiter(
        proxy.url, PLENTY, prefix=prefix, consistency="leased", timeout=5, flush_interval=600
    )
    decisions: list[Decision] = [limiter.try_acquire("k") for _ in range(300)]
    strategy: Any = limiter._strategy
    state = key_state(limiter)
    strategy._refunds.queue_unspent(state)
    limiter.flush()
    state.demand = HighDemand(time.monotonic())
    with proxy.inject(Delay(only=SCRIPT, replies=0.2)):
        thread = threading.Thread(target=lambda: decisions.append(limiter.try_acquire("k")))
        thread.start()
        until(lambda: state.lease_fetch is not None)
        limiter.close()
        thread.join()
    assert len(decisions) == 301
    with admin(proxy.url) as server:
        assert used(server, prefix) == sum(decision.allowed for decision in decisions)


# -- closes and flushes are completed although their caller is interrupted
# --------------------------


def with_unspent_permits(url: str, prefix: str) -> tuple[Limiter, int]:
    """Return a limiter that holds unspent permits, and how many calls it has admitted."""
    limiter = Limiter(
        url, PLENTY, prefix=prefix, consistency="leased", timeout=5, flush_interval=600
    )
    admitted = int(limiter.try_acquire("k").allowed)
    key_state(limiter).demand = HighDemand(time.monotonic())
    for _ in range(5):
        admitted += limiter.try_acquire("k").allowed
    assert limiter._strategy.unreturned_permits() > 0
    return limiter, admitted


@pytest.mark.parametrize("repeated", [1, 3])
def test_an_interrupted_close_refunds_everything(proxy: Proxy, prefix: str, repeated: int) -> None:
    limiter, admitted = with_unspent_permits(proxy.url, prefix)
    with proxy.inject(Delay(only=SCRIPT, replies=0.3)):
        for _ in range(repeated):
            expected = subclass(KeyboardInterrupt)
            with raised_after(0.08, expected), pytest.raises(KeyboardInterrupt) as caught:
                limiter.close()
            assert caught.value is expected
        limiter.close()
    with admin(proxy.url) as server:
        assert used(server, prefix) == admitted


def test_an_interrupted_flush_refunds_what_was_queued(proxy: Proxy, prefix: str) -> None:
    limiter, admitted = with_unspent_permits(proxy.url, prefix)
    strategy: Any = limiter._strategy
    strategy._refunds.queue_unspent(strategy._key_states.get("k"))
    with proxy.inject(Delay(only=SCRIPT, replies=0.2)):
        expected = subclass(TimeoutError)
        with raised_after(0.1, expected), pytest.raises(TimeoutError) as caught:
            limiter.flush()
        assert caught.value is expected
        limiter.close()
    with admin(proxy.url) as server:
        assert used(server, prefix) == admitted


ENDS_IN_CLOSE = """
import signal, sys
from distwindow import Limiter
limiter = Limiter(sys.argv[1], "1000000/day", prefix=sys.argv[2], consistency="eventual",
                  sync_interval=600, timeout=5)
for _ in range(1000):
    limiter.try_acquire("k")
limiter.flush()
for _ in range(1000):
    limiter.try_acquire("k")
def handle(number, frame):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, handle)
print("ready", flush=True)
sys.stdin.readline()
signal.setitimer(signal.ITIMER_REAL, 0.1)
limiter.close()
"""


def test_a_process_that_ends_by_an_interrupted_close_sends_its_counts(
    proxy: Proxy, prefix: str
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENDS_IN_CLOSE, proxy.url, prefix],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with proxy.inject(Delay(requests=0.3)):
            _, complaints = child.communicate("go\n", timeout=30)
    assert "KeyboardInterrupt" in complaints
    assert "lost" not in complaints
    with admin(proxy.url) as server:
        assert used(server, prefix) == 2000


# -- one deadline for the whole call --------------------------------------------------------------


class Stalling(MemoryStore):
    """A store outside this process that does not answer lease commands until `let` is set."""

    source = "store"

    def __init__(self) -> None:
        super().__init__()
        self.deadlines: list[float | None] = []
        self.asked, self.let = threading.Event(), threading.Event()

    def execute(self, command: Command[Any], deadline: float | None = None) -> Any:
        self.deadlines.append(deadline)
        if command.script == "lease" and not self.let.is_set():
            self.asked.set()
            self.let.wait(30)
        return super().execute(command)

    def attempt(self, command: Acquire, deadline: float | None = None) -> Decision:
        self.deadlines.append(deadline)
        return super().attempt(command)


def test_after_waiting_for_the_lease_of_another_caller_only_the_rest_of_the_timeout_is_left() -> (
    None
):
    store, timeout = Stalling(), 0.2
    limiter = Limiter(store, PLENTY, consistency="leased", timeout=timeout, flush_interval=600)
    for _ in range(5):
        store.let.set()
        limiter.try_acquire("k")
    strategy: Any = limiter._strategy
    state = key_state(limiter)
    strategy._refunds.queue_unspent(state)
    state.demand = HighDemand(time.monotonic())
    store.let.clear()
    store.asked.clear()
    fetching = threading.Thread(target=limiter.try_acquire, args=("k",))
    fetching.start()
    assert store.asked.wait(10)
    came = time.monotonic()
    limiter.try_acquire("k")  # waits for the other caller, and then fetches a lease itself
    assert store.deadlines[-1] is not None
    assert store.deadlines[-1] <= came + timeout + 0.05
    store.let.set()
    fetching.join()
    limiter.close()


@pytest.mark.parametrize("mode", ["direct", "leased", "eventual"])
def test_all_commands_of_a_call_have_one_deadline(mode: Any) -> None:
    """`refund`, `stats` and a call over several keys are several commands."""
    store = Stalling()
    store.let.set()
    with Limiter(store, PLENTY, consistency=mode, flush_interval=600, timeout=7) as limiter:
        decision = limiter.try_acquire("k")
        for call in (
            lambda: limiter.stats("k"),
            lambda: limiter.refund(decision),
            lambda: limiter.try_acquire_all([("k", PLENTY), ("l", PLENTY)]),
        ):
            store.deadlines.clear()
            before = time.monotonic()
            call()
            given = {deadline for deadline in store.deadlines if deadline is not None}
            assert len(given) == 1
            assert before + 7 <= given.pop() <= time.monotonic() + 7


# -- a key as text and as bytes -------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["direct", "leased", "eventual"])
def test_bytes_and_text_are_one_key(redis_url: str, prefix: str, mode: Any) -> None:
    with Limiter(
        redis_url, "3/day", prefix=prefix, consistency=mode, flush_interval=600, sync_interval=600
    ) as limiter:
        limiter.try_acquire("user")
        limiter.flush()
        answers = [limiter.try_acquire(key) for key in ("user", b"user", "user", b"user", b"user")]
        assert [answer.allowed for answer in answers] == [True, True, False, False, False]
        assert {answer.key for answer in answers} == {"user"}
        strategy: Any = limiter._strategy
        assert len(strategy._key_states) == 1
        assert limiter.stats(b"user").blocked == 3
        assert not limiter.peek(b"user")
        limiter.reset(b"user")
        assert limiter.try_acquire("user")


def test_a_store_that_works_again_is_used_again(proxy: Proxy, prefix: str) -> None:
    """After failures and interruptions the limiter works as before."""
    with Limiter(proxy.url, PLENTY, prefix=prefix, timeout=0.3) as limiter:
        with proxy.inject(Silent()), pytest.raises(StoreError):
            limiter.try_acquire("k")
        proxy.fault = Pass()
        until(lambda: bool(_answers(limiter)))


def _answers(limiter: Limiter) -> bool:
    try:
        return limiter.try_acquire("k").allowed
    except StoreError:
        return False
