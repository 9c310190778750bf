"""Run a command with a server of its own: `python -m tests.servers COMMAND [ARGUMENT...]`.

The URL of the server is in DISTWINDOW_URL. Exits with the exit status of the command.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.servers.standalone import Standalone


def main(command: list[str]) -> int:
    if not command:
        print("usage: python -m tests.servers COMMAND [ARGUMENT...]", file=sys.stderr)
        return 2
    with Standalone() as server:
        return subprocess.call(command, env={**os.environ, "DISTWINDOW_URL": server.url})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
