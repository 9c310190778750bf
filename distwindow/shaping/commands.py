"""The commands of calls under limits that are paced or warm up, their replies, and their hash."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..errors import ConfigurationError
from ..ring.command import Command, ScriptReply, ring_arguments, time_argument
from ..ring.commands import Acquire, Read
from ..ring.decision import Charge
from ..ring.key import shaping_name
from ..ring.limit import MAX_SHAPED_MS, Limit
from ..ring.replies import AcquireReply, ReadReply, hash_fields
from .shaping import ShapingState


def any_shaped(limits: Iterable[Limit]) -> bool:
    """True if any of the limits is paced or warms up."""
    return any([limit.is_shaped for limit in limits])


def max_wait_ms_of(limit: Limit, cap_ms: int | None) -> int | None:
    """Return for how long a call that can wait `cap_ms` (None: any time) waits; None: not paced."""
    if limit.max_wait_ms is None or cap_ms is None:
        return limit.max_wait_ms
    return min(limit.max_wait_ms, cap_ms)


def _shaped_keys(charges: tuple[Charge, ...]) -> list[bytes]:
    rings = [charge.ring for charge in charges]
    return [*rings, *map(shaping_name, rings)]


def _terms_arguments(charges: tuple[Charge, ...]) -> list[bytes | int | str]:
    """Return (max_wait_ms, warmup_ms, cold_factor) of each ring; empty for what a limit has not."""
    arguments: list[bytes | int | str] = []
    for charge in charges:
        limit = charge.limit
        terms = (limit.max_wait_ms, limit.warmup_ms, limit.cold_factor)
        arguments += ["" if term is None else term for term in terms]
    return arguments


def _shaped_reply(raw: ScriptReply) -> AcquireReply:
    if raw[1] >= 0:
        _, left, now, index, reset_ms, wait_us, *starts = raw
        return AcquireReply(
            1, index - 1, left, reset_ms, 0, now, None, tuple(starts) or None, wait_us
        )
    _, _, now, index, left, reset_ms, retry_ms = raw
    return AcquireReply(0, index - 1, left, reset_ms, retry_ms, now, None, None, 0)


@dataclass(slots=True, eq=False)
class AcquireShaped(Acquire):
    """One call under limits of which at least one is paced or warms up."""

    script: ClassVar[str] = "acquire_shaped"
    has_own_moment: ClassVar[bool] = True

    cap_ms: int | None = None
    """For how long the caller can wait, ms; None: as long as the limits have it wait."""

    @property
    def keys(self) -> list[bytes]:
        return _shaped_keys(self.charges)

    def arguments(self) -> list[bytes | int | str]:
        now: int | str = "" if self.now_ms is None else self.now_ms
        cap: int | str = "" if self.cap_ms is None else min(self.cap_ms, MAX_SHAPED_MS)
        rings = ring_arguments(self.charges)
        return [*rings, now, int(self.write_limit), cap, *_terms_arguments(self.charges)]

    def reply(self, raw: ScriptReply) -> AcquireReply:
        return _shaped_reply(raw)

    def unshared(self) -> AcquireShaped:
        """Return an equal command that nobody else has, with the frame of this one."""
        if self._split_frame is None:
            self._split_frame = self._split_around_stamp()
        twin = AcquireShaped(self.charges, self.now_ms, write_limit=self.write_limit)
        twin._split_frame = self._split_frame
        return twin

    def capped(self, seconds: float) -> AcquireShaped:
        """Return the command of a caller that can wait for at most `seconds`."""
        cap_ms = max(0, int(seconds * 1000))
        return replace(self, cap_ms=cap_ms, counts=None)

    def _split_around_stamp(self) -> tuple[bytes, bytes]:
        return self._split_whole()  # it has more keys than its rings


@dataclass(slots=True, eq=False)
class PeekShaped(Command[AcquireReply]):
    """The reply that `AcquireShaped` would get now; nothing is written."""

    script: ClassVar[str] = "peek_shaped"
    writes: ClassVar[bool] = False

    @property
    def keys(self) -> list[bytes]:
        return _shaped_keys(self.charges)

    def arguments(self) -> list[bytes | int | str]:
        now = time_argument(self.now_ms)
        return [*ring_arguments(self.charges), now, *_terms_arguments(self.charges)]

    def reply(self, raw: ScriptReply) -> AcquireReply:
        return _shaped_reply(raw)


@dataclass(slots=True, eq=False)
class ReadShaped(Read):
    """The rings, and the shaping of those limits that are shaped."""

    @property
    def keys(self) -> list[bytes]:
        shaped = [charge.ring for charge in self.charges if charge.limit.is_shaped]
        return [*(charge.ring for charge in self.charges), *map(shaping_name, shaped)]

    def reply(self, raw: ScriptReply) -> ReadReply:
        hashes = iter(raw[3 + len(self.charges) :])
        shapings = [
            shaping_state(hash_fields(next(hashes))) if charge.limit.is_shaped else None
            for charge in self.charges
        ]
        return Read.reply(self, raw)._replace(shapings=tuple(shapings))


SHAPING_COMMANDS: tuple[type[Command[Any]], ...] = (AcquireShaped, PeekShaped)


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
    """Return the limit that such a hash names; None: none. Raises as `Limit` does."""
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
