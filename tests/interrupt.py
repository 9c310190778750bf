"""Children that SIGINT reaches: a shell that starts the tests in the background has it ignored,
and children inherit that.
"""

from __future__ import annotations

import signal


def reachable() -> None:
    """For `subprocess.Popen(preexec_fn=...)`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
