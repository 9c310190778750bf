"""What the tests on real servers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import required
from tests.servers import Standalone
from tests.web.server import SOURCES


@pytest.fixture(scope="module")
def store() -> Iterator[Standalone]:
    server = required(Standalone().start)
    yield server
    server.stop()


@pytest.fixture
def source() -> str:
    """An address of this machine that no other test has used, and so has windows of its own."""
    return next(SOURCES)
