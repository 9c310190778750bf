"""How many examples the property tests draw.

The quick tier (`-m "not slow"`) draws at most QUICK_EXAMPLES for each test, so that it stays quick
whatever a test asks for. Any other run draws as many as the tests say.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

QUICK_EXAMPLES = 12

_SETTINGS = "_hypothesis_internal_use_settings"
"""Where Hypothesis keeps the settings of a test; there is no public way to change them later."""


def load_profile() -> None:
    """Have no test fail because of how long its examples take, which depends on what else the
    machine does.
    """
    settings.register_profile(
        "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
    )
    settings.load_profile("any machine")


def limit_to_quick(test: Any) -> None:
    """Have a property test draw at most QUICK_EXAMPLES."""
    found = getattr(test, _SETTINGS, None)
    if found is not None and found.max_examples > QUICK_EXAMPLES:
        setattr(test, _SETTINGS, settings(found, max_examples=QUICK_EXAMPLES))
