"""The same requests to the same application, with the storage of `limits` in memory and with ours:
the answers are the same.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest

pytest.importorskip("flask_limiter")


from tests.limits_storage import flask_apps
from tests.limits_storage.common import STRATEGIES

pytestmark = pytest.mark.slow

SEEDS = range(1)
FIELDS = ("X-RateLimit-Limit", "X-RateLimit-Remaining")
OPTIONS: dict[str, dict[str, Any]] = {
    "as the example": {},
    "each limit is looked at": {"fail_on_first_breach": False},
    "keys have a prefix": {"key_prefix": "a/b"},
    "no meta limits": {"meta_limits": None, "on_breach": None},
    "defaults by method": {"default_limits_per_method": True, "meta_limits": None},
    "applications by method": {"application_limits_per_method": True, "meta_limits": None},
    "applications cost and deduct": {
        "application_limits_cost": 2,
        "application_limits_deduct_when": lambda response: response.status_code < 300,
        "meta_limits": None,
    },
}
CASES = [
    (options, strategy)
    for number, options in enumerate(OPTIONS)
    for at, strategy in enumerate(STRATEGIES)
    if number == 0 or (number + at) % len(STRATEGIES) == 0
]
"""Each strategy with some options, and all of them with the example's."""
HEADERS: dict[str, list[str]] = {
    "X-User": ["ann", "bob", "ann/60/1/year", "a b\N{SNOWMAN}"],
    "X-Cost": ["0", "1", "2", "3", "50"],
    "X-Status": ["200", "404", "500"],
    "X-Plan": ["gold", "free", "none"],
    "X-Evil": ["1"],
    "X-Internal": ["1"],
    "X-Filtered": ["1"],
}


class Answer(NamedTuple):
    """What the same requests have in common."""

    request: tuple[Any, ...]
    status: int
    limit: str | None
    remaining: str | None
    body: bytes


def requests(seed: str, paths: list[str], count: int) -> list[tuple[str, str, dict[str, str]]]:
    """Return requests that are mostly of few paths, so that limits are reached."""
    chance = random.Random(seed)
    few = chance.sample(paths, 4)
    made = []
    for _ in range(count):
        path = chance.choice(few if chance.random() < 0.7 else paths)
        method = chance.choice(["GET", "GET", "GET", "POST", "PUT", "HEAD", "OPTIONS"])
        headers = {"X-User": chance.choice(["ann", "ann", "ann", *HEADERS["X-User"]])}
        for name, values in HEADERS.items():
            if name != "X-User" and chance.random() < 0.15:
                headers[name] = chance.choice(values)
        made.append((method, path, headers))
    return made


def answers(app: Any, made: list[tuple[str, str, dict[str, str]]]) -> list[Answer]:
    client = app.test_client()
    found = []
    for method, path, headers in made:
        answer = client.open(path, method=method, headers=headers)
        limit, remaining = (answer.headers.get(name) for name in FIELDS)
        assert (answer.status_code == 429) <= (answer.headers.get("Retry-After") is not None)
        found.append(Answer((method, path, headers), answer.status_code, limit, remaining,
                            answer.data))  # fmt: skip
    return found


def paths_of(app: Any) -> list[str]:
    return sorted(str(rule) for rule in app.url_map.iter_rules() if rule.endpoint != "static")


@pytest.mark.parametrize(("options", "strategy"), CASES)
def test_each_request_is_answered_as_with_the_storage_of_limits(
    options: str, strategy: str, redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTWINDOW_URL", redis_url)
    statuses = set()
    for seed in SEEDS:
        chosen = {"strategy": strategy, **OPTIONS[options]}
        ours = {"timeout": 30, "prefix": f"{prefix}-{seed}"}
        theirs = flask_apps.kitchen_sink(
            storage_uri="memory://", storage_options={}, **chosen
        )  # fmt: skip
        made = requests(f"{seed} {options}", paths_of(theirs), 120)
        expected = answers(theirs, made)
        statuses |= {one.status for one in expected}
        here = flask_apps.kitchen_sink(
            storage_uri="distwindow+memory://", storage_options={}, **chosen
        )  # fmt: skip
        there = flask_apps.kitchen_sink(storage_options=ours, **chosen)
        for found in (answers(here, made), answers(there, made)):
            for number, (a, b) in enumerate(zip(found, expected, strict=True)):
                assert a == b, (number, found[:number])
        for limiter in there.extensions["limiter"]:
            limiter.storage._windows._pool.close()  # while the store is there
    assert {200, 429} <= statuses
