"""The two faces as one fixture: a test that takes `face` is run for each, and for the awaiting one
on both kinds of event loop.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.event_loops import uvloop_param
from tests.integration.faces import FACES, HICCUPS, Face


@pytest.fixture(params=["sync", "async", uvloop_param()])
def face(request: pytest.FixtureRequest) -> Iterator[Face]:
    HICCUPS.watch()
    made = FACES[request.param]()
    yield made
    made.close()


# Their laws are about the wall clock (deadlines, healing), and a shared machine that stands still
# for a second breaks those without any fault of ours. So they may be tried again, which the report
# says ("rerun"). Laws about counts are not among them: an excess seen once is an excess.
WALL_CLOCK = {
    "test_process_exit",
    "test_background_worker",
    "test_slow_links",
    "test_transport_outcomes",
    "test_transport_topology",
    "test_unknown_total",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in WALL_CLOCK:
            item.add_marker(pytest.mark.flaky(reruns=2))
