"""`distwindow doctor`"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distwindow import Limiter
from distwindow.cli import doctor
from distwindow.cli.doctor import acl_rule
from distwindow.inspect.servers import Server
from distwindow.ring import command as script
from tests.cli.conftest import Cli, Result
from tests.lua.target import LUA
from tests.servers import Standalone, until


@pytest.fixture(scope="module")
def server() -> Iterator[Standalone]:
    with Standalone(maxmemory="50mb") as server:
        yield server


def levels(result: Result) -> dict[str, str]:
    findings = json.loads(result.out)["findings"]
    worst: dict[str, str] = {}
    for one in findings:
        order = ["ok", "warning", "problem"]
        known = worst.get(one["check"], "ok")
        worst[one["check"]] = max(known, one["level"], key=order.index)
    return worst


def test_a_server_without_problems(cli: Cli, server: Standalone) -> None:
    result = cli("doctor", store=server.url)
    assert result.code == 0
    assert "PROBLEM" not in result.out
    assert "Redis " in result.out or "Valkey " in result.out
    assert "noeviction" in result.out
    assert re.search(r"p50 [\d.]+ ms, p99", result.out)
    assert "redis-py" in result.out
    assert f"{len(script.script_names())} scripts" in result.out


def test_its_keys_are_deleted(cli: Cli, server: Standalone, prefix: str) -> None:
    cli("doctor", store=server.url)
    assert list(server.client().scan_iter(f"{prefix}:*")) == []


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "volatile-lru"])
def test_eviction_is_a_problem(cli: Cli, server: Standalone, policy: str) -> None:
    client = server.client()
    client.config_set("maxmemory-policy", policy)
    try:
        result = cli("doctor", store=server.url)
        assert result.code == 1
        assert f"PROBLEM  eviction     {policy}" in result.out
        assert "fix: CONFIG SET maxmemory-policy noeviction" in result.out
        as_json = cli("doctor", "--json", store=server.url)
        assert (as_json.code, levels(as_json)["eviction"]) == (1, "problem")
    finally:
        client.config_set("maxmemory-policy", "noeviction")


@pytest.mark.parametrize(
    ("name", "value", "check"),
    [("maxmemory", "1mb", "memory"), ("hash-max-ziplist-entries", "128", "encoding")],
)
def test_warnings_do_not_fail(
    cli: Cli, server: Standalone, name: str, value: str, check: str
) -> None:
    client = server.client()
    (before,) = client.config_get(name).values()
    client.config_set(name, value)
    try:
        result = cli("doctor", "--json", store=server.url)
    finally:
        client.config_set(name, before)
    if check == "memory":  # memory is full, so calls may fail and the exit code may be 1
        assert levels(result)["memory"] == "warning"
    else:
        assert result.code == 0
        assert levels(result)[check] == "warning"


@pytest.mark.parametrize(
    ("find", "info", "level"),
    [
        (doctor._version, {"redis_version": "6.0.9"}, "problem"),
        (doctor._version, {"redis_version": "6.2.0"}, "ok"),
        (doctor._version, {"redis_version": "7.2.4", "valkey_version": "8.0"}, "ok"),
        (doctor._memory, {"maxmemory": 100, "used_memory": 79}, "ok"),
        (doctor._memory, {"maxmemory": 100, "used_memory": 80}, "warning"),
        (doctor._memory, {"maxmemory": 0, "used_memory": 80}, "ok"),
        (doctor._replicas, {"role": "slave"}, "problem"),
        (doctor._replicas, {"role": "master", "connected_slaves": 0}, "ok"),
        (doctor._replicas, {"role": "master", "connected_slaves": 1}, "warning"),
        (doctor._replicas, {"connected_slaves": 1, "min_slaves_good_slaves": 1}, "ok"),
        (doctor._persistence, {"rdb_last_bgsave_status": "err"}, "warning"),
        (doctor._persistence, {"rdb_last_bgsave_status": "ok", "aof_enabled": 1}, "ok"),
    ],
)
def test_what_info_says_is_judged(find: Any, info: dict[str, Any], level: str) -> None:
    client = SimpleNamespace(
        execute_command=lambda *words: {"maxmemory_policy": "noeviction"} | info
    )
    server = Server("a server", client, None)
    found = doctor.Check("info", find, "").run(server)
    assert max((one.level for one in found), key=["ok", "warning", "problem"].index) == level


@pytest.mark.slow
def test_replicas_without_min_replicas(cli: Cli, server: Standalone) -> None:
    with Standalone(config={"replicaof": f"127.0.0.1 {server.port}"}) as replica:
        client = server.client()
        until(
            lambda: (
                client.info("replication")["connected_slaves"] == 1
                and replica.client().info("replication")["master_link_status"] == "up"
            ),
            what="the replica",
            timeout=20,
        )
        assert levels(cli("doctor", "--json", store=server.url))["replicas"] == "warning"
        on_replica = cli("doctor", "--json", store=replica.url)
        assert on_replica.code == 1
        assert levels(on_replica)["replicas"] == "problem"
        client.config_set("min-replicas-to-write", 1)
        try:
            assert levels(cli("doctor", "--json", store=server.url))["replicas"] == "ok"
        finally:
            client.config_set("min-replicas-to-write", 0)


@pytest.mark.slow
def test_every_primary_of_a_cluster_is_checked(cli: Cli, cluster_url: str) -> None:
    result = cli("doctor", store=cluster_url)
    assert result.code == 0
    assert result.out.count("noeviction") == 3
    assert "all 16,384 slots served" in result.out


@pytest.fixture(params=["everywhere", "in scripts"])
def refusing_url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Yield the URL of a server that refuses `TIME`; in scripts alone it is stood in for by a
    command that every server refuses there, with the same words.
    """
    if request.param == "everywhere":
        yield request.getfixturevalue("timeless_url")
        return
    shutil.copytree(LUA, tmp_path / "lua")
    piece = tmp_path / "lua" / "shared" / "clock.lua"
    text = piece.read_text("utf-8").replace("redis.call('TIME')", "redis.call('SUBSCRIBE', '')")
    piece.write_text(text, "utf-8")
    monkeypatch.setattr(script, "_PACKAGE", tmp_path / "distwindow")
    script.load_script.cache_clear()
    script.lua_files.cache_clear()
    yield request.getfixturevalue("redis_url")
    script.load_script.cache_clear()
    script.lua_files.cache_clear()


