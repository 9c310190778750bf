"""`distwindow try`: one call, as a program would make it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from .. import Decision, Limiter
from ..inspect.key_text import parse_key
from .command import (
    DEFAULT_PREFIX,
    DEFAULT_URL,
    JsonOption,
    PrefixOption,
    UrlOption,
    report_errors,
)
from .render import format_duration, make_console

_TIMEOUT_S = 2.0
"""Longer than a program's default, because a person can wait for a distant server."""


@report_errors
def try_command(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="The key to call with.", show_default=False)
    ],
    limit: Annotated[
        list[str],
        typer.Option(
            "--limit",
            "-l",
            metavar="LIMIT",
            help="100/second, 10 per 2 hours, 5000/day strict; several may be given.",
            show_default=False,
        ),
    ],
    cost: Annotated[str, typer.Option(metavar="N", help="Permits that the call takes.")] = "1",
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
    prefix: PrefixOption = DEFAULT_PREFIX,
) -> None:
    """Make one call under a limit, and print the decision. The call counts like any other.

    Exit 0: allowed. Exit 1: refused. Exit 2: no decision, because of an error.
    """
    with Limiter(url, limit, prefix=prefix, timeout=_TIMEOUT_S) as limiter:
        decision = limiter.try_acquire(parse_key(key), _parse_cost(cost))
    if as_json:
        print(json.dumps(as_object(decision)))
    else:
        style = "green" if decision else "red"
        make_console().print(decision_text(decision), style=style, markup=False)
    if not decision:
        raise typer.Exit(1)


def decision_text(decision: Decision) -> str:
    """Return the decision in one line."""
    limit = decision.limit
    if decision.allowed and limit.is_shaped:
        after = f" after {format_duration(decision.wait)}" if decision.wait else ""
        return f"allowed{after}, {decision.remaining:,} more now"
    if decision.allowed:
        return f"allowed, {decision.remaining:,} of {limit.amount:,} left"
    return f"refused by {limit}, retry in {format_duration(decision.retry_after)}"


def as_object(decision: Decision) -> dict[str, Any]:
    """Return the decision for JSON: the fields that its `repr` shows."""
    key = decision.key
    fields = decision._asdict() | {
        "key": key.decode("utf-8", "backslashreplace") if isinstance(key, bytes) else str(key),
        "limit": str(decision.limit),
    }
    del fields["charged"]
    return fields


def _parse_cost(cost: str) -> int:
    # Not an option of type int: typer prints its errors in a box of several lines.
    try:
        return int(cost)
    except ValueError:
        raise ValueError(f"cost={cost!r} is not a whole number of at least 1") from None
