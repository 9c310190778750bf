"""`python -m benchmarks`: runs the sections, prints a table for each, and the missed targets."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks import report, server
from benchmarks.measure import log
from benchmarks.report import Section
from benchmarks.sections import SECTIONS, run_alone

MAX_LOAD = 1.0
"""The highest load average at its start of a run whose figures are written."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="What distwindow costs, as ratios measured in one run. Starts its own servers.",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds: about five minutes")
    parser.add_argument(
        "--only", action="append", choices=SECTIONS, metavar="SECTION",
        help=f"one of {', '.join(SECTIONS)}; may be given several times",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    return parser.parse_args()


def main() -> int:
    options = _arguments()
    names = [name for name in SECTIONS if not options.only or name in options.only]
    command = " ".join(
        ["python -m benchmarks", *(["--quick"] if options.quick else [])]
        + [f"--only {name}" for name in options.only or []]
    )
    if (options.json or options.markdown) and (load := os.getloadavg()[0]) > MAX_LOAD:
        raise SystemExit(
            f"the load average is {load:.2f}, and what is written may be published: wait until it "
            f"is at most {MAX_LOAD:g}, or leave out --json and --markdown"
        )
    environment = report.environment(server.version())
    print(f"{command}\n" + "\n".join(f"  {name}: {value}" for name, value in environment.items()))
    sections: list[Section] = []
    for name in names:
        sections.append(run_alone(name, options.quick))
        print(report.text(sections[-1]), flush=True)
    print("\n" + "\n".join(report.summary(sections)))
    if options.markdown:
        options.markdown.write_text(
            report.markdown(command, environment, sections), encoding="utf-8"
        )
    if options.json:
        options.json.write_text(report.as_json(command, environment, sections), encoding="utf-8")
    log("done")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
