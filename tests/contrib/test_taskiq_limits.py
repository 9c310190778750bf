"""`distwindow.contrib.taskiq` with taskiq's broker in memory, and with one that records."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any

import pytest
from taskiq import AckableMessage, BrokerMessage, Context, InMemoryBroker, TaskiqDepends
from taskiq_redis import RedisStreamBroker

from distwindow import ConfigurationError
from distwindow.contrib import taskiq as contrib
from distwindow.contrib.taskiq import LimitedReceiver, RateLimits


def in_memory_broker(**options: Any) -> Any:
    return InMemoryBroker().with_middlewares(RateLimits("memory://", **options))


async def test_without_the_receiver_tasks_wait_as_well() -> None:
    broker = in_memory_broker()
    running: list[int] = []

    @broker.task("job", limits=["2/100ms", "3/minute"], limit_key=lambda number: f"n{number % 1}")
    async def job(number: int) -> None:
        running.append(number)

    await broker.startup()
    handles = [await job.kiq(number) for number in range(3)]
    assert [(await handle.wait_result(timeout=10)).is_err for handle in handles] == [False] * 3
    assert sorted(running) == [0, 1, 2]
    await broker.shutdown()


async def test_limits_may_have_keys_of_their_own() -> None:
    broker = in_memory_broker()
    running: list[str] = []

    @broker.task("job", limits=["6/300ms", ("{tenant}", "1/300ms"), (lambda tenant: "x", "9/m", 2)])
    async def job(tenant: str) -> None:
        running.append(tenant)

    await broker.startup()
    handles = [await job.kiq(tenant) for tenant in "aabb"]
    assert [(await handle.wait_result(timeout=10)).is_err for handle in handles] == [False] * 4
    assert sorted(running[:2]) == ["a", "b"]
    assert sorted(running) == ["a", "a", "b", "b"]
    await broker.shutdown()


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"limits": "5/s", "limit_key": "{tennant}"}, "task 'job': .* names 'tennant'"),
        ({"limits": "5/fortnight"}, "task 'job': .* is not a unit of time"),
        ({"limit_cost": 2}, "limit_cost but no limits"),
        ({"limit": "1/hour"}, "unknown option limit='1/hour'"),
        ({"limits": "1/hour", "limit_keys": "x"}, "unknown option limit_keys='x'"),
        ({"limits": "5/s", "key": "{tenant}"}, "task 'job': key= is no option .* limit_key="),
        ({"limits": "5/s", "cost": 2}, "task 'job': cost= is no option of a task.* limit_cost="),
        ({"concurrency": 3}, "task 'job': concurrency=3 is no option of a task"),
    ],
)
async def test_wrong_labels_are_errors_when_the_worker_starts(
    labels: dict[str, Any], message: str
) -> None:
    broker = in_memory_broker()

    @broker.task("job", **labels)
    async def job(tenant: str) -> None: ...

    with pytest.raises(ConfigurationError, match=message):
        await broker.startup()


async def test_a_label_of_the_applications_own_is_none_of_ours() -> None:
    broker = in_memory_broker()

    @broker.task("job", limit=100, limited="no", priority=3, key="x")
    async def job() -> None: ...

    await broker.startup()
    assert not (await (await job.kiq()).wait_result(timeout=10)).is_err


async def test_a_task_that_is_declared_late_with_wrong_labels_is_held(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(contrib, "HOLD_S", 0.01)
    broker = in_memory_broker()
    started: list[int] = []
    happened: list[Any] = []
    await broker.startup()

    @broker.task("late", limits="1/fortnight")
    async def late(number: int) -> None:
        started.append(number)

    async def kick(message: BrokerMessage) -> None:
        happened.append(message.message)

    data = broker.formatter.dumps(late.kicker()._prepare_message(1)).message
    receiver = contrib.LimitedReceiver(broker, run_startup=False)
    broker.kick = kick
    await receiver.callback(AckableMessage(data=data, ack=lambda: happened.append("ack")))
    assert (started, happened) == ([], [data, "ack"])
    rate_limits: Any = broker.middlewares[0]
    without = asyncio.ensure_future(rate_limits.pre_execute(_parsed(broker, data)))
    await asyncio.sleep(0.05)
    assert not without.done()
    without.cancel()
    assert "task 'late': limit '1/fortnight'" in caplog.text
    assert "its calls are held" in caplog.text


def _parsed(broker: Any, data: bytes) -> Any:
    return broker.formatter.loads(message=data)


async def test_labels_of_limits_are_not_sent_and_those_of_a_call_change_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker = in_memory_broker()
    sent: list[dict[str, Any]] = []

    @broker.task("job", limits=["5/s", "9/m"], limit_key=lambda: "x", limit_cost=2, own="label")
    async def job() -> None: ...

    async def kick(message: BrokerMessage) -> None:
        sent.append(_parsed(broker, message.message).labels)

    await broker.startup()
    broker.kick = kick
    await job.kiq()
    assert caplog.text == ""
    await job.kicker().with_labels(limits="100/second").kiq()
    assert sent == [{"own": "label"}] * 2
    assert "limits=100/second of one call of task 'job' changes no limit" in caplog.text


def test_a_message_is_kept_for_a_tenth_of_its_idle_time() -> None:
    """The rest is left to run the task: a message that is idle for longer is run twice."""
    rate_limits = RateLimits("memory://")
    RedisStreamBroker("redis://localhost", idle_timeout=4_000).with_middlewares(rate_limits)
    assert rate_limits._hold_s() == 0.4


async def test_the_receiver_sends_a_message_back_and_acknowledges_it_afterwards() -> None:
    broker = in_memory_broker(max_hold=0.05)
    started: list[int] = []
    happened: list[Any] = []

    @broker.task("job", limits="1/minute")
    async def job(number: int) -> None:
        started.append(number)

    async def kick(message: BrokerMessage) -> None:
        happened.append(message.message)

    async def ack() -> None:
        happened.append("ack")

    await broker.startup()
    receiver = LimitedReceiver(broker, run_startup=False)
    broker.kick = kick
    for number in range(2):
        await job.kiq(number)
    first, second = happened
    happened.clear()
    for data in (first, second):
        await receiver.callback(AckableMessage(data=data, ack=ack))
    assert started == [0]
    assert happened == ["ack", second, "ack"]


async def test_a_worker_that_is_to_end_sends_back_what_waits_and_runs_what_may_start() -> None:
    broker = in_memory_broker()
    delivered: asyncio.Queue[AckableMessage] = asyncio.Queue()
    started: list[int] = []
    sent_back: list[bytes] = []
    acknowledged: list[bytes] = []
    three_have_ended = asyncio.Event()

    @broker.task("job", limits="2/hour")
    async def job(number: int) -> None:
        started.append(number)

    @broker.task("free")
    async def free(number: int) -> None:
        started.append(number)

    async def kick(message: BrokerMessage) -> None:
        sent_back.append(message.message)

    async def listen() -> Any:
        while True:
            yield await delivered.get()

    def acknowledge(data: bytes) -> None:
        acknowledged.append(data)
        if len(acknowledged) == 3:
            three_have_ended.set()

    messages = [
        broker.formatter.dumps(task.kicker()._prepare_message(number)).message
        for number, task in enumerate([job, job, job, job, free])
    ]
    for data in messages:
        delivered.put_nowait(AckableMessage(data=data, ack=partial(acknowledge, data)))
    broker.kick, broker.listen = kick, listen
    finish = asyncio.Event()
    worker = asyncio.ensure_future(LimitedReceiver(broker, max_async_tasks=10).listen(finish))
    await asyncio.wait_for(three_have_ended.wait(), 20)
    assert (sorted(started), sent_back) == ([0, 1, 4], [])
    finish.set()
    await asyncio.wait_for(worker, 20)
    assert sorted(started) == [0, 1, 4]
    assert sorted(sent_back) == sorted(messages[2:4])
    assert sorted(acknowledged) == sorted(messages)


async def test_what_an_admitted_task_starts_is_counted_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`InMemoryBroker` runs a task in the context of the one that sent it."""
    broker = in_memory_broker()
    rate_limits = next(m for m in broker.middlewares if isinstance(m, RateLimits))
    started: list[str] = []
    waited: list[str] = []
    wait = rate_limits.wait

    async def recording(message: Any, *args: Any) -> float:
        waited.append(message.task_name)
        return await wait(message, *args)

    monkeypatch.setattr(rate_limits, "wait", recording)

    @broker.task("inner", limits="9/minute")
    async def inner() -> None:
        started.append("inner")

    @broker.task("outer", limits="9/minute")
    async def outer() -> None:
        started.append("outer")
        await inner.kiq()

    await broker.startup()
    message = broker.formatter.dumps(outer.kicker()._prepare_message())
    receiver = LimitedReceiver(broker, run_startup=False)
    await receiver.callback(AckableMessage(data=message.message, ack=lambda: None))
    await broker.wait_all()
    assert started == ["outer", "inner"]
    assert waited == ["outer", "inner"]


async def test_the_receiver_without_the_middleware_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="needs the middleware RateLimits"):
        await LimitedReceiver(InMemoryBroker()).callback(b"{}")


async def test_what_taskiq_injects_is_no_argument_of_a_key() -> None:
    broker = in_memory_broker()
    keys: list[str] = []

    def key_of(tenant: str, page: int) -> str:
        keys.append(f"{tenant}:{page}")
        return keys[-1]

    async def job(tenant: str, context: Any, page: int = 1) -> None: ...

    job.__annotations__["context"] = Annotated[Context, TaskiqDepends()]
    task = broker.register_task(job, "job", limits="5/s", limit_key=key_of)
    await broker.startup()
    handle = await task.kiq("acme")
    assert not (await handle.wait_result(timeout=10)).is_err
    assert keys == ["acme:1"]
    await broker.shutdown()
