"""A Redis Cluster, made with CLUSTER commands, because redis-cli is not always installed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import redis
from redis.crc import key_slot

from tests.servers.process import Config, RedisProcess
from tests.servers.wait import Started, until

if TYPE_CHECKING:
    from typing_extensions import Self

SLOTS = 16_384


class Cluster(Started):
    """`masters` nodes that share the slots evenly, each with `replicas` replicas.

    Its timeouts are small: a dead master is noticed in about a second, and a replica takes over
    soon after. `nodes` holds the masters first, then the replicas.
    """

    def __init__(
        self, masters: int = 3, replicas: int = 0, *, config: Config | None = None
    ) -> None:
        self.masters = masters
        self.replicas = replicas
        settings: Config = {
            "cluster-enabled": "yes",
            "cluster-config-file": "nodes.conf",
            "cluster-node-timeout": 800,
            "cluster-replica-validity-factor": 0,
            "repl-diskless-sync-delay": 0,
            # CLUSTER SLOTS hides a replica until its first byte of replication, which is a ping.
            "repl-ping-replica-period": 1,
            **(config or {}),
        }
        self.nodes = [RedisProcess(settings) for _ in range(masters * (1 + replicas))]

    @property
    def url(self) -> str:
        """Every node, as `redis+cluster://host:port,host:port`."""
        return "redis+cluster://" + ",".join(f"{node.host}:{node.port}" for node in self.nodes)

    def client(self, **options: Any) -> redis.RedisCluster:
        settings: dict[str, Any] = {"decode_responses": True, "socket_timeout": 5, **options}
        first = next(node for node in self.nodes if node.alive)
        return redis.RedisCluster(host=first.host, port=first.port, **settings)

    def launch(self) -> Self:
        """Start the processes only. A node serves nothing in its first two seconds, so tests that
        need a cluster later save these if it is launched early.
        """
        try:
            for node in self.nodes:
                node.start()
        except BaseException:  # Ctrl-C, too, must leave no server behind
            self.stop()
            raise
        return self

    def _start(self) -> None:
        """Start the processes, unless they are launched already, and make a cluster of them."""
        if not all(node.alive for node in self.nodes):
            self.launch()
        self._form()

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def node_of(self, key: str) -> RedisProcess:
        """Return the process of the master that serves `key` now."""
        with self.client() as client:
            port = client.get_node_from_key(key).port
        return next(node for node in self.nodes if node.port == port)

    @staticmethod
    def slot_of(key: str) -> int:
        """Return the slot of all rings of `key`."""
        return int(key_slot(f"{{{key}}}".encode()))

    def keys_by_port(self) -> dict[int, list[str]]:
        """Return ten keys for each master, by its port."""
        with self.client() as client:
            found: dict[int, list[str]] = {node.port: [] for node in self.nodes[: self.masters]}
            for number in range(1000):
                node = client.nodes_manager.get_node_from_slot(self.slot_of(f"k{number}"))
                if len(found[node.port]) < 10:
                    found[node.port].append(f"k{number}")
        return found

    def migrate(self, slot: int, source: RedisProcess, target: RedisProcess) -> None:
        """Move a slot as redis-cli does, key by key."""
        with self.migration(slot, source, target) as migration:
            migration.begin()
            while migration.move_key():
                time.sleep(0.02)  # calls come while one part of the slot has moved
            time.sleep(0.05)  # and while all of it has moved, and nobody knows
            migration.end()

    def migration(self, slot: int, source: RedisProcess, target: RedisProcess) -> Migration:
        """Return the migration of a slot, which has not begun."""
        masters = [node for node in self.nodes[: self.masters] if node.alive]
        others = [node for node in masters if node not in (source, target)]
        return Migration(slot, source, target, others)

    def move(self, host: str, *nodes: RedisProcess) -> None:
        """Give nodes another address at once, as pods that were replaced, with what they knew."""
        for node in nodes:
            node.kill()
        for node in nodes:
            node.config["cluster-announce-ip"] = host
            known = node.folder / "nodes.conf"
            text = known.read_text()
            for moved in nodes:  # their names are resolved anew, as it were
                text = text.replace(f"{moved.host}:{moved.port}@", f"{host}:{moved.port}@")
            known.write_text(text)
        for node in nodes:
            node.move(host)

    # -- forming the cluster -----------------------------------------------------------------------

    def _form(self) -> None:
        clients = [node.client() for node in self.nodes]
        try:
            first = clients[0]
            for epoch, client in enumerate(clients, start=1):
                # Nodes with equal epochs would take seconds to resolve the collision.
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", epoch)
            for index, client in enumerate(clients[: self.masters]):
                low = SLOTS * index // self.masters
                high = SLOTS * (index + 1) // self.masters
                _add_slots(client, low, high - 1)
            for node in self.nodes[1:]:
                first.execute_command("CLUSTER", "MEET", node.host, node.port)
            until(
                lambda: all(
                    _info(client)["cluster_known_nodes"] == len(self.nodes) for client in clients
                ),
                what="all cluster nodes know each other",
                timeout=20,
            )
            for index, client in enumerate(clients[self.masters :]):
                master = clients[index % self.masters].execute_command("CLUSTER", "MYID")
                until(
                    # mypy cannot infer a lambda whose parameter has a default.
                    lambda c=client, m=master: c.execute_command("CLUSTER", "REPLICATE", m),  # type: ignore[misc]
                    what="replica accepted",
                )
            until(
                lambda: self._agreed(clients),
                what="all cluster nodes agree on the topology",
                timeout=20,
            )
        finally:
            for client in clients:
                client.close()

    def await_service(self) -> None:
        """Wait until all nodes serve: where a machine stands still for longer than their timeout,
        they take each other for failed, and refuse calls for some seconds.
        """
        clients = [node.client() for node in self.nodes]
        try:
            until(
                lambda: all(_info(client)["cluster_state"] == "ok" for client in clients),
                what="all cluster nodes serve",
                timeout=20,
            )
        finally:
            for client in clients:
                client.close()

    def _agreed(self, clients: list[redis.Redis]) -> bool:
        for client in clients:
            info = _info(client)
            if info["cluster_state"] != "ok" or info["cluster_slots_ok"] != SLOTS:
                return False
            # Every node must know every replica, because clients ask any of them for the topology.
            shards: Any = client.execute_command("CLUSTER", "SLOTS")
            if len(shards) != self.masters or any(len(s) != 3 + self.replicas for s in shards):
                return False
        return all(
            client.info("replication").get("master_link_status") == "up"
            for client in clients[self.masters :]
        )


class Migration:
    """A slot on its way from one node to another, step by step."""

    def __init__(
        self, slot: int, source: RedisProcess, target: RedisProcess, others: list[RedisProcess]
    ) -> None:
        self.slot = slot
        self.source, self.target = source, target
        self._from, self._to = source.client(), target.client()
        self._others = [node.client() for node in others]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in (self._from, self._to, *self._others):
            client.close()

    def begin(self) -> None:
        """From now on calls of keys that the source does not have go to the target."""
        source_id, target_id = (
            client.execute_command("CLUSTER", "MYID") for client in (self._from, self._to)
        )
        self._to.execute_command("CLUSTER", "SETSLOT", self.slot, "IMPORTING", source_id)
        self._from.execute_command("CLUSTER", "SETSLOT", self.slot, "MIGRATING", target_id)

    def move_key(self) -> bool:
        """Move one key. False if there is none any more."""
        keys = self._from.execute_command("CLUSTER", "GETKEYSINSLOT", self.slot, 1)
        if keys:
            to = self.target
            self._from.execute_command("MIGRATE", to.host, to.port, keys[0], 0, 5000)
        return bool(keys)

    def end(self) -> None:
        """Move all keys that are left, and then the slot. The other masters are told, too: by what
        they have heard before, they would contradict a slot that moves on at once.
        """
        while self.move_key():
            pass
        target_id = self._to.execute_command("CLUSTER", "MYID")
        for client in (self._to, self._from, *self._others):
            client.execute_command("CLUSTER", "SETSLOT", self.slot, "NODE", target_id)


def _add_slots(client: redis.Redis, low: int, high: int) -> None:
    try:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", low, high)
    except redis.ResponseError:  # Redis 6.2 knows only the long form
        client.execute_command("CLUSTER", "ADDSLOTS", *range(low, high + 1))


def _info(client: redis.Redis) -> dict[str, Any]:
    # redis-py parses the reply of CLUSTER INFO in some versions and not in others.
    reply: Any = client.execute_command("CLUSTER", "INFO")
    if not isinstance(reply, dict):
        reply = dict(line.split(":", 1) for line in reply.splitlines() if ":" in line)
    return {name: int(value) if str(value).isdigit() else value for name, value in reply.items()}
