"""Put the rows of sections that have a page of their own into these pages.
`docs/make/benchmarks.py` calls it: all figures are of one run, but for those of `OWN_RUNS`.

python -m benchmarks --only agents --json docs/make/agents.json
python docs/make/sections.py

`tests/docs/test_sections.py` compares the pages with the rows, so that no page has a figure that
was not measured.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ROWS_FILE = Path(__file__).with_name("benchmarks.json")
PAGES = {
    "guard": "docs/howto/guard.md",
    "resource": "docs/operations.md",
    "fleet": "docs/operations.md",
    "web": "docs/benchmarks.md",
    "second": "docs/benchmarks.md",
    "growth": "docs/benchmarks.md",
    "agents": "docs/benchmarks.md",
    "observer": "docs/benchmarks.md",
    "limits": "docs/benchmarks.md",
    "limits-page": "docs/howto/limits.md",
}
OWN_RUNS = ("agents", "observer", "limits")
"""Sections of runs of their own, each in the file of its name here."""
GUARDED = {
    "try_acquire": "`limiter.try_acquire(key)`",
    "an entry": "`limiter.entry(key)`",
    "an entry with a closed breaker": "`limiter.entry(key, breaker=...)`, closed",
    "a guarded call, 0 slots": "`guard.entry(resource)` of a resource without rules",
    "a guarded call, 1 slot": "1 slot: flow",
    "a guarded call, 3 slots": "3 slots: authority, flow, breaker",
    "a guarded call, 6 slots": "6 slots: authority, system, flow for an origin and for all, "
    "two breakers",
    "a guarded call, one slot for running calls": "1 slot: flow, grade `thread`",
}
WHEN = ("under load", "called once a second", "after the last call")


class Growth(NamedTuple):
    """What the calls of one row of `growth` cost."""

    us: float
    """The client's processor time of one call, µs."""
    rate: float
    """Calls per second."""
    scripts: float
    """Script calls per call."""


def load(section: str) -> dict[str, Any]:
    """Return the report of one section; `SECTION-page` is of the same."""
    section = section.removesuffix("-page")
    file = ROWS_FILE.with_name(f"{section}.json") if section in OWN_RUNS else ROWS_FILE
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return {**report, "rows": [row for row in report["rows"] if row["section"] == section]}


def _rows(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["what"]: row for row in report["rows"]}


def _where(report: dict[str, Any]) -> str:
    about = report["environment"]
    server = about["server"].split(" sha")[0]
    return (
        f"`{report['command']}`: {server}, {about['python']}, {about['machine']}; {about['load']}."
    )


def guard_text(report: dict[str, Any]) -> str:
    """Return the table of a guarded call, beside the limiter's own call."""
    rows = _rows(report)
    lines = [
        "| a call | `leased`, µs | over `try_acquire` | `direct`, µs | over `try_acquire` |",
        "|---|---:|---|---:|---|",
    ]
    for name, words in GUARDED.items():
        cells = [cell for mode in ("leased", "direct") for cell in _guarded(rows, mode, name)]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    slot = rows["leased: each of 6 slots, over the floor"]
    verdict = {"met": "met", "MISSED": "missed"}[slot["verdict"]]
    return (
        "\n".join(lines)
        + "\n\nWith `leased`, µs of the calling thread's processor time; with `direct`, µs that "
        f"pass. Medians, and\nratios with their quartiles, round by round, of {_where(report)} A "
        f"slot that is decided in\nthe process takes {_short(slot['measured'])}x a clock, a lock "
        f"and an increment (of six; the target is {slot['target']['bound']:g}x: {verdict}).\n"
    )


def _guarded(rows: dict[str, dict[str, Any]], mode: str, name: str) -> tuple[str, str]:
    bare = rows[f"{mode}: try_acquire"]
    if name == "try_acquire":
        return _short(bare["measured"]["median"]), ""
    row = rows.get(f"{mode}: {name}, over try_acquire")
    if row is None:
        return "", ""
    found = re.match(r"([\d.,]+) µs", row["detail"])
    assert found is not None
    ratio = row["measured"]
    quartiles = f"{_short(ratio['low'])} to {_short(ratio['high'])}"
    return _short(float(found[1].replace(",", ""))), f"{_short(ratio['median'])}x ({quartiles})"


