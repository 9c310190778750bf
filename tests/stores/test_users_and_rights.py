"""Passwords, users, and the ACL rights that a limiter needs."""

from __future__ import annotations

import re
import time
import uuid
from contextlib import suppress
from typing import Any

import pytest

from distwindow import Concurrency, ConfigurationError, Limit, Limiter, RateLimitExceeded
from distwindow.ring.commands import charges_of
from distwindow.ring.key import ring_name_prefix
from distwindow.stores.redis.outcome import RIGHTS, RIGHTS_OF_SLOTS
from distwindow.upstream.commands import (
    ASK_AGAIN,
    PAUSED,
    PROBE,
    SEND,
    SEND_ONE,
    Lower,
    PauseCommand,
    What,
    pause_name,
)
from tests.clock_and_stores import T0, blocking
from tests.harness import Harness
from tests.servers import Cluster, Standalone
from tests.stores.store_check import THREE, works

MINIMAL_ACL = f"~distwindow:* resetchannels -@all {RIGHTS}"
"""The least rights with which everything works (docs/operations.md). `+time` may be left out only
with `clock="client"`; without `+info` the server version is not read.
"""

ACL_OF_NAME = "+client|setname"
"""For `name=`."""

ACL_OF_DATABASE = "+select"
"""For a database other than 0."""

ACL_OF_CLUSTER = "+cluster|slots +command +asking"
"""For redis-py to read the map of a cluster, and for calls of slots that migrate."""


# -- passwords and users ----------------------------------------------------------------------

PASSWORD = "p@ss/w:rd#?é"  # characters that a URL has to escape
QUOTED = "p%40ss%2Fw%3Ard%23%3F%C3%A9"


@pytest.fixture(scope="module")
def guarded() -> Any:
    """Yield a server with a password, and with users of which one has just the rights that are
    needed.
    """
    with Standalone(
        password="secret",
        users=(
            f"limiter on >least {MINIMAL_ACL}",
            f"blind on >least {MINIMAL_ACL} -time -info",
            f"holder on >least {MINIMAL_ACL} {RIGHTS_OF_SLOTS}",
            "nobody on >least -@all",
            f"outsider on >least {MINIMAL_ACL.replace('~distwindow:*', '~other:*')}",
            f"scriptless on >least {MINIMAL_ACL.replace('+evalsha +eval', '')}",
            f"halfway on >least {MINIMAL_ACL.replace('+hincrby', '')}",
            f"odd on >{PASSWORD} ~* +@all",
        ),
    ) as server:
        yield server


def at(server: Standalone, login: str) -> str:
    return f"redis://{login}@{server.host}:{server.port}/0"


@pytest.mark.compat
@pytest.mark.parametrize("login", [":secret", "default:secret", f"odd:{QUOTED}"])
def test_a_password_in_the_url(
    harness: Harness, guarded: Standalone, prefix: str, login: str
) -> None:
    works(harness.limiter(at(guarded, login), THREE, prefix=prefix))


@pytest.mark.parametrize("login", [":wrong-password", "default:wrong-password", "ghost:secret"])
def test_a_wrong_password_is_a_configuration_error_that_keeps_it_secret(
    harness: Harness, guarded: Standalone, prefix: str, login: str
) -> None:
    limiter = harness.limiter(at(guarded, login), prefix=prefix)
    with pytest.raises(ConfigurationError, match="password") as caught:
        limiter.try_acquire("k")
    assert "wrong-password" not in str(caught.value)
    assert ":secret" not in str(caught.value)


# -- rights -----------------------------------------------------------------------------------


def test_the_least_rights_are_enough(harness: Harness, guarded: Standalone) -> None:
    key = uuid.uuid4().hex
    limiter = harness.limiter(at(guarded, "limiter:least"), ["3/hour", "3/day"])
    works(limiter, key)
    with guarded.client() as server:
        server.script_flush()
    works(limiter, key)


def test_they_are_enough_for_every_path(guarded: Standalone) -> None:
    with Limiter(at(guarded, "limiter:least"), ["8/200ms", "1000/hour"], timeout=10) as limiter:
        every_path(limiter, uuid.uuid4().hex)


@pytest.mark.parametrize(
    "right", [word for word in re.findall(r"\+(\w+)", MINIMAL_ACL) if word != "info"]
)
def test_none_of_the_least_rights_can_be_spared(right: str, guarded: Standalone) -> None:
    name = f"without-{right}"
    with guarded.client() as server:
        server.execute_command("ACL", "SETUSER", name, "on", ">least", *MINIMAL_ACL.split())
        server.execute_command("ACL", "SETUSER", name, f"-{right}")
        server.script_flush()
    key = f"needs-{right}"
    with Limiter(at(guarded, f"{name}:least"), ["8/200ms", "1000/hour"], timeout=10) as limiter:
        with pytest.raises(ConfigurationError, match=r"these rights"):
            every_path(limiter, key)


def every_path(limiter: Limiter, key: str) -> None:
    """Call so that every part of the scripts runs: a new ring, its hot path, several buckets, a
    refusal, the end of a window; and the other commands.
    """
    for _ in range(12):
        decision = limiter.try_acquire(key)
        limiter.try_acquire(f"{key} alone")
        if decision:
            limiter.refund(decision)
        limiter.try_acquire(key, 3)
        limiter.peek(key)
        limiter.stats(key)
        with suppress(RateLimitExceeded), limiter.entry(f"{key} alone"):
            pass
        limiter.flush()
        time.sleep(0.02)  # the time until another bucket, on the server's clock
    limiter.reset(key)