def test_a_server_that_refuses_time_needs_the_clock_of_the_clients(
    cli: Cli, refusing_url: str, prefix: str
) -> None:
    result = cli("doctor", "--json", store=refusing_url)
    assert result.code == 0
    findings = [one for one in json.loads(result.out)["findings"] if one["check"] == "scripts"]
    refused, run = findings
    assert (refused["level"], run["level"]) == ("warning", "ok")
    assert re.search("unknown command ['`]TIME['`]|not allowed from script", refused["found"])
    assert 'clock="client"' in refused["fix"]
    assert levels(result)["concurrency"] == "ok"
    with Limiter(refusing_url, "2/hour", prefix=prefix, clock="client", timeout=10.0) as limiter:
        assert [bool(limiter.try_acquire("k")) for _ in range(3)] == [True, True, False]


def rights(prefix: str) -> list[str]:
    rule = acl_rule(prefix)
    assert rule.startswith("ACL SETUSER <user> ")
    return rule.split()[3:]


class TestRights:
    @pytest.fixture
    def store(self, server: Standalone, prefix: str) -> str:
        self.client: Any = server.client()
        self.client.execute_command(
            "ACL", "SETUSER", "app", "reset", "on", ">pw-of-app", *rights(prefix)
        )
        return f"redis://app:pw-of-app@127.0.0.1:{server.port}/0"

    def test_its_acl_rule_suffices_and_forbidden_checks_are_warnings(
        self, cli: Cli, store: str
    ) -> None:
        result = cli("doctor", store=store)
        assert result.code == 0
        assert "could not check" in result.out
        assert "ok       scripts" in result.out

    @pytest.mark.slow
    def test_every_right_that_is_missing_is_found(
        self, cli: Cli, store: str, prefix: str, server: Standalone
    ) -> None:
        if server.client().info("server")["redis_version"] < "7":
            pytest.skip("before Redis 7 a script's commands are not checked one by one")
        wanted = [right for right in rights(prefix) if right.startswith("+")]
        assert len(wanted) > 8
        for right in wanted:
            self.client.execute_command("ACL", "SETUSER", "app", f"-{right[1:]}")
            result = cli("doctor", "--json", store=store)
            assert (result.code, levels(result)["scripts"]) == (1, "problem"), right
            (finding,) = [
                one for one in json.loads(result.out)["findings"] if one["check"] == "scripts"
            ]
            assert finding["fix"] == acl_rule(prefix)
            self.client.execute_command("ACL", "SETUSER", "app", right)
        assert cli("doctor", store=store).code == 0

    def test_missing_rights_for_concurrency_limits_are_a_warning(
        self, cli: Cli, store: str
    ) -> None:
        result = cli("doctor", "--json", store=store)
        assert result.code == 0
        assert levels(result)["concurrency"] == "warning"
        (finding,) = [
            one for one in json.loads(result.out)["findings"] if one["check"] == "concurrency"
        ]
        self.client.execute_command("ACL", "SETUSER", "app", *finding["fix"].split()[3:])
        assert levels(cli("doctor", "--json", store=store))["concurrency"] == "ok"

    def test_keys_that_the_user_may_not_access(self, cli: Cli, store: str, prefix: str) -> None:
        self.client.execute_command("ACL", "SETUSER", "app", "resetkeys", "~other:*")
        result = cli("doctor", store=store)
        assert result.code == 1
        assert f"~{prefix}:*" in result.out
