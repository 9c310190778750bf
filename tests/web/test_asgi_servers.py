"""`examples/web/asgi_app.py` on real servers with two processes each."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import Standalone
from tests.servers.wait import until
from tests.web.burst import Answer, burst, get, parts_of, statuses
from tests.web.proxy import PROXIES, ProxyType
from tests.web.server import SERVERS, SOURCES, Served, serve
from tests.web.ws import attempt

pytestmark = pytest.mark.slow

FIELDS = ("ratelimit", "ratelimit-policy")
APP = "examples.web.asgi_app"
GRANIAN = "granian {app} --interface asgi --workers 2 --host 127.0.0.1 --port {port}"
SENT_BYTES = 5_000_000


@pytest.fixture(scope="module")
def sent_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("web") / "file"
    path.write_bytes(os.urandom(SENT_BYTES))
    return path


@pytest.fixture(scope="module", params=SERVERS)
def served(request: pytest.FixtureRequest, store: Standalone, sent_file: Path) -> Iterator[Served]:
    """Each server in turn, for all tests of this module."""
    command = SERVERS[request.param]
    with serve(command, APP, store.url, SENT_FILE=str(sent_file), TICK_S="0.2") as running:
        yield running


def test_a_burst_gets_the_limit_across_processes(served: Served, source: str) -> None:
    answers = burst(f"{served.url}/", 200, source=source)
    assert statuses(answers) == {200: 20, 429: 180}
    for answer in answers:
        is_refusal = answer.status == 429
        assert answer.limits == ((*FIELDS, "retry-after") if is_refusal else FIELDS)
        assert answer.field("ratelimit-policy") == '"default";q=20;w=60'
        if is_refusal:
            seconds = re.fullmatch(r'"default";r=0;t=(\d+)', str(answer.field("ratelimit")))
            assert seconds is not None
            assert int(str(answer.field("retry-after"))) >= int(seconds[1])
            assert json.loads(answer.body)["violated-policies"] == ["default"]


def test_a_stream_arrives_part_by_part(served: Served, source: str) -> None:
    found = parts_of(f"{served.url}/stream", source=source)
    assert [line for _, line in found] == [b"%d\n" % number for number in range(5)]
    # The application sends one each 0.2 s: what is held back comes together.
    assert found[-1][0] - found[0][0] > 0.3
    answer = get(f"{served.url}/stream", source=source)
    assert answer.limits == FIELDS
    assert [name for name, _ in answer.fields].count("content-type") == 1


def test_a_file_arrives_whole(served: Served, sent_file: Path, source: str) -> None:
    answer = get(f"{served.url}/file", source=source)
    assert len(answer.body) == SENT_BYTES
    assert hashlib.sha256(answer.body).digest() == hashlib.sha256(sent_file.read_bytes()).digest()
    assert answer.limits == FIELDS


def test_a_background_task_ends_although_the_client_has_gone(served: Served, source: str) -> None:
    link = http.client.HTTPConnection("127.0.0.1", served.port, 60, source_address=(source, 0))
    link.request("GET", "/background?name=ended")
    link.getresponse()
    link.close()
    done = f"{served.url}/done"  # of the process that is asked
    until(lambda: any(b"ended" in answer.body for answer in burst(done, 20)), 30)


def test_websockets(served: Served, source: str) -> None:
    tried = attempt(f"ws://127.0.0.1:{served.port}/ws", source=source)
    assert tried.statuses == [101] * 5 + [429]
    assert tried.retry_after is not None
    assert int(tried.retry_after) >= 1
    assert json.loads(tried.body)["violated-policies"] == ["handshakes"]
    assert tried.answers[:5] == ["0", "1", "2", "3", "4"]
    assert tried.answers[5].startswith("slow down: 5 requests per minute are allowed")
    assert "Traceback" not in served.output


def test_a_forged_field_changes_nothing(served: Served, source: str) -> None:
    forged = ({"X-Forwarded-For": f"9.9.9.{n}"} for n in range(30))
    answers = [get(f"{served.url}/", headers, source=source) for headers in forged]
    assert statuses(answers) == {200: 20, 429: 10}


# -- one server each ------------------------------------------------------------------------------


def test_websockets_of_wsproto(store: Standalone) -> None:
    with serve(f"{SERVERS['uvicorn']} --ws wsproto", APP, store.url) as served:
        tried = attempt(f"ws://127.0.0.1:{served.port}/ws")
    assert tried.statuses == [101] * 5 + [429]
    assert tried.retry_after is not None


def test_another_server(store: Standalone, source: str) -> None:
    with serve(GRANIAN, APP, store.url) as served:
        answers = burst(f"{served.url}/", 200, source=source)
        assert statuses(answers) == {200: 20, 429: 180}
        assert {each.limits for each in answers} == {FIELDS, (*FIELDS, "retry-after")}


@PROXIES
def test_behind_a_proxy_each_client_has_a_window_of_its_own(
    store: Standalone, proxy_type: ProxyType
) -> None:
    # uvicorn itself believes X-Forwarded-For of 127.0.0.1, unless it is told not to.
    command = f"{SERVERS['uvicorn']} --no-proxy-headers"
    with (
        serve(command, APP, store.url, TRUSTED_PROXIES="127.0.0.1") as served,
        proxy_type(served.port) as proxy,
    ):

        def ask(source: str, count: int = 25) -> list[Answer]:
            forged = ({"X-Forwarded-For": f"9.9.9.{n}"} for n in range(count))
            return [get(f"{proxy.url}/", headers, source=source) for headers in forged]

        for client in (next(SOURCES), next(SOURCES)):
            assert statuses(ask(client)) == {200: 20, 429: 5}


# -- while the store stands still ----------------------------------------------------------------


def test_a_store_that_stands_still_stops_no_route_without_a_limit(store: Standalone) -> None:
    """One process, so that one route would be stopped by another."""
    command = "uvicorn {app} --port {port}"
    with serve(command, APP, store.url, DISTWINDOW_TIMEOUT="5") as served:
        assert statuses([get(f"{served.url}/allow")]) == {200: 1}
        store.pause()
        try:
            link = http.client.HTTPConnection("127.0.0.1", served.port, 60)
            link.request("GET", "/raise")  # waits for its timeout
            # What is answered meanwhile was not stopped by it: not one answer came after it.
            assert statuses(burst(f"{served.url}/free", 50)) == {200: 50}
            link.sock.settimeout(0)
            with pytest.raises(BlockingIOError):
                link.sock.recv(1)
            link.sock.settimeout(60)
            assert link.getresponse().status == 500
            link.close()
            assert statuses(burst(f"{served.url}/allow", 5)) == {200: 5}
            denied = burst(f"{served.url}/deny", 5)
            assert statuses(denied) == {503: 5}
            for answer in denied:
                assert answer.limits == ("retry-after",)
                problem = json.loads(answer.body)
                assert problem["type"].endswith("#temporary-reduced-capacity")
        finally:
            store.resume()
        until(lambda: get(f"{served.url}/raise").status == 200, 30)
        until(lambda: "is back" in served.output, 30)
        assert statuses(burst(f"{served.url}/", 30)) == {200: 20, 429: 10}
        assert len(re.findall(r"is away", served.output)) == 1
