"""Run all setups in all modes, and print a table as in docs/servers.md."""

from __future__ import annotations

import argparse
import sys

from tests.app_servers.run import MODES, missing, run
from tests.app_servers.setups import SETUPS
from tests.servers import Standalone


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.app_servers")
    parser.add_argument("--only", default="", help="those that have this in their name")
    parser.add_argument("--mode", choices=MODES, action="append")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--output", action="store_true", help="print the output of each server")
    options = parser.parse_args()
    chosen = [setup for setup in SETUPS if options.only in setup.name]
    if options.list:
        print("\n".join(setup.name for setup in chosen))
        return 0
    failed = 0
    print("| server | mode | processes | admitted | connections | p50 | p99 | end |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    with Standalone() as server:
        for setup in chosen:
            if absent := missing(setup):
                print(f"skipped: {setup.name}: {', '.join(absent)} not installed", file=sys.stderr)
                continue
            for mode in options.mode or MODES:
                one = run(setup, mode, server)
                print(
                    f"| {setup.name} | {mode} | {one.processes} | {one.admitted} "
                    f"| {one.connections} | {one.p50_us:,.0f} µs | {one.p99_us:,.0f} µs "
                    f"| {one.end_s:.1f} s |",
                    flush=True,
                )
                if faults := one.faults(mode):
                    failed += 1
                    print(f"  FAILED: {'; '.join(faults)[:600]}", flush=True)
                if options.output:
                    print(one.output, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
