"""`examples/web/flask_app.py` on gunicorn with four workers of two kinds, and on `flask run`."""

from __future__ import annotations

import http.client
import signal
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import pytest

from distwindow import Limiter
from tests.servers import Standalone
from tests.servers.wait import until
from tests.web.burst import burst, get, parts_of, statuses
from tests.web.server import serve

pytestmark = pytest.mark.slow

SERVERS = {
    "gthread": "gunicorn {app} --no-control-socket -w 4 -k gthread --threads 4 -b 127.0.0.1:{port}",
    "gevent": "gunicorn {app} --no-control-socket -w 4 -k gevent -b 127.0.0.1:{port}",
}

APP = "examples.web.flask_app"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


class OnRedis(NamedTuple):
    """A server of the application, with a Redis of its own."""

    name: str
    url: str
    redis_url: str


@pytest.fixture(scope="module", params=SERVERS)
def served(request: pytest.FixtureRequest) -> Iterator[OnRedis]:
    """Each server in turn, for all tests that take it."""
    with Standalone() as redis, serve(SERVERS[request.param], APP, redis.url, TICK_S="0.5") as one:
        yield OnRedis(request.param, one.url, redis.url)


def test_a_burst_on_several_workers_is_limited_to_the_permit(served: OnRedis) -> None:
    # asgiref refuses coroutine functions of several greenlets at once, with limits or without.
    for path in ("/search",) if served.name == "gevent" else ("/search", "/async"):
        got = burst(served.url + path, 200)
        assert statuses(got) == {200: 20, 429: 180}
        for one in got:
            again = one.field("retry-after")
            assert one.field("ratelimit-policy") == f'"GET {path}";q=20;w=60'
            limit = one.field("ratelimit")
            assert limit is not None
            assert (again is not None) == (one.status == 429)
            assert again is None or limit.endswith(f";r=0;t={again}")


def test_a_stream_arrives_chunk_by_chunk(served: OnRedis) -> None:
    _check_stream(served.url + "/stream")


def test_a_stream_of_flask_run_arrives_chunk_by_chunk(redis_url: str) -> None:
    with serve("flask --app {app} run --port {port}", APP, redis_url, TICK_S="0.5") as served:
        _check_stream(served.url + "/stream")


def _check_stream(url: str) -> None:
    parts = parts_of(url)
    assert [line for _, line in parts] == [b"0\n", b"1\n", b"2\n", b"3\n", b"4\n"]
    assert parts[-1][0] - parts[0][0] > 1.5  # four times half a second after the first
    assert get(url).field("ratelimit") is not None


def test_wrong_passwords_alone_are_counted(served: OnRedis) -> None:
    url = served.url + "/login"
    for _ in range(20):  # of which each gives its permit back before the next one comes
        assert get(url, FORM, method="POST", body=b"password=right").status == 200
    got = burst(url, 200, FORM, method="POST", body=b"password=wrong")
    assert statuses(got) == {401: 5, 429: 195}


def test_a_permit_of_the_blueprint_is_back_when_the_route_refuses(served: OnRedis) -> None:
    assert statuses(burst(served.url + "/api/reports", 50)) == {200: 5, 429: 45}
    with Limiter(served.redis_url, "100/hour") as limiter:
        assert limiter.stats("api 100/hour:127.0.0.1").passed == 5


ENDINGS = {
    "it ends": (signal.SIGTERM, 1),
    "it is killed": (signal.SIGTERM, 100),
    "SIGINT": (signal.SIGINT, 100),
    "SIGQUIT": (signal.SIGQUIT, 100),
}
"""By what happens to an open stream when gunicorn ends: the signal, and the stream's length, s."""
WITH_STREAMS = (
    "gunicorn {app} -c examples/web/gunicorn_flask.py --graceful-timeout 3 --no-control-socket "
    "-b 127.0.0.1:{port}"
)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("worker", ["sync", "gthread --threads 4", "gevent", "gevent_pywsgi"])
def test_an_open_stream_is_settled_however_gunicorn_ends(
    redis_url: str, worker: str, ending: str
) -> None:
    number, seconds = ENDINGS[ending]
    with (
        Limiter(redis_url, "1000/day", prefix="streams") as limiter,
        serve(f"{WITH_STREAMS} -k {worker}", "tests.web.flask_stream", redis_url) as served,
        closing(http.client.HTTPConnection("127.0.0.1", served.port, 30)) as link,
    ):
        limiter.reset("parts:all")
        link.request("GET", f"/stream?seconds={seconds}")
        link.getresponse().read(len("part\n") * 3)
        assert limiter.peek("parts:all").remaining == 1000 - 500
        served.end(number)
        assert 1000 - 100 < limiter.peek("parts:all").remaining < 1000


def test_redis_is_stopped_and_comes_back() -> None:
    with Standalone() as redis, serve(SERVERS["gthread"], APP, redis.url) as served:
        assert get(served.url + "/raise").status == 200
        redis.kill()
        assert statuses(burst(served.url + "/allow", 20)) == {200: 20}
        assert statuses(burst(served.url + "/deny", 20)) == {503: 20}
        assert statuses(burst(served.url + "/raise", 20)) == {500: 20}
        redis.restart()
        # Each of the four workers notices by itself.
        until(lambda: statuses(get(served.url + "/raise") for _ in range(20)) == {200: 20})
        until(lambda: all(get(served.url + "/allow").limits for _ in range(20)))
