"""Hooks for uWSGI, with a module in place of the one that uWSGI provides. The real one runs in
`python -m tests.app_servers --only uWSGI`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from distwindow import AsyncLimiter, Limiter
from distwindow.runtime import shutdown as ours
from distwindow.support.locks import OneShotEvent, start_thread


@pytest.fixture
def uwsgi(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = SimpleNamespace(
        opt={}, has_threads=1, worker_id=lambda: 0, masterpid=os.getpid, post_fork_hook=None
    )
    monkeypatch.setitem(sys.modules, "uwsgi", module)
    monkeypatch.setitem(sys.modules, "uwsgidecorators", None)  # cannot be imported
    return module


def test_no_thread_is_started_before_the_fork(uwsgi: Any) -> None:
    done = OneShotEvent()
    assert not start_thread(done.set)
    uwsgi.worker_id = lambda: 1
    assert start_thread(done.set)
    assert done.wait(10)


def test_a_spooler_is_no_master(uwsgi: Any) -> None:
    uwsgi.masterpid = os.getppid
    assert start_thread(OneShotEvent().set)


@pytest.fixture
def began_anew(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(ours, "reset_process_state", lambda: calls.append("ours"))
    return calls


def after_fork(monkeypatch: pytest.MonkeyPatch, hook: Callable[[], None]) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        hook()


def test_workers_start_without_the_state_of_the_master(
    uwsgi: Any, began_anew: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uwsgi.post_fork_hook = lambda: began_anew.append("theirs")
    hooks = ours.Uwsgi()
    hooks.hook_fork()
    hooks.hook_fork()
    uwsgi.post_fork_hook()
    assert began_anew == ["theirs"]  # without a master: this process is a worker now
    after_fork(monkeypatch, uwsgi.post_fork_hook)
    assert began_anew == ["theirs", "ours", "theirs"]


def test_the_decorators_of_uwsgi_are_kept(
    uwsgi: Any, began_anew: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain: list[Callable[[], None]] = [lambda: began_anew.append("theirs")]
    monkeypatch.setitem(sys.modules, "uwsgidecorators", SimpleNamespace(postfork_chain=chain))
    ours.Uwsgi().hook_fork()
    for function in chain:
        after_fork(monkeypatch, function)
    assert began_anew == ["ours", "theirs"]


@pytest.mark.parametrize("make", [Limiter, AsyncLimiter])
def test_a_limiter_of_either_kind_installs_the_hook(
    uwsgi: Any, monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    """Otherwise forked workers would flush under one sender, and a ring take one of them only."""
    monkeypatch.setattr(ours.UWSGI, "_hooked", False)
    limiter = make("redis://127.0.0.1:1/0", "10/second")
    assert uwsgi.post_fork_hook is not None
    if make is Limiter:
        limiter.close()


@pytest.mark.parametrize("threads", [0, 1])
def test_a_server_without_threads_is_logged(
    uwsgi: Any, caplog: pytest.LogCaptureFixture, threads: int
) -> None:
    uwsgi.has_threads = threads
    with caplog.at_level(logging.WARNING, "distwindow"):
        ours.Uwsgi().hook_fork()
    assert ("--enable-threads" in caplog.text) is (threads == 0)
