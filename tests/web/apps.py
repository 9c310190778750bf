"""The application of the module that APPLICATION names, whose limits wait for their store for
DISTWINDOW_TIMEOUT seconds.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from distwindow.contrib.http.rate_limits import BaseRateLimits

assert BaseRateLimits.__init__.__kwdefaults__
BaseRateLimits.__init__.__kwdefaults__["timeout"] = float(os.environ["DISTWINDOW_TIMEOUT"])
app: Any = importlib.import_module(os.environ["APPLICATION"]).app
