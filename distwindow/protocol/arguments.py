"""The arguments that scripts have in common."""

from __future__ import annotations

from ..core.charge import Charge


def ring_arguments(charges: tuple[Charge, ...], calls: int = 1) -> list[bytes | int | str]:
    """Return (permits, limit, bucket_ms, shape) of each ring."""
    arguments: list[bytes | int | str] = []
    for _, limit, cost, _, _ in charges:
        shape = f"{limit.buckets}+1" if limit.bound == "strict" else limit.buckets
        arguments += (cost * calls, limit.amount, limit.bucket_ms, shape)
    return arguments


def time_argument(now_ms: int | None) -> int | str:
    """Return the client's time; '' where the server's is used."""
    return "" if now_ms is None else now_ms
