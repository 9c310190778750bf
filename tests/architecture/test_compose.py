"""docker-compose.yml is consistent. It is read here, since not every machine can run it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

FILE = Path(__file__).parents[2] / "docker-compose.yml"


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text())
    services: dict[str, dict[str, Any]] = loaded["services"]
    return services


def test_the_topologies_are_all_there(services: dict[str, dict[str, Any]]) -> None:
    names = set(services)
    assert {"redis", "valkey", "cluster-init", "primary", "replica"} <= names
    assert {"cluster-1", "cluster-2", "cluster-3"} <= names
    assert {"sentinel-1", "sentinel-2", "sentinel-3"} <= names


def test_ports_are_open_to_this_machine_alone_and_used_once(
    services: dict[str, dict[str, Any]],
) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    published = [port.split(":")[1] for port in ports]
    assert len(published) == len(set(published))


def test_every_server_has_a_healthcheck(services: dict[str, dict[str, Any]]) -> None:
    assert [name for name, service in services.items() if "healthcheck" not in service] == []


def test_services_refer_to_services_that_exist(services: dict[str, dict[str, Any]]) -> None:
    for service in services.values():
        assert set(service.get("depends_on", {})) <= set(services)
        if shared := service.get("network_mode"):
            holder = services[shared.removeprefix("service:")]
            # Docker refuses ports of a service that uses the network of another one.
            assert "ports" not in service
            if port := service.get("environment", {}).get("PORT"):
                assert f"127.0.0.1:{port}:{port}" in holder["ports"]


def test_docker_itself_accepts_the_file() -> None:
    docker = shutil.which("docker")
    if (
        docker is None
        or subprocess.run([docker, "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("no `docker compose` here; the tests above read the file")
    subprocess.run([docker, "compose", "-f", FILE, "config", "--quiet"], check=True)
