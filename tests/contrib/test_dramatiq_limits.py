"""`distwindow.contrib.dramatiq` in a worker of this process, with dramatiq's broker in memory.

The limits have a clock of their own, so no stall of the machine ends a window.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq import middleware
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import CurrentMessage, TimeLimit
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend

from distwindow import ConfigurationError, Limiter, StoreUnavailable
from distwindow.contrib import tasks as task_gate
from distwindow.contrib.dramatiq import RateLimits
from distwindow.stores.memory import MemoryStore
from distwindow.testing import ManualClock
from tests.servers import until

LIMIT = "2/hour"


@pytest.fixture
def broker(clock: ManualClock) -> Iterator[Any]:
    stub = StubBroker()
    stub.add_middleware(CurrentMessage())
    stub.emit_after("process_boot")
    stub.add_middleware(RateLimits(MemoryStore(clock)))
    yield stub
    stub.close()


@pytest.fixture
def _delays_pass(broker: Any, clock: ManualClock) -> None:
    """Have a delay move the clock, and end at once."""
    enqueue = broker.enqueue

    def enqueue_now(message: Any, *, delay: int | None = None) -> Any:
        if delay is not None:
            clock.advance(delay / 1000)
        return enqueue(message, delay=None if delay is None else 1)

    broker.enqueue = enqueue_now


@pytest.fixture
def worker(broker: Any) -> Iterator[Any]:
    running = dramatiq.Worker(broker, worker_timeout=20, worker_threads=2)
    running.start()
    yield running
    running.stop()


@pytest.mark.usefixtures("_delays_pass")
def test_a_refused_message_keeps_its_retries_and_its_result(broker: Any, worker: Any) -> None:
    backend = StubBackend()
    broker.add_middleware(Results(backend=backend, store_results=True), before=RateLimits)
    retries: list[int] = []

    @dramatiq.actor(broker=broker, limits=LIMIT, limit_key="retries:{tenant}")
    def double(tenant: str, number: int) -> int:
        retries.append(dramatiq_message().options.get("retries", 0))
        return number * 2

    messages = [double.send("acme", number) for number in range(8)]
    results = [
        message.get_result(backend=backend, block=True, timeout=20_000) for message in messages
    ]
    assert results == [number * 2 for number in range(8)]
    assert retries == [0] * 8


def dramatiq_message() -> Any:
    return CurrentMessage.get_current_message()


def test_an_actor_without_limits_runs_beside_refused_ones(broker: Any, worker: Any) -> None:
    done: list[str] = []

    @dramatiq.actor(broker=broker, limits="1/hour")
    def limited() -> None:
        done.append("limited")

    @dramatiq.actor(broker=broker)
    def free() -> None:
        done.append("free")

    for _ in range(20):
        limited.send()
    free.send()
    until(lambda: "free" in done, 10)
    assert done.count("limited") <= 1


def test_limits_may_have_keys_of_their_own(broker: Any, worker: Any) -> None:
    done: list[str] = []

    @dramatiq.actor(broker=broker, limits=["3/hour", ("tenant:{tenant}", "1/hour")])
    def limited(tenant: str) -> None:
        done.append(tenant)

    for tenant in "aaabbbcccddd":
        limited.send(tenant)
    until(lambda: len(done) == 3, 10)
    assert len(set(done)) == 3


def test_wrong_options_are_errors_where_the_actor_is_declared(broker: Any) -> None:
    with pytest.raises(ConfigurationError, match="names 'tennant'"):

        @dramatiq.actor(broker=broker, limits=LIMIT, limit_key="{tennant}")
        def fetch(tenant: str) -> None: ...

    with pytest.raises(ConfigurationError, match="limit_key but no limits"):

        @dramatiq.actor(broker=broker, limit_key="{tenant}")
        def fetch_more(tenant: str) -> None: ...

    assert broker.get_declared_actors() == set()


@pytest.fixture
def send_second(
    broker: Any, worker: Any, _delays_pass: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Return a function that has an actor refuse its second message, and waits until that has run
    nevertheless. `before_delay` is called before each delayed message is enqueued.
    """
    monkeypatch.setattr(task_gate, "BROKER_RETRY_S", 0.01)

    def send(before_delay: Callable[[], object], **options: Any) -> None:
        started: list[int] = []
        enqueue = broker.enqueue

        def enqueue_later(message: Any, **delay: Any) -> Any:
            if delay.get("delay"):
                before_delay()
            return enqueue(message, **delay)

        @dramatiq.actor(broker=broker, limits="1/hour", max_retries=0, **options)
        def job(number: int) -> None:
            started.append(number)

        job.send(0)
        until(lambda: started == [0], 10)
        monkeypatch.setattr(broker, "enqueue", enqueue_later)
        job.send(1)
        until(lambda: started == [0, 1], 20)
        assert broker.dead_letters == []

    return send