def test_the_least_rights_for_a_name_and_another_database(
    harness: Harness, guarded: Standalone, prefix: str
) -> None:
    url = at(guarded, "limiter:least")
    for options, where in (({"name": prefix}, url), ({}, url[:-1] + "3")):
        with pytest.raises(ConfigurationError, match=r"these rights"):
            harness.limiter(where, **options).try_acquire("k")
    with guarded.client() as server:
        rights = [*MINIMAL_ACL.split(), ACL_OF_NAME, ACL_OF_DATABASE]
        server.execute_command("ACL", "SETUSER", prefix, "on", ">least", *rights)
    url = at(guarded, f"{prefix}:least")[:-1] + "3"
    assert harness.limiter(url, name=prefix).try_acquire("k")


def test_the_least_rights_in_a_cluster(harness: Harness, cluster: Cluster, prefix: str) -> None:
    for rights, enough in (([], False), (ACL_OF_CLUSTER.split(), True)):
        for node in cluster.nodes:
            with node.client() as server:
                words = ("reset", "on", ">least", *MINIMAL_ACL.split(), *rights)
                server.execute_command("ACL", "SETUSER", prefix, *words)
        limiter = harness.limiter(cluster.url.replace("://", f"://{prefix}:least@"), timeout=3)
        keys = [f"{prefix}-{number}" for number in range(20)]
        if enough:
            assert all(limiter.each(keys))
            slot, source = Cluster.slot_of(f"{prefix}-new"), cluster.node_of(f"{prefix}-new")
            others = [node for node in cluster.nodes if node is not source]
            with cluster.migration(slot, source, others[0]) as migration:
                migration.begin()
                assert limiter.try_acquire(f"{prefix}-new")
                migration.end()
        else:
            with pytest.raises(ConfigurationError, match=r"these rights"):
                limiter.each(keys)


def test_time_and_info_are_not_sent_with_the_clients_clock(
    harness: Harness, guarded: Standalone
) -> None:
    limiter = harness.limiter(at(guarded, "blind:least"), THREE, clock="client")
    works(limiter, uuid.uuid4().hex)


@pytest.mark.parametrize("user", ["nobody", "outsider", "scriptless", "halfway", "blind"])
def test_missing_rights_are_a_configuration_error_that_names_the_remedy(
    harness: Harness, guarded: Standalone, user: str
) -> None:
    limiter = harness.limiter(at(guarded, f"{user}:least"))
    with pytest.raises(ConfigurationError, match="these rights"):
        limiter.each(["k"] * 2)  # the first call on a key does not need HINCRBY


# -- concurrency limits ---------------------------------------------------------------------------


def every_slot_path(slots: Concurrency) -> None:
    key = uuid.uuid4().hex
    with slots.hold(key):
        for claim in slots._held._claims.values():
            claim.next_due_at = 0.0  # have it renewed now
        slots.flush()
        assert slots.try_hold(key).refusal is not None
        assert slots.stats(key).held == 1
    assert slots.stats(key).held == 0


def test_the_rights_for_slots_are_enough(guarded: Standalone) -> None:
    with Concurrency(at(guarded, "holder:least"), 1, timeout=4) as slots:
        every_slot_path(slots)


@pytest.mark.parametrize("right", re.findall(r"\+(\w+)", RIGHTS_OF_SLOTS))
def test_none_of_the_rights_for_slots_can_be_spared(right: str, guarded: Standalone) -> None:
    name = f"without-{right}"
    rights = f"{MINIMAL_ACL} {RIGHTS_OF_SLOTS} -{right}"
    with guarded.client() as server:
        server.execute_command("ACL", "SETUSER", name, "on", ">least", *rights.split())
    with Concurrency(at(guarded, f"{name}:least"), 1, timeout=4) as slots:
        with pytest.raises((ConfigurationError, AssertionError), match=r"rights|held|assert"):
            every_slot_path(slots)


# -- paced limits ---------------------------------------------------------------------------------


def test_the_least_rights_are_enough_for_limits_that_are_paced_and_warm_up(
    harness: Harness, guarded: Standalone
) -> None:
    prefix = f"distwindow:{uuid.uuid4().hex[:8]}"
    limit = "60/minute warmup 10m paced 10m"
    limiter = harness.limiter(at(guarded, "limiter:least"), limit, prefix=prefix)
    assert [limiter.try_acquire("k").reason for _ in range(2)] == ["ok", "paced"]
    assert limiter.peek("k").wait > 1
    limiter.reset("k")
    assert limiter.try_acquire("k").wait == 0.0


# -- what upstreams say ---------------------------------------------------------------------------


def test_the_least_rights_are_enough_for_what_upstreams_say(guarded: Standalone) -> None:
    key = uuid.uuid4().hex
    charges = charges_of(key, ring_name_prefix("distwindow", key), [Limit("5/minute")], 3)
    # Each branch of the script: a pause, its probe, an answer, the return, and the end.
    steps: list[tuple[What, int, int]] = [
        ("tell", 0, PAUSED), ("ask", 0, PAUSED), ("ask", 1000, PROBE), ("free", 1000, SEND),
        ("ask", 1000, PROBE), ("ok", 1000, SEND), ("ask", 1000, SEND_ONE), ("ask", 1000, ASK_AGAIN),
        ("tell", 1000, PAUSED), ("ask", 3000, PROBE), ("ok", 3000, SEND), ("ask", 5000, SEND),
    ]  # fmt: skip
    with blocking(at(guarded, "limiter:least")) as execute:
        assert execute(Lower(charges, T0, resets_ms=(0,))).added == (3,)
        for what, after_ms, state in steps:
            command = PauseCommand((), T0 + after_ms, name=pause_name("distwindow", key), what=what)
            command.call, command.second_ms = "a1", 60_000
            command.first_ms = T0 + after_ms if what == "ok" else 0
            assert execute(command).state == state, (what, after_ms)
