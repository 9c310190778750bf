"""What a fork waits for. The threads are files in a directory, and the time is a number."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distwindow.support import fork as _fork_wait
from distwindow.support.fork import MAX_WAIT_S, ForkWait

STARTER = -1
"""The number of a thread that is none of those here."""
ACCURACY_S = 0.0003
"""A little more than the time between two checks."""


class System:
    """The threads and the time of a machine: `at` lists what happens at which time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now = 1000.0
        self.this_thread = 1
        self.at: list[tuple[float, Callable[[], object]]] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for due in [due for due in self.at if due[0] <= self.now]:
            self.at.remove(due)
            due[1]()

    def run(self, wait: ForkWait, thread: int, starter: int = STARTER) -> None:
        """Run a thread until it has left Python. It is not gone."""
        (self.directory / str(thread)).touch()
        before, self.this_thread = self.this_thread, thread
        wait.run_thread(starter, lambda: None, ())
        self.this_thread = before

    def connect(self, wait: ForkWait, thread: int) -> Callable[[], None]:
        """Have a thread begin to connect. Return what ends that."""
        connecting = ExitStack()
        before, self.this_thread = self.this_thread, thread
        connecting.enter_context(wait.connecting())
        self.this_thread = before
        return connecting.close

    def gone(self, thread: int) -> None:
        (self.directory / str(thread)).unlink()

    def waited(self, wait: ForkWait) -> float:
        """Return how many seconds a fork waits."""
        began = self.now
        wait.wait()
        return self.now - began


@contextmanager
def simulated(directory: Path) -> Iterator[System]:
    system = System(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fork_wait, "monotonic", lambda: system.now)
        patch.setattr(_fork_wait, "sleep", system.sleep)
        patch.setattr(_fork_wait, "get_native_id", lambda: system.this_thread)
        yield system


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    with simulated(tmp_path) as system:
        yield system


@pytest.fixture
def wait(system: System) -> ForkWait:
    return ForkWait(str(system.directory))


def test_without_threads_nothing_is_waited_for(system: System, wait: ForkWait) -> None:
    assert system.waited(wait) == 0


def test_threads_that_are_gone_are_not_waited_for(system: System, wait: ForkWait) -> None:
    for thread in range(10, 20):
        system.run(wait, thread)
        system.gone(thread)
    assert system.waited(wait) == 0


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 0.2)), min_size=1, max_size=5))
def test_a_fork_waits_until_all_threads_are_gone(threads: list[tuple[bool, float]]) -> None:
    """Some of them connect, the others have left Python."""
    with tempfile.TemporaryDirectory() as directory, simulated(Path(directory)) as system:
        wait = ForkWait(directory)
        for thread, (connects, seconds) in enumerate(threads, start=10):
            if connects:
                end = system.connect(wait, thread)
            else:
                system.run(wait, thread)
                end = partial(system.gone, thread)
            system.at.append((system.now + seconds, end))
        longest = max(seconds for _, seconds in threads)
        assert system.waited(wait) == pytest.approx(min(longest, MAX_WAIT_S), abs=ACCURACY_S)


def test_a_thread_does_not_wait_for_itself(system: System, wait: ForkWait) -> None:
    with wait.connecting():
        assert system.waited(wait) == 0
        system.this_thread = 2
        assert system.waited(wait) == pytest.approx(MAX_WAIT_S, abs=ACCURACY_S)


def test_a_server_that_does_not_answer_delays_forks_for_a_second(
    system: System, wait: ForkWait
) -> None:
    end = system.connect(wait, 10)
    for _ in range(9):
        assert system.waited(wait) == pytest.approx(MAX_WAIT_S, abs=ACCURACY_S)
    system.now += 0.2
    assert system.waited(wait) == 0
    end()


def test_greenlets_that_end_are_not_waited_for(system: System, wait: ForkWait) -> None:
    system.run(wait, 10, starter=10)  # its thread goes on
    assert system.waited(wait) == 0


def test_greenlets_that_connect_share_a_thread(system: System, wait: ForkWait) -> None:
    end_of_one, end_of_other = system.connect(wait, 10), system.connect(wait, 10)
    end_of_one()
    assert system.waited(wait) > 0
    end_of_other()
    assert system.waited(wait) == 0


def test_a_new_thread_with_the_number_of_an_old_one(system: System, wait: ForkWait) -> None:
    system.run(wait, 10)
    system.now += 1.1
    assert system.waited(wait) == 0


def test_systems_that_do_not_list_their_threads(system: System) -> None:
    wait = ForkWait(str(system.directory / "absent"))
    system.run(wait, 10)
    assert system.waited(wait) == pytest.approx(0.005, abs=ACCURACY_S)
    assert system.waited(wait) == 0


def test_a_failing_thread_ends_like_others(system: System, wait: ForkWait) -> None:
    def fail() -> None:
        raise ValueError("of the thread")

    (system.directory / "1").touch()
    with pytest.raises(ValueError, match="of the thread"):
        wait.run_thread(STARTER, fail, ())
    with pytest.raises(ValueError, match="of the thread"), wait.connecting():
        fail()
    system.this_thread = 2
    system.at.append((system.now + 0.01, lambda: system.gone(1)))
    assert system.waited(wait) == pytest.approx(0.01, abs=ACCURACY_S)


def test_an_exception_of_a_signal_handler_ends_the_wait(system: System, wait: ForkWait) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    system.run(wait, 10)
    system.at.append((system.now, interrupt))
    with pytest.raises(KeyboardInterrupt):
        wait.wait()
    system.at.append((system.now + 0.01, lambda: system.gone(10)))
    assert system.waited(wait) == pytest.approx(0.01, abs=ACCURACY_S)


def test_a_child_waits_for_no_thread_of_its_parent(system: System, wait: ForkWait) -> None:
    end = system.connect(wait, 10)
    system.run(wait, 11)
    wait.after_fork()
    assert system.waited(wait) == 0
    end()  # the child was forked by a thread that connects


def test_threads_that_have_ended_are_not_collected(system: System, wait: ForkWait) -> None:
    for thread in range(10, 1010):
        system.run(wait, thread)
        system.gone(thread)
        assert len(wait._ending) <= 2
    late = range(2000, 2010)
    for thread in late:  # they take long to end, and are gone all at once
        system.run(wait, thread)
    assert list(wait._ending) == list(late)
    for thread in late:
        system.gone(thread)
    for thread in range(3000, 3010):
        system.run(wait, thread)
        system.gone(thread)
    assert len(wait._ending) <= 2
