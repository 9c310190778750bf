"""Servers as fixtures. Each is started when a test first uses it, and stopped after the last test.

Tests share servers, so they never empty one: each uses its own `prefix`. A test that stops, pauses
or configures a server starts one of its own from `tests.servers`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TypeVar

import pytest
import redis
from _pytest.terminal import TerminalReporter

from distwindow import Limiter
from distwindow.lifecycle.connect import open_store
from distwindow.ring.command import load_script, script_names
from distwindow.runtime.options import Options
from tests import bytecode, event_loops, examples, logging_state
from tests.clock_and_stores import Execute, ManualClock, blocking, memory
from tests.harness import HARNESSES, STALLS, Harness
from tests.patience import patient
from tests.servers import (
    Cluster,
    Container,
    FakeServer,
    NoServer,
    Proxy,
    SentinelSet,
    Standalone,
    find_binary,
    server_version,
)
from tests.servers.own import own_server

T = TypeVar("T")

# The runs with each redis-py install the group `compat` only. arq needs redis-py below 6.
collect_ignore = [] if find_spec("celery") else ["celery", "docs/test_celery_workers.py"]
if not find_spec("websockets"):
    collect_ignore += ["web/test_asgi_servers.py", "web/test_fastapi_servers.py"]
if not find_spec("gunicorn"):
    collect_ignore.append("web/test_flask_servers.py")
for framework in ("fastapi", "flask"):
    if not find_spec(framework):
        collect_ignore.append(f"web/test_{framework}.py")
for queue in ("arq", "dramatiq", "rq", "taskiq"):
    if not find_spec(queue):
        collect_ignore.append(f"contrib/test_{queue}_limits.py")

# So that its assertions show the values, as those of test files do.
pytest.register_assert_rewrite("tests.stores.store_check")
bytecode.keep()
examples.load_profile()

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="have property tests draw as many examples as they say; otherwise they draw few",
    )
    parser.addoption(
        "--few-cases",
        type=int,
        metavar="NUMBER",
        help="run at most so many cases of each test that has parameters",
    )


TERMINAL = {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "TZ": "UTC"}
"""What the tests and the processes that they start have of a terminal and its user."""
_OF_WHO_RUNS_THEM = re.compile(
    "NO_COLOR|(FORCE|CLICOLOR|PY)_?COLORS?.*|COLUMNS|LINES|LANG.*|LC_.*|.*_proxy|PYTHON(IOENC|UTF8).*"
    "|DISTWINDOW_(URL|PREFIX|DEBUG)",
    re.IGNORECASE,
)


def set_terminal() -> None:
    """Have the tests take nothing from the terminal and the settings of who runs them. It comes
    before their imports, because libraries read some of it when they are imported.
    """
    for name in list(os.environ):
        if _OF_WHO_RUNS_THEM.fullmatch(name):
            del os.environ[name]
    os.environ.update(TERMINAL)
    time.tzset()


def pytest_configure(config: pytest.Config) -> None:
    set_terminal()
    owner = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # in a forked child of a test SIGTERM has its usual effect
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        raise KeyboardInterrupt

    asyncio.set_event_loop_policy(event_loops.POLICY)

    # A run that gets SIGTERM must stop its servers, and SIGTERM alone skips atexit.
    signal.signal(signal.SIGTERM, end)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, None, None]:
    if "harness" in metafunc.fixturenames:
        both = not event_loops.is_on_one_kind(metafunc.definition.path)
        kinds = ["sync", "async", *([event_loops.uvloop_param()] if both else [])]
        metafunc.parametrize("harness", kinds, indirect=True)
    if event_loops.runs_on_both(metafunc.definition):
        slow = metafunc.definition.path.stem not in event_loops.IN_QUICK_TIER
        kinds = ["asyncio", event_loops.uvloop_param(slow=slow)]
        metafunc.parametrize("event_loop_kind", kinds, indirect=True)
    yield
    if number := metafunc.config.getoption("--few-cases"):
        examples.keep_few_cases(metafunc, number)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        test = getattr(item, "function", None)
        if examples.asks_for_many(test):
            item.add_marker("examples")
            if not config.getoption("--all"):
                examples.limit_to_few(test)
        if item.path.stem in WALL_CLOCK:
            item.add_marker(pytest.mark.flaky(reruns=2))


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.set_threshold(10_000, 20, 20)
    _freeze_what_is_left()


def pytest_runtest_logfinish() -> None:
    _ended.append(None)
    if len(_ended) % 500 == 0:
        _freeze_what_is_left()


_ended: list[None] = []
"""One for each test that has ended."""


def _freeze_what_is_left() -> None:
    """Collect garbage, and have later collections look at newer objects only. Several tests collect
    garbage, and the interpreter does as well: thousands of tests, and what they have imported, need
    not be looked through each time.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Show why tests were tried again, of which pytest shows the names only."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"tried again: {report.nodeid}", sep="_")
        terminalreporter.write_line(report.longreprtext)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    with logging_state.restored():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    event_loops.choose_for(item)


