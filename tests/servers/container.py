"""A plain server in a Docker container, for machines without a redis-server."""

from __future__ import annotations

import warnings
from typing import Any

from tests.servers.binary import REMEDY, NoServer
from tests.servers.wait import Started


class Container(Started):
    """A Redis in a container; `url` is where it listens."""

    IMAGE = "redis:7-alpine"

    def __init__(self) -> None:
        self.url = ""
        self._container: Any = None

    def _start(self) -> None:
        try:
            # pytest makes errors of warnings: its deprecations would look like a missing Docker.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                from testcontainers.redis import RedisContainer

                self._container = RedisContainer(self.IMAGE).start()
        except Exception as exc:  # no package, no engine, or no image: there is no server
            raise NoServer(f"{REMEDY}, or start Docker ({type(exc).__name__})") from exc
        host = self._container.get_container_host_ip()
        self.url = f"redis://{host}:{self._container.get_exposed_port(6379)}/0"

    def stop(self) -> None:
        if self._container is not None:
            self._container.stop()
            self._container = None
