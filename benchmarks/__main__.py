"""`python -m benchmarks`: run the sections, print one table each, and what was missed."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from benchmarks import report, server
from benchmarks.measure import said, say
from benchmarks.report import Section

SECTIONS = {
    "server": "server_cost",
    "senders": "sender_cost",
    "memory": "footprint",
    "latency": "latency",
    "threads": "threads",
    "connections": "connections",
    "asyncio": "aio",
    "inprocess": "inprocess",
    "near": "near",
    "stranded": "fleet_simulation",
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="What distwindow costs, as ratios measured in one run. Starts its own servers.",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds: about a minute")
    parser.add_argument(
        "--only", action="append", choices=SECTIONS, metavar="SECTION",
        help=f"one of {', '.join(SECTIONS)}; may be given several times",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    return parser.parse_args()


def _run(name: str, quick: bool) -> Section:
    say(f"{name}: started")
    try:
        run: Callable[[bool], Section] = import_module(f"benchmarks.{SECTIONS[name]}").run
        return run(quick)
    except Exception as error:
        say(f"{name}: failed: {said(error)}")
        section = Section(name, name)
        section.failed({"the whole section": said(error)})
        return section


def main() -> int:
    options = _arguments()
    # Peers warn with every refused call; that is not what is timed.
    logging.disable(logging.CRITICAL)
    names = [name for name in SECTIONS if not options.only or name in options.only]
    command = " ".join(
        ["python -m benchmarks", *(["--quick"] if options.quick else [])]
        + [f"--only {name}" for name in options.only or []]
    )
    about = report.environment(server.version())
    print(f"{command}\n" + "\n".join(f"  {name}: {value}" for name, value in about.items()))
    sections: list[Section] = []
    for name in names:
        sections.append(_run(name, options.quick))
        print(report.text(sections[-1]), flush=True)
    print("\n" + "\n".join(report.tally(sections)))
    if options.markdown:
        options.markdown.write_text(report.markdown(command, about, sections), encoding="utf-8")
    if options.json:
        options.json.write_text(report.as_json(command, about, sections), encoding="utf-8")
    say("done")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
