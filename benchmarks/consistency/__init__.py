"""Calls that are decided in the process: by leases, cached refusals and periodic sync.

The section measures calls of one thread and of eight, the commands that Redis still executes, bytes
per key, a flood of keys, and a fleet of processes over one server: how fast they are, and how far
their windows are from the limit.
"""

from __future__ import annotations

from benchmarks.consistency import calls, fleet, hot_key, many_keys
from benchmarks.report import Section


def run(quick: bool) -> Section:
    section = Section(
        "consistency", "decided in the process: leases, cached refusals, periodic sync"
    )
    for measure in (
        calls.measure_one_thread,
        calls.measure_threads,
        hot_key.measure,
        many_keys.measure_memory,
        many_keys.measure_flood,
        fleet.measure,
    ):
        measure(section, quick)
    return section
