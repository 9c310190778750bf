"""Errors of users are one line on stderr without a password, and exit code 2."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.parse import quote

import pytest
import redis

from tests.cli.conftest import Cli, Result
from tests.servers import Standalone, free_port

PASSWORD = "geh:eim/ni$"
COMMANDS = ["stats", "try k --limit 5/s", "reset k", "doctor", "demo", "bench --seconds 0.1"]


def one_line(result: Result, *words: str) -> None:
    assert result.code == 2, result
    assert result.out == ""
    assert result.err.startswith("distwindow: ")
    assert result.err.count("\n") == 1
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err


@pytest.fixture(scope="module")
def locked() -> Iterator[Standalone]:
    with Standalone(password=PASSWORD) as server:
        yield server


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--limit", "many"], ["'many'"]),
        (["--limit", "10/parsec"], ["parsec"]),
        (["--limit", "0/s"], ["0"]),
        (["--limit", "10/1s 7 buckets"], ["7 buckets", "5 or 8"]),
        (["--limit", ""], ["''"]),
        (["--limit", "1/s;2/s"], ["same buckets"]),
        (["--limit", "5/s", "--cost", "0"], ["cost=0"]),
        (["--limit", "5/s", "--cost", "-1"], ["cost=-1"]),
        (["--limit", "5/s", "--cost", "1.5"], ["1.5"]),
        (["--limit", "5/s", "--cost", "True"], ["True"]),
        (["--limit", "5/s", "--cost", "NaN"], ["NaN"]),
        (["--limit", "5/s", "--cost", "6"], ["cost=6", "5"]),
        (["--limit", "5/s", "--prefix", "a b"], ["a b"]),
        (["--limit", "5/s", "--prefix", ""], ["''"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_arguments_of_try(
    cli: Cli, redis_url: str, prefix: str, arguments: list[str], words: list[str]
) -> None:
    one_line(cli("try", "k", *arguments), *words)
    with redis.Redis.from_url(redis_url) as client:
        assert not list(client.scan_iter(f"{prefix}:*"))


@pytest.mark.parametrize("command", ["try", "stats", "reset"])
def test_an_empty_key(cli: Cli, command: str) -> None:
    more = ["--limit", "5/s"] if command == "try" else []
    one_line(cli(command, "", *more), "key must not be empty")


@pytest.mark.parametrize(
    "key", ["{", "}{", "a\nb", "\x01", "🦀" * 40, "k" * 100_000, "-", "100%"], ids=range(8)
)
def test_odd_keys_work(cli: Cli, key: str) -> None:
    assert cli("try", "--limit", "5/hour", "--", key).code == 0
    assert "1 window deleted" in cli("reset", "--", key).out


@pytest.mark.slow
@pytest.mark.parametrize(
    "url",
    [
        f"redsi://:{PASSWORD}@localhost",
        f"redis:/:{PASSWORD}@localhost",
        f"redis//user:{PASSWORD}@localhost",
        f"user:{PASSWORD}@localhost",
        f"redis://user:{PASSWORD}@localhost:port/0",
        f"redis+cluster://user:{PASSWORD}@localhost:1/5",
        f"redis+sentinel://user:{PASSWORD}@localhost:1",
        f"redis://localhost/0?password={PASSWORD}&nonsense=1",
        "localhost:6379",
        "",
        "http://localhost",
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_invalid_urls(cli: Cli, url: str, command: str) -> None:
    result = cli(*command.split(), store=url)
    one_line(result)
    assert PASSWORD not in result.err
    assert "geh" not in result.err


@pytest.mark.parametrize("command", COMMANDS)
class TestStores:
    def test_no_server_at_the_port(self, cli: Cli, command: str) -> None:
        url = f"redis://user:{quote(PASSWORD, safe='')}@127.0.0.1:{free_port()}/0"
        result = cli(*command.split(), store=url)
        one_line(result, "not reachable")
        assert PASSWORD not in result.err
        assert "geh" not in result.err

    def test_a_wrong_password(self, cli: Cli, command: str, locked: Standalone) -> None:
        wrong = quote(PASSWORD + "X", safe="")
        result = cli(*command.split(), store=f"redis://:{wrong}@127.0.0.1:{locked.port}/0")
        one_line(result, "password")
        assert "geh" not in result.err

    def test_no_password(self, cli: Cli, command: str, locked: Standalone) -> None:
        one_line(cli(*command.split(), store=f"redis://127.0.0.1:{locked.port}/0"))

    def test_a_database_that_does_not_exist(self, cli: Cli, command: str, redis_url: str) -> None:
        result = cli(*command.split(), store=redis_url.replace("/0", "/9999"))
        one_line(result, "out of range")

    def test_a_store_inside_one_process(self, cli: Cli, command: str) -> None:
        if command.startswith(("try", "bench")):  # these need no other process
            assert cli(*command.split(), store="memory://").code == 0
        else:
            one_line(cli(*command.split(), store="memory://"), "one process")

    def test_a_cluster_url_for_a_plain_server(self, cli: Cli, command: str, redis_url: str) -> None:
        one_line(cli(*command.split(), store=redis_url.replace("redis:", "redis+cluster:")))

    def test_an_unknown_host_name(self, cli: Cli, command: str) -> None:
        one_line(cli(*command.split(), store="redis://no-such-host.invalid:6379/0"))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["try k --limit 5/s", "bench --seconds 0.1"])
def test_the_log_adds_no_line(shell: Cli, command: str) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    one_line(shell(*command.split(), DISTWINDOW_URL=url), "not reachable")


@pytest.mark.slow
def test_the_right_password_is_not_shown_either(shell: Cli, locked: Standalone) -> None:
    for command in ("doctor", "stats", "try k --limit 5/s --json", "bench --seconds 0.1"):
        result = shell(*command.split(), DISTWINDOW_URL=locked.url)
        assert result.code == 0, result
        assert "geh" not in result.out + result.err


def test_a_key_of_another_type(cli: Cli, redis_url: str, prefix: str) -> None:
    name = f"{prefix}:{{k}}:360000:10"
    with redis.Redis.from_url(redis_url) as client:
        client.set(name, "x")
        one_line(cli("try", "k", "--limit", "5/hour"), "another type")
        assert client.get(name) == b"x"


@pytest.mark.slow
def test_a_server_that_never_answers(cli: Cli) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        one_line(cli("try", "k", "--limit", "5/s", store=f"redis://127.0.0.1:{port}/0"))
