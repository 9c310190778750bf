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


def test_ports_are_open_to_this_machine_alone_and_used_once(
    services: dict[str, dict[str, Any]],
) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    published = [port.split(":")[1] for port in ports]
    assert len(published) == len(set(published))


def test_docker_itself_accepts_the_file() -> None:
    docker = shutil.which("docker")
    if (
        docker is None
        or subprocess.run([docker, "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("no `docker compose` here; the tests above read the file")
    subprocess.run([docker, "compose", "-f", FILE, "config", "--quiet"], check=True)
