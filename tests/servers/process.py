"""One redis-server process: started with a config file, and ended by its pid."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.servers.binary import find_binary
from tests.servers.wait import Started, free_port, until

if TYPE_CHECKING:
    from typing_extensions import Self

Config = Mapping[str, "str | int | Sequence[str]"]

# What a server, and a sentinel, write into their log when they accept connections.
READY = ("Ready to accept connections", "Sentinel ID is")
PORT_TAKEN = (
    "Address already in use",
    "Could not create server TCP listening socket",
    "Failed listen",
)

PREFIX = "distwindow-test-"

_running: set[RedisProcess] = set()


@atexit.register
def _stop_all() -> None:
    """Stop the servers of an interrupted run; not in a forked child, see `stop`."""
    for process in list(_running):
        process.stop()


def remove(folder: Path) -> None:
    """Remove a folder that `start()` made; raise `ValueError` for any other path."""
    inside = folder.is_absolute() and folder.parent == Path(tempfile.gettempdir())
    if not (inside and folder.name.startswith(PREFIX)):
        raise ValueError(f"refusing to remove {str(folder)!r}: not a folder made by start()")
    shutil.rmtree(folder, ignore_errors=True)


class RedisProcess(Started):
    """A server on a free port of 127.0.0.1.

    `config` is written as config lines, values as they would stand in `redis.conf`; a list makes
    several lines. `restart()` keeps the port, `kill()` is SIGKILL, `pause()` and `resume()` are
    SIGSTOP and SIGCONT. `env` is added to its environment.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        sentinel: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.env = dict(env or {})
        self.config = dict(config or {})
        self.sentinel = sentinel
        self.host = "127.0.0.1"
        self.port = 0
        # None until start() has made one. Not a default such as Path(), which is the working
        # directory: stop() removes this folder.
        self._made: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    # -- start and stop ----------------------------------------------------------------------------

    def _start(self) -> None:
        find_binary()  # raises before anything is made
        self._made = Path(tempfile.mkdtemp(prefix=PREFIX))
        _running.add(self)
        for _ in range(10):
            self._pick_ports()
            if self._launch():
                return
        raise OSError("ten ports in a row were taken before the server could bind them")

    def restart(self) -> Self:
        """Start again on the same port, without data."""
        self._end(signal.SIGKILL)
        # A client socket may occupy the port for a moment.
        until(self._launch, what=f"restart on port {self.port}", every=0.1)
        return self

    def move(self, host: str) -> Self:
        """Start again on another address of this machine, as a pod that was replaced."""
        self._end(signal.SIGKILL)
        self.host = host
        return self.restart()

    def stop(self) -> None:
        """End the process and remove its folder. Does nothing the second time, or in a child."""
        if os.getpid() != self._owner:
            return
        self._end(signal.SIGTERM)
        _running.discard(self)
        made, self._made = self._made, None
        if made is not None:
            remove(made)

    def kill(self) -> None:
        """End the process by SIGKILL."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    # -- properties --------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """The server's own temporary folder, from start() to stop()."""
        if self._made is None:
            raise RuntimeError("the server has no folder: it is not running")
        return self._made

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        if self._made is None or not (self._made / "log").exists():
            return ""
        return (self._made / "log").read_text(errors="replace")

    def client(self, **options: Any) -> redis.Redis:
        """Return a client of this process, without retries, that waits 5 s at most for a reply."""
        settings: dict[str, Any] = {
            "host": self.host,
            "port": self.port,
            "decode_responses": True,
            "socket_timeout": 5,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            **options,
        }
        return redis.Redis(**settings)

    # -- the process -------------------------------------------------------------------------------

    def _pick_ports(self) -> None:
        self.port = free_port()

    def _lines(self) -> dict[str, str | int | Sequence[str]]:
        return {
            "bind": self.host,
            "port": self.port,
            "dir": f'"{self.folder}"',
            "daemonize": "no",
            "logfile": f'"{self.folder / "log"}"',
            **({} if self.sentinel else {"save": '""', "appendonly": "no"}),
            **self.config,
        }

    def _launch(self) -> bool:
        """Start on the present port; return False if another process has taken it."""
        path = self.folder / "redis.conf"
        path.write_text(
            "".join(
                f"{name} {value}\n"
                for name, values in self._lines().items()
                for value in ([values] if isinstance(values, str | int) else values)
            )
        )
        (self.folder / "log").unlink(missing_ok=True)
        command = [str(find_binary()), str(path), *(["--sentinel"] if self.sentinel else [])]
        with (self.folder / "output").open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**os.environ, **self.env},
                # Ctrl-C in the terminal is for pytest only, which then stops its servers.
                start_new_session=True,
            )
        process = self._process
        until(
            lambda: process.poll() is not None or any(line in self.log for line in READY),
            what="redis-server ready",
            timeout=20,
        )
        if process.poll() is None:
            return True
        printed = self.log + (self.folder / "output").read_text(errors="replace")
        if any(line in printed for line in PORT_TAKEN):
            return False
        self.stop()
        raise RuntimeError(f"{command[0]} ended with {process.returncode}:\n{printed[-2000:]}")

    def _signal(self, number: signal.Signals) -> None:
        if self.alive:
            os.kill(self.pid, number)

    def _end(self, number: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)  # a paused process ignores SIGTERM until then
            try:
                process.wait(timeout=3)
            except subprocess.TimeoutExpired:  # busy in a script that never ends
                process.kill()
                process.wait(timeout=10)
        self._process = None