def raising(*errors: BaseException) -> Callable[[], None]:
    """Return a function that raises each of these errors once."""
    left = list(errors)

    def call() -> None:
        if left:
            raise left.pop(0)

    return call


def test_a_message_that_the_broker_does_not_take_back_is_offered_again(
    send_second: Any, caplog: pytest.LogCaptureFixture
) -> None:
    send_second(raising(OSError("away"), OSError("away")))
    assert caplog.text.count("the broker did not take back message") == 2


@pytest.mark.parametrize("interrupt", ["TimeLimitExceeded", "Shutdown"])
def test_an_interrupt_while_a_message_is_sent_back_fails_no_message(
    send_second: Any, caplog: pytest.LogCaptureFixture, interrupt: str
) -> None:
    send_second(raising(getattr(middleware, interrupt)()))
    assert caplog.text.count("the broker did not take back message") == 1


def test_the_time_limit_of_an_actor_is_not_for_sending_back(broker: Any, send_second: Any) -> None:
    time_limit = TimeLimit()
    manager: Any = time_limit.manager
    broker.add_middleware(time_limit, before=RateLimits)
    broker.emit_after("process_boot")
    deadlines: list[Any] = []
    fail_twice = raising(OSError("away"), OSError("away"))

    def note_deadline() -> None:
        deadlines.append(manager.deadlines[threading.get_ident()])
        fail_twice()

    send_second(note_deadline, time_limit=60_000)
    assert deadlines == [None] * 3


def test_a_generic_actor_has_the_arguments_of_its_method(broker: Any, worker: Any) -> None:
    started: list[str] = []
    dramatiq.set_broker(broker)

    class Fetch(dramatiq.GenericActor):
        class Meta:
            limits = "1/hour"
            limit_key = "generic:{tenant}"

        def perform(self, tenant: str) -> None:
            started.append(tenant)

    for tenant in ("acme", "acme", "initech", "initech"):
        Fetch.send(tenant)
    until(lambda: sorted(started) == ["acme", "initech"], 10)

    with pytest.raises(ConfigurationError, match="names 'tennant'"):

        class FetchMore(dramatiq.GenericActor):
            class Meta:
                limits = "1/hour"
                limit_key = "{tennant}"

            def perform(self, tenant: str) -> None: ...


@pytest.mark.usefixtures("_delays_pass")
def test_a_failing_store_holds_messages_and_burns_no_retry(
    broker: Any, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_gate, "HOLD_S", 0.01)
    attempt, failures = Limiter.try_acquire, iter([StoreUnavailable("connection refused")] * 6)

    def failing(self: Limiter, *args: Any, **kwargs: Any) -> Any:
        if (failure := next(failures, None)) is not None:
            raise failure
        return attempt(self, *args, **kwargs)

    monkeypatch.setattr(Limiter, "try_acquire", failing)
    retries: list[int] = []

    @dramatiq.actor(broker=broker, limits="5/hour")
    def job() -> None:
        retries.append(dramatiq_message().options.get("retries", 0))

    for _ in range(5):
        job.send()
    until(lambda: len(retries) == 5, 10)
    assert retries == [0] * 5
    assert next(failures, None) is None
