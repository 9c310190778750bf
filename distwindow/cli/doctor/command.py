"""`distwindow doctor`: is this store fit to keep limits?"""

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
from ..errors import guarded, without_password
from ..options import DEFAULT_PREFIX, DEFAULT_URL, Json, Prefix, Url
from ..render import console, printable
from ..servers import Server, servers
from .checks import examined
from .finding import Finding
from .probe import covered, exercised, installed

_SIGNS = {
    "ok": ("ok", "green"),
    "warning": ("warning", "yellow"),
    "problem": ("PROBLEM", "bold red"),
}


@guarded
def doctor(as_json: Json = False, url: Url = DEFAULT_URL, prefix: Prefix = DEFAULT_PREFIX) -> None:
    """Look at what limits depend on: version, eviction, replicas, clock, script rights, latency.

    What is unsafe is named with its mend. Exit 0: fit, perhaps with warnings. Exit 1: a problem.
    Exit 2: it cannot be connected to.
    """
    check_prefix(prefix)
    out = console()
    findings: list[Finding] = []
    with servers(url) as nodes:
        for finding in _examination(nodes, url, prefix):
            clean = finding._replace(found=without_password(finding.found, url))
            findings.append(clean)
            if not as_json:
                _show(clean, out)
    problems = sum(finding.level == "problem" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if as_json:
        said = {"url": masked_url(url), "fit": not problems}
        print(json.dumps(said | {"findings": [one._asdict() for one in findings]}, indent=1))
    else:
        out.print()
        out.print(Text(f"{masked_url(url)}: {_summary(problems, warnings)}", style="bold"))
    if problems:
        raise typer.Exit(1)


def _examination(nodes: Sequence[Server], url: str, prefix: str) -> Iterator[Finding]:
    for server in nodes:
        with suppress(
            redis.exceptions.NoPermissionError
        ):  # PING may be forbidden; it has answered all the same
            server.client.ping()  # what cannot be connected to is no finding, but the end
    yield from installed()
    several = len(nodes) > 1
    for server in nodes:
        for finding in examined(server):
            yield finding._replace(found=f"{server.name}: {finding.found}") if several else finding
    if parse_url_text(url).kind == "cluster":
        yield from covered(nodes[0])
    yield from exercised(nodes, url, prefix)


def _show(finding: Finding, out: Console) -> None:
    sign, style = _SIGNS[finding.level]
    head = Text(f"{sign:7}", style=style).append(
        f"  {finding.check:11}  ", style="not bold default"
    )
    indent = len(head)
    width = max(30, out.width - indent)
    lines = Text(printable(finding.found)).wrap(out, width)
    lines[0] = head.append_text(lines[0])
    if finding.mend:
        mend = Text("mend: ", style="cyan").append(printable(finding.mend), style="default")
        lines.extend(mend.wrap(out, width))
    for i, line in enumerate(lines):
        out.print(Text(" " * indent if i else "").append_text(line))


def _summary(problems: int, warnings: int) -> str:
    parts = []
    if problems:
        parts.append(f"{problems} problem{'s' if problems > 1 else ''}")
    if warnings:
        parts.append(f"{warnings} warning{'s' if warnings > 1 else ''}")
    return " and ".join(parts) or "fit to keep limits"
