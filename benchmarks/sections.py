"""The sections of the report, each run in a process of its own."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module

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
    "entries": "entries",
    "consistency": "consistency",
    "simulation": "fleet_simulation",
    "slots": "slots",
    "breakers": "breakers",
    "guard": "guards",
    "second": "second_calls",
    "growth": "growth",
    "fleet": "fleet_commands",
    "resource": "whole_resource",
    "waiters": "waiters",
    "web": "web",
    "outgoing": "outgoing",
    "agents": "agents",
    "observer": "observers",
    "limits": "limits_storage",
}


def run_alone(name: str, quick: bool) -> Section:
    """Run a section in a process of its own.

    What the sections before it leave in a process would be measured with it: where the objects of
    memory:// lay scattered among three million others, calls on 10,000 keys took a fifth longer.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as process:
        return process.submit(_run, name, quick).result()


def _run(name: str, quick: bool) -> Section:
    log(f"{name}: started")
    # Peers log a warning with every refused call, which would be timed, too.
    logging.disable(logging.CRITICAL)
    try:
        run: Callable[[bool], Section] = import_module(f"benchmarks.{SECTIONS[name]}").run
        return run(quick)
    except Exception as error:
        log(f"{name}: failed: {error_text(error)}")
        section = Section(name, name)
        section.add_failures({"the whole section": error_text(error)})
        return section
