"""Flask-Limiter on gunicorn with three workers, and its commands."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

pytest.importorskip("flask_limiter")
pytest.importorskip("gunicorn")

import limits

import distwindow.contrib.limits
from distwindow import Limit, Limiter
from distwindow.local.base import REFUSAL_S
from tests.limits_storage.common import STRATEGIES, new_user, refusal
from tests.servers import Standalone, free_port, until
from tests.web.burst import Answer, burst, get, statuses
from tests.web.server import ROOT, Served, serve

pytestmark = pytest.mark.slow

MODULE = "tests.limits_storage.flask_apps"
GUNICORN = f"gunicorn {MODULE}:{{factory}}() --no-control-socket -b 127.0.0.1:{{port}}"
THREE = f"{GUNICORN} -w 3 -k gthread --threads 8"
PASSWORD = "opensesame"


@contextmanager
def served(
    factory: str, redis: Standalone | str, command: str = THREE, **environment: str
) -> Iterator[Served]:
    """Run gunicorn with what `factory` makes."""
    url = redis if isinstance(redis, str) else redis.url
    with serve(command.replace("{factory}", factory), MODULE, url, **environment) as one:
        yield one


def rate_fields(answer: Answer) -> dict[str, int]:
    """The fields about limits, and when it is, by the clock of this machine."""
    names = ("limit", "remaining", "reset")
    found = {name: int(answer.field(f"x-ratelimit-{name}") or "") for name in names}
    return {**found, "retry": int(answer.field("retry-after") or "")}


# -- counts ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared() -> Iterator[Served]:
    """The application like examples/sample.py, with three workers."""
    with Standalone() as redis, served("sample", redis) as one:
        yield one


@pytest.mark.parametrize("flags", ["", "--preload", "-k gevent", "-k gevent --preload"])
def test_a_burst_on_three_workers_is_limited_to_the_permit(flags: str) -> None:
    if "gevent" in flags:
        pytest.importorskip("gevent")
    with Standalone() as redis, served("sample", redis, f"{THREE} {flags}") as one:
        assert get(f"{one.url}/five").status == 200  # the first of a worker opens connections
        headers = new_user()
        answers = burst(f"{one.url}/five", 60, headers)
        assert statuses(answers) == {200: 5, 429: 55}
        until(lambda: len({get(f"{one.url}/free").body for _ in range(30)}) == 3)
        for answer in answers:
            fields = rate_fields(answer)
            assert fields["limit"] == 5
            assert fields["remaining"] == 0 or answer.status == 200
            assert 0 < fields["reset"] - time.time() <= 63
            assert 0 < fields["retry"] <= 63
        assert statuses(burst(f"{one.url}/five", 20, headers)) == {429: 20}
        assert "Traceback" not in one.output


def test_fields_tell_the_limit_what_is_left_and_when_it_resets(shared: Served) -> None:
    headers = new_user()
    for remaining in (4, 3, 2, 1, 0, 0, 0):
        answer = get(f"{shared.url}/five", headers)
        now = time.time()
        fields = rate_fields(answer)
        assert (fields["limit"], fields["remaining"]) == (5, remaining)
        assert 59 <= fields["reset"] - now <= 63  # a bucket more than the interval, and a second
        assert abs(fields["reset"] - now - fields["retry"]) <= 2


def test_defaults_blueprints_and_exempt_routes_are_those_of_the_example(shared: Served) -> None:
    headers = new_user()
    assert statuses(burst(f"{shared.url}/slow", 30, headers)) == {200: 1, 429: 29}
    assert statuses(burst(f"{shared.url}/bills/", 30, headers)) == {200: 3, 429: 27}
    assert statuses(burst(f"{shared.url}/fast", 120, headers)) == {200: 50, 429: 70}
    assert statuses(burst(f"{shared.url}/free", 120, headers)) == {200: 120}
    # Each route has the default limits for itself.
    assert get(f"{shared.url}/medium", headers).status == 200


WAITS = ("3/second", "2 per 3 second", "4 per 2 second")


def test_who_waits_for_retry_after_is_served() -> None:
    """At the first try, whatever the strategy: 50 of 50 of each."""
    chance = random.Random(7)

    def is_served(url: str, limit: str, delay: float) -> bool:
        headers = {**new_user(), "X-Limit": limit}
        time.sleep(delay)
        seconds = int(refusal(url, headers).field("retry-after") or "")
        assert 0 <= seconds <= limits.parse(limit).get_expiry() + 2
        time.sleep(seconds)
        return get(url, headers).status == 200

    with Standalone() as redis, served("waits", redis) as one:
        calls = [
            (f"{one.url}/{strategy}", WAITS[n % len(WAITS)], chance.uniform(0, 1))
            for strategy in STRATEGIES
            for n in range(50)
        ]
        with ThreadPoolExecutor(len(calls)) as pool:
            found = list(pool.map(lambda call: (*call[:2], is_served(*call)), calls))
    failed = Counter(one[:2] for one in found if not one[2])
    assert not failed


def used_of(redis: Standalone, headers: dict[str, str], scope: str, amount: int) -> int:
    """How many permits of an hour's limit are spent, as this library sees it."""
    limit = Limit(amount, per=3600, bound="strict")
    with Limiter(redis.url, limit, prefix="limits") as limiter:
        passed = limiter.stats(f"LIMITER/{headers['X-User']}/{scope}/{amount}/1/hour").passed
    assert passed is not None
    return passed


