"""When application servers end, the counts of their processes reach the store.

They are the real gunicorn, uvicorn and Celery. Flush intervals are so long that only the end
flushes.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distwindow import Limiter
from tests.servers import free_port, until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
LIMIT = "1000000/hour"
KEYS = [f"k{n}" for n in range(20)]

OPTIONS = """
import os, random
url, prefix = os.environ["STORE_URL"], os.environ["PREFIX"]
options = dict(prefix=prefix, consistency="eventual", timeout=5)
options |= dict(sync_interval=60, flush_interval=60)
def key():
    return f"k{random.randrange(20)}"
"""
WSGI = (
    OPTIONS
    + """
from distwindow import Limiter
limiter = Limiter(url, "1000000/hour", **options)
def app(environ, start_response):
    limiter.try_acquire(key())
    body = str(os.getpid()).encode()
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]
"""
)
ASGI = (
    OPTIONS
    + """
from distwindow import AsyncLimiter, Limiter
limiter = AsyncLimiter(url, "1000000/hour", **options)
blocking = Limiter(url, "1000000/hour", **options)
async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown" and "CLOSE" in os.environ:
                await limiter.aclose()
                blocking.close()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    if random.random() < 0.5:
        await limiter.try_acquire(key())
    else:
        blocking.try_acquire(key())
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(os.getpid()).encode()})
"""
)
TASKS = (
    OPTIONS
    + """
from celery import Celery
from distwindow import Limiter
app = Celery(broker=os.environ["STORE_URL"], backend=os.environ["STORE_URL"])
app.conf.broker_connection_retry_on_startup = True
app.conf.worker_prefetch_multiplier = 1
app.conf.task_default_queue = prefix
limiter = Limiter(url, "1000000/hour", **options)
@app.task
def count(times):
    for _ in range(times):
        limiter.try_acquire(key())
    return os.getpid()
"""
)


@contextmanager
def running(
    tmp_path: Path, source: str, args: list[str], url: str, prefix: str, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "application.py").write_text(source)
    process = subprocess.Popen(
        [sys.executable, "-m", *args],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
            "STORE_URL": url,
            "PREFIX": prefix,
            **variables,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def terminated(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=25)
    assert "lost" not in output, output
    return output


def known(url: str, prefix: str) -> int:
    with Limiter(url, LIMIT, prefix=prefix, timeout=5) as limiter:
        return sum(limiter.stats(key).passed for key in KEYS)


class Load:
    """Requests without a break, on several connections, until the server has ended."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.answered = self.unanswered = 0
        self.processes: set[bytes] = set()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(4)]
        until(self._answers, timeout=20)
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()

    def _answers(self) -> bool:
        try:
            self._get()
        except OSError:
            return False
        self.answered += 1
        return True

    def _get(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        try:
            connection.request("GET", "/")
            response = connection.getresponse()
            assert response.status == 200
            self.processes.add(response.read())
        finally:
            connection.close()

    def _run(self) -> None:
        while True:
            try:
                self._get()
            except ConnectionRefusedError:
                return
            except (OSError, http.client.HTTPException):
                with self._lock:
                    self.unanswered += 1
                continue
            with self._lock:
                self.answered += 1


def loses_nothing(
    tmp_path: Path,
    source: str,
    args: list[str],
    port: int,
    url: str,
    prefix: str,
    *,
    workers: int = 2,
    **more: str,
) -> str:
    with running(tmp_path, source, args, url, prefix, **more) as process:
        load = Load(port)
        # A worker that gunicorn has just forked ignores SIGTERM. One that answers does not.
        until(lambda: len(load.processes) == workers and load.answered > 20, timeout=30)
        output = terminated(process)
        load.join()
        code = process.returncode
    counted = known(url, prefix)
    assert load.answered <= counted <= load.answered + load.unanswered, output
    return f"{code}\n{output}"


@pytest.mark.parametrize("more", [[], ["--preload"]], ids=["", "preload"])
@pytest.mark.parametrize("worker", ["sync", "gthread", "gevent"])
def test_gunicorn_loses_no_counts(
    redis_url: str, prefix: str, worker: str, more: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("gunicorn", reason="gunicorn is not installed")
    if worker == "gevent":
        pytest.importorskip("gevent", reason="gevent is not installed")
    port = free_port()
    args = ["gunicorn", "-w", "2", "-k", worker, "-b", f"127.0.0.1:{port}", *more]
    if worker == "gthread":
        args += ["--threads", "4"]
    loses_nothing(tmp_path, WSGI, [*args, "application:app"], port, redis_url, prefix)


@pytest.mark.parametrize("more", [{}, {"CLOSE": "1"}], ids=["", "lifespan"])
@pytest.mark.parametrize("workers", [1, 2])
def test_uvicorn_loses_no_counts(
    redis_url: str, prefix: str, workers: int, more: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    port = free_port()
    args = ["uvicorn", "--workers", str(workers), "--port", str(port), "application:app"]
    output = loses_nothing(tmp_path, ASGI, args, port, redis_url, prefix, workers=workers, **more)
    if workers == 1:  # as without distwindow
        assert output.startswith(f"{-signal.SIGTERM}\n")


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo", "max_tasks"])
def test_celery_loses_no_counts(redis_url: str, prefix: str, pool: str, tmp_path: Path) -> None:
    pytest.importorskip("celery", reason="celery is not installed")
    args = ["celery", "-A", "application", "worker", "-c", "2", "--loglevel", "WARNING"]
    args += ["-P", "prefork" if pool == "max_tasks" else pool]
    args += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    if pool == "max_tasks":
        args += ["--max-tasks-per-child", "3"]
    send = (
        "from application import count\n"
        "results = [count.delay(10) for _ in range(12)]\n"
        "print(len({result.get(timeout=30) for result in results}))\n"
    )
    with running(tmp_path, TASKS, args, redis_url, prefix) as process:
        client = subprocess.run(
            [sys.executable, "-c", send],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
                "STORE_URL": redis_url,
                "PREFIX": prefix,
            },
            capture_output=True,
            text=True,
            timeout=40,
            check=False,
        )
        assert client.returncode == 0, client.stderr
        output = terminated(process)
    assert known(redis_url, prefix) == 120, output
    if pool == "max_tasks":
        assert int(client.stdout) >= 4
