"""Fleets of real Celery workers on a real broker: the bound holds, nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from tests.celery.processes import Fleet, most_in_a_window, visible_again_after
from tests.servers import Proxy, Standalone
from tests.servers.faults import Blackhole, Pass
from tests.servers.wait import until

pytestmark = [pytest.mark.slow, pytest.mark.fleet, pytest.mark.timeout(180)]

PER_SECOND = 20
LIMITED = {"limits": f"{PER_SECOND}/second"}


REDELIVERED_S = 140.0
"""How long to wait for what is delivered again: kombu before 5.7 knows not all these options."""


def check_bound(fleet: Fleet) -> None:
    assert most_in_a_window([int(at_ms) for at_ms in fleet.recorded("admitted")]) <= PER_SECOND


def reach_what_is_behind_the_line(fleet: Fleet) -> None:
    """For a limit of one an hour, and `max_parked` of 50."""
    fleet.start()
    fleet.send_all(600, "fetch")
    fleet.send_all(20, "free")
    until(lambda: fleet.records.llen("free") == 20, what="free tasks", timeout=30)
    until(lambda: fleet.records.llen("sent_back") == 549, what="the rest", timeout=30)


def overtake_the_line(fleet: Fleet, usual: int, urgent: int) -> None:
    """Send tasks of the priority `usual`, and one that is urgent, which starts before them."""
    fleet.start(slots=1)
    fleet.send_all(40, "fetch", priority=usual)
    until(lambda: len(fleet.started()) >= 8, what="a line", timeout=60)
    fleet.send("fetch", 100, priority=urgent)
    fleet.wait_started(41)
    started = fleet.started()
    assert started.index(100) <= 30
    started.remove(100)
    assert started == sorted(started)


def span_s(fleet: Fleet) -> float:
    moments: list[float] = [at_s for _, at_s, *_ in fleet.recorded("starts")]
    return max(moments) - min(moments)


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_two_workers_keep_one_limit(pool: str) -> None:
    count = 100
    with Fleet(options=LIMITED) as fleet:
        slots = 8 if pool in ("gevent", "eventlet") else 2
        fleet.start_all(2, pool=pool, slots=slots)
        fleet.send_all(count, "fetch")
        fleet.wait_started(count)
        assert sorted(fleet.started()) == list(range(count))
        check_bound(fleet)
        ideal_s = (count - 1) // PER_SECOND
        assert ideal_s - 0.15 <= span_s(fleet) <= ideal_s + 2.5
        assert fleet.recorded("sent_back") == []
        found = fleet.inspect()
        assert len(found) == 2
        asks = sum(worker["asks"] for worker in found.values())
        # Each of two workers is refused once in a bucket of 100 ms at most.
        assert count < asks <= count + 2 * 10 * (span_s(fleet) + 1)
        assert all(worker["line count"] == worker["parked"] == 0 for worker in found.values())


def test_limits_with_keys_of_their_own_hold_for_all_workers_together() -> None:
    """40 tenants with two tasks each, and one with 20."""
    of_tenant, count = 4, 100
    limits = [f"{PER_SECOND}/second", ["tenant:{tenant}", f"{of_tenant}/second"]]
    with Fleet(options={"limits": limits}) as fleet:
        fleet.start_all(2)
        for number in range(count):
            fleet.send("fetch", number, 0.0, str(number % 40 if number % 5 else "many"))
        fleet.wait_started(count)
        assert sorted(fleet.started()) == list(range(count))
        check_bound(fleet)
        tenants = {tenant for *_, tenant in fleet.recorded("starts")}
        for tenant in tenants:
            admitted = [int(at_ms) for at_ms in fleet.recorded(f"admitted tenant:{tenant}")]
            assert most_in_a_window(admitted) <= of_tenant
        ideal_s = (count - 1) // PER_SECOND
        assert ideal_s - 0.15 <= span_s(fleet) <= 2 * ideal_s + 2.5
        found = fleet.inspect()
        asks = sum(worker["asks"] for worker in found.values())
        # A refusal of all in each bucket for each worker, and a few of the tenant with a long line.
        assert count < asks <= count + 2 * 2 * 10 * (span_s(fleet) + 1)
        assert all(worker["line count"] == worker["parked"] == 0 for worker in found.values())
        assert next(iter(found.values()))["tasks"]["tests.celery.project.fetch"]["limits"] == [
            "20/second", "4/second for tenant:{tenant}",
        ]  # fmt: skip


def test_without_the_gate_the_check_of_the_bound_fails() -> None:
    with Fleet(options=LIMITED, gate=False) as fleet:
        fleet.start()
        fleet.send_all(60, "fetch")
        fleet.wait_started(60)
        moments = [int(at_s * 1000) for _, at_s, *_ in fleet.recorded("starts")]
        assert most_in_a_window(moments) > PER_SECOND


def test_other_tasks_and_other_keys_pass_a_line() -> None:
    with Fleet(options={"limits": "1/minute", "limit_key": "tenant:{tenant}"}) as fleet:
        fleet.start()
        fleet.send_all(62, "fetch", 0.01, "acme")
        until(lambda: fleet.records.llen("parked") == 61, what="a line", timeout=60)
        fleet.send("free", 1)
        fleet.send("fetch", 100, 0.01, "initech")
        until(lambda: fleet.records.llen("free") == 1, what="the task without a limit", timeout=3)
        until(lambda: 100 in fleet.started(), what="the other key", timeout=3)
        assert len(fleet.started()) == 2


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_a_killed_worker_loses_nothing(late: bool) -> None:
    count = 60
    conf = {"broker_transport_options": visible_again_after(4)}
    with Fleet(options={**LIMITED, "acks_late": late}, conf=conf) as fleet:
        doomed = fleet.start_all(2)
        fleet.send_all(count, "fetch", 0.02)
        until(lambda: len(fleet.started()) >= 25, what="starts", timeout=60)
        fleet.kill(doomed)
        # With early acknowledgement Celery itself loses what the two killed processes had begun.
        least = count if late else count - 2
        until(lambda: len(set(fleet.started())) >= least, what="all", timeout=REDELIVERED_S)
        doubled = [number for number, times in Counter(fleet.started()).items() if times > 1]
        assert len(doubled) <= 2
        check_bound(fleet)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_a_killed_child_loses_nothing_that_waits(late: bool) -> None:
    """The child is killed in the middle of a long task: with early acknowledgement Celery itself
    loses a task that a child has accepted and not begun.
    """
    count, long = 50, 15
    options = {**LIMITED, "acks_late": late, "reject_on_worker_lost": late}
    with Fleet(options=options) as fleet:
        fleet.start()
        for number in range(count):
            fleet.send("fetch", number, 2.0 if number == long else 0.05)
        until(lambda: long in fleet.started(), what="the long task", timeout=60)
        pid = next(pid for number, _, pid, _ in fleet.recorded("starts") if number == long)
        os.kill(pid, signal.SIGKILL)
        until(lambda: len(set(fleet.started())) == count, what="all", timeout=40)
        assert len(fleet.started()) <= count + late
        check_bound(fleet)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT], ids=["warm", "cold"])
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_shutdown_gives_what_waits_back_to_the_broker(number: signal.Signals, pool: str) -> None:
    with Fleet(options={"limits": "3/minute"}) as fleet:
        worker = fleet.start(pool=pool)
        fleet.send_all(40, "fetch")
        until(lambda: fleet.records.llen("parked") == 37, what="a line", timeout=60)
        fleet.wait_started(3)
        fleet.stop(worker, number)
        assert len(fleet.started()) == 3
        assert fleet.broker_client.llen("celery") == 37
        assert fleet.broker_client.hlen("unacked") == 0


def test_connections_to_the_broker_are_cut() -> None:
    """kombu takes a message by BRPOP and lists it as unacknowledged only when the reply is there:
    what Redis hands to a connection that was cut is lost, with a gate and without. So the law is
    about what a worker has received.
    """
    count, workers, cuts = 60, 2, 2
    with Standalone() as broker_server, Proxy(broker_server.port) as proxy:
        conf = {"broker_transport_options": visible_again_after(4)}
        publisher = broker_server.url
        with Fleet(options=LIMITED, broker=proxy.url, publisher=publisher, conf=conf) as fleet:
            fleet.start_all(workers)
            numbers = {fleet.send("fetch", number).id: number for number in range(count)}
            for times in range(1, cuts + 1):
                until(lambda: len(fleet.started()) >= 15 * times, what="starts", timeout=30)  # noqa: B023
                proxy.cut()
            client: Any = broker_server.client(db=0)

            def all_that_was_received() -> set[int] | None:
                left = int(client.llen("celery")) + int(client.hlen("unacked"))
                received = {numbers[identity] for identity in fleet.received()}
                return received if not left and received == set(fleet.started()) else None

            received = until(all_that_was_received, what="all", timeout=60) or set()
            assert len(received) >= count - workers * cuts
            doubled = [number for number, n in Counter(fleet.started()).items() if n > 1]
            assert len(doubled) <= 2 * 4  # what ran, and could not be acknowledged, in each cut
            check_bound(fleet)


@pytest.mark.parametrize("policy", ["hold", "run"])
def test_the_store_of_the_limits_is_away(policy: str) -> None:
    count = 60
    with Standalone() as store, Proxy(store.port) as proxy:
        conf = {"distwindow_on_store_error": policy}
        with Fleet(options=LIMITED, store=proxy.url, conf=conf) as fleet:
            fleet.start()
            fleet.send_all(count, "fetch")
            until(lambda: len(fleet.started()) >= 20, what="starts", timeout=60)
            proxy.fault = Blackhole()
            if policy == "run":
                fleet.wait_started(count, timeout=15)
                assert "run without their limits" in fleet.log()
            else:
                until(lambda: "limited tasks wait" in fleet.log(), what="a pause", timeout=10)
                before = len(fleet.started())
                for number in range(5):  # the worker goes on with everything else meanwhile
                    fleet.send("free", number)
                until(lambda: fleet.records.llen("free") == 5, what="free tasks", timeout=5)
                assert len(fleet.started()) <= before + 2
                proxy.fault = Pass()
                fleet.wait_started(count, timeout=30)
                assert "answers again" in fleet.log()
                check_bound(fleet)
            assert sorted(fleet.started()) == list(range(count))


def test_what_is_behind_more_than_max_parked_is_reached() -> None:
    with Fleet(options={"limits": "1/hour"}, conf={"distwindow_max_parked": 50}) as fleet:
        reach_what_is_behind_the_line(fleet)


def test_a_task_of_priority_0_overtakes_its_line() -> None:
    with Fleet(options={"limits": "4/second"}) as fleet:
        overtake_the_line(fleet, usual=9, urgent=0)


@pytest.mark.parametrize("max_hold", [None, 3600.0], ids=["by age", "kept for too long"])
def test_a_backlog_longer_than_the_visibility_timeout(max_hold: float | None) -> None:
    """24 tasks at 2/s, and the broker gives a message to another worker after 4 s."""
    conf = {"broker_transport_options": visible_again_after(4), "distwindow_max_hold": max_hold}
    with Fleet(options={"limits": "2/second"}, conf=conf) as fleet:
        fleet.start_all(2)
        fleet.send_all(24, "fetch")
        fleet.wait_started(24, timeout=120)
        until(lambda: fleet.messages_in_broker() == 0, what="an empty broker", timeout=60)
        assert all(worker["line count"] == 0 for worker in fleet.inspect().values())
        assert sorted(fleet.started()) == list(range(24))
        assert (fleet.records.llen("sent_back") > 0) == (max_hold is None)


def test_what_finds_no_room_goes_back_about_once_in_a_fleet() -> None:
    """Tasks with an eta come to the workers all at once, whatever their prefetch count. With turns
    of each worker's own they would go back more than twice.
    """
    count, workers, max_parked = 200, 3, 8
    with Fleet(options=LIMITED, conf={"distwindow_max_parked": max_parked}) as fleet:
        fleet.start_all(workers)
        eta = datetime.now(timezone.utc) + timedelta(seconds=3)
        fleet.send_all(count, "fetch", eta=eta)
        fleet.wait_started(count, timeout=60)
        assert sorted(fleet.started()) == list(range(count))
        check_bound(fleet)
        without_room = count - PER_SECOND - workers * max_parked
        assert fleet.records.llen("sent_back") <= 1.5 * without_room


def test_celerys_own_rate_limit_changes_at_runtime_and_holds_beside_the_limits() -> None:
    name = "tests.celery.project.fetch"
    with Fleet(options={"limits": "3/hour"}) as fleet:
        fleet.start()
        fleet.command("control", "rate_limit", name, "2/s")
        fleet.send_all(10, "fetch")
        until(lambda: fleet.records.llen("parked") == 7, what="a line", timeout=30)
        found = fleet.inspect()["w0@test"]
        assert found["tasks"][name] == {"limits": ["3/hour"], "set by": "the task's options"}
        assert [(line["task"], line["waiting"]) for line in found["lines"]] == [(name, 7)]
        starts = [json.loads(start)[1] for start in fleet.records.lrange("starts", 0, -1)]
        assert len(starts) == 3
        assert starts[-1] - starts[0] > 0.6  # without Celery's limit they start at once
        assert fleet.log().count("begin to wait") == 1


def test_what_waits_in_workers_is_discarded() -> None:
    """`celery purge` empties queues, and what waits has left them."""
    with Fleet(options={"limits": "1/hour"}) as fleet:
        fleet.start()
        sent = [fleet.send("fetch", number) for number in range(31)]
        late = fleet.send("fetch", 31, countdown=3600)
        until(lambda: fleet.records.llen("parked") == 30, what="tasks that wait", timeout=60)
        until(lambda: fleet.messages_in_broker() == 31, what="the one with an eta", timeout=60)
        fleet.command("purge", "-f")
        said = fleet.command("control", "discard", "tests.celery.project.fetch")
        assert "31 waiting tasks tests.celery.project.fetch are revoked" in said
        until(lambda: fleet.messages_in_broker() == 0, what="all acknowledged", timeout=60)
        assert next(iter(fleet.inspect().values()))["parked"] == 0
        states = [result.state for result in [*sent, late]]
        assert states.count("REVOKED") == 31
        assert states.count("SUCCESS") == len(fleet.started()) == 1
