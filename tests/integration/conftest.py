"""The two faces as one fixture: a test that takes `face` is run for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.faces import FACES, HICCUPS, Face


@pytest.fixture(params=["sync", "async"])
def face(request: pytest.FixtureRequest) -> Iterator[Face]:
    HICCUPS.watch()
    made = FACES[request.param]()
    yield made
    made.close()
