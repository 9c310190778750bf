"""Fixtures that run commands: in this process (`cli`), or in a process of their own (`shell`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from distwindow import Limit, Limiter
from distwindow.cli.app import app
from distwindow.ring.command import load_script
from distwindow.ring.commands import Acquire, charges_of
from distwindow.ring.key import ring_name, ring_name_prefix
from tests.programs import run_python
from tests.servers.own import own_server


@dataclass(frozen=True)
class Result:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str = ""


Cli = Callable[..., Result]


@pytest.fixture(scope="session")
def redis_url(redis_url: str) -> Iterator[str]:
    """`redis://…` of a plain server: `stats` and `reset` search all of it."""
    yield from own_server(redis_url)


@pytest.fixture
def cli(
    redis_url: str,
    prefix: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Cli:
    """Return a function that runs a command in this process, by default on the plain server. It
    shows no progress, which a busy machine would add to what is compared.
    """
    monkeypatch.setattr("distwindow.cli.progress._PIPE_S", (math.inf, math.inf))

    def run(*arguments: str, store: str = redis_url, own: str = prefix) -> Result:
        capsys.readouterr()
        command, *more = arguments
        with pytest.raises(SystemExit) as end:
            app([command, "--url", store, "--prefix", own, *more])
        code = end.value.code or 0
        assert isinstance(code, int)
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture
def shell() -> Cli:
    """Return a function that runs a command in a process of its own, with further variables."""

    def run(*arguments: str, timeout: float = 60, **env: str) -> Result:
        done = run_python("-m", "distwindow.cli", *arguments, env=env, timeout=timeout)
        return Result(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def use(url: str, prefix: str, *keys: Any, limits: Any = "10/hour") -> None:
    """Call a limiter of these limits once on each key."""
    with Limiter(url, limits, prefix=prefix, timeout=5) as limiter:
        for key in keys:
            limiter.try_acquire(key)


def fill(url: str, prefix: str, count: int) -> None:
    """Make keys `user:0`.. with `i % 100 + 1` used permits each. Every tenth is refused once.

    Calls make the first hundred, and the others are copies of their rings.
    """
    client: Any = redis.Redis.from_url(url)
    script, limit = load_script("acquire"), Limit("100/hour")
    client.script_load(script.text)
    pipeline = client.pipeline(transaction=False)
    for i in range(count):
        key, like = f"user:{i}", f"user:{i % 100}"
        if i >= 100:
            pipeline.copy(*(ring_name(ring_name_prefix(prefix, one), limit) for one in (like, key)))
        else:
            for cost in [i + 1] + [limit.amount] * (i % 10 == 0):
                charges = charges_of(key, ring_name_prefix(prefix, key), [limit], cost)
                command = Acquire(charges, write_limit=True)
                guard = "9999999999999.000001"
                keys = command.keys
                pipeline.evalsha(script.sha, len(keys), *keys, guard, *command.arguments())
        if i % 500 == 499:
            pipeline.execute()
    pipeline.execute()
    client.close()
