"""A primary with replicas, and sentinels that fail over within about a second."""

from __future__ import annotations

from typing import Any

import redis

from tests.servers.process import Config, RedisProcess
from tests.servers.wait import Started, until


class SentinelSet(Started):
    """`servers` (the first one starts as the primary) and `sentinels`, under the name `service`.

    `config` goes to the servers, e.g. `{"min-replicas-to-write": 1, "min-replicas-max-lag": 1}`.
    """

    def __init__(
        self,
        replicas: int = 1,
        sentinels: int = 3,
        *,
        service: str = "service",
        config: Config | None = None,
    ) -> None:
        self.service = service
        settings: Config = {
            # Without these a replica waits seconds before it first copies its primary.
            "repl-diskless-sync-delay": 0,
            "repl-ping-replica-period": 1,
            "repl-timeout": 5,
            **(config or {}),
        }
        self.servers = [RedisProcess(settings) for _ in range(1 + replicas)]
        self.sentinels = [RedisProcess(sentinel=True) for _ in range(sentinels)]

    @property
    def url(self) -> str:
        """`redis+sentinel://host:port,host:port/service/0`"""
        hosts = ",".join(f"{node.host}:{node.port}" for node in self.sentinels)
        return f"redis+sentinel://{hosts}/{self.service}/0"

    @property
    def primary(self) -> RedisProcess:
        """The process that most sentinels name as the primary now."""
        ports = [self._primary_port(sentinel) for sentinel in self.sentinels if sentinel.alive]
        port = max(ports, key=ports.count)
        return next(server for server in self.servers if server.port == port)

    def _start(self) -> None:
        self._start_servers()
        self._start_sentinels()

    def stop(self) -> None:
        # Sentinels first: they would start a failover while the servers end.
        for node in [*self.sentinels, *self.servers]:
            node.stop()

    def await_failover(self, dead: RedisProcess, timeout: float = 15.0) -> RedisProcess:
        """Wait until every sentinel names another, writable primary than `dead`; return it."""

        def moved() -> RedisProcess | None:
            ports = {self._primary_port(s) for s in self.sentinels if s.alive}
            if len(ports) != 1 or dead.port in ports:
                return None
            new = next(server for server in self.servers if server.port in ports)
            with new.client() as client:
                role: Any = client.execute_command("ROLE")
            return new if role[0] == "master" else None

        found = until(moved, timeout, what="failover")
        assert found is not None
        return found

    # -- starting ----------------------------------------------------------------------------------

    def _start_servers(self) -> None:
        primary, *replicas = self.servers
        primary.start()
        for replica in replicas:
            replica.config["replicaof"] = f"{primary.host} {primary.port}"
            replica.start()
        for replica in replicas:
            # mypy cannot infer a lambda whose parameter has a default.
            until(lambda r=replica: _in_sync(r), what="replica in step with its primary")  # type: ignore[misc]

    def move(self, host: str) -> None:
        """Give all of them another address at once."""
        primary, *replicas = self.servers
        for server in self.servers:
            server.config["replica-announce-ip"] = host
        primary.move(host)
        for replica in replicas:
            replica.config["replicaof"] = f"{host} {primary.port}"
            replica.move(host)
        for sentinel in self.sentinels:
            sentinel.host = host
        self._start_sentinels()

    def _start_sentinels(self) -> None:
        primary = self.servers[0]
        quorum = len(self.sentinels) // 2 + 1
        for sentinel in self.sentinels:
            sentinel.config = {
                "sentinel monitor": f"{self.service} {primary.host} {primary.port} {quorum}",
                "sentinel down-after-milliseconds": f"{self.service} 500",
                "sentinel failover-timeout": f"{self.service} 1000",
                "sentinel parallel-syncs": f"{self.service} 5",
                "sentinel announce-ip": sentinel.host,
            }
            sentinel.restart() if sentinel.port else sentinel.start()
            _shorten_periods(sentinel)
        until(self._discovered, what="sentinels know each other and the replicas", timeout=20)

    def _discovered(self) -> bool:
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                # Not redis-py's own methods: those of version 6 fail on these two replies.
                seen = _pairs(client.execute_command("SENTINEL", "MASTER", self.service))
                others = int(seen["num-other-sentinels"])
                reply: Any = client.execute_command("SENTINEL", "REPLICAS", self.service)
                replicas = [_pairs(replica) for replica in reply]
            if others != len(self.sentinels) - 1:
                return False
            if len(replicas) != len(self.servers) - 1:
                return False
            # Only a replica that has answered INFO can be promoted.
            if any(replica["master-link-status"] != "ok" for replica in replicas):
                return False
        return True

    def _primary_port(self, sentinel: RedisProcess) -> int:
        with sentinel.client() as client:
            reply: Any = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
        return int(reply[1])


def _shorten_periods(sentinel: RedisProcess) -> None:
    """Have the sentinel ping, ask and publish more often. Redis 6.2 has no such command."""
    periods = {
        "INFO-PERIOD": 500,
        # Not less: a replica can be promoted only while its last INFO is younger than five of
        # these, and once the primary is down a sentinel sends INFO only once a second.
        "PING-PERIOD": 300,
        "ASK-PERIOD": 100,
        "PUBLISH-PERIOD": 200,
        "ELECTION-TIMEOUT": 1000,
    }
    with sentinel.client() as client:
        for name, ms in periods.items():
            try:
                client.execute_command("SENTINEL", "DEBUG", name, ms)
            except redis.ResponseError:
                return


def _pairs(flat: Any) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _in_sync(replica: RedisProcess) -> bool:
    with replica.client() as client:
        info: Any = client.info("replication")
    return bool(info["master_link_status"] == "up")
