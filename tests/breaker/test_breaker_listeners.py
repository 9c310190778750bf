"""Exceptions of signal handlers that arrive while a listener of a circuit breaker runs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from distwindow import BreakerChange, CircuitBreaker, ErrorCount
from distwindow.breaker.circuit_breaker import Listeners
from distwindow.support.locks import run_to_completion, was_raised_by_signal_handler
from tests.clock_and_stores import ManualClock


class SoftTimeLimit(Exception):
    """An exception of the application."""


def handle(number: int, frame: FrameType | None) -> None:
    raise SoftTimeLimit


class Handler:
    """Handlers as applications have them: an object, and a method."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise SoftTimeLimit

    def method(self, number: int, frame: FrameType | None) -> None:
        raise SoftTimeLimit


@pytest.fixture(params=[handle, Handler(), Handler().method], ids=["function", "object", "method"])
def handler(request: pytest.FixtureRequest) -> Iterator[Any]:
    before = signal.signal(signal.SIGUSR1, request.param)
    yield request.param
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("handler")
def test_an_interruption_in_a_listener_reaches_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    breaker = CircuitBreaker("memory://", ErrorCount(1, open_for=5), time=(clock := ManualClock()))
    heard: list[str] = []

    def interrupted_once(change: BreakerChange) -> None:
        heard.append(change.state)
        if len(heard) == 1:
            signal.raise_signal(signal.SIGUSR1)

    breaker.on_change(interrupted_once)
    with pytest.raises(SoftTimeLimit), breaker.call("k"):
        raise OSError
    assert "has failed" not in caplog.text
    clock.advance(6)
    with breaker.call("k"):
        pass
    assert heard == ["open", "half_open", "closed"], "the next changes are heard"


@pytest.mark.parametrize(
    "kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, ValueError]
)
def test_what_a_listener_raises_is_logged_with_its_name_and_reaches_nobody(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    listeners = CircuitBreaker("memory://", ErrorCount(1)).listeners
    heard: list[BreakerChange] = []
    change = BreakerChange("k", "closed", "open", 0)

    def quits(change: BreakerChange) -> None:
        raise kind

    listeners.add(quits)
    listeners.add(heard.append)
    # In a thread, as in the main thread a KeyboardInterrupt may be that of Ctrl-C.
    for _ in range(2):
        run_to_completion(lambda: listeners.notify(change))
    assert heard == [change, change], "the listeners after it, and the changes after it"
    failed = [line for line in caplog.messages if "has failed" in line]
    assert len(failed) == 2
    name = "a listener of breaker 'distwindow' at memory://"
    assert all(name in line and "quits" in line for line in failed)


def test_ctrl_c_in_a_listener_reaches_the_caller() -> None:
    listeners = Listeners("breaker 'b'")
    listeners.add(lambda change: signal.raise_signal(signal.SIGINT))
    # A shell that starts the tests in the background ignores SIGINT in them.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            listeners.notify(BreakerChange("k", "closed", "open", 0))
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("raised", [SoftTimeLimit, ValueError])
def test_what_code_raises_itself_was_raised_by_no_handler(raised: Callable[[], Exception]) -> None:
    with pytest.raises(Exception) as own:  # noqa: PT011 - of any kind
        raise raised()
    assert not was_raised_by_signal_handler(own.value)
    assert not was_raised_by_signal_handler(raised())
