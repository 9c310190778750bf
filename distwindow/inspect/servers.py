"""The servers of a store, each with a redis-py client for the commands that inspect them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import redis

from ..lifecycle.connect import admin_client
from ..ring.replies import hash_fields

AT_ONCE = 500
"""The number of names that one exchange is about, at most."""

Item = TypeVar("Item")


class Server(NamedTuple):
    """One server that holds keys: the only one, or a primary of a cluster."""

    name: str
    client: Any
    """A `redis.Redis` with undecoded replies. redis-py's own types say that each command may return
    an awaitable, so they would need a cast at every call.
    """
    connection: Any
    """One more connection to it, for `read_hashes`."""

    @classmethod
    def of(cls, name: str, client: Any) -> Server:
        """Return the server of this client."""
        return cls(name, client, client.connection_pool.make_connection())


@contextmanager
def open_servers(url: str) -> Iterator[list[Server]]:
    """Connect to all servers of the store at `url`; the connections are closed at the end."""
    client = admin_client(url)
    servers: list[Server] = []
    try:
        if isinstance(client, redis.RedisCluster):
            cluster: Any = client
            servers = [
                Server.of(node.name, cluster.get_redis_connection(node))
                for node in sorted(cluster.get_primaries(), key=lambda node: str(node.name))
            ]
        else:
            # A URL may ask for decoded replies, but a key need not be valid text.
            client.connection_pool.connection_kwargs["decode_responses"] = False
            kwargs = client.connection_pool.connection_kwargs
            name = kwargs.get("path") or f"{kwargs.get('host', 'primary')}:{kwargs.get('port', '')}"
            servers = [Server.of(str(name).rstrip(":"), client)]
        yield servers
    finally:
        for server in servers:
            server.connection.disconnect()
        client.close()


def read_hashes(server: Server, names: Sequence[bytes]) -> tuple[int, list[Any]]:
    """Return the server's time (ms since the epoch), and the hash of each name as a dict, empty
    where there is none. It is an error where the key has another type, or was moved meanwhile.

    They are read without MULTI, so the server executes commands of others in between. A pipeline of
    redis-py takes three times as long, which of a million hashes is 7 s.
    """
    connection = server.connection
    frames = [b"*2\r\n$7\r\nHGETALL\r\n$%d\r\n%s\r\n" % (len(name), name) for name in names]
    connection.send_packed_command([b"*1\r\n$4\r\nTIME\r\n" + b"".join(frames)])
    seconds, micros = connection.read_response(disable_decoding=True)
    hashes: list[Any] = []
    for _ in names:
        try:
            reply = connection.read_response(disable_decoding=True)
            # RESP3 has dicts, RESP2 lists.
            hashes.append(reply if isinstance(reply, dict) else hash_fields(reply))
        except redis.ResponseError as exc:
            # MOVED is a kind of ASK for redis-py.
            if not isinstance(exc, redis.exceptions.AskError) and "WRONGTYPE" not in str(exc):
                raise
            hashes.append(exc)
    return int(seconds) * 1000 + int(micros) // 1000, hashes


def chunks(items: Sequence[Item], size: int = AT_ONCE) -> Iterator[Sequence[Item]]:
    """Yield `items` in their order, no more than `size` at a time."""
    return (items[at : at + size] for at in range(0, len(items), size))
