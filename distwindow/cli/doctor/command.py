"""`distwindow doctor`: checks whether a store is fit for limits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress

import redis
import typer
from rich.console import Console
from rich.text import Text

from ...protocol.keys import check_prefix
from ...store.redis.urls import masked_url, parse_url_text
from ..errors import mask_passwords, report_errors
from ..options import DEFAULT_PREFIX, DEFAULT_URL, JsonOption, PrefixOption, UrlOption
from ..render import make_console, printable
from ..servers import Server, open_servers
from .checks import check_installation, check_server, check_slots
from .finding import Finding
from .probe import probe_concurrency, probe_scripts

_LABELS = {
    "ok": ("ok", "green"),
    "warning": ("warning", "yellow"),
    "problem": ("PROBLEM", "bold red"),
}


@report_errors
def doctor(
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    prefix: PrefixOption = DEFAULT_PREFIX,
) -> None:
    """Check what limits depend on: version, eviction, replicas, clock, script rights, latency.

    A finding that is unsafe is printed with its fix. Exit 0: fit, perhaps with warnings. Exit 1: a
    problem. Exit 2: the store cannot be reached.
    """
    check_prefix(prefix)
    console = make_console()
    findings: list[Finding] = []
    with open_servers(url) as servers:
        for finding in _findings(servers, url, prefix):
            masked = finding._replace(found=mask_passwords(finding.found, url))
            findings.append(masked)
            if not as_json:
                _print_finding(masked, console)
    problems = sum(finding.level == "problem" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if as_json:
        report = {"url": masked_url(url), "fit": not problems}
        print(json.dumps(report | {"findings": [one._asdict() for one in findings]}, indent=1))
    else:
        console.print()
        console.print(Text(f"{masked_url(url)}: {_summary(problems, warnings)}", style="bold"))
    if problems:
        raise typer.Exit(1)


def _findings(servers: Sequence[Server], url: str, prefix: str) -> Iterator[Finding]:
    for server in servers:
        # A failure to connect ends the command. PING may be forbidden, which shows that the
        # server answers.
        with suppress(redis.exceptions.NoPermissionError):
            server.client.ping()
    yield from check_installation()
    several = len(servers) > 1
    for server in servers:
        for finding in check_server(server):
            yield finding._replace(found=f"{server.name}: {finding.found}") if several else finding
    if parse_url_text(url).kind == "cluster":
        yield from check_slots(servers[0])
    yield from probe_scripts(servers, url, prefix)
    yield from probe_concurrency(url, prefix)


def _print_finding(finding: Finding, console: Console) -> None:
    label, style = _LABELS[finding.level]
    head = Text(f"{label:7}", style=style).append(
        f"  {finding.check:11}  ", style="not bold default"
    )
    indent = len(head)
    width = max(30, console.width - indent)
    lines = Text(printable(finding.found)).wrap(console, width)
    lines[0] = head.append_text(lines[0])
    if finding.fix:
        fix = Text("fix: ", style="cyan").append(printable(finding.fix), style="default")
        lines.extend(fix.wrap(console, width))
    for i, line in enumerate(lines):
        console.print(Text(" " * indent if i else "").append_text(line))


def _summary(problems: int, warnings: int) -> str:
    parts = []
    if problems:
        parts.append(f"{problems} problem{'s' if problems > 1 else ''}")
    if warnings:
        parts.append(f"{warnings} warning{'s' if warnings > 1 else ''}")
    return " and ".join(parts) or "fit for limits"
