"""`Reachability` plays every row of its state table, and `Outages` tells each change once."""

from __future__ import annotations

import logging
import random
import threading

import pytest

from distwindow import ConfigurationError
from distwindow.away.outages import (
    BACKOFF_S,
    QUIET_S,
    Outages,
    Reachability,
    probe_pause_s,
)
from tests.clock_and_stores import ManualClock


class Server(Reachability):
    """One whose calls are answered when a test says so."""

    last_answer = last_execution = float("-inf")

    def __init__(
        self,
        outages: Outages | None = None,
        clock: ManualClock | None = None,
        *,
        is_probed: bool = True,
    ) -> None:
        self.clock = clock or ManualClock(auto_advance=False)
        self.told: list[tuple[str, ...]] = []
        if outages is None:
            outages = Outages()
            outages.start_probe = lambda server: is_probed
            outages.add_listener(lambda: self.told.append(self.outages.away))
        super().__init__("10.0.0.7:6379", self.clock, outages)

    @property
    def answered_at(self) -> float:
        return self.last_answer

    @property
    def executed_at(self) -> float:
        return self.last_execution

    def fail(self, *, slow: bool = False, began_ms_ago: int = 0) -> None:
        self.on_connect_failed("refused", self.clock.monotonic() - began_ms_ago / 1000, slow=slow)

    def is_tried(self) -> bool:
        return self.unavailable_reason() is None


def away() -> Server:
    server = Server()
    server.fail(slow=True)
    assert server.told == []  # the call goes on at once; who probes tells
    server.clock.move(10_000)
    assert not server.is_tried()
    assert server.poll() == "connect"
    return server


def test_up_after_a_failure_it_is_suspect_and_tried_again() -> None:
    server = Server()
    server.fail()
    assert server.is_tried()
    assert server.told == []


def test_up_after_a_whole_timeout_it_is_away() -> None:
    assert away().told == [("10.0.0.7:6379",)]


def test_suspect_after_another_failure_it_is_away() -> None:
    server = Server()
    server.fail()
    server.fail()
    assert not server.is_tried()


def test_suspect_after_a_connection_it_is_up() -> None:
    server = Server()
    server.fail()
    server.on_connected()
    server.fail()
    assert server.is_tried()


def test_up_a_refused_call_makes_it_refusing_and_calls_go_on() -> None:
    server = Server()
    server.on_refused_call("OOM command not allowed")
    server.on_refused_call("OOM command not allowed")
    assert server.is_tried()
    server.on_connected()  # which says nothing about calls
    assert server.poll() == "wait"
    assert server.told == [("10.0.0.7:6379",)]


def test_refusing_an_answered_call_that_writes_makes_it_up() -> None:
    server = Server()
    server.on_refused_call("OOM command not allowed")
    assert server.poll() == "wait"
    server.clock.move(5)
    server.last_answer = server.clock.monotonic()  # of a call that only reads
    assert server.poll() == "wait"
    server.last_execution = server.clock.monotonic()
    assert server.poll() == "done"
    assert server.told == [("10.0.0.7:6379",), ()]


def test_refusing_again_and_again_takes_longer_each_time() -> None:
    """A server that is full takes some calls: it is told at most as often as that."""
    server = Server()
    for _ in range(100):
        server.clock.move(50)
        server.on_refused_call("OOM command not allowed")
        for _ in range(24):
            server.clock.move(50)
            server.last_execution = server.clock.monotonic()
            server.poll()
    assert server.told.count(()) <= 3
    server.clock.move(int(QUIET_S * 1000) + 1)
    assert server.poll() == "done"


def test_refusing_a_server_that_nobody_calls_is_up_again() -> None:
    server = Server()
    server.on_refused_call("OOM command not allowed")
    for _ in range(3):
        server.clock.move(int(QUIET_S * 900))
        assert server.poll() == "wait"
        server.on_refused_call("OOM command not allowed")
    server.clock.move(int(QUIET_S * 1000) + 1)
    assert server.poll() == "done"


def test_refusing_a_server_that_ends_is_away() -> None:
    server = Server()
    server.on_refused_call("LOADING")
    server.fail(slow=True)
    assert server.poll() == "connect"
    assert not server.is_tried()


