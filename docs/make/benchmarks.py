"""Put a benchmark report into docs/benchmarks.md, and some rows each into README.md, docs/index.md,
docs/consistency.md, docs/howto/breakers.md, docs/howto/waiting.md and the pages of
docs/make/sections.py, which has the sections that are measured by themselves, too:

python -m benchmarks --markdown report.md --json report.json
python docs/make/benchmarks.py report.md report.json

The rows are kept in docs/make/benchmarks.json. `tests/docs/test_benchmarks.py` compares the pages
with them, so that no page has a figure that was not measured.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from sections import PAGES
from sections import main as put_sections

ROOT = Path(__file__).resolve().parents[2]
ROWS_FILE = Path(__file__).with_suffix(".json")

OVER_RETURN_1 = ", 10 buckets, limit 100,000"
README_ROWS = (
    ("server", f"allowed{OVER_RETURN_1}", "script time of an admitted call, over `return 1`"),
    ("latency", "p50: distwindow", "one synchronous call, p50, over a raw socket's `return 1`"),
    ("latency", None, "the same of the best peer"),
    ("asyncio", "one hot key: over the best peer", "200 tasks on one key, over the best peer"),
)
PEERS = ("limits", "throttled-py", "pyrate-limiter")
MODES = ("direct", "leased", "eventual")
EXCESS = {
    "direct": "never",
    "leased": "never",
    "eventual": "what all processes pass within two syncs",
}


class Report:
    """The rows of a report, by section and name."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.environment = report["environment"]
        self.command = report["command"]
        self.rows: list[dict[str, Any]] = report["rows"]

    def row(self, section: str, what: str) -> dict[str, Any]:
        return next(r for r in self.rows if r["section"] == section and r["what"] == what)

    def has(self, section: str, what: str) -> bool:
        return any(r["section"] == section and r["what"] == what for r in self.rows)

    def best_peer(self, section: str) -> dict[str, Any]:
        peers = [
            row
            for row in self.rows
            if row["section"] == section
            and row["what"].removeprefix("p50: ").startswith(PEERS)
            and row["measured"] is not None
        ]
        return min(peers, key=lambda row: float(row["measured"]["median"]))

    def where(self) -> str:
        about = self.environment
        server = about["server"].split(" sha")[0]
        peers = ", ".join(f"{peer} {about[peer]}" for peer in PEERS)
        return f"{server}, {about['python']}, {about['machine']}, {about['load']}; {peers}"


def readme_table(report: Report) -> str:
    lines = ["| | measured (quartiles) | target |", "|---|---|---|"]
    for section, what, words in README_ROWS:
        row = report.best_peer(section) if what is None else report.row(section, what)
        name = f" ({row['what'].removeprefix('p50: ')})" if what is None else ""
        lines.append(f"| {words}{name} | {_shown(row)} | {_target(row)} |")
    return (
        "\n".join(lines) + f"\n\nRatios within one run of `{report.command}`: {report.where()}. "
        "Peers at their best settings. All rows, and the method: "
        "[Benchmarks](docs/benchmarks.md).\n"
    )


def strategies_table(report: Report, page: str) -> str:
    lines = [
        "| `consistency` | more than the limit | commands for 1,000 admissions on a hot key "
        "| one call, p50 |",
        "|---|---|---:|---:|",
    ]
    for mode in MODES:
        name = f"`{mode}`{' (default)' if mode == 'direct' else ''}"
        p50 = _detail(_latency(report, mode), r"p50 ([\d.,]+)")
        lines.append(f"| {name} | {EXCESS[mode]} | {_commands(report, mode)} | {p50} µs |")
    return (
        "\n".join(lines) + f"\n\n`{report.command}`, Redis on the same machine. "
        f"[Which one, and the bounds]({page}).\n"
    )


def consistency_text(report: Report) -> str:
    parts = [
        f"`{report.command}`: {report.where()}.",
        "One process calls one key at half of `100000/second` (`direct` as often as it can):",
        _hot_key_table(report),
        "One call that is decided in the process, over a clock, a lock and a dict increment; and "
        "how many of them\ntake the time of one call of the fastest peer over Redis:",
        _calls_table(report),
        "Eight threads on one key, over one thread: "
        + ", ".join(
            f"{name} {_shown(row)}"
            for name in ("leased hit", "cached refusal", "eventual hit")
            for row in report.rows
            if row["section"] == "consistency" and row["what"].endswith(f"over 1 thread: {name}")
        )
        + ".",
        "A fleet on one key, 5 s a run. *Without pause*: each process calls as fast as it can. *At "
        "twice the limit*: all\nof them together call that often. Windows are those aligned to the "
        "buckets; the mean is of those after the\nfirst.",
        _fleet_table(report),
    ]
    return "\n\n".join(parts) + "\n"


