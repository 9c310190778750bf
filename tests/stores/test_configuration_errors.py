"""What will not heal by itself raises `ConfigurationError` under every policy, whatever step of
connecting or calling meets it. The cases are the rows of the table in docs/guarantees.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from distwindow import ConfigurationError, Limiter, StoreUnavailable
from distwindow.away.policy import Answer
from distwindow.runtime.options import Consistency
from distwindow.stores.redis.outcome import RIGHTS
from tests.limiter.first_call import SECRET, all_texts_of, each_limiter, error_of
from tests.servers import Standalone, until
from tests.servers.other import HTTP, SILENT, OtherServer
from tests.servers.process import RedisProcess

PAGE = Path(__file__).parents[2] / "docs" / "guarantees.md"
RULE = f"~distwindow:* resetchannels -@all {RIGHTS}"
WRONG = f"{SECRET}-wrong"
RING_OF_KEY = "distwindow:{key}:6000:10"


@pytest.fixture(scope="module")
def servers() -> Iterator[Any]:
    """Yield servers that refuse something, each by its name."""
    users = {
        "unselecting": f"{RULE} -select",
        "unnaming": f"{RULE} -client",
        "timeless": f"{RULE} -time",
        "scriptless": f"{RULE} -evalsha -eval",
        "halfway": f"{RULE} -hincrby -hset",
        "outsider": RULE.replace("~distwindow:*", "~other:*"),
    }
    with (
        Standalone(
            password=SECRET, users=[f"{name} on >{SECRET} {rule}" for name, rule in users.items()]
        ) as guarded,
        Standalone(config={"rename-command": ['TIME ""', 'AUTH ""']}) as renaming,
        Standalone(tls=True, asks_certificates=True) as tls,
        RedisProcess(
            {"sentinel monitor": f"service {renaming.host} {renaming.port} 1"}, sentinel=True
        ) as sentinel,
        OtherServer(HTTP) as http,
    ):
        with guarded.client() as client:
            Limiter(guarded.url, "5/minute", timeout=5.0).try_acquire("odd")
            (ring,) = client.keys()
            client.set(ring, "no hash")
        with sentinel.client() as client:
            client.execute_command("ACL", "SETUSER", "default", "resetpass", f">{SECRET}")
        yield SimpleNamespace(
            guarded=guarded, renaming=renaming, tls=tls, sentinel=sentinel, http=http
        )


def _at(server: RedisProcess, login: str = "", path: str = "/0", scheme: str = "redis") -> str:
    return f"{scheme}://{login}{server.host}:{server.port}{path}"


def _user(servers: Any, name: str, path: str = "/0") -> str:
    return _at(servers.guarded, f"{name}:{SECRET}@", path)


CASES: dict[tuple[str, str], tuple[Any, dict[str, Any], str]] = {
    ("connecting", "another server: HTTP, mail, SSH, MySQL, memcached"): (
        lambda s: f"redis://{s.http.address}/0", {}, "the port of the URL is wrong",
    ),
    ("connecting", "a server that wants TLS, without it"): (
        lambda s: f"redis://{s.tls.host}:{s.tls.tls_port}/0", {}, "write rediss://",
    ),
    ("TLS", "a server that answers in plain"): (
        lambda s: _at(s.guarded, f":{SECRET}@", "/0", "rediss"),
        {}, "write redis://",
    ),
    ("asking the sentinels", "a server that is no sentinel"): (
        lambda s: _at(s.renaming, "", "/service/0", "redis+sentinel"), {}, "it is no sentinel",
    ),
    ("asking the sentinels", "a wrong password of the sentinels"): (
        lambda s: _at(s.sentinel, "", f"/service/0?sentinel_password={WRONG}", "redis+sentinel"),
        {}, "sentinel_password",
    ),
    ("asking the sentinels", "no password of the sentinels"): (
        lambda s: _at(s.sentinel, "", "/service/0", "redis+sentinel"), {}, "sentinel_password",
    ),
    ("TLS", "a certificate that is not trusted"): (
        lambda s: s.tls.tls_url.partition("?")[0], {}, "ssl_ca_certs",
    ),
    ("TLS", "a certificate for another name"): (
        lambda s: s.tls.tls_url.replace("127.0.0.1", "127.1"), {}, "write one of them",
    ),
    ("TLS", "files or ciphers of the URL that cannot be used"): (
        lambda s: f"{s.tls.tls_url.partition('?')[0]}?ssl_ca_certs={PAGE}", {}, "TLS cannot begin",
    ),
    ("TLS", "no certificate of the client"): (lambda s: s.tls.tls_url, {}, "ssl_certfile"),
    ("`AUTH`", "a wrong password"): (lambda s: _at(s.guarded, f":{WRONG}@"), {}, "password"),
    ("`AUTH`", "no password"): (lambda s: _at(s.guarded), {}, "password"),
    ("`AUTH`", "a server that has renamed it"): (
        lambda s: _at(s.renaming, f":{SECRET}@"), {}, "unknown command",
    ),
    ("`SELECT`", "a database that the server does not have"): (
        lambda s: _user(s, "default", "/4711"), {}, "names a database",
    ),
    ("`SELECT`", "no right to it"): (lambda s: _user(s, "unselecting", "/1"), {}, "select"),
    ("`CLIENT SETNAME`", "no right to it, with `name=`"): (
        lambda s: _user(s, "unnaming"), {"name": "me"}, "client",
    ),
    ("`TIME`", "no right to it"): (lambda s: _user(s, "timeless"), {}, 'clock="client"'),
    ("`TIME`", "a server that has renamed it"): (
        lambda s: _at(s.renaming), {}, 'clock="client"',
    ),
    ("reading the map", "a server that is no cluster"): (
        lambda s: _at(s.guarded, f":{SECRET}@", "", "redis+cluster"), {}, "redis://",
    ),
    ("a script", "no right to run scripts"): (lambda s: _user(s, "scriptless"), {}, "evalsha"),
    ("a script", "no right to a command in it"): (lambda s: _user(s, "halfway"), {}, "hset"),
    ("a script", "no right to the key"): (lambda s: _user(s, "outsider"), {}, "prefix"),
    ("a script", "a key of another type"): (
        lambda s: _user(s, "default"), {"key": "odd"}, "another type",
    ),
}  # fmt: skip


def test_the_table_has_these_cases() -> None:
    text = PAGE.read_text(encoding="utf-8")
    table = text.split("<!-- configuration -->")[1].split("<!-- /configuration -->")[0]
    rows = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in table.splitlines()]
    assert [row for row in rows if len(row) == 2][2:] == list(CASES)


@each_limiter
@pytest.mark.compat
@pytest.mark.parametrize("case", list(CASES), ids=" ".join)
def test_it_is_raised_under_every_policy(
    limiter_class: type, servers: Any, case: tuple[str, str]
) -> None:
    url_of, options, words = CASES[case]
    url = url_of(servers)
    with servers.guarded.client() as client:
        is_old = client.info("server")["redis_version"] < "7"
    if is_old and case == ("TLS", "no certificate of the client"):
        # Redis 6.2 ends the connection without a TLS alert: nobody can tell it from an outage.
        assert isinstance(error_of(limiter_class, url, **options), StoreUnavailable)
        return
    for policy in (*get_args(Answer), lambda *_: True):
        exc = error_of(limiter_class, url, **options, on_store_error=policy)
        assert isinstance(exc, ConfigurationError), policy
        assert re.search(re.escape(words), str(exc)), exc
        assert SECRET not in all_texts_of(exc)


NOT_OF_SENTINELS = {
    "a server that answers in plain",  # tests/stores/test_wrong_server.py
    "no certificate of the client",  # named if its alert comes before the end of the connection
}
TLS = [case for case in CASES if case[0] == "TLS" and case[1] not in NOT_OF_SENTINELS]


@each_limiter
@pytest.mark.parametrize("topology", ["sentinel", "cluster"])
@pytest.mark.parametrize("case", TLS, ids=" ".join)
def test_tls_that_cannot_begin_is_named_by_each_topology(
    limiter_class: type, servers: Any, topology: str, case: tuple[str, str]
) -> None:
    """Where sentinels, or the nodes of a cluster, are asked."""
    url_of, _, words = CASES[case]
    url, _, options = url_of(servers).partition("?")
    url = url.replace("rediss", f"rediss+{topology}").removesuffix("/0")
    url += ("/service/0" if topology == "sentinel" else "") + f"?{options}"
    exc = error_of(limiter_class, url, on_store_error="allow")
    assert isinstance(exc, ConfigurationError)
    assert re.search(re.escape(words), str(exc)), exc


@each_limiter
@pytest.mark.compat
@pytest.mark.parametrize(
    ("name", "words"), [("guarded", "password"), ("renaming", "unknown command")]
)
def test_a_mistake_is_not_hidden_by_hosts_that_are_silent(
    limiter_class: type,
    servers: Any,
    name: str,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Although reading the map takes longer than a call has. Its text may have the password."""
    server = getattr(servers, name)
    with OtherServer(SILENT) as first, OtherServer(SILENT) as second:
        hosts = f"{server.host}:{server.port},{first.address},{second.address}"
        url = f"redis+cluster://:{WRONG}@{hosts}"
        exc = error_of(limiter_class, url, on_store_error="allow", timeout=0.5)
    assert isinstance(exc, ConfigurationError)
    assert words in str(exc)
    assert SECRET not in all_texts_of(exc) + caplog.text


