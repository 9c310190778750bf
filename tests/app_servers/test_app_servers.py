"""Real application servers whose workers share one limit. `python -m tests.app_servers` runs all of
them; here run those whose packages are in the development environment.
"""

from __future__ import annotations

import pytest

from tests.app_servers.applications import WSGI
from tests.app_servers.run import MODES, missing, run
from tests.app_servers.setups import SETUPS, Setup
from tests.programs import printed
from tests.servers import Standalone

pytestmark = pytest.mark.slow
QUIET = ("-W", "ignore", "-c")


def is_in_another(setup: Setup) -> bool:
    """True if another setup has all that this one has: gunicorn with a limiter that is used before
    the fork, and Pool, whose children are multiprocessing's as well.
    """
    if setup.name.startswith("ProcessPoolExecutor"):
        return not setup.name.endswith("fork")
    return setup.name.startswith("gunicorn") and not setup.used and setup.application == WSGI


# Run all modes where gevent patches between the import and the first call; the other setups take
# in turn those in which only the end of the processes sends the refusals.
CASES = [
    pytest.param(setup, mode, id=f"{setup.name}-{mode}")
    for number, setup in enumerate(one for one in SETUPS if not is_in_another(one))
    for turn, mode in enumerate(MODES)
    if setup.name == "gunicorn gevent preload, used at import" or number % 2 == turn
]


@pytest.mark.parametrize(("setup", "mode"), CASES)
def test_workers_share_a_limit(standalone: Standalone, setup: Setup, mode: str) -> None:
    """Exactly the limit is admitted (`eventual`: at least), every call is answered, and after
    SIGTERM the store holds the counts of what was answered.
    """
    if absent := missing(setup):
        pytest.skip(f"{', '.join(absent)} not installed")
    outcome = run(setup, mode, standalone)
    assert outcome.faults(mode) == []


PATCHED_LATER = """
import sys
url, prefix, mode, order = sys.argv[1:]
if order == "imported before":
    import gevent
from distwindow import ConfigurationError, Limiter
limiter = Limiter(url, "100000/hour", prefix=prefix, consistency=mode, timeout=5, sync_interval=60,
    flush_interval=60)
if order == "imported before":
    assert limiter.try_acquire("k")
import gevent
from gevent import monkey
monkey.patch_all()
greenlets = [gevent.spawn(limiter.try_acquire, "k") for _ in range(30)]
gevent.joinall(greenlets, timeout=20)
assert all(one.ready() for one in greenlets)
refusals = {str(one.exception) for one in greenlets if one.exception is not None}
if refusals:
    assert all(isinstance(one.exception, (ConfigurationError, type(None))) for one in greenlets)
    print(refusals.pop())
else:
    assert all(one.value for one in greenlets)
    limiter.close()
    with Limiter(url, "100000/hour", prefix=prefix, timeout=5) as other:
        print(other.stats("k").passed)
"""


@pytest.mark.parametrize("mode", MODES)
def test_gevent_that_patches_after_a_call(redis_url: str, prefix: str, mode: str) -> None:
    """Counts from before the patch are kept, and each greenlet gets its own connection."""
    pytest.importorskip("gevent", reason="gevent is not installed")
    assert printed(*QUIET, PATCHED_LATER, redis_url, prefix, mode, "imported before") == "31\n"


@pytest.mark.parametrize("mode", MODES)
def test_gevent_that_is_imported_after_a_limiter_was_made(
    redis_url: str, prefix: str, mode: str
) -> None:
    """Nothing reports the patch to distwindow, so whatever needs a connection or a thread after it
    is refused.
    """
    pytest.importorskip("gevent", reason="gevent is not installed")
    output = printed(*QUIET, PATCHED_LATER, redis_url, prefix, mode, "imported after")
    assert output.startswith("gevent.monkey.patch_all() was called after a limiter was made"), (
        output
    )


PATCHED_IN_PART = """
import sys
from gevent import monkey
exec(sys.argv[1])
from distwindow import ConfigurationError, Limiter
try:
    Limiter("redis://localhost", "1/second")
except ConfigurationError as exc:
    print(exc)
"""


@pytest.mark.parametrize(
    "patch",
    ["monkey.patch_all(thread=False)", "monkey.patch_all(queue=False)", "monkey.patch_socket()"],
)
def test_gevent_that_patches_a_part_is_refused(patch: str) -> None:
    pytest.importorskip("gevent", reason="gevent is not installed")
    assert printed(*QUIET, PATCHED_IN_PART, patch).startswith("gevent has patched only a part")


PATCHED_AFTER_CALLS = """
import sys
from distwindow import ConfigurationError, Limiter
limiter = Limiter(sys.argv[1], "100/second", prefix=sys.argv[2], consistency="eventual",
                  sync_interval=0.05)
for _ in range(5):
    limiter.try_acquire("k")
limiter.flush()
import gevent
from gevent import monkey
monkey.patch_all()
try:
    for number in range(3):
        limiter.try_acquire(f"k{number}")
except ConfigurationError as exc:
    print(exc, flush=True)
import os
os._exit(0)
"""


def test_eventual_calls_are_refused_where_no_flush_would_come(redis_url: str, prefix: str) -> None:
    pytest.importorskip("gevent", reason="gevent is not installed")
    output = printed(*QUIET, PATCHED_AFTER_CALLS, redis_url, prefix)
    assert output.startswith("gevent.monkey.patch_all() was called after a limiter was made")


FORKED_AMID_IMPORT = """
import importlib.abc, os, sys, threading, time
url, prefix = sys.argv[1:]

class Slow(importlib.abc.MetaPathFinder):
    began = threading.Event()
    def find_spec(self, name, path, target=None):
        if threading.current_thread() is not threading.main_thread():
            self.began.set()
            time.sleep(2)

sys.meta_path.insert(0, Slow())
from distwindow import Limiter
limiter = Limiter(url, "100000/hour", prefix=prefix, timeout=5)
thread = threading.Thread(target=limiter.try_acquire, args=("k",))
thread.start()
Slow.began.wait(1)
child = os.fork()
if child == 0:
    sys.meta_path.remove(next(one for one in sys.meta_path if isinstance(one, Slow)))
    try:
        os._exit(0 if limiter.try_acquire("k") else 3)
    except BaseException as exc:  # the child must not go on as its parent does
        print(repr(exc), file=sys.stderr, flush=True)
        os._exit(4)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
thread.join()
sys.exit(code)
"""


def test_a_fork_while_another_thread_connects(redis_url: str, prefix: str) -> None:
    """Connecting imports nothing, because the child would wait for the lock of that import for
    ever.
    """
    printed(*QUIET, FORKED_AMID_IMPORT, redis_url, prefix)
