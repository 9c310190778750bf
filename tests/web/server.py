"""Real servers of applications, on a free port of 127.0.0.1, ended by their process group."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.patience import PATIENT_S
from tests.servers import free_port
from tests.servers.wait import until

ROOT = Path(__file__).parents[2]
UVICORN = "uvicorn {app} --workers 2 --port {port} --log-level info"
SERVERS = {
    "uvicorn": f"{UVICORN} --loop asyncio",
    "uvloop": f"{UVICORN} --loop uvloop",
    "hypercorn": "hypercorn {app} --workers 2 --bind 127.0.0.1:{port}",
}
"""Commands of servers with two workers each."""
SOURCES = (f"127.0.{n // 250}.{n % 250 + 2}" for n in itertools.count())
"""Addresses of this machine that no test has used yet."""


class Served:
    """A server that runs."""

    def __init__(
        self, port: int, output: Path, store_url: str, process: subprocess.Popen[bytes]
    ) -> None:
        self._process = process
        self.store_url = store_url
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._output = output

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._output.read_text()

    def end(self, number: int = signal.SIGTERM) -> None:
        """Ask it to end, as each deployment does, and wait until it has."""
        self._process.send_signal(number)
        self._process.wait(60)


@contextmanager
def serve(command: str, app: str, url: str, **environment: str) -> Iterator[Served]:
    """Run the server of `command` with the application in the module `app`, whose limits are at
    `url`.
    """
    port = free_port()
    words = command.format(app="tests.web.apps:app", port=port).split()
    with tempfile.TemporaryDirectory(prefix="distwindow-web-") as folder:
        output = Path(folder) / "output"
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                env={
                    **os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1",
                    "PYTHONWARNINGS": "", "DISTWINDOW_URL": url, "APPLICATION": app,
                    "DISTWINDOW_TIMEOUT": str(PATIENT_S), **environment,
                },
            )  # fmt: skip
        served = Served(port, output, url, process)
        try:
            until(lambda: _answers(port), 60, what=f"{command} answers\n{served.output}")
            yield served
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(port: int) -> bool:
    link = http.client.HTTPConnection("127.0.0.1", port, 10)
    with contextlib.closing(link):
        link.request("GET", "/free")
        return link.getresponse().status == 200
