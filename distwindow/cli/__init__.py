"""The command line, `distwindow`: a guest of the package. Its extra, `cli`, is typer and rich."""

from __future__ import annotations

import sys

MISSING = "the command line needs its extra: pip install 'distwindow[cli]'"


def main() -> None:
    """What the console script calls. Says so in one line, and exits with 2, without the extra."""
    try:
        from .app import run
    except ModuleNotFoundError as exc:
        # Only the extra's own absence: a module of ours that is missing is a broken installation.
        if (exc.name or "").partition(".")[0] not in ("typer", "rich", "click"):
            raise
        if sys.argv[1:] == ["--version"]:
            from distwindow import __version__

            print(f"distwindow {__version__}")
            return
        print(MISSING, file=sys.stderr)
        raise SystemExit(2) from None
    run()
