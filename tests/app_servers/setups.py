"""The table: which server, which worker class, which command."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.app_servers import applications

_GUNICORN = "-m gunicorn -w {workers} -b 127.0.0.1:{port} --no-control-socket application:app"
_CELERY = (
    "-m celery -A application worker --loglevel WARNING --without-gossip --without-mingle "
    "--without-heartbeat"
)
_UWSGI = (
    "uwsgi --http-socket 127.0.0.1:{port} --module application:app --processes {workers} "
    "--die-on-term --disable-logging --listen 64"
)


@dataclass(frozen=True)
class Setup:
    """How a server is started. A command that begins with `-` is an option of this Python."""

    name: str
    kind: str
    """http, celery or processes."""
    command: str
    packages: tuple[str, ...] = ()
    application: str = applications.WSGI
    workers: int = 4
    """Processes that must have answered before the calls are sent."""
    used: bool = False
    """The limiter is called while the application is imported."""
    files: dict[str, str] = field(default_factory=dict)
    """Further files in the folder in which it is started."""
    restarts: str = ""
    """Why its workers are replaced during the calls. For `SIGHUP` the run sends that signal. Each
    worker prints `SERVES` when it has its own signal handlers.
    """


def _gunicorn(name: str, options: str, *packages: str, workers: int = 4) -> list[Setup]:
    """Return setups without `--preload`, with it, and with a limiter used before the fork."""
    command = f"{_GUNICORN} {options}".replace("{workers}", str(workers))
    packages = ("gunicorn", *packages)
    return [
        Setup(f"gunicorn {name}", "http", command, packages, workers=workers),
        Setup(
            f"gunicorn {name} preload", "http", f"{command} --preload", packages, workers=workers
        ),
        Setup(
            f"gunicorn {name} preload, used at import", "http", f"{command} --preload", packages,
            workers=workers, used=True,
        ),
    ]  # fmt: skip


_PATCH = "from gevent import monkey\nmonkey.patch_all()\n"
SERVES = "this worker serves"
_TELL = {"gunicorn.conf.py": f"def post_worker_init(worker): print({SERVES!r})\n"}

SETUPS = [
    *_gunicorn("sync", "-k sync"),
    *_gunicorn("gthread", "-k gthread --threads 8", workers=2),
    *_gunicorn("gevent", "-k gevent", "gevent"),
    Setup(
        "gunicorn gevent preload, --max-requests 150, used at import", "http",
        _GUNICORN + " -k gevent --preload --max-requests 150", ("gunicorn", "gevent"), used=True,
        files=_TELL, restarts="max-requests",
    ),
    Setup(
        "gunicorn gevent preload, SIGHUP, used at import", "http",
        _GUNICORN + " -k gevent --preload", ("gunicorn", "gevent"), used=True,
        files=_TELL, restarts="SIGHUP",
    ),
    Setup(
        "gunicorn gevent preload, patched in gunicorn.conf.py, used at import", "http",
        _GUNICORN + " -k gevent --preload", ("gunicorn", "gevent"), used=True,
        files={"gunicorn.conf.py": _PATCH},
    ),
    Setup(
        "gunicorn uvicorn_worker", "http", _GUNICORN + " -k uvicorn_worker.UvicornWorker",
        ("gunicorn", "uvicorn_worker"), applications.ASGI,
    ),
    Setup(
        "gunicorn uvicorn_worker preload", "http",
        _GUNICORN + " -k uvicorn_worker.UvicornWorker --preload",
        ("gunicorn", "uvicorn_worker"), applications.ASGI,
    ),
    Setup(
        "uvicorn", "http", "-m uvicorn --port {port} --no-access-log application:app",
        ("uvicorn",), applications.ASGI, workers=1,
    ),
    Setup(
        "uvicorn --workers 4", "http",
        "-m uvicorn --workers 4 --port {port} --no-access-log application:app",
        ("uvicorn",), applications.ASGI,
    ),
    Setup(
        "hypercorn asyncio", "http",
        "-m hypercorn -w {workers} -b 127.0.0.1:{port} application:app", ("hypercorn",),
        applications.ASGI,
    ),
    Setup(
        "hypercorn uvloop", "http",
        "-m hypercorn -k uvloop -w {workers} -b 127.0.0.1:{port} application:app",
        ("hypercorn", "uvloop"), applications.ASGI,
    ),
    Setup("uWSGI", "http", f"{_UWSGI} --master", ("uwsgi",)),
    Setup("uWSGI, used at import", "http", f"{_UWSGI} --master", ("uwsgi",), used=True),
    Setup(
        "uWSGI --enable-threads, used at import", "http", f"{_UWSGI} --master --enable-threads",
        ("uwsgi",), used=True,
    ),
    Setup(
        "uWSGI --threads 8, used at import", "http", f"{_UWSGI} --master --threads 8",
        ("uwsgi",), used=True,
    ),
    Setup(
        "uWSGI --enable-threads --lazy-apps", "http",
        f"{_UWSGI} --master --enable-threads --lazy-apps", ("uwsgi",), used=True,
    ),
    Setup(
        "werkzeug threaded", "http", "application.py {port}", ("werkzeug",),
        applications.WERKZEUG, workers=1, used=True,
    ),
    *[
        Setup(
            f"Celery {pool}", "celery", f"{_CELERY} -P {pool} -c {size}", ("celery", *packages),
            applications.CELERY, workers=4 if pool == "prefork" else 1, used=True,
        )
        for pool, size, packages in (
            ("prefork", 4, ()),
            ("threads", 8, ()),
            ("gevent", 20, ("gevent",)),
            ("eventlet", 20, ("eventlet",)),
            ("solo", 1, ()),
        )
    ],
    Setup(
        "Celery prefork, --max-tasks-per-child 20", "celery",
        f"{_CELERY} -c 4 --max-tasks-per-child 20", ("celery",), applications.CELERY,
    ),
    *[
        Setup(
            f"{kind}, {method}", "processes", f"application.py {kind} {method} {{calls}}",
            (), applications.PROCESSES, used=True,
        )
        for kind in ("Pool", "ProcessPoolExecutor")
        for method in ("fork", "forkserver", "spawn")
    ],
]  # fmt: skip
