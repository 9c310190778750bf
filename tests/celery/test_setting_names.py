"""A setting of distwindow in Celery's configuration is read, or is an error."""

from __future__ import annotations

import types
from typing import Any

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

from distwindow import ConfigurationError
from distwindow.contrib.celery import RateLimits
from distwindow.contrib.celery.settings import CONF_KEYS

LIMITS = {"proj.*": "1/s"}


def rate_limits(conf: dict[str, Any], namespace: str | None = None) -> RateLimits:
    app = Celery("test", set_as_current=False)
    app.config_from_object(types.SimpleNamespace(**conf), namespace=namespace)
    return RateLimits(app, "memory://")


@pytest.mark.parametrize(
    "key",
    [
        "DISTWINDOW_LIMITS", "distwindow_Limits", "Distwindow_limits", "CELERY_DISTWINDOW_LIMITS",
        "distwindow_limit", "distwindow_",
    ],
)  # fmt: skip
def test_a_setting_that_is_not_read_is_an_error(key: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        rate_limits({key: LIMITS}).settings()
    assert repr(key) in str(caught.value)
    assert "distwindow_limits" in str(caught.value)


@pytest.mark.parametrize(
    "key", ["DISTWINDOW_LIMITS", "CELERY_DISTWINDOW_LIMIT", "CELERY_distwindow_limits"]
)
def test_with_a_namespace_the_error_says_what_to_write(key: str) -> None:
    with pytest.raises(ConfigurationError, match="CELERY_DISTWINDOW_LIMITS"):
        rate_limits({key: LIMITS}, "CELERY").settings()


@given(st.sampled_from(CONF_KEYS), st.sampled_from([None, "CELERY", "proj"]), st.randoms())
def test_a_setting_in_any_case_is_read_or_is_an_error(
    name: str, namespace: str | None, random: Any
) -> None:
    full = f"{namespace or ''}{'_' if namespace else ''}distwindow_{name}"
    key = "".join(random.choice([letter.lower(), letter.upper()]) for letter in full)
    limits = rate_limits({key: LIMITS}, namespace)
    limits._store = None
    if limits.app.conf.get(f"distwindow_{name}") != LIMITS:
        with pytest.raises(ConfigurationError, match="not read by Celery"):
            limits.settings()


def test_what_an_application_calls_so_for_itself_is_left_alone() -> None:
    # A Django project may keep the URL for both, and give it to `RateLimits`.
    rate_limits({"DISTWINDOW_URL": "memory://"}, "CELERY").settings()
    own = {"DISTWINDOW_PREFIX": "a", "CELERY_DISTWINDOW_PREFIX": "b"}
    assert rate_limits(own, "CELERY").settings().prefix == "b"
    rate_limits({"distwindow": types, "distwindow_url_of": len, "window_limits": 7}).settings()
    rate_limits({"MYAPP_DISTWINDOW_TABLE": "t"}).settings()


def test_settings_with_a_namespace_are_read() -> None:
    limits = rate_limits({"CELERY_DISTWINDOW_LIMITS": LIMITS, "distwindow_prefix": "p"}, "CELERY")
    assert limits.settings().prefix == "p"
    assert limits.app.conf.get("distwindow_limits") == LIMITS