# -- a server whose configuration changes ---------------------------------------------------------


USER = f"me on >{SECRET} {RULE}"


def _execute(server: RedisProcess, *lines: str) -> None:
    with server.client() as client:
        for line in lines:
            client.execute_command(*line.split())


FAULTS = {
    # What begins it, and what mends it.
    "password": (
        ["ACL SETUSER me resetpass >another", "CLIENT KILL USER me"],
        f"ACL SETUSER me resetpass >{SECRET}",
    ),
    "right": (["ACL SETUSER me -evalsha"], "ACL SETUSER me +evalsha"),
    "key": ([f"SET {RING_OF_KEY} text"], f"DEL {RING_OF_KEY}"),
}


@pytest.mark.compat
@pytest.mark.parametrize("fault", list(FAULTS))
@pytest.mark.parametrize("consistency", get_args(Consistency))
def test_every_consistency_and_health_tell_until_it_is_mended(
    harness: Any, consistency: str, fault: str
) -> None:
    """Once a call or flush has failed for the configuration, calls raise until one succeeds: those
    of all keys, or of the one that has another type.
    """
    begin, mend = FAULTS[fault]
    with Standalone(
        users=[f"me on >{SECRET} ~distwindow:* resetchannels -@all {RIGHTS}"]
    ) as server:
        limiter = harness.limiter(
            _at(server, f"me:{SECRET}@"), "1000/minute", timeout=5.0, consistency=consistency,
            on_store_error="allow", sync_interval=0.02,
        )  # fmt: skip

        def raises(key: str) -> bool:
            try:
                limiter.try_acquire(key)
            except ConfigurationError:
                return True
            return False

        def health() -> Any:
            return limiter.limiter.health()

        if fault == "key":
            _execute(server, *begin)
        else:
            limiter.each(["key", "other", "idle"])
            until(lambda: health().pending == 0)
            _execute(server, *begin)
        until(lambda: raises("key"))
        if fault == "key":
            assert not any(map(raises, ["other", "new"] * 3))
            assert health().up
        else:
            assert all(map(raises, ["key", "other", "idle", "new"] * 3))
            assert not health().up
        assert health().last_error
        _execute(server, mend)
        until(lambda: not raises("key"))
        assert not any(map(raises, ["key", "other", "idle", "new"] * 3))
        until(lambda: health().up)
