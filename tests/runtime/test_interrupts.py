"""Events that threads wait for, and starting threads; which errors are those of signal handlers."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from types import SimpleNamespace

import pytest

from distwindow.support.locks import OneShotEvent, WakeUp, is_interruption, start_thread


def test_an_event_that_is_set_stays_set() -> None:
    event = OneShotEvent()
    assert not event.wait(0)
    assert not event.wait(-1)
    event.set()
    event.set()
    assert all(event.wait(0) for _ in range(3))


class StalledQueue:
    """Empty. A `get` that takes the inner lock first waits for ever, as CPython's does if the time
    is over when it has the lock.
    """

    locked = False

    def get(self, block: bool, seconds: float | None = None) -> None:
        assert self.locked or not block, "this waits for ever"
        self.locked = True
        raise Empty


@pytest.mark.parametrize("seconds", [0.0, 0.001])
def test_a_wait_on_a_machine_that_stalls_ends(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr("queue.SimpleQueue", StalledQueue)
    assert not OneShotEvent().wait(seconds)
    assert not WakeUp.sleep(SimpleNamespace(_tokens=StalledQueue()), seconds)  # type: ignore[arg-type]  # `wake` is left out


def test_one_event_wakes_all_threads_that_wait_for_it() -> None:
    event, passed = OneShotEvent(), SimpleQueue[bool]()
    threads = [threading.Thread(target=lambda: passed.put(event.wait(10))) for _ in range(5)]
    for thread in threads:
        thread.start()
    event.set()
    for thread in threads:
        thread.join(10)
    assert [passed.get(timeout=1) for _ in threads] == [True] * 5


def test_a_wake_up_before_the_sleep_is_kept_once() -> None:
    wake_up = WakeUp()
    wake_up.wake()
    wake_up.wake()
    assert wake_up.sleep(None)
    assert not wake_up.sleep(0)


def test_a_thread_is_started() -> None:
    started = OneShotEvent()
    assert start_thread(started.set)
    assert started.wait(10)


def test_an_exception_of_other_code_is_an_interruption() -> None:
    with pytest.raises(OSError, match="sent") as raised:
        raise OSError("sent by a handler")
    assert is_interruption(raised.value)  # its innermost frame is this test's
    assert not is_interruption(raised.value.with_traceback(None))
