"""What `from distwindow import *` gives, and what `except` catches. The signatures are stated once,
in docs/api, where tests/docs/test_api.py compares them with the code.
"""

from __future__ import annotations

import distwindow


def test_everything_named_is_there_and_nothing_is_named_twice() -> None:
    assert list(distwindow.__all__) == sorted(set(distwindow.__all__))
    assert all(hasattr(distwindow, name) for name in distwindow.__all__)


def test_the_tree_of_errors() -> None:
    d = distwindow
    assert issubclass(d.ConfigurationError, (d.DistwindowError, ValueError))
    assert issubclass(d.ConfigurationError, ValueError)
    assert issubclass(d.RateLimitExceeded, d.DistwindowError)
    for refusal in (
        d.RateLimitExceeded,
        d.ConcurrencyExceeded,
        d.BreakerOpen,
        d.AuthorityDenied,
        d.SystemOverloaded,
    ):
        assert issubclass(refusal, d.Blocked)
    assert issubclass(d.Blocked, d.DistwindowError)
    assert issubclass(d.StoreError, d.DistwindowError)
    assert issubclass(d.StoreTimeout, d.StoreError)
    assert issubclass(d.StoreUnavailable, d.StoreError)
    assert not issubclass(d.RateLimitExceeded, d.StoreError)
