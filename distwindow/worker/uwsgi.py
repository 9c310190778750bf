"""For programs inside uWSGI, which forks its workers after it has imported the application.

It forks by C code that does not run the functions of `os.register_at_fork` (unless it is started
with `--py-call-uwsgi-fork-hooks`): all workers would use the connections of the process that they
were forked from, and read each other's replies. Therefore limiters begin anew in
`uwsgi.post_fork_hook`, which uWSGI calls in each worker. No thread is started before the fork
(`is_before_uwsgi_forks`).

Older versions (2.0.26, not 2.0.31) do not run threads of Python unless they are started with
`--enable-threads`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from .._fork import reset_process_state
from .flush_job import LOG


class Uwsgi:
    """The hook that is called in forked workers of uWSGI."""

    def __init__(self) -> None:
        self._hooked = False

    def hook_fork(self) -> None:
        """Have limiters begin anew in forked workers. Called when a limiter is made; the first call
        in a process installs the hook.
        """
        uwsgi = sys.modules.get("uwsgi")
        if uwsgi is None or self._hooked or not hasattr(uwsgi, "opt"):
            return
        self._hooked = True
        _hook(uwsgi)
        if not getattr(uwsgi, "has_threads", True):
            LOG.warning(
                "uWSGI runs no threads: what is counted in this process is flushed late, or lost. "
                "Start it with --enable-threads"
            )


def _hook(uwsgi: Any) -> None:
    try:
        # `uwsgidecorators` replaces the installed hook when it is imported. So it is imported
        # first, and the hook is added to its list.
        chain = import_module("uwsgidecorators").postfork_chain
    except Exception:  # it is not installed, or (a plain `Exception`) there is no master process
        uwsgi.post_fork_hook = _make_fork_hook(getattr(uwsgi, "post_fork_hook", None))
    else:
        chain.insert(0, _make_fork_hook(None))


def _make_fork_hook(before: Callable[[], Any] | None) -> Callable[[], None]:
    pid = os.getpid()

    def hook() -> None:
        if os.getpid() != pid:  # without a master this process becomes the first worker
            reset_process_state()
        if before is not None:
            before()

    return hook


UWSGI = Uwsgi()