@pytest.fixture(autouse=True)
def event_loop_kind(request: pytest.FixtureRequest) -> str:
    """The kind of the event loops of this test, "asyncio" or "uvloop": see tests/event_loops.py."""
    return getattr(request, "param", "asyncio")


@pytest.fixture(autouse=True)
def _patient(request: pytest.FixtureRequest) -> Iterator[None]:
    """All tests are patient. But signatures are compared as they are."""
    if request.path.stem == "test_api":
        yield
    else:
        with patient():
            yield


@pytest.fixture
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    """A test that takes this runs for `Limiter` and for `AsyncLimiter`, the latter on the kinds of
    event loop that `tests/event_loops.py` says.
    """
    STALLS.watch()
    made = HARNESSES[request.param]()
    yield made
    made.close()


def pytest_report_header(config: pytest.Config) -> str:
    if url := os.environ.get("DISTWINDOW_TEST_URL"):
        return f"redis: DISTWINDOW_TEST_URL ({url.rpartition('@')[2]})"
    try:
        binary = find_binary()
        return f"redis: {binary} {'.'.join(map(str, server_version(binary)))}"
    except NoServer as exc:
        return f"redis: {exc}"


def required(start: Callable[[], T]) -> T:
    """Start a server, or fail the test: without a server the run must not pass."""
    try:
        return start()
    except NoServer as exc:
        if os.environ.get("DISTWINDOW_ALLOW_SKIP") == "1" and not os.environ.get("CI"):
            pytest.skip(str(exc))
        pytest.fail(f"{exc} (DISTWINDOW_ALLOW_SKIP=1 skips instead)", pytrace=False)


