"""The command line, `distwindow`. It needs the extra `cli`, which is typer and rich."""

from __future__ import annotations

import sys

MISSING_EXTRA = "the command line needs the extra `cli`: pip install 'distwindow[cli]'"


def main() -> None:
    """Run the command line, for the console script. Without the extra: one line, and exit 2."""
    try:
        from .app import run
    except ModuleNotFoundError as exc:
        # Any other missing module is a broken installation, and its traceback is needed.
        if (exc.name or "").partition(".")[0] not in ("typer", "rich", "click"):
            raise
        if sys.argv[1:] in (["--version"], ["-V"]):
            from .. import __version__

            print(f"distwindow {__version__}")
            return
        print(MISSING_EXTRA, file=sys.stderr)
        raise SystemExit(2) from None
    run()
