"""What each client does with an upstream that limits it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from distwindow import ConfigurationError, RateLimitExceeded
from distwindow.contrib.upstream import by_header
from distwindow.stores.memory import MemoryStore
from tests.clock_and_stores import ManualClock

from .clients import CLIENTS, URL, Answer, Client, Upstream, limits_of

pytestmark = pytest.mark.event_loops
every_client = pytest.mark.parametrize("kind", CLIENTS, ids=lambda kind: kind.__name__)


class Fleet:
    """Processes of one kind of client over one store, at a time that the test moves."""

    def __init__(self, kind: type[Client], upstream: Upstream, **options: Any) -> None:
        self.clock = ManualClock(auto_advance=True)
        self._store = MemoryStore(self.clock)
        self._kind, self._upstream, self._options = kind, upstream, options

    def process(self, **options: Any) -> Client:
        options = {"time": self.clock, **self._options, **options}
        return self._kind(self._upstream, limits_of(self._kind, self._store, **options))


def refuses_once(answer: Answer) -> tuple[list[str], Upstream]:
    """Return the URLs that were called, and an upstream that gives `answer` to the first call."""
    called: list[str] = []

    def upstream(url: str) -> Answer:
        called.append(url)
        return answer if len(called) == 1 else Answer()

    return called, upstream


@every_client
def test_calls_of_a_fleet_share_one_window(kind: type[Client]) -> None:
    fleet = Fleet(kind, lambda url: Answer(), limits={"api.example": "3/minute"}, max_wait=0)
    one, other = fleet.process(), fleet.process()
    assert [one.call(), other.call(), one.call()] == [200] * 3
    for error in (other.limited, other.library_error, RateLimitExceeded):
        with pytest.raises(error, match="was not sent"):
            other.call()
    assert other.call("https://elsewhere.example/") == 200
    fleet.clock.advance(60)
    assert other.call() == 200


@every_client
@pytest.mark.parametrize("limits", [None, "100/minute"])
@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (429, {"Retry-After": "171"}, 171), (503, {"Retry-After": "171"}, 171),
        (529, {"retry-after-ms": "171000"}, 171), (403, {"Retry-After": "171"}, 171),
        (429, {}, 1), (429, {"Retry-After": "-5"}, 1), (429, {"Retry-After": "soon"}, 1),
        (429, {"RateLimit": '"x";r=0;t=20'}, 20),
    ],
)  # fmt: skip
def test_a_pause_is_the_fleets_and_ends_with_one_probe(
    kind: type[Client], limits: str | None, status: int, headers: dict[str, str], seconds: int
) -> None:
    called, upstream = refuses_once(Answer(status, headers))
    fleet = Fleet(kind, upstream, limits=limits, max_wait=0)
    assert fleet.process().call() == status  # it comes back to the caller as it is
    others = [fleet.process() for _ in range(3)]
    for other in others:
        with pytest.raises(other.limited, match="has asked to wait") as caught:
            other.call()
        assert seconds <= caught.value.retry_after <= seconds * 1.1
    assert len(called) == 1
    fleet.clock.advance(seconds * 1.1)
    assert [fleet.process(max_wait=5).call() for _ in range(3)] == [200] * 3
    assert len(called) == 4


@every_client
def test_who_may_wait_is_served_after_the_pause(kind: type[Client]) -> None:
    _, upstream = refuses_once(Answer(429, {"Retry-After": "20"}))
    fleet = Fleet(kind, upstream, max_wait=30)
    assert fleet.process().call() == 429
    began = fleet.clock.monotonic()
    assert fleet.process().call() == 200
    assert 20 <= fleet.clock.monotonic() - began <= 22.1


@every_client
def test_a_pause_beyond_the_cap_fails_at_once_with_the_true_time(kind: type[Client]) -> None:
    _, upstream = refuses_once(Answer(429, {"Retry-After": "277403"}))
    fleet = Fleet(kind, upstream, max_wait=1000, cap=600)
    assert fleet.process().call() == 429
    began = fleet.clock.monotonic()
    other = fleet.process()
    with pytest.raises(other.limited) as caught:
        other.call()
    assert caught.value.retry_after == pytest.approx(277403, abs=1)
    assert fleet.clock.monotonic() == began  # nobody has slept
    fleet.clock.advance(600)
    assert other.call() == 200


@every_client
def test_a_response_is_asked_for_again_after_the_pause(kind: type[Client]) -> None:
    called, upstream = refuses_once(Answer(429, {"Retry-After": "2"}))
    fleet = Fleet(kind, upstream, limits="10/minute", retries=1)
    process = fleet.process()
    assert process.call() == 200
    assert len(called) == 2


@every_client
def test_what_others_use_lowers_the_window_and_nothing_raises_it(kind: type[Client]) -> None:
    left = iter([99, 3, 50, 50, 50])
    fleet = Fleet(
        kind,
        lambda url: Answer(200, {"RateLimit": f'"x";r={next(left)};t=20'}),
        limits="50/minute",
        max_wait=0,
    )
    processes = [fleet.process() for _ in range(4)]
    assert [process.call() for process in processes] == [200] * 4  # the second leaves three
    assert processes[0].call() == 200
    with pytest.raises(processes[0].limited):
        processes[0].call()


@every_client
def test_a_secret_is_no_key(kind: type[Client]) -> None:
    store_keys: list[bytes] = []
    fleet = Fleet(
        kind, lambda url: Answer(429), limits="1/minute", max_wait=0,
        key=by_header("authorization"),
    )  # fmt: skip
    process = fleet.process()
    assert process.call(headers={"Authorization": "Bearer s3cret"}) == 429
    assert process.call(headers={"Authorization": "Bearer other"}) == 429
    with pytest.raises(process.limited) as caught:
        process.call(headers={"Authorization": "Bearer s3cret"})
    store_keys = [*fleet._store._values.by_name]
    assert "s3cret" not in str(caught.value) + repr(store_keys)


class NoAnswer(Exception):
    pass


@every_client
def test_a_probe_without_an_answer_leaves_the_place_to_the_next(kind: type[Client]) -> None:
    answers: list[Callable[[], Answer]] = []

    def fails() -> Answer:
        raise NoAnswer

    answers = [lambda: Answer(429, {"Retry-After": "1"}), fails, Answer]
    fleet = Fleet(kind, lambda url: answers.pop(0)(), max_wait=0)
    one, other = fleet.process(), fleet.process()
    assert one.call() == 429
    fleet.clock.advance(1.1)
    with pytest.raises(NoAnswer):
        one.call()
    assert other.call() == 200


@every_client
def test_an_upstream_that_lies_pauses_its_own_key_for_the_cap_at_most(kind: type[Client]) -> None:
    hostile = ["-1", "1e999", "nan", "9" * 40, "", "Fri, 31 Dec 2099 23:59:59 GMT", "x" * 10_000]
    lies = iter(
        Answer(429, {"Retry-After": text, "RateLimit": text, "X-RateLimit-Remaining": text,
                     "X-RateLimit-Reset": text, "Date": text or "x"})
        for text in hostile
    )  # fmt: skip
    fleet = Fleet(kind, lambda url: next(lies), max_wait=0, cap=600)
    process = fleet.process()
    for _ in hostile:
        assert process.call() == 429
        fleet.clock.advance(601)


@every_client
def test_the_wrong_kind_of_limits_is_named(kind: type[Client]) -> None:
    other = next(each for each in CLIENTS if each.is_async != kind.is_async)
    wrong = kind(lambda url: Answer(), limits_of(other, "memory://"))
    with pytest.raises(ConfigurationError, match="UpstreamLimits"):
        wrong.call(URL)