@pytest.fixture
def prefix() -> str:
    """A key prefix that no other test has used."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def standalone() -> Iterator[Standalone]:
    """The shared plain server as a process, with a unix socket too."""
    server = required(Standalone(unix=True).start)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def redis_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """`redis://…` of a plain server: DISTWINDOW_TEST_URL, a local process, or a container."""
    if url := os.environ.get("DISTWINDOW_TEST_URL"):
        yield url
        return
    try:
        find_binary()
    except NoServer:
        container = required(Container().start)
        yield container.url
        container.stop()
    else:
        server: Standalone = request.getfixturevalue("standalone")
        yield server.url


@pytest.fixture(scope="session")
def examples_url(redis_url: str) -> Iterator[str]:
    """`redis://…` of a plain server for property tests: each of their examples has its own keys."""
    yield from own_server(redis_url)


@pytest.fixture(scope="module", params=["memory", "redis"])
def execute(request: pytest.FixtureRequest) -> Iterator[Execute]:
    """Executes commands in a store in memory, and on Redis."""
    if request.param == "memory":
        with memory() as store:
            yield store
    else:
        with blocking(request.getfixturevalue("examples_url")) as store:
            yield store


@pytest.fixture(params=["memory", "redis"])
def where(request: pytest.FixtureRequest) -> str:
    """The address of a store in memory, and of a server."""
    return "memory://" if request.param == "memory" else request.getfixturevalue("redis_url")


@pytest.fixture
def clock() -> ManualClock:
    """A clock that stands still until it is moved."""
    return ManualClock()


@pytest.fixture(params=["memory", "redis", "cluster"])
def make(request: pytest.FixtureRequest, clock: ManualClock) -> Iterator[Callable[..., Limiter]]:
    """Return a function that makes limiters of one store, as different processes have them."""
    kind = request.param
    url = "memory://" if kind == "memory" else request.getfixturevalue(f"{kind}_url")
    store = open_store(url, Options(clock="client", time=clock, timeout=10))
    yield lambda limits: Limiter(store, limits, time=clock)
    store.close()


@pytest.fixture(scope="module")
def server(redis_url: str) -> Iterator[redis.Redis]:
    """A client of a plain server that has all scripts."""
    with redis.Redis.from_url(redis_url) as client:
        for name in script_names():
            client.script_load(load_script(name).text)
            assert client.script_exists(load_script(name).sha) == [True]
        yield client


@pytest.fixture(scope="session")
def unix_url(standalone: Standalone) -> str:
    """`unix://…?db=0` of the plain server."""
    return standalone.unix_url


@pytest.fixture(scope="session")
def timeless_url() -> Iterator[str]:
    """`redis://…` of a server that does not execute `TIME`, as some that are managed."""
    server = required(Standalone(config={"rename-command": 'TIME ""'}).start)
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def tls_server() -> Iterator[Standalone]:
    """A server that also speaks TLS. Its certificate is issued by an authority of the tests."""
    server = required(Standalone(tls=True).start)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def tls_url(tls_server: Standalone) -> str:
    """`rediss://…?ssl_ca_certs=…`: the authority's file is in the URL."""
    return tls_server.tls_url


@pytest.fixture(scope="session")
def tls_ca(tls_server: Standalone) -> Path:
    """The authority's file, for clients that are given options instead of a URL."""
    return tls_server.ca


@pytest.fixture(scope="session", autouse=True)
def _launched_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster | None]:
    """The processes of the shared cluster, as soon as tests begin of which one needs it."""
    if not any("cluster" in getattr(item, "fixturenames", ()) for item in request.session.items):
        yield None
        return
    nodes = Cluster()
    with suppress(NoServer):  # which the test that needs it reports
        nodes.launch()
    yield nodes
    nodes.stop()


@pytest.fixture(scope="session")
def cluster(_launched_cluster: Cluster | None) -> Iterator[Cluster]:
    """Three masters, no replicas."""
    nodes = required((_launched_cluster or Cluster()).start)
    yield nodes
    nodes.stop()


@pytest.fixture(scope="session")
def cluster_url(cluster: Cluster) -> str:
    """`redis+cluster://host:port,host:port,host:port`"""
    return cluster.url


@pytest.fixture(scope="session")
def sentinel() -> Iterator[SentinelSet]:
    """A primary, a replica and three sentinels."""
    nodes = required(SentinelSet().start)
    yield nodes
    nodes.stop()


@pytest.fixture(scope="session")
def sentinel_url(sentinel: SentinelSet) -> str:
    """`redis+sentinel://host:port,…/service/0`"""
    return sentinel.url


@pytest.fixture(scope="session")
def fake_url() -> Iterator[str]:
    """`redis://…` of fakeredis's TCP server."""
    with FakeServer() as server:
        yield server.url


@pytest.fixture
def proxy(standalone: Standalone) -> Iterator[Proxy]:
    """A proxy of this test's own in front of the plain server; `proxy.url` leads through it."""
    with Proxy(standalone.port) as link:
        yield link
