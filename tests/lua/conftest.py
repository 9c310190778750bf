"""The fixture `server`: a client of a server that has all scripts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from distwindow.ring.scripts import load_script, script_names


@pytest.fixture(scope="module")
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        for name in script_names():
            client.script_load(load_script(name).text)
            assert client.script_exists(load_script(name).sha) == [True]
        yield client