def resource_text(report: dict[str, Any]) -> str:
    """Return the table of the bytes of one resource with everything on it."""
    rows = _rows(report)
    names = [name.removeprefix("1 process: ") for name in rows if name.startswith("1 process: ")]
    lines = ["| | 1 process | 8 processes |", "|---|---:|---:|"]
    for name in names:
        one, eight = (rows[f"{used}: {name}"]["measured"] for used in ("1 process", "8 processes"))
        words = f"**{name}**" if name == "everything" else name
        lines.append(f"| {words} | {one:,.0f} B | {eight:,.0f} B |")
    return "\n".join(lines) + f"\n\n`MEMORY USAGE key SAMPLES 0` of each key. {_where(report)}\n"


def fleet_text(report: dict[str, Any]) -> str:
    """Return the table of the commands that a fleet sends per second."""
    rows = _rows(report)
    sizes = dict.fromkeys(name.rpartition(", ")[0] for name in rows)
    lines = [
        "| processes | breakers in each | under load | called once a second "
        "| after the last call |",
        "|---:|---:|---:|---:|---:|",
    ]
    for size in sizes:
        found = re.match(r"(\d+) processes, (\d+) breakers", size)
        assert found is not None
        rates = " | ".join(f"{rows[f'{size}, {when}']['measured']:,.0f}" for when in WHEN)
        lines.append(f"| {found[1]} | {found[2]} | {rates} |")
    return (
        "\n".join(lines) + f"\n\nScript calls a second, by `INFO commandstats`. {_where(report)}\n"
    )


