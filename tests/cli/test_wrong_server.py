"""A wrong port, and TLS where there is none: what answers there is named by every command."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Cli
from tests.servers import Standalone
from tests.servers.other import BLANK, HTTP, OtherServer

COMMANDS: dict[str, list[str]] = {
    "doctor": [], "stats": [], "reset": ["k"], "try": ["k", "--limit", "5/minute"],
}  # fmt: skip


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "redis+sentinel"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_another_server(cli: Cli, command: str, scheme: str) -> None:
    with OtherServer(HTTP) as server:
        service = "/service" if scheme == "redis+sentinel" else ""
        result = cli(command, *COMMANDS[command], store=f"{scheme}://{server.address}{service}")
    assert result.code == 2, result
    assert f"{server.address} answers as an HTTP server does" in result.err
    assert "the port of the URL is wrong" in result.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_that_tls_is_wanted(cli: Cli, command: str) -> None:
    with Standalone(tls=True) as server:
        url = f"redis://{server.host}:{server.tls_port}/0"
        result = cli(command, *COMMANDS[command], store=url)
    assert result.code == 2, result
    assert "wants TLS; write rediss:// in place of redis://" in result.err


@pytest.mark.slow  # the handshake takes the whole timeout
def test_doctor_says_that_there_is_no_tls(cli: Cli) -> None:
    with Standalone() as server:
        result = cli("doctor", store=f"rediss://{server.host}:{server.port}/0")
    assert result.code == 2, result
    assert "answers in plain, without TLS; write redis://" in result.err


def test_what_closes_the_connection_is_an_outage(cli: Cli) -> None:
    with OtherServer(BLANK) as server:
        result = cli("doctor", store=f"redis://{server.address}/0")
    assert result.code == 2, result
    assert "is not reachable" in result.err