def test_never_more_is_deducted_than_the_limit() -> None:
    """Of 200 requests at once, of which many may be served (flask-limiter#448)."""
    with Standalone() as redis, served("deducting", redis) as one:
        url = f"{one.url}/deducted"
        for cost, spent in ((1, 10), (3, 9), (10, 10)):
            headers = new_user()
            answers = burst(url, 200, {**headers, "X-Cost": str(cost)})
            assert {*statuses(answers)} <= {200, 429}
            assert statuses(answers)[200] * cost >= spent
            assert used_of(redis, headers, "deducted", 10) == spent
            assert get(url, {**headers, "X-Cost": str(11 - spent)}).status == 429
        headers = new_user()
        assert statuses(burst(url, 50, {**headers, "X-Status": "404"})) == {404: 50}
        assert used_of(redis, headers, "deducted", 10) == 0
        assert statuses(burst(url, 50, {**headers, "X-Cost": "11"})) == {429: 50}
        assert used_of(redis, headers, "deducted", 10) == 0


def test_a_reload_keeps_the_counts() -> None:
    with Standalone() as redis, served("sample", redis, f"{GUNICORN} -w 3") as one:
        headers = new_user()
        assert statuses(get(f"{one.url}/five", headers) for _ in "123") == {200: 3}
        before = {get(f"{one.url}/free").body for _ in range(200)}
        one._process.send_signal(signal.SIGHUP)
        found: list[Answer] = []

        def is_reloaded() -> bool:
            found.extend(get(f"{one.url}/free") for _ in range(20))
            return not before & {answer.body for answer in found[-20:]}

        until(is_reloaded, 30, every=0.1)
        assert statuses(found) == {200: len(found)}
        assert statuses(burst(f"{one.url}/five", 20, headers)) == {200: 2, 429: 18}


def test_clearing_while_workers_are_called_fails_no_request() -> None:
    """Each kind of clearing; and what is counted afterwards is exact."""
    with Standalone() as redis, served("sample", redis) as one:
        storage = distwindow.contrib.limits.DistwindowStorage(f"distwindow+{redis.url}", timeout=10)
        headers, is_over = new_user(), threading.Event()
        item = limits.parse("5/minute")
        cleared = 0

        def clear() -> None:
            nonlocal cleared
            while not is_over.wait(0.003):
                storage.clear(item.key_for(headers["X-User"], "five"))
                if cleared % 10 == 0:
                    storage.reset()
                if cleared % 40 == 0:
                    redis.client().flushall()
                cleared += 1

        thread = threading.Thread(target=clear)
        thread.start()
        found = burst(f"{one.url}/five", 500, headers, rate=200)
        is_over.set()
        thread.join()
        assert {*statuses(found)} == {200, 429}
        assert statuses(found)[200] > 5
        assert cleared > 5
        storage.reset()
        _forget_refusals()
        storage.reset()  # what a request counted that was under way
        assert statuses(burst(f"{one.url}/five", 30, headers)) == {200: 5, 429: 25}


