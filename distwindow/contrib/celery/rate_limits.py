"""`RateLimits`: what an application makes once, beside its Celery app."""

from __future__ import annotations

from typing import Any

import celery

from ... import Limiter
from ...connect import store_name
from ...core.errors import ConfigurationError
from . import remote_control  # registers the commands
from .annotations import Annotations
from .effective_limits import EffectiveLimits
from .setting_names import check_conf_keys
from .settings import OnStoreError, Settings, check_celery_version, make_settings, max_hold_s
from .task_limits import LimitTable
from .worker_steps import ConsumerStep, GateStep


class RateLimits:
    """Limits tasks of a Celery application, for all its workers together.

        app = Celery("proj", broker="redis://localhost:6379/1")
        limits = RateLimits(app, "redis://localhost:6379/0")

        @app.task(limits=["5/second", "1000/hour"], limit_key="tenant:{tenant}")
        def fetch(tenant, url): ...

    A task that its limits refuse waits, unacknowledged, in the parent of the worker that received
    it, and starts when they admit it. It takes no slot of the pool and no retry, and other tasks
    pass it.

    `store` is a URL or a redis-py client, as for `Limiter`; None means `app.conf.distwindow_url`.
    The other arguments replace settings of the configuration, `distwindow_<name>`:

    `prefix`: the beginning of the names of all keys ("distwindow").
    `on_store_error`: "hold" (limited tasks wait until the store answers; the default) or "run".
    `max_parked`: how many waiting tasks a worker fetches beyond its prefetch count (1000). Beyond
    that, further messages stay in the broker.
    `max_hold`: how long, in seconds, a worker keeps a message before it sends it back to its queue;
    by default half of the broker's visibility timeout.
    `timeout`: the deadline of one call to the store, in seconds (0.25).

    Nothing is connected to, and no task is looked at, before a worker starts. There, whatever
    cannot work raises `ConfigurationError`, which ends `celery worker` with one sentence. One
    application has one `RateLimits`; a second one raises `ConfigurationError` at once.
    """

    def __init__(
        self,
        app: Any,
        store: Any = None,
        *,
        prefix: str | None = None,
        on_store_error: OnStoreError | None = None,
        max_parked: int | None = None,
        max_hold: float | None = None,
        timeout: float | None = None,
    ) -> None:
        check_celery_version(tuple(celery.VERSION))
        if not isinstance(app, celery.Celery) and not hasattr(app, "steps"):
            raise ConfigurationError(f"{type(app).__name__} is no Celery application")
        if getattr(app, "distwindow_rate_limits", None) is not None:
            raise ConfigurationError("this Celery application has its RateLimits already")
        self.app = app
        self._store = store
        self._given = {
            "prefix": prefix, "on_store_error": on_store_error, "max_parked": max_parked,
            "max_hold": max_hold, "timeout": timeout,
        }  # fmt: skip
        app.distwindow_rate_limits = self
        if app.control_cls == celery.Celery.control_cls:  # an application may have one of its own
            app.control_cls = remote_control.Control
            vars(app).pop("control", None)
        app.steps["worker"].add(GateStep)
        app.steps["consumer"].add(ConsumerStep)

    def __repr__(self) -> str:
        store = self._store if self._store is not None else self.app.conf.get("distwindow_url")
        shown = "no store yet" if store is None else store_name(store)
        return f"RateLimits({self.app.main!r}, {shown!r})"

    @property
    def store(self) -> Any:
        """The store's URL or client. Raises `ConfigurationError` if none was given."""
        store = self._store if self._store is not None else self.app.conf.get("distwindow_url")
        if store is None:
            raise ConfigurationError(
                "the rate limits have no store: give RateLimits a URL, or set distwindow_url"
            )
        return store

    def check(self) -> None:
        """Check the settings, the store, and the limits of all tasks that have been imported, as a
        worker does when it starts. Raises `ConfigurationError`. Nothing is connected to, so a store
        that does not answer is no error. A test of an application may call this.
        """
        settings = self.settings()
        self.effective_limits(settings).check(self.app.tasks)
        Limiter(self.store, "1/second", prefix=settings.prefix, timeout=settings.timeout).close()

    def settings(self) -> Settings:
        """Return the settings, checked. Raises `ConfigurationError`."""
        given = {"url": self._store, **self._given}
        check_conf_keys(self.app.conf, [name for name in given if given[name] is not None])
        return make_settings(self.app.conf, self._given)

    def table(self) -> LimitTable:
        """Return what limits which task, as configured. Raises `ConfigurationError`."""
        annotations = Annotations(self.app.annotations)
        return LimitTable(self.app.conf.get("distwindow_limits"), annotations)

    def effective_limits(self, settings: Settings) -> EffectiveLimits:
        """Return what is to limit the tasks of a worker; it is still to be given the tasks."""
        return EffectiveLimits(self.table(), self.max_hold_s(settings))

    def max_hold_s(self, settings: Settings) -> float:
        """Return how long a worker keeps a message, in seconds. Nothing is connected to."""
        driver = self.app.connection_for_read().get_transport_cls().driver_type
        return max_hold_s(settings, driver, self.app.conf.broker_transport_options or {})