def _hot_key_table(report: Report) -> str:
    lines = [
        "| | commands for 1,000 admissions | admissions a second | p50 | p99 | p99.9 |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for mode in MODES:
        latency = _latency(report, mode)
        rate = _detail(_admissions(report, mode), r"at ([\d,]+)/s")
        times = " | ".join(
            f"{_detail(latency, rf'{name} +([0-9.,]+)')} µs" for name in ("p50", "p99", r"p99\.9")
        )
        lines.append(f"| `{mode}` | {_commands(report, mode)} | {rate} | {times} |")
    return "\n".join(lines)


def _calls_table(report: Report) -> str:
    lines = [
        "| | over the floor | target | in one call of a peer | target |",
        "|---|---|---|---|---|",
    ]
    over_redis = "one thread: calls in the time of the fastest peer's over Redis: "
    for name in ("leased hit", "cached refusal", "eventual hit"):
        here = report.row("consistency", f"one thread: {name}")
        there = report.row("consistency", over_redis + name)
        lines.append(
            f"| {name} | {_shown(here)} | {_target(here)} | {_shown(there)} | {_target(there)} |"
        )
    return "\n".join(lines)


def _fleet_table(report: Report) -> str:
    lines = [
        "| | decisions a second | without pause | at twice the limit |",
        "|---|---:|---|---|",
    ]
    for row in report.rows:
        found = re.fullmatch(r"(\d+ process.*): decisions per second, over direct's", row["what"])
        if row["section"] == "consistency" and found:
            rate, without_pause, at_twice = re.match(
                r"([\d,]+)/s; without pause: (.*); at twice the limit: (.*)", row["detail"]
            ).groups()  # type: ignore[union-attr]  # the detail always has these parts
            lines.append(f"| {found[1]} | {rate} | {without_pause} | {at_twice} |")
    return "\n".join(lines)


def memory_table(report: Report) -> str:
    lines = [
        "| | bytes per key | a flood of keys: memory, over the most before "
        "| p99 of a hot key in the flood |",
        "|---|---:|---:|---|",
    ]
    for mode in MODES:
        size = report.row("consistency", f"bytes per key kept in the process: {mode}")
        flood = "a flood of keys: memory at its end, over the most in its first 70 %"
        if not report.has("consistency", f"{flood}: {mode}"):  # `--quick` measures one of them
            lines.append(f"| `{mode}` | {size['measured']:,.0f} B | | |")
            continue
        memory = report.row("consistency", f"{flood}: {mode}")
        times = "a flood of keys: p99 of a hot key's calls, over that without it"
        p99 = report.row("consistency", f"{times}: {mode}")
        with_flood = _detail(p99, r"p99 ([\d.,]+)")
        without = _detail(p99, r"without p50 .* p99 ([\d.,]+)")
        lines.append(
            f"| `{mode}` | {size['measured']:,.0f} B | {_shown(memory)} "
            f"| {with_flood} µs; without it {without} |"
        )
    return (
        "\n".join(lines) + "\n\nBytes of the process, with one limit, no pending counts, and the "
        "cached command of the key, but without the\nkey itself; of 20,000 keys. The flood: "
        "100,000 keys that are called once, with `max_local_keys=10000`, under\n`leased`; 50,000 "
        "with 2,000 under the others.\n"
    )


BREAKERS = {
    "distwindow ErrorCount(20), 8 processes": "`ErrorCount(20)`",
    "distwindow ErrorRatio(0.5, window=2), 8 processes": "`ErrorRatio(0.5, window=2)`",
    "pybreaker fail_max=20, 8 processes": "pybreaker, eight breakers",
}


def breakers_table(report: Report) -> str:
    lines = [
        "| | open everywhere after | calls to the broken service | of them after that (probes) "
        "| closed everywhere, after the service was back |",
        "|---|---:|---:|---:|---:|",
    ]
    for what, name in BREAKERS.items():
        row = report.row("breakers", what)
        opened, calls, probes, closed = (
            _detail(row, pattern)
            for pattern in (
                r"open everywhere after ([\d.]+ s)", r"(\d+) calls", r"(\d+) of them",
                r"closed everywhere ([\d.]+ s)",
            )
        )  # fmt: skip
        lines.append(f"| {name} | {opened} | {calls} | {probes} | {closed} |")
    return "\n".join(lines) + f"\n\n`{report.command}`: {_machine(report)}.\n"


WINDOWS = {"an empty window": "empty", "a window that was filled evenly": "filled evenly"}


def waiters_table(report: Report) -> str:
    lines = [
        "| limit, and window when they come | | script calls for each admission | order | unused "
        "| the last after |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in report.rows:
        if row["section"] == "waiters":
            found = re.fullmatch(r"(.*), (a.* window.*): .*, (.*)", row["what"])
            if found is None:
                raise ValueError(row["what"])
            limit, window, way = found.groups()
            first = f" {limit}, {WINDOWS[window]}" if way == "without turns" else ""
            order, unused, last = (
                _detail(row, pattern)
                for pattern in (r"order ([\d.]+)", r"(\d+)% of", r"last after ([\d.]+ s)")
            )
            calls = _number(row["measured"]["median"])
            lines.append(f"|{first} | {way} | {calls} | {order} | {unused} % | {last} |")
    return (
        "\n".join(lines).replace("|  |", "| |") + f"\n\n`{report.command}`: {_machine(report)}.\n"
    )


def _machine(report: Report) -> str:
    return report.where().rpartition(";")[0]


def _admissions(report: Report, mode: str) -> dict[str, Any]:
    start = "admissions per command on a hot key"
    return next(
        row
        for row in report.rows
        if row["what"].startswith(start) and row["what"].endswith(f": {mode}")
    )


def _latency(report: Report, mode: str) -> dict[str, Any]:
    return report.row("consistency", f"direct's p50 on a hot key, over the p50 of: {mode}")


def _commands(report: Report, mode: str) -> str:
    return _detail(_admissions(report, mode), r"([\d.,]+) commands")


def _detail(row: dict[str, Any], pattern: str) -> str:
    found = re.search(pattern, row["detail"])
    if found is None:
        raise ValueError(f"{row['what']}: no {pattern!r} in {row['detail']!r}")
    return found[1]


def _shown(row: dict[str, Any]) -> str:
    measured = row["measured"]
    if not isinstance(measured, dict):
        return f"{measured:.2f}x"
    median, low, high = (_number(measured[part]) for part in ("median", "low", "high"))
    return f"{median}x ({low} to {high})"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _target(row: dict[str, Any]) -> str:
    target = row["target"]
    if target is None:
        return ""
    sign = "≥" if target["at_least"] else "≤"
    return f"{sign} {target['bound']:g}x{', missed' if row['verdict'] == 'MISSED' else ''}"


def parts(report: Report) -> list[tuple[str, str, str]]:
    """Return (page, name of the markers, text between them) for every page but benchmarks.md."""
    return [
        ("README.md", "benchmarks", readme_table(report)),
        ("docs/index.md", "strategies", strategies_table(report, "consistency.md")),
        ("docs/consistency.md", "consistency", consistency_text(report)),
        ("docs/consistency.md", "memory", memory_table(report)),
        ("docs/howto/breakers.md", "breakers", breakers_table(report)),
        ("docs/howto/waiting.md", "waiters", waiters_table(report)),
    ]


def between(page: str, name: str) -> str:
    """Return what stands between the markers `name` in `page`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return text.split(f"<!-- {name} -->\n\n")[1].split(f"\n<!-- /{name} -->")[0]


def put(page: str, name: str, text: str) -> None:
    """Write `text` between the markers `name` of `page`."""
    path = ROOT / page
    before, rest = path.read_text(encoding="utf-8").split(f"<!-- {name} -->\n")
    after = rest.split(f"<!-- /{name} -->")[1]
    path.write_text(f"{before}<!-- {name} -->\n\n{text}\n<!-- /{name} -->{after}", encoding="utf-8")
    print(f"{page}: {name}")


def main() -> None:
    whole, rows = (Path(name).read_text(encoding="utf-8") for name in sys.argv[1:3])
    tables, summary = re.split(r"\n(?=\d+ met, )", whole.strip().replace("MISSED", "missed"))
    facts, *parts_of = tables.split("\n\n### ")
    names = dict.fromkeys(row["section"] for row in json.loads(rows)["rows"])
    kept = [
        f"### {text.strip()}"
        for name, text in zip(names, parts_of, strict=True)
        if name not in PAGES
    ]
    tables = "\n\n".join([facts, *kept])
    put("docs/benchmarks.md", "benchmarks", f"{tables}\n\n```text\n{summary}\n```\n")
    ROWS_FILE.write_text(rows, encoding="utf-8")
    for page, name, text in parts(Report(json.loads(rows))):
        put(page, name, text)
    put_sections()


if __name__ == "__main__":
    main()
