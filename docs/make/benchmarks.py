"""Put a benchmark report into docs/benchmarks.md (all of it) and README.md (a few rows):

python -m benchmarks --markdown report.md --json report.json
python docs/make/benchmarks.py report.md report.json
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- benchmarks -->\n", "<!-- /benchmarks -->"

ROWS = (
    (
        "server",
        "allowed, 10 buckets, limit 100,000",
        "script time of an admitted call, over `return 1`",
    ),
    (
        "server",
        "refused, 10 buckets, limit 100,000",
        "of a call refused again in the same bucket, over `return 1`",
    ),
    (
        "server",
        "bucket change, 10 buckets, limit 100,000",
        "of the call that opens a bucket, over `return 1`",
    ),
    (
        "server",
        "first refusal of a bucket, 10 buckets, limit 100,000",
        "of the first refusal in a bucket, over `return 1`",
    ),
    (
        "server",
        "hot path, dearest shape over cheapest",
        "the slowest of 1 to 500 buckets and limits 10 to 100,000, over the fastest "
        "(lower quartiles)",
    ),
    ("latency", "p50: distwindow", "one synchronous call, p50, over a raw socket's `return 1`"),
    ("latency", None, "the same of the best peer"),
    (
        "threads",
        "admitted: over the best peer",
        "8 threads on one key: calls per second, over the best peer's",
    ),
    ("asyncio", "one hot key: over the best peer", "200 tasks on one key, over the best peer's"),
    (
        "asyncio",
        "10,000 keys: over the best peer",
        "200 tasks on 10,000 keys, over the best peer's",
    ),
    (
        "inprocess",
        "distwindow",
        "one call on `memory://`, over a clock, a lock and a dict increment",
    ),
    ("inprocess", None, "the same of the best peer"),
    ("consistency", "one thread: leased hit", "one leased call, over the same"),
    ("consistency", "one thread: cached refusal", "one cached refusal, over the same"),
)
PEERS = ("limits", "throttled-py", "pyrate-limiter")


def table(report: dict[str, Any]) -> str:
    """Return the rows of ROWS as a table for the README."""
    about, rows = report["environment"], report["rows"]
    lines = ["| | measured (quartiles) | target |", "|---|---|---|"]
    for section, what, words in ROWS:
        found = [row for row in rows if row["section"] == section]
        row = _best_peer(found) if what is None else next(r for r in found if r["what"] == what)
        name = f" ({row['what'].removeprefix('p50: ')})" if what is None else ""
        lines.append(f"| {words}{name} | {_shown(row)} | {_aim(row)} |")
    machine = f"{about['machine']}, {about['load']}"
    where = f"{about['server'].split(' sha')[0]}, {about['python']}, {machine}"
    return (
        "\n".join(lines) + f"\n\nRatios within one run of `{report['command']}`: {where}. Peers at "
        f"their best settings: {', '.join(f'{peer} {about[peer]}' for peer in PEERS)}. All rows, "
        "and the method: [Benchmarks](docs/benchmarks.md).\n"
    )


def _best_peer(rows: list[dict[str, Any]]) -> dict[str, Any]:
    peers = [
        row
        for row in rows
        if row["what"].removeprefix("p50: ").startswith(PEERS) and row["measured"] is not None
    ]
    return min(peers, key=lambda row: float(row["measured"]["median"]))


def _shown(row: dict[str, Any]) -> str:
    measured = row["measured"]
    if not isinstance(measured, dict):
        return f"{measured:.2f}x"
    median, low, high = (_number(measured[part]) for part in ("median", "low", "high"))
    return f"{median}x ({low} to {high})"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _aim(row: dict[str, Any]) -> str:
    target = row["target"]
    if target is None:
        return ""
    sign = "≥" if target["at_least"] else "≤"
    return f"{sign} {target['bound']:g}x{', missed' if row['verdict'] == 'MISSED' else ''}"


def put(page: Path, text: str) -> None:
    """Write `text` between the markers of `page`."""
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    print(page)


def main() -> None:
    whole, rows = (Path(name).read_text(encoding="utf-8") for name in sys.argv[1:3])
    tables, tally = re.split(r"\n(?=\d+ met, )", whole.strip().replace("MISSED", "missed"))
    put(ROOT / "docs" / "benchmarks.md", f"{tables}\n```text\n{tally}\n```\n")
    put(ROOT / "README.md", table(json.loads(rows)))


if __name__ == "__main__":
    main()
