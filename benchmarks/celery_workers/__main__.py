"""`python -m benchmarks.celery_workers`: measures all ways in turn, and prints a table.

With `--write` it also writes docs/make/celery_workers.json, the table in docs/howto/celery.md, and
has docs/make/pictures.py draw the picture. With `--shares` it measures how limited tasks and others
share one worker's pool instead; then `--write` writes celery_shares.json and that table.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import celery

from benchmarks import report, server
from benchmarks.celery_workers import shares
from benchmarks.celery_workers.fleet import ROOT, SETUPS, bytes_of_a_waiting_task, is_installed, run
from benchmarks.celery_workers.results import as_json, table

JSON = ROOT / "docs" / "make" / "celery_workers.json"
PAGE = ROOT / "docs" / "howto" / "celery.md"
SHARES_JSON = ROOT / "docs" / "make" / "celery_shares.json"


def environment() -> dict[str, str]:
    return {**report.environment(server.version()), "celery": celery.__version__}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.celery_workers")
    parser.add_argument("--only", action="append", choices=SETUPS)
    parser.add_argument("--write", action="store_true", help="write the table and the picture")
    parser.add_argument("--memory", action="store_true", help="bytes of a waiting task, only")
    parser.add_argument(
        "--shares", action="store_true", help="only how limited tasks and others share each pool"
    )
    options = parser.parse_args()
    if options.memory:
        print(f"{bytes_of_a_waiting_task() / 1000:.1f} kB for each task that waits in a worker")
        return 0
    if options.shares:
        rows = shares.measure()
        print(shares.table(rows))
        if options.write:
            SHARES_JSON.write_text(shares.as_json(rows, environment()), encoding="utf-8")
            text = report.page_with(PAGE, "celery shares", shares.table(rows))
            PAGE.write_text(text, encoding="utf-8")
        return 0
    runs = []
    for setup in options.only or SETUPS:
        if not is_installed(setup):
            print(f"{SETUPS[setup]}: not installed", file=sys.stderr)
            continue
        runs.append(run(setup))
        print(table(runs[-1:]).splitlines()[-1], flush=True)
    print(f"\n{table(runs)}")
    if options.write:
        JSON.write_text(as_json(runs, environment()), encoding="utf-8")
        text = report.page_with(PAGE, "celery workers", table(runs))
        PAGE.write_text(text, encoding="utf-8")
        subprocess.run([sys.executable, str(ROOT / "docs" / "make" / "pictures.py")], check=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