# -- a store that is away -------------------------------------------------------------------------


def test_a_store_that_stops_is_answered_as_each_limiter_says_and_comes_back() -> None:
    # Of threads that find the store away at once, Flask-Limiter has all but the first raise.
    command = f"{GUNICORN} -w 3"
    with Standalone(password=PASSWORD) as redis, served("down", redis, command) as one:
        fallback = f"{one.url}/in_memory_fallback_enabled"
        names = ("in_memory_fallback_enabled", "swallow_errors", "neither")
        headers = new_user()
        for name in names:
            for path in (name, f"{name}/deducted"):
                assert statuses(get(f"{one.url}/{path}", headers) for _ in range(3)) == {200: 3}
        redis.kill()
        for path in ("", "/deducted"):
            headers = new_user()
            # Each of three workers admits five from its memory.
            found = statuses(burst(fallback + path, 100, headers))
            assert {*found} == {200, 429}
            assert 5 <= found[200] <= 15
            assert statuses(burst(f"{one.url}/swallow_errors{path}", 30, headers)) == {200: 30}
            assert statuses(burst(f"{one.url}/neither{path}", 30, headers)) == {500: 30}
        assert "is not reachable" in one.output
        assert f"127.0.0.1:{redis.port}" in one.output
        assert PASSWORD not in one.output

        redis.restart()
        headers = new_user()
        until(
            lambda: statuses(get(f"{one.url}/neither", new_user()) for _ in range(20)) == {200: 20}
        )

        def counts_in_the_store() -> bool:
            answers = burst(fallback, 60, new_user())
            return statuses(answers) == {200: 5, 429: 55}

        until(counts_in_the_store, 20, every=0.2)
        fields = get(f"{one.url}/swallow_errors", headers)
        assert rate_fields(fields)["remaining"] == 4


def test_a_store_that_is_frozen_holds_a_request_for_its_timeout_only() -> None:
    with Standalone() as redis, served("down", redis, DISTWINDOW_TIMEOUT="0.25") as one:
        expected = {"in_memory_fallback_enabled": 200, "swallow_errors": 200, "neither": 500}
        for name in expected:
            assert get(f"{one.url}/{name}", new_user()).status == 200
        redis.pause()
        try:
            for name, status in expected.items():
                for path in (name, f"{name}/deducted"):
                    began = time.monotonic()
                    assert get(f"{one.url}/{path}", new_user()).status == status
                    # With the storage of `limits` it would be until the store goes on.
                    assert time.monotonic() - began < 3
            began = time.monotonic()
            assert statuses(burst(f"{one.url}/neither", 100, new_user())) == {500: 100}
            assert time.monotonic() - began < 10  # and not each for its timeout
        finally:
            redis.resume()
        until(lambda: statuses(get(f"{one.url}/neither", new_user()) for _ in range(9)) == {200: 9})


def test_an_application_starts_while_the_store_is_away_and_counts_when_it_is_there() -> None:
    with Standalone() as redis:
        redis.kill()
        with served("down", redis, f"{THREE} --preload") as one:
            assert get(f"{one.url}/neither").status == 500
            redis.restart()
            until(lambda: get(f"{one.url}/neither", new_user()).status == 200)
            until(
                lambda: statuses(burst(f"{one.url}/neither", 30, new_user())) == {200: 5, 429: 25}
            )


