"""The fixture `harness`: a test that takes it runs for `Limiter`, and for `AsyncLimiter` on both
kinds of event loop.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.event_loops import uvloop_param
from tests.integration.harness import HARNESSES, STALLS, Harness
from tests.patience import patient

# So that its assertions show the values, as those of test files do.
pytest.register_assert_rewrite("tests.integration.store_check")

# arq needs redis-py below 6: its tests run with redis-py 5 (scripts/test-redis-py).
collect_ignore = [] if int(redis.__version__.partition(".")[0]) < 6 else ["test_arq_limits.py"]


@pytest.fixture(autouse=True)
def _patient() -> Iterator[None]:
    with patient():
        yield


@pytest.fixture(params=["sync", "async", uvloop_param()])
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    STALLS.watch()
    made = HARNESSES[request.param]()
    yield made
    made.close()


# These tests check times on the wall clock (deadlines, recovery), which a machine that is busy with
# other work can break without a fault of the code. So they may be repeated, which the report shows
# as "rerun". Tests of counts are never repeated: one excess is a failure.
WALL_CLOCK = {
    "test_process_exit",
    "test_background_worker",
    "test_close_and_fork",
    "test_evicted_keys",
    "test_slow_links",
    "test_transport_outcomes",
    "test_transport_topology",
    "test_unknown_total",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in WALL_CLOCK:
            item.add_marker(pytest.mark.flaky(reruns=2))