def test_away_a_probe_that_connects_makes_it_up() -> None:
    server = away()
    server.fail(slow=True)  # a probe that does not
    assert server.poll() == "connect"
    server.on_connected()
    assert server.is_tried()
    assert server.poll() == "done"
    assert server.told == [("10.0.0.7:6379",), ()]


def test_away_an_answered_call_makes_it_up() -> None:
    server = away()
    server.last_answer = server.clock.monotonic()
    assert server.poll() == "done"
    assert server.is_tried()


def test_a_server_that_answers_others_is_not_away() -> None:
    server = Server()
    server.clock.move(100)
    server.last_answer = server.clock.monotonic()
    for _ in range(3):
        server.fail(slow=True, began_ms_ago=50)
    assert server.told == []
    assert not server.is_tried()
    server.clock.move(int(BACKOFF_S * 1000))
    assert server.is_tried()


def test_an_attempt_of_before_the_server_was_back_says_nothing_when_it_fails() -> None:
    """Several threads connect at a time: those whose packets were lost fail when others work."""
    server = away()
    server.clock.move(100)
    server.on_connected()
    server.clock.move(100)
    for _ in range(3):
        server.fail(slow=True, began_ms_ago=150)
    assert server.is_tried()
    assert server.poll() == "done"


def test_a_server_that_was_replaced_is_not_away_again_when_its_last_probe_fails() -> None:
    server = away()
    server.on_replaced()
    server.fail(slow=True)
    assert server.poll() == "done"
    assert server.outages.away == ()


def test_where_nothing_can_probe_the_next_call_finds_out() -> None:
    server = Server(is_probed=False)
    server.fail(slow=True)
    assert not server.is_tried()
    server.clock.move(int(BACKOFF_S * 1000))
    assert server.is_tried()
    assert server.told == []


def test_what_nobody_probes_any_more_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """The limiter is being closed, or its event loop is: the next loop goes on with it."""
    server = away()
    caplog.clear()
    server.stop_probing()
    assert server.is_tried()
    server.fail(slow=True)
    again = Server(server.outages, server.clock)
    assert not again.is_tried()
    again.clock.move(int(BACKOFF_S * 1000))
    assert again.is_tried()
    again.fail()
    assert again.poll() == "connect"
    assert (server.told, caplog.messages) == ([("10.0.0.7:6379",)], [])
    again.on_connected()
    assert server.told == [("10.0.0.7:6379",), ()]
    assert caplog.messages == ["10.0.0.7:6379 is back (a store)"]


def test_a_probe_that_connects_at_once_ends_what_was_recorded_before() -> None:
    server = Server()
    threads: list[threading.Thread] = []

    def start_probe(probed: Reachability) -> bool:
        threads.append(threading.Thread(target=probed.on_connected))
        threads[0].start()
        return True

    server.outages.start_probe = start_probe
    server.fail(slow=True)
    threads[0].join()
    assert server.is_tried()
    assert server.outages.away == ()


def test_a_server_that_refuses_the_user_is_reached_and_not_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "distwindow")
    server = away()
    server.poll()
    for _ in range(3):
        server.on_refused_client(ConfigurationError("WRONGPASS"))
    assert server.is_tried()
    assert server.outages.last_error == "WRONGPASS"
    assert server.told == [("10.0.0.7:6379",)] * 2
    assert caplog.messages[1:] == [
        "10.0.0.7:6379 cannot be used: WRONGPASS (a store); calls raise ConfigurationError"
    ]
    server.last_execution = server.clock.monotonic() + 1
    server.poll()
    assert server.told[2:] == [()]


def test_each_change_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "distwindow")
    server = away()
    server.fail(slow=True)
    server.on_connected()
    for _ in range(3):
        server.poll()
    assert caplog.messages == [
        "10.0.0.7:6379 is away: refused (a store); it is probed until it is back",
        "10.0.0.7:6379 is back (a store)",
    ]


def test_probes_leave_the_random_numbers_of_the_program_alone() -> None:
    before = random.getstate()
    assert probe_pause_s() != probe_pause_s()
    assert random.getstate() == before