def test_a_wrong_password_is_said_and_not_shown() -> None:
    with Standalone(password="right") as redis:
        url = redis.url.replace(":right@", f":{PASSWORD}@")
        with served("down", url) as one:
            assert get(f"{one.url}/neither").status == 500
            assert get(f"{one.url}/swallow_errors").status == 200
            assert get(f"{one.url}/in_memory_fallback_enabled").status == 200
            assert "WRONGPASS" in one.output or "password" in one.output
            assert PASSWORD not in one.output


def _forget_refusals() -> None:
    """Wait until no worker repeats a refusal of the store, which each does for a second."""
    time.sleep(REFUSAL_S + 0.1)


# -- commands -------------------------------------------------------------------------------------


def flask(url: str, factory: str, *words: str, program: str = "") -> str:
    """Run `flask`, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "flask", "--app", f"{MODULE}:{factory}", *words],
        cwd=ROOT, text=True, capture_output=True, timeout=60, input=program,
        env={**os.environ, "DISTWINDOW_URL": url, "COLUMNS": "200", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_commands_of_flask_limiter_show_and_clear(shared: Served) -> None:
    pytest.importorskip("rich")
    url = shared.store_url
    headers = new_user()
    user = headers["X-User"]
    for path, count in (("five", 5), ("bills/", 3), ("slow", 1)):
        answers = burst(f"{shared.url}/{path}", 20, headers)
        assert statuses(answers) == {200: count, 429: 20 - count}
    other = new_user()
    assert get(f"{shared.url}/slow", other).status == 200

    shown = flask(url, "sample", "limiter", "limits", f"--key={user}")
    assert "5 per 1 minute: Fail (0 out of 5 remaining)" in shown
    assert "1 per 1 second: Pass (1 out of 1 remaining)" in shown
    assert "3 per 1 hour: Fail (0 out of 3 remaining)" in shown
    assert "Exempt" in shown
    shown = flask(url, "sample", "limiter", "config")
    assert "DistwindowStorage" in shown
    assert "MovingWindowRateLimiter" in shown
    assert "OK" in shown

    assert "Cleared" in flask(url, "sample", "limiter", "clear", f"--key={user}", "-y")
    _forget_refusals()
    for path, count in (("five", 5), ("bills/", 3), ("slow", 1)):
        answers = burst(f"{shared.url}/{path}", 20, headers)
        assert statuses(answers) == {200: count, 429: 20 - count}
    assert get(f"{shared.url}/slow", other).status == 429


def test_one_endpoint_is_cleared_by_a_command(shared: Served) -> None:
    pytest.importorskip("rich")
    headers = new_user()
    for path in ("five", "slow"):
        assert 429 in statuses(burst(f"{shared.url}/{path}", 10, headers))
    words = ("limiter", "clear", f"--key={headers['X-User']}", "--endpoint=slow", "-y")
    flask(shared.store_url, "sample", *words)
    _forget_refusals()
    assert get(f"{shared.url}/slow", headers).status == 200
    assert get(f"{shared.url}/five", headers).status == 429


def test_the_commands_say_that_a_store_is_away() -> None:
    pytest.importorskip("rich")
    url = f"redis://:{PASSWORD}@127.0.0.1:{free_port()}"
    assert "Storage not available" in flask(url, "sample", "limiter", "limits", "--key=ann")
    assert "Error" in flask(url, "sample", "limiter", "config")


def test_a_reset_from_a_shell_frees_all_users(shared: Served) -> None:
    first, second = new_user(), new_user()
    for headers in (first, second):
        assert 429 in statuses(burst(f"{shared.url}/five", 10, headers))
    program = """
import json
from flask import current_app
(limiter,) = current_app.extensions["limiter"]
limiter.reset()
print("reset:", json.dumps(limiter.storage.check()))
"""
    shown = flask(shared.store_url, "sample", "shell", program=program)
    assert json.dumps(True) in shown
    _forget_refusals()
    for headers in (first, second):
        assert statuses(burst(f"{shared.url}/five", 10, headers)) == {200: 5, 429: 5}
