"""Options that can never work, alone or together, raise one clear error that names the value."""

from __future__ import annotations

import datetime
import math
import time as system_time
from typing import Any

import pytest

from distwindow import ConfigurationError
from tests.limiter.first_call import each_limiter, error_of


@each_limiter
@pytest.mark.parametrize("option", ["on_store_error", "on_unknown"])
def test_a_policy_that_would_have_to_be_awaited(limiter_class: type, option: str) -> None:
    async def decide(*_: Any) -> bool:
        return True

    exc = error_of(limiter_class, "memory://", **{option: decide})
    assert f"{option}=" in str(exc)
    assert "is asynchronous; write a plain function" in str(exc)


@each_limiter
def test_an_unknown_option(limiter_class: type) -> None:
    with pytest.raises(TypeError, match="colour"):
        limiter_class("memory://", "5/minute", colour="blue")


@each_limiter
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        *(("timeout", v, "is not a number of seconds above 0")
          for v in (0, -1, math.nan, math.inf, "1", None, True)),
        *(("clock", v, 'is neither "server" nor "client"') for v in ("redis", None, 1)),
        *(("name", v, "is not a word of printable ASCII")
          for v in ("", "two words", "é", 5, "a\n")),
        *(("prefix", v, "must be a word without")
          for v in ("", "a b", "a{b", "a*", "a\n", None, b"a", 5)),
        *(("consistency", v, "is none of direct, leased, eventual")
          for v in ("strong", "Direct", "", None, 1)),
        *((option, v, "is not a number of seconds above 0")
          for option in ("sync_interval", "flush_interval")
          for v in (0, -1, math.nan, math.inf, True, "x", None)),
        *(("share", v, "is not a part of the limit, above 0 and at most 1")
          for v in (0, -0.1, 1.1, math.nan, True, "x")),
        *(("max_local_keys", v, "is not a whole number of at least 1")
          for v in (0, -1, 1.5, math.nan, True, "x", None)),
        *((name, v, 'is none of "raise", "allow", "deny", "local"')
          for name in ("on_store_error", "on_unknown") for v in ("fail_open", 1, True)),
        ("on_store_error", None, 'is none of "raise", "allow", "deny", "local"'),
        *(("time", v, "is no clock, as it has no now_ms()")
          for v in (1, None, "now", datetime.time(), system_time)),
    ],
)  # fmt: skip
def test_an_option_that_can_never_work(
    limiter_class: type, option: str, value: Any, message: str
) -> None:
    exc = error_of(limiter_class, "memory://", **{option: value})
    assert isinstance(exc, ConfigurationError)
    assert repr(value) in str(exc)
    assert message in str(exc)


@each_limiter
@pytest.mark.parametrize("store", ["memory://", "redis://127.0.0.1:1"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"consistency": "direct", "share": 0.5}, "share=0.5 means nothing"),
        ({"consistency": "leased", "share": 1}, "share=1 means nothing"),
        ({"consistency": "leased", "clock": "client"}, 'needs clock="server"'),
    ],
    ids=str,
)
def test_options_that_do_not_go_together(
    limiter_class: type, store: str, options: dict[str, Any], message: str
) -> None:
    exc = error_of(limiter_class, store, **options)
    assert isinstance(exc, ConfigurationError)
    assert message in str(exc)
