"""`examples/web/fastapi_app.py` on a real server with two processes."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from distwindow import Limiter
from tests.servers import Standalone
from tests.servers.wait import until
from tests.web.burst import burst, get, parts_of, statuses
from tests.web.openapi_429 import faults, limited_operations
from tests.web.server import SERVERS, Served, serve

pytestmark = pytest.mark.slow

TEN = {200: 10, 429: 90}
FIELDS = ("ratelimit", "ratelimit-policy")


@pytest.fixture(scope="module")
def served(store: Standalone) -> Iterator[Served]:
    with serve(SERVERS["uvloop"], "examples.web.fastapi_app", store.url) as running:
        yield running


def test_a_burst_gets_the_limit_across_processes(served: Served, source: str) -> None:
    assert statuses(burst(f"{served.url}/search?q=x", 100, source=source)) == TEN


def test_a_router_has_windows_of_its_own_wherever_it_is_included(
    served: Served, source: str
) -> None:
    for place in ("/api", "/v1", "/v2"):
        answers = burst(f"{served.url}{place}/items/7", 100, source=source)
        assert statuses(answers) == TEN, place
        refused = next(answer for answer in answers if answer.status == 429)
        policy = f'"GET {place}/items/{{item}}";q=10;w=60'
        assert refused.field("ratelimit-policy") == policy


def test_a_mounted_application(served: Served, source: str) -> None:
    groups = burst(f"{served.url}/admin/groups", 50, {"x-tenant": source}, source=source)
    users = burst(f"{served.url}/admin/users", 50, {"x-tenant": source}, source=source)
    assert statuses([*groups, *users]) == TEN
    assert groups[0].limits[:2] == FIELDS


def test_each_user_has_ten(served: Served, source: str) -> None:
    for user in "abc":
        answers = burst(f"{served.url}/mine", 100, {"x-user": user + source}, source=source)
        assert statuses(answers) == TEN


@pytest.mark.parametrize("kind", ["stream", "events", "response", "dict", "redirect", "missing"])
def test_all_kinds_of_responses_have_the_fields(served: Served, source: str, kind: str) -> None:
    assert get(f"{served.url}/kinds/{kind}", source=source).limits == FIELDS


def test_only_wrong_passwords_count(served: Served, source: str) -> None:
    def login(password: str, count: int) -> dict[int, int]:
        body = json.dumps({"password": password}).encode()
        headers = {"content-type": "application/json"}
        url = f"{served.url}/login"
        return statuses(burst(url, count, headers, method="POST", body=body, source=source))

    for _ in range(20):  # of which each gives its permit back before the next one comes
        assert login("right", 1) == {200: 1}
    assert login("wrong", 200) == {401: 5, 429: 195}
    assert login("right", 1) == {429: 1}


def test_a_client_that_goes_has_used_what_it_was_sent(served: Served, source: str) -> None:
    link = http.client.HTTPConnection("127.0.0.1", served.port, 60, source_address=(source, 0))
    link.request("GET", "/chat")
    response = link.getresponse()
    for _ in range(6):  # three parts of two lines
        response.readline()
    assert used(served, source) == 100  # as long as it lasts
    link.close()
    # The server learns of it when it sends the next parts; each has forty bytes, which is four.
    until(lambda: used(served, source) < 100, 30)
    assert 12 <= used(served, source) <= 40
    assert used(served, source) % 4 == 0


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_streams_that_are_open_when_the_server_ends_are_settled(
    store: Standalone, source: str, loop: str
) -> None:
    command = f"uvicorn {{app}} --port {{port}} --loop {loop} --timeout-graceful-shutdown 1"
    app = "examples.web.fastapi_app"
    with serve(command, app, store.url, TICK_S="1") as served, ExitStack() as links:
        for _ in range(5):
            link = http.client.HTTPConnection("127.0.0.1", served.port, 60, (source, 0))
            links.enter_context(closing(link))
            link.request("GET", "/chat")
            link.getresponse().readline()
        assert used(served, source) == 500  # as long as they last
        served.end()
        assert 20 <= used(served, source) <= 60  # some parts of forty bytes each, which is four
        assert used(served, source) % 4 == 0


def used(served: Served, source: str) -> int:
    with Limiter(served.store_url, "1000/minute") as limiter:
        return limiter.stats(f"tokens:{source}").passed


def test_a_stream_that_ends_has_used_all(served: Served, source: str) -> None:
    assert len(parts_of(f"{served.url}/chat", source)) == 20
    until(lambda: used(served, source) == 40, 30)


def test_openapi_names_the_refusals_of_limited_routes(served: Served) -> None:
    schema = json.loads(get(f"{served.url}/openapi.json").body)
    found = limited_operations(schema)
    free = {"GET /free"}
    everything = {
        f"{method.upper()} {path}" for path, of in schema["paths"].items() for method in of
    }
    assert set(found) == everything - free
    assert not any(map(faults, found.values()))
    assert get(f"{served.url}/docs").status == 200
