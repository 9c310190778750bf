"""`distwindow try`: one call, as a program would make it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from distwindow import Decision, Limiter

from .errors import guarded
from .options import DEFAULT_PREFIX, DEFAULT_URL, Json, Prefix, Url, given_key
from .render import console, duration

_TIMEOUT = 2.0
"""Seconds: a person waits longer for a far server than a program may."""


@guarded
def trial(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Who calls.", show_default=False)],
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
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Make one call under a limit, and say what became of it. It counts like any other.

    Exit 0: allowed. Exit 1: refused. Exit 2: it could not be asked.
    """
    with Limiter(url, limit, prefix=prefix, timeout=_TIMEOUT) as limiter:
        decision = limiter.try_acquire(given_key(key), _whole(cost))
    if as_json:
        print(json.dumps(as_object(decision)))
    else:
        console().print(spoken(decision), style="green" if decision else "red", markup=False)
    if not decision:
        raise typer.Exit(1)


def spoken(decision: Decision) -> str:
    """The decision in one line."""
    limit = decision.limit
    if decision.allowed:
        return f"allowed, {decision.remaining:,} of {limit.amount:,} left"
    return f"refused by {limit}, retry in {duration(decision.retry_after)}"


def as_object(decision: Decision) -> dict[str, Any]:
    """The decision for JSON: the fields that `repr` shows."""
    key = decision.key
    fields = decision._asdict() | {
        "key": key.decode("utf-8", "backslashreplace") if isinstance(key, bytes) else str(key),
        "limit": str(decision.limit),
    }
    del fields["charged"]
    return fields


def _whole(cost: str) -> int:
    # Said here, in one line, and not by the parser of the command line in a box.
    try:
        return int(cost)
    except ValueError:
        raise ValueError(f"cost={cost!r} is not a whole number of at least 1") from None
