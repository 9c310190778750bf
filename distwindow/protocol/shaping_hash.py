"""The hash of a limit that is paced or warms up (`lua/README.md`): its fields, parsed."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.errors import ConfigurationError
from ..core.limit import Limit
from ..core.shaping import ShapingState


def shaping_state(fields: Mapping[bytes, bytes]) -> ShapingState | None:
    """Return the state in a hash of these fields; None if there are none. `expires_at_ms` is not
    stored, because the hash itself expires: it is 0.

    Raises `ConfigurationError` if they are not those of such a hash.
    """
    if not fields:
        return None
    try:
        decided_ms = int(fields[b"decided"])
        moment_us, rest, parts = None, 0, 1
        if b"moment" in fields:
            moment_us, rest, parts = map(int, fields[b"moment"].split())
        tokens, filled_ms, passed = 0, None, 0
        if b"tokens" in fields:
            tokens, filled_ms, passed = map(int, fields[b"tokens"].split())
    except (LookupError, ValueError) as exc:
        raise ConfigurationError(
            f"the hash of this key does not pace or warm up a limit ({exc!r}); use a prefix that "
            "no other program uses"
        ) from exc
    return ShapingState(decided_ms, moment_us, rest, parts, tokens, filled_ms, passed, 0)


def shaped_limit(fields: Mapping[bytes, bytes], bucket_ms: int, span: int) -> Limit | None:
    """Return the limit of such a hash as a call has last used it; None if it names none.

    Raises `ConfigurationError` or `ValueError` if it is not one.
    """
    words = fields.get(b"terms", b"").split(b",")
    if len(words) != 4:
        return None
    amount, max_wait_ms, warmup_ms, cold_factor = (int(word) if word else None for word in words)
    if amount is None:
        return None
    buckets = span - (amount < 0)
    return Limit(
        abs(amount),
        bucket_ms * buckets / 1000,
        buckets,
        "strict" if amount < 0 else "leap",
        max_wait=None if max_wait_ms is None else max_wait_ms / 1000,
        warmup=None if warmup_ms is None else warmup_ms / 1000,
        cold_factor=cold_factor,
    )