def web_text(report: dict[str, Any]) -> str:
    """Return the table of limited routes of web applications."""
    lines = [
        "| a route | time for a request | processor time of the worker | p50 | p99 | target |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in report["rows"]:
        found = re.search(r", ([\d.]+x) of the .* p50 ([\d.]+ ms), p99 ([\d.]+ ms)", row["detail"])
        assert found is not None
        time, target, ratio = "1", "", row["measured"]
        if ratio is not None:
            quartiles = f"{_short(ratio['low'])} to {_short(ratio['high'])}"
            time = f"{_short(ratio['median'])}x ({quartiles})"
        if row["target"] is not None:
            verdict = {"met": "met", "MISSED": "missed"}[row["verdict"]]
            target = f"{row['target']['bound']:g}x: {verdict}"
        lines.append(f"| {row['what']} | {time} | {' | '.join(found.groups())} | {target} |")
    return "\n".join(lines) + f"\n\nOver the bare route, round by round. {_where(report)}\n"


def second_text(report: dict[str, Any]) -> str:
    """Return the table of the calls beside `try_acquire`."""
    lines = ["| | ratio | target | µs | on a core each |", "|---|---|---|---|---|"]
    for row in report["rows"]:
        us, _, apart = row["detail"].partition("; on a core each ")
        ratio, target = row["measured"], ""
        if row["target"] is not None:
            verdict = {"met": "met", "MISSED": "missed"}[row["verdict"]]
            target = f"{row['target']['bound']:g}x: {verdict}"
        quartiles = f"{_short(ratio['low'])} to {_short(ratio['high'])}"
        lines.append(
            f"| {row['what']} | {_short(ratio['median'])}x ({quartiles}) | {target} | {us} "
            f"| {apart.replace('..', ' to ')} |"
        )
    return "\n".join(lines) + f"\n\n{_where(report)}\n"


def growth_figures(report: dict[str, Any]) -> dict[tuple[str, int, int, int], Growth]:
    """Return the figures of each row, by place and the numbers of limits, threads and keys."""
    figures = {}
    for row in report["rows"]:
        counts = re.fullmatch(r"(.*), (\d+) limits?, (\d+) threads?, ([\d,]+) keys?", row["what"])
        found = re.match(r"([\d.]+) µs .*, ([\d,]+) calls/s .* ([\d.-]+) script", row["detail"])
        assert counts is not None
        assert found is not None
        place, *numbers = (word.replace(",", "") for word in counts.groups())
        us, rate, scripts = (float(word.replace(",", "")) for word in found.groups())
        limits, threads, keys = map(int, numbers)
        figures[place, limits, threads, keys] = Growth(us, rate, scripts)
    return figures


def growth_text(report: dict[str, Any]) -> str:
    """Return the table of how the cost of a call grows."""
    figures = growth_figures(report)
    places, limits, threads, keys = (
        list(dict.fromkeys(part)) for part in zip(*figures, strict=True)
    )
    lines = [
        "| | limits | keys | "
        + " | ".join(f"{n} thread{'s' * (n > 1)}, calls/s | µs" for n in threads)
        + " | script calls for each |",
        f"|---|---:|---:|{'---:|---:|' * len(threads)}---:|",
    ]
    for place, limit, key in itertools.product(places, limits, keys):
        of_threads = [figures[place, limit, thread, key] for thread in threads]
        cells = " | ".join(f"{one.rate:,.0f} | {one.us:.1f}" for one in of_threads)
        scripts = f"{of_threads[-1].scripts:.2f}"
        lines.append(f"| {place} | {limit} | {key:,} | {cells} | {scripts} |")
    return (
        "\n".join(lines) + "\n\nµs of the client's processor time of one call; script calls of one "
        f"call of {threads[-1]} threads. Medians. {_where(report)}\n"
    )


def agents_text(report: dict[str, Any]) -> str:
    """Return the table of the calls of agents, of the date and versions of its own run."""
    lines = ["| four processes | the most in any window | over the limit | target |"]
    lines.append("|---|---:|---:|---|")
    for row in report["rows"]:
        most, target = row["detail"].partition(",")[0], ""
        if row["target"] is not None:
            target = "1x: " + {"met": "met", "MISSED": "missed"}[row["verdict"]]
        what = row["what"].partition(":")[0]
        lines.append(f"| {what} | {most} | {_short(row['measured'])}x | {target} |")
    about = report["environment"]
    run = ", ".join(f"{name} {about[name]}" for name in ("langchain-core", "fastmcp"))
    return "\n".join(lines) + f"\n\n{about['date']}, {run}. {_where(report)}\n"


def observer_text(report: dict[str, Any]) -> str:
    """Return the table of calls with an observer, of the date of its own run."""
    lines = ["| a call | with an observer, over none | | target |", "|---|---:|---|---|"]
    for row in report["rows"]:
        verdict = {"met": "met", "MISSED": "missed"}[row["verdict"]]
        target = f"{row['target']['bound']:g}x: {verdict}"
        lines.append(
            f"| {row['what'].partition(':')[0]} | {_short(row['measured']['median'])}x | "
            f"{row['detail']} | {target} |"
        )
    return "\n".join(lines) + f"\n\n{report['environment']['date']}. {_where(report)}\n"


def limits_text(report: dict[str, Any]) -> str:
    """Return the table of hits of `limits`, of the date of its own run."""
    lines = ["| | ours over theirs | ours and theirs | target |", "|---|---:|---|---|"]
    for row in report["rows"]:
        measured = row["measured"]
        ratio = measured["median"] if isinstance(measured, dict) else measured
        target = row["target"] and {"met": "met", "MISSED": "missed"}[row["verdict"]]
        lines.append(f"| {row['what']} | {_ratio(ratio)} | {row['detail']} | {target or ''} |")
    about = report["environment"]
    run = f"{about['date']}, limits {about['limits']}"
    return "\n".join(lines) + f"\n\n{run}. {_where(report)}\n"


def limits_page_text(report: dict[str, Any]) -> str:
    """Return the rows of hits of `limits` that are on the page of the storage."""
    shown = (
        "moving-window: time of the client", "moving-window: time of the server",
        "moving-window: bytes of 70,000 hits", "a hit while Redis is frozen",
    )  # fmt: skip
    return limits_text({**report, "rows": [r for r in report["rows"] if r["what"] in shown]})


def _ratio(value: float) -> str:
    return f"{value:.4f}x" if value < 0.01 else f"{_short(value)}x"


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


TEXTS = {
    "guard": guard_text,
    "resource": resource_text,
    "fleet": fleet_text,
    "web": web_text,
    "second": second_text,
    "growth": growth_text,
    "agents": agents_text,
    "observer": observer_text,
    "limits": limits_text,
    "limits-page": limits_page_text,
}


def between(section: str) -> str:
    """Return what stands between the markers of a section in its page."""
    text = (ROOT / PAGES[section]).read_text(encoding="utf-8")
    return text.split(f"<!-- {section} -->\n\n")[1].split(f"\n<!-- /{section} -->")[0]


def main() -> None:
    for section, page in PAGES.items():
        path = ROOT / page
        before, rest = path.read_text(encoding="utf-8").split(f"<!-- {section} -->\n")
        after = rest.split(f"<!-- /{section} -->")[1]
        text = TEXTS[section](load(section))
        path.write_text(
            f"{before}<!-- {section} -->\n\n{text}\n<!-- /{section} -->{after}", encoding="utf-8"
        )
        print(f"{page}: {section}")


if __name__ == "__main__":
    main()
