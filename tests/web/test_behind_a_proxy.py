"""The configurations of docs/howto/behind-a-proxy.md in a real nginx, before a real server."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.docs.pages import between, blocks
from tests.servers import Standalone
from tests.servers.wait import until
from tests.web.burst import get, statuses
from tests.web.proxy import NEEDS_NGINX, AppendingProxy, Nginx
from tests.web.server import ROOT, SOURCES, Served, serve

pytestmark = [pytest.mark.slow, NEEDS_NGINX]

PAGE = ROOT / "docs" / "howto" / "behind-a-proxy.md"
APP = "examples.web.asgi_app"
UVICORN = "uvicorn {app} --port {port} --no-proxy-headers"
ALONE = {200: 20, 429: 5}
"""Of 25 requests of a client that has a limit of its own."""


def config(marker: str) -> str:
    """Return the configuration of nginx between two markers of the page."""
    (text,) = (each.text for each in blocks(PAGE, "nginx") if each.text in between(PAGE, marker))
    return text


@pytest.fixture(scope="module")
def cdn_address() -> str:
    """The address under which a CDN reaches nginx."""
    return next(SOURCES)


def ask(url: str, source: str) -> dict[int, int]:
    """Send 25 requests of one client, each with a forged field."""
    forged = ({"X-Forwarded-For": f"9.9.9.{number}"} for number in range(25))
    return dict(statuses([get(f"{url}/", headers, source=source) for headers in forged]))


def ask_each(url: str) -> list[dict[int, int]]:
    return [ask(url, next(SOURCES)) for _ in range(3)]


def shared(answers: list[dict[int, int]]) -> bool:
    """True if clients have one limit together."""
    return sum(answer.get(200, 0) for answer in answers) == 20


@pytest.fixture
def behind_nginx(store: Standalone) -> Iterator[Served]:
    with serve(UVICORN, APP, store.url, TRUSTED_PROXIES="127.0.0.1") as served:
        yield served


def test_each_client_behind_nginx_has_a_limit_of_its_own(behind_nginx: Served) -> None:
    with Nginx(behind_nginx.port, config("nginx")) as nginx:
        assert ask_each(nginx.url) == [ALONE] * 3


def test_nginx_that_finds_the_client_behind_a_cdn(behind_nginx: Served, cdn_address: str) -> None:
    text = config("cdn").replace("203.0.113.0/24", cdn_address)
    with (
        Nginx(behind_nginx.port, text) as nginx,
        AppendingProxy(nginx.port, cdn_address) as cdn,
    ):
        assert ask_each(cdn.url) == [ALONE] * 3
        assert ask_each(nginx.url) == [ALONE] * 3  # past the CDN


def test_an_application_that_finds_the_client_behind_a_cdn(
    store: Standalone, cdn_address: str
) -> None:
    proxies = f"127.0.0.1 {cdn_address}"
    with (
        serve(UVICORN, APP, store.url, TRUSTED_PROXIES=proxies) as served,
        Nginx(served.port, config("nginx")) as nginx,
        AppendingProxy(nginx.port, cdn_address) as cdn,
    ):
        assert ask_each(cdn.url) == [ALONE] * 3


def test_a_forgotten_nginx_looks_as_the_page_says(store: Standalone) -> None:
    line, _ = log_lines()
    with (
        serve(UVICORN, APP, store.url) as served,
        Nginx(served.port, config("nginx")) as nginx,
    ):
        assert shared(ask_each(nginx.url))
        until(lambda: line in served.output, what=f"the log line in {served.output}")
        assert served.output.count("trusted_proxies=") == 1


def test_a_forgotten_cdn_looks_as_the_page_says(store: Standalone, cdn_address: str) -> None:
    """uvicorn by itself believes nginx on its own host, and so takes the CDN for the client."""
    _, line = log_lines()
    with (
        serve("uvicorn {app} --port {port}", APP, store.url) as served,
        Nginx(served.port, config("nginx")) as nginx,
        AppendingProxy(nginx.port, cdn_address) as cdn,
    ):
        assert shared(ask_each(cdn.url))
        line = line.replace("203.0.113.10", cdn_address)
        until(lambda: line in served.output, what=f"the log line in {served.output}")
        assert served.output.count("trusted_proxies=") == 1


def log_lines() -> list[str]:
    """Return the log lines of the page's table."""
    return re.findall(r"^\| `(.*? trusted_proxies=.*?)` \|", PAGE.read_text(), re.MULTILINE)
