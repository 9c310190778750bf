"""The server of the property tests, and how long they wait for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.patience import patient
from tests.servers.own import own_server


@pytest.fixture(autouse=True)
def _patient() -> Iterator[None]:
    with patient():
        yield


@pytest.fixture(scope="session")
def redis_url(redis_url: str) -> Iterator[str]:
    """`redis://…` of a plain server: each example of a property test has keys of its own."""
    yield from own_server(redis_url)
