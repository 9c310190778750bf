"""What `from distwindow import *` gives, and what `except` catches. The signatures are stated once,
in docs/api, where tests/docs/test_api.py compares them with the code.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

import distwindow
from tests.programs import ROOT, run_python


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


_LIBRARY = """
import warnings
from distwindow import DistwindowDeprecationWarning

def old():
    warnings.warn("old() goes in 0.3: use new()", DistwindowDeprecationWarning, stacklevel=2)
"""


def test_a_deprecation_is_shown_unasked_also_where_a_module_meets_it(tmp_path: Path) -> None:
    """Python does not show a `DeprecationWarning` there."""
    (tmp_path / "library.py").write_text(_LIBRARY)
    (tmp_path / "service.py").write_text("import library\nlibrary.old()\n")
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTHONWARNINGS": ""}
    shown = run_python("-c", "import service", env=env).stderr
    assert "service.py:2: DistwindowDeprecationWarning: old() goes in 0.3: use new()" in shown


@pytest.mark.filterwarnings("ignore::distwindow.DistwindowDeprecationWarning")
def test_filters_of_pytest_take_its_public_name() -> None:
    """Here every other warning is an error."""
    category = distwindow.DistwindowDeprecationWarning
    warnings.warn("old() goes in 0.3: use new()", category, stacklevel=1)
