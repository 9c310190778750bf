"""The files of docker compose are consistent. They are read here, since not every machine can run
them.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = ["docker-compose.yml", "examples/shop/docker-compose.yml"]


@pytest.fixture(params=FILES)
def file(request: pytest.FixtureRequest) -> Path:
    return ROOT / str(request.param)


@pytest.fixture
def services(file: Path) -> dict[str, dict[str, Any]]:
    loaded: dict[str, Any] = yaml.safe_load(file.read_text())
    services: dict[str, dict[str, Any]] = loaded["services"]
    return services


def test_ports_are_open_to_this_machine_alone_and_used_once(
    services: dict[str, dict[str, Any]],
) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    published = [port.split(":")[1] for port in ports]
    assert len(published) == len(set(published))


def test_what_is_built_is_there(file: Path, services: dict[str, dict[str, Any]]) -> None:
    for service in services.values():
        if "build" in service:
            context = (file.parent / service["build"]["context"]).resolve()
            assert context == ROOT
            assert (context / service["build"]["dockerfile"]).is_file()


def test_docker_itself_accepts_the_file(file: Path) -> None:
    docker = shutil.which("docker")
    if (
        docker is None
        or subprocess.run([docker, "compose", "version"], capture_output=True).returncode
    ):
        pytest.skip("no `docker compose` here; the tests above read the file")
    subprocess.run([docker, "compose", "-f", file, "config", "--quiet"], check=True)
