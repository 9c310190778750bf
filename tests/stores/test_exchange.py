"""Many commands in one exchange: each gets the reply that it would get alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import fakeredis
import pytest

from distwindow import ConfigurationError, Key, Limit, StoreUnavailable
from distwindow.lifecycle.connect import open_async_store, open_store
from distwindow.ring.command import Command
from distwindow.ring.commands import CURRENT_BUCKET, Acquire, Flush, Lease, Read, Refund, charges_of
from distwindow.ring.decision import Charge
from distwindow.ring.key import AnyKey, ring_name_prefix
from distwindow.ring.stats import Bucket
from distwindow.runtime.options import Options
from distwindow.stores.memory import MemoryStore
from tests.clock_and_stores import T0, fresh_key
from tests.event_loops import uvloop_param
from tests.harness import admin
from tests.servers import Cluster, Proxy, ResetAfterSend, Standalone

Exchange = Callable[[Sequence[Command[Any]]], list[Any]]
LIMIT = Limit("100/hour")
HOUR = T0 // 3_600_000 * 3_600_000


def charges(key: AnyKey, prefix: str = "exchange") -> tuple[Charge, ...]:
    return charges_of(key, ring_name_prefix(prefix, key), [LIMIT], 1)


def commands_on(keys: Sequence[AnyKey], prefix: str = "exchange") -> list[Command[Any]]:
    """Return a few commands on each key, whose replies depend on their order."""
    commands: list[Command[Any]] = []
    for key in keys:
        ring = charges(key, prefix)
        counts = ((Bucket(CURRENT_BUCKET, 3, 1),),)
        commands += [
            Acquire(ring, HOUR),
            Lease(ring, HOUR + 1, extra=9),
            *[
                Flush(ring, now, counts=counts, sender="a", seq=1, pull=True)
                for now in (HOUR + 2, HOUR + 3)
            ],
            Refund(ring, HOUR + 4, charged_ms=HOUR),
            Read(ring, HOUR + 5),
        ]
    return commands


@contextmanager
def blocking(where: Any, **options: Any) -> Iterator[Exchange]:
    store = open_store(where, Options(**{"clock": "client", "timeout": 5, **options}))
    yield store.execute_many
    store.close()


@contextmanager
def awaiting(where: Any, **options: Any) -> Iterator[Exchange]:
    loop = asyncio.new_event_loop()
    store = open_async_store(where, Options(**{"clock": "client", "timeout": 5, **options}))
    yield lambda commands: loop.run_until_complete(store.execute_many(commands))
    loop.run_until_complete(store.aclose())
    loop.close()


@pytest.fixture(params=[blocking, awaiting, uvloop_param(awaiting)])
def opened(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize(
    "where",
    [
        "redis_url",
        "unix_url",
        *(
            pytest.param(url, marks=pytest.mark.slow)
            for url in ("cluster_url", "tls_url", "fake_url")
        ),
    ],
)
def test_replies_together_are_those_that_each_would_get_alone(
    opened: Any, where: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(where)
    # There are more than are written at once, and on a cluster they go to all nodes.
    commands = commands_on([fresh_key() for _ in range(60)])
    expected = MemoryStore().execute_many(commands)
    with opened(url) as exchange:
        # Load the scripts on every node, as the order is not promised without them.
        exchange(commands_on([fresh_key() for _ in range(60)]))
        assert exchange(commands) == expected


def test_together_over_a_client_without_a_socket(opened: Any) -> None:
    server = fakeredis.FakeServer()
    kind = fakeredis.FakeRedis if opened is blocking else fakeredis.FakeAsyncRedis
    commands = commands_on([fresh_key() for _ in range(5)])
    with opened(kind(server=server)) as exchange:
        exchange(commands_on([fresh_key()]))
        assert exchange(commands) == MemoryStore().execute_many(commands)


def test_no_commands_are_no_exchange(opened: Any) -> None:
    with opened("redis://127.0.0.1:1") as exchange:
        assert exchange([]) == []


def test_a_command_that_fails_does_not_fail_the_others(
    opened: Any, redis_url: str, prefix: str
) -> None:
    keys = [fresh_key() for _ in range(3)]
    with admin(redis_url) as server:
        server.set(charges(keys[1], prefix)[0].ring, "no ring")
        commands = [Acquire(charges(key, prefix), HOUR) for key in keys]
        with opened(redis_url) as exchange:
            first, second, third = exchange(commands)
    assert first.admitted == third.admitted == 1
    assert isinstance(second, ConfigurationError)


def test_scripts_that_the_server_has_lost_are_sent_again_once(opened: Any, prefix: str) -> None:
    with Standalone() as server, opened(server.url) as exchange, server.client() as client:
        assert exchange(commands_on([fresh_key()], prefix))
        client.script_flush()
        client.config_resetstat()
        commands = commands_on([fresh_key() for _ in range(30)], prefix)
        assert exchange(commands) == MemoryStore().execute_many(commands)
        sent = client.info("commandstats")["cmdstat_eval"]["calls"]
        assert sent == len({command.script for command in commands})


def test_each_node_of_a_cluster_gets_a_lost_script_once(
    opened: Any, cluster: Cluster, cluster_url: str, prefix: str
) -> None:
    commands = commands_on([fresh_key() for _ in range(30)], prefix)
    with ExitStack() as stack, opened(cluster_url) as exchange:
        clients = [stack.enter_context(node.client()) for node in cluster.nodes]
        assert exchange(commands_on([fresh_key() for _ in range(30)], prefix))
        for client in clients:
            client.script_flush()
            client.config_resetstat()
        assert exchange(commands) == MemoryStore().execute_many(commands)
        sent = [client.info("commandstats").get("cmdstat_eval", {"calls": 0}) for client in clients]
    scripts = len({command.script for command in commands})
    assert [of_node["calls"] for of_node in sent if of_node["calls"]] == [scripts] * 3


def test_after_a_broken_connection_all_outcomes_are_unknown_and_none_is_sent_again(
    opened: Any, proxy: Proxy, redis_url: str, prefix: str
) -> None:
    commands = [Acquire(charges(Key(fresh_key(), "t"), prefix)) for _ in range(20)]
    with opened(proxy.url, clock="server") as exchange:
        exchange([Read(charges("warm", prefix))])
        exchange([Acquire(charges("warm", prefix))])
        with proxy.inject(ResetAfterSend(only=b"EVALSHA", times=1)):
            answers = exchange(commands)
    lost = [answer for answer in answers if isinstance(answer, StoreUnavailable)]
    assert lost
    assert all(answer.charged is None for answer in lost)
    with admin(redis_url) as server:
        for command, answer in zip(commands, answers, strict=True):
            held = int(server.hget(command.keys[0], "used") or 0)
            assert held == 1 if answer not in lost else held <= 1


def test_an_unreachable_server_is_tried_once_for_all_commands(opened: Any) -> None:
    commands = [Acquire(charges(fresh_key())) for _ in range(2000)]
    with opened("redis://127.0.0.1:1", clock="server") as exchange:
        answers = exchange(commands)
    assert {type(answer) for answer in answers} == {StoreUnavailable}
    assert {answer.charged for answer in answers} == {False}


@pytest.mark.event_loops
def test_who_is_cancelled_in_an_exchange_gets_its_replies_and_is_then_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was sent is counted, and would be sent again without its reply."""
    returned: list[Any] = []

    async def scenario() -> None:
        store, sent = open_async_store("redis://127.0.0.1:1", Options()), list[Any]()

        def execute(command: Command[Any], deadline: float | None) -> Any:
            sent.append(asyncio.get_running_loop().create_future())
            return sent[-1]

        async def dispatcher(deadline: float | None) -> Any:
            return SimpleNamespace(execute=execute), deadline

        async def caller() -> None:
            returned.append(await store.execute_many([Read(charges("k"))] * 2))
            await asyncio.sleep(0)
            returned.append("it went on")

        monkeypatch.setattr(store, "_ready_dispatcher", dispatcher)
        task = asyncio.create_task(caller())
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        for number, reply in enumerate(sent):
            await asyncio.sleep(0)
            reply.set_result(number)
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(scenario())
    assert returned == [[0, 1]]


@pytest.mark.event_loops
def test_a_closed_store_returns_an_error_for_each_command() -> None:
    store = open_store("redis://127.0.0.1:1", Options())
    awaited = open_async_store("redis://127.0.0.1:1", Options())
    store.close()

    async def ask() -> list[Any]:
        await awaited.aclose()
        return await awaited.execute_many([Read(charges("k"))] * 2)

    for answers in (store.execute_many([Read(charges("k"))] * 2), asyncio.run(ask())):
        assert [type(answer) for answer in answers] == [ConfigurationError] * 2
