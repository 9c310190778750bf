"""The servers behind a URL, each as a redis-py client for looking around."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import redis

from ..connect import admin_client


class Server(NamedTuple):
    """One server that keys lie on: the one there is, or a primary of a cluster."""

    name: str
    client: Any


@contextmanager
def servers(url: str) -> Iterator[list[Server]]:
    """All servers of the store at `url`. Connections are closed at the end."""
    client = admin_client(url)
    try:
        if isinstance(client, redis.RedisCluster):
            cluster: Any = client
            yield [
                Server(node.name, cluster.get_redis_connection(node))
                for node in sorted(cluster.get_primaries(), key=lambda node: str(node.name))
            ]
        else:
            # A URL may ask for decoded replies; keys need not be text.
            client.connection_pool.connection_kwargs["decode_responses"] = False
            kwargs = client.connection_pool.connection_kwargs
            name = kwargs.get("path") or f"{kwargs.get('host', 'primary')}:{kwargs.get('port', '')}"
            yield [Server(str(name).rstrip(":"), client)]
    finally:
        client.close()
