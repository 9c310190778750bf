"""The applications of examples/coming_from give the same answers before and after."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import pytest

from tests.conftest import required
from tests.programs import ROOT, printed
from tests.servers import Standalone

from .test_coming_from import MODULES
from .world import needs, statuses

FOLDER = ROOT / "examples" / "coming_from"
WHICH = ("before", "after")
IN_PROCESS = """
import json, sys
from importlib import import_module
from tests.coming_from.world import statuses
import_module(sys.argv[1])
print(json.dumps(statuses("django", *sys.argv[2:])))
"""


class Sent(NamedTuple):
    """Requests of a user, and the statuses of the responses."""

    requests: list[str]
    statuses: list[int]
    fields: dict[str, str] = {}  # noqa: RUF012  # a tuple's


SEARCHES = Sent(["/search"] * 6, [200] * 5 + [429])
PROGRAMS = {
    "limits": {"sent": 5, "refused": 3, "left": 0},
    "pybreaker": {"paid": 1, "Declined": 1, "OSError": 3, "refused": 2, "open": 1},
}
"""What the `main` of each returns."""
APPLICATIONS = {
    "slowapi": [
        SEARCHES,
        Sent(["/search"] * 2, [200] * 2, {"x_internal": "yes"}),
        Sent(["/reports/daily", "/reports/weekly"] * 2, [200] * 3 + [429], {"x_user": "eve"}),
        Sent(["/reports/daily"], [200], {"x_user": "bob"}),
    ],
    "fastapi_limiter": [SEARCHES],
    "fastapi_redis_sdk": [SEARCHES, Sent(["/reports"] * 4, [200] * 3 + [429], {"x_user": "eve"})],
    "flask_limiter": [
        Sent(["POST /login?password=right"] * 4, [200] * 4),
        Sent(["POST /login?password=wrong"] * 3, [401] * 3),
        Sent(["/search"] * 4, [200] * 3 + [429]),
    ],
}
SITES = {
    "django_ratelimit": Sent(
        [*["/search"] * 6, *["POST /login?name=eve"] * 4, "POST /login?name=bob", "/login"],
        [200] * 5 + [429] + [200] * 3 + [429] + [200] * 2,
    ),
    "rest_framework": Sent([*["/items"] * 7, *["POST /uploads"] * 4], [200] * 10 + [429]),
}
"""Of Django, which a process configures once."""
ALL = [*PROGRAMS, *APPLICATIONS, *SITES]


@pytest.fixture
def url() -> Iterator[str]:
    """A server of the test's own: the applications name their keys themselves."""
    server = required(Standalone().start)
    yield server.url
    server.stop()


def test_each_library_has_an_application_before_and_after() -> None:
    assert sorted(ALL) == sorted(re.sub("[ -]", "_", name).lower() for name in MODULES)
    found = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py")}
    assert found == {f"{library}/{which}.py" for library in ALL for which in WHICH}


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("library", ALL)
def test_an_application(
    library: str, which: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if which == "before":
        needs({"fastapi_redis_sdk": "redis_fastapi"}.get(library, library))
    monkeypatch.setenv("REDIS_URL", url)
    name = f"examples.coming_from.{library}.{which}"
    if library in SITES:
        site = SITES[library]
        assert of_a_process(name, site.requests) == site.statuses
        return
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = import_module(name)
    if library in PROGRAMS:
        assert module.main(url) == Counter(PROGRAMS[library])
        return
    if library == "fastapi_redis_sdk" and which == "before":
        import_module("redis_fastapi").get_settings.cache_clear()
    for sent in APPLICATIONS[library]:
        assert statuses(module.app, *sent.requests, **sent.fields) == sent.statuses
    if hasattr(module, "rate_limits") and hasattr(module.rate_limits, "close"):
        module.rate_limits.close()


def of_a_process(name: str, requests: list[str]) -> Any:
    return json.loads(printed("-c", IN_PROCESS, name, *requests))
