"""`python -m benchmarks`: runs the sections, prints a table for each, and the missed targets."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from benchmarks import report, server
from benchmarks.measure import error_text, log
from benchmarks.report import Section

SECTIONS = {
    "server": "server_cost",
    "senders": "sender_cost",
    "memory": "footprint",
    "latency": "latency",
    "threads": "threads",
    "connections": "connections",
    "asyncio": "asyncio_tasks",
    "cold": "cold_keys",
    "inprocess": "inprocess",
    "consistency": "consistency",
    "simulation": "fleet_simulation",
    "breakers": "breakers",
}


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


def _run(name: str, quick: bool) -> Section:
    log(f"{name}: started")
    try:
        run: Callable[[bool], Section] = import_module(f"benchmarks.{SECTIONS[name]}").run
        return run(quick)
    except Exception as error:
        log(f"{name}: failed: {error_text(error)}")
        section = Section(name, name)
        section.add_failures({"the whole section": error_text(error)})
        return section


def main() -> int:
    options = _arguments()
    # Peers log a warning with every refused call, which would be timed, too.
    logging.disable(logging.CRITICAL)
    names = [name for name in SECTIONS if not options.only or name in options.only]
    command = " ".join(
        ["python -m benchmarks", *(["--quick"] if options.quick else [])]
        + [f"--only {name}" for name in options.only or []]
    )
    environment = report.environment(server.version())
    print(f"{command}\n" + "\n".join(f"  {name}: {value}" for name, value in environment.items()))
    sections: list[Section] = []
    for name in names:
        sections.append(_run(name, options.quick))
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
