"""The examples of task queues run, as programs: RQ handles signals, and dramatiq has one broker."""

from __future__ import annotations

import pytest
import redis

from tests.programs import ROOT, printed

ARQ_IS_HERE = int(redis.__version__.partition(".")[0]) < 6
"""arq needs redis-py below 6: its example runs in scripts/test-redis-py, and the others here."""
PROGRAMS = (
    [pytest.param("arq_limits.py", marks=pytest.mark.compat)]
    if ARQ_IS_HERE
    else ["dramatiq_limits.py", "rq_limits.py", "taskiq_limits.py"]
)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_all_calls_are_done_and_those_above_the_limit_later(program: str, redis_url: str) -> None:
    *calls, last = printed(ROOT / "examples" / program, redis_url).splitlines()
    assert last == "9 of 9 done"
    after_s = {tuple(call.split()[:2]): float(call.split()[3]) for call in calls}
    assert len(calls) == len(after_s) == 9
    at_once = [key for key, seconds in after_s.items() if seconds - min(after_s.values()) < 0.35]
    assert {tenant for tenant, _ in at_once} == {"acme", "initech"}
    assert sum(tenant == "acme" for tenant, _ in at_once) == 3
