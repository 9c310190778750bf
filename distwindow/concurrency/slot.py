"""`Slot` and `AsyncSlot`, which a caller holds, and the blocks of `hold`, which own them.

    call              returns                          freed by
    hold(key)         a block; entering it waits for   the end of the block, or `release`
                      a slot, and returns that
    try_hold(key)     a slot, or one that is false     `release`, or the end of `with slot:`

`release_soon` of an `AsyncSlot` frees either, where nothing can be awaited.

A block, or a slot of `try_hold`, that is garbage-collected is not renewed any more, and the worker
frees what it holds when that would be due, and logs that once: in `if slots.try_hold(key):` nothing
keeps the slot. The block is an object of its own, because a signal handler may raise before the
first line of `__exit__`: then nobody refers to the block any more, while a variable may still refer
to the slot. Python drops what a handler raises in a destructor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ref

from ..errors import ConcurrencyExceeded, StoreError, short_repr
from ..observer import Result
from ..ring.key import AnyKey
from ..runtime.steps import StoreStep
from ..support.async_use import EnteredBlock, only_async_with
from .commands import Hold, HoldReply
from .held import SlotClaim
from .operations import SlotOperations

if TYPE_CHECKING:
    from typing_extensions import Self


class SlotDriver:
    """A `Concurrency` as its slots use it."""

    wait: Callable[[SlotClaim, float | None], Any]
    """Waits until the claim is granted, for so many seconds; awaited in tasks."""
    free: Callable[[SlotClaim], Any]
    """Frees the slot of the claim; awaited in tasks."""

    def __init__(self, store: Any, operations: SlotOperations) -> None:
        self._store = store
        self._operations = operations
        self._held, self._wait_queues = operations.held, operations.queues
        self._monotonic = store.clock.monotonic

    def count(
        self,
        claim: SlotClaim,
        result: Result,
        queued_at: float | None = None,
        source: str | None = None,
    ) -> None:
        """Count how a call has ended that asked for a slot; `queued_at` is when it began to wait
        in this process, `source` what decided it, by default the store.
        """
        tally = self._held.tally
        if tally is None:
            return
        if result == "error":
            tally.failed(claim.key, 1, (claim.command.limit,))
            return
        waited = () if queued_at is None else (self._monotonic() - queued_at,)
        reason = "ok" if result == "allowed" else "no_slot"
        decided_by = source or self._store.decided_by
        limit = self._held.limit_text
        tally.counted(claim.key, limit, result, reason, decided_by, 1, 1, waited)

    def is_lost(self, claim: SlotClaim) -> bool:
        return self._held.check_lost(claim, self._monotonic())

    def answered(self, claim: SlotClaim, reply: HoldReply, source: str | None = None) -> HoldReply:
        """Note the answer to a caller that does not wait, and return it; `source`: see `count`."""
        if reply.granted:
            self._held.on_granted(claim)
        else:
            self.abandon(claim)
        self.count(claim, "allowed" if reply.granted else "refused", source=source)
        return reply

    def give_up(self, claim: SlotClaim, exc: BaseException, queued_at: float | None) -> None:
        """Note that `exc` has ended the wait of a caller. If nobody else waits here, the worker
        gives back the places in the line. `queued_at`: see `count`.
        """
        has_place = claim.command.waited_ms and claim.may_have_place
        if has_place and not self._wait_queues.count(claim.name):
            self._held.leave_line(claim.name, self._monotonic())
        if isinstance(exc, StoreError):
            self.count(claim, "error")
        elif isinstance(exc, ConcurrencyExceeded):
            self.count(claim, "refused", queued_at)

    def abandon(self, claim: SlotClaim) -> None:
        """Free what `claim` may hold, by the worker. Waits for nothing."""
        self._held.end(claim, self._monotonic())

    def _execute(self, claim: SlotClaim, step: StoreStep) -> Any:
        assert isinstance(step, Hold)
        return self._store.execute(step, claim.deadline)


class _BaseSlot:
    """Base class of both slots."""

    def __init__(
        self,
        driver: SlotDriver,
        claim: SlotClaim,
        refusal: ConcurrencyExceeded | None = None,
        *,
        owns_claim: bool = True,
    ) -> None:
        self._driver = driver
        self._claim = claim
        self._refusal = refusal
        if owns_claim:  # a slot of `try_hold`; that of `hold` belongs to its block
            claim.owner = ref(self)

    @property
    def key(self) -> AnyKey:
        """The key of the slot."""
        return self._claim.key

    @property
    def held(self) -> bool:
        """True while the slot is held: no longer after the block, and not once it is lost."""
        return not self.lost and self._claim.is_renewed

    @property
    def lost(self) -> bool:
        """True once the slot was lost while it was held: it could not be renewed in time, or the
        store has it no more. Another holder may have it, so stop what it guards. It stays true.
        """
        return self._driver.is_lost(self._claim)

    @property
    def refusal(self) -> ConcurrencyExceeded | None:
        """Why `try_hold` found no slot; None if it did, and for `hold`, which raises it."""
        return self._refusal

    def __bool__(self) -> bool:
        return self.held

    def __repr__(self) -> str:
        state = self._claim.state if self._refusal is None else "refused"
        return f"<{type(self).__name__} of {short_repr(self.key)}: {state}>"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise `TypeError` for `pickle` and `copy`."""
        raise TypeError("a slot cannot be pickled or copied: this process holds it, and renews it")


class Slot(_BaseSlot):
    """One slot of a `Concurrency`. True while it is held."""

    def release(self) -> None:
        """Free the slot before the end of the block. A second release does nothing. Never raises
        because of the store: what cannot be freed now is freed in the background.
        """
        if not self._claim.ended:
            self._driver.free(self._claim)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@only_async_with
class AsyncSlot(_BaseSlot):
    """One slot of an `AsyncConcurrency`. True while it is held."""

    async def release(self) -> None:
        """See `Slot.release`. If it is cancelled, the slot is freed in the background."""
        if not self._claim.ended:
            await self._driver.free(self._claim)

    def release_soon(self) -> None:
        """Free the slot without waiting for the store: the worker does so at once, in one flush,
        and wakes the next who waits. May be called in any task, thread or callback, also where no
        event loop runs. Whichever of this and `release` comes first frees the slot; the others do
        nothing, and nothing is taken from another holder.

        Never raises because of the store: what cannot be freed now is tried again until the slot's
        deadline. Once every event loop of the process is closed, the slot is freed by the next
        call that asks for one in a new loop, or when the process ends. After `aclose` it is free
        already, and in a forked child it is the parent's: nothing happens.
        """
        if not self._claim.ended:
            self._driver.abandon(self._claim)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class _BaseBlock(EnteredBlock):
    """The claim of a block of `hold`, and whether it was entered."""

    def __init__(self, driver: SlotDriver, claim: SlotClaim, timeout: float | None) -> None:
        self._driver = driver
        self._claim = claim
        self._timeout = timeout
        self._entered = False
        claim.owner = ref(self)

    def _misused(self, how: str) -> RuntimeError:
        return RuntimeError(f"this block of {short_repr(self._claim.key)} {how}")


_ENTERED_BEFORE = "was entered before; call `hold` again for each block"
_NOT_ENTERED = "is left, but was not entered; use `hold` with `with`"


class SlotBlock(_BaseBlock):
    """`with slots.hold(key) as slot:`."""

    _written = (
        "`with slots.hold(key):`, or, not to wait, `with slots.try_hold(key) as slot:` and in that "
        "block `if slot:`"
    )

    def __enter__(self) -> Slot:
        if self._entered:
            raise self._misused(_ENTERED_BEFORE)
        self._entered = True
        try:
            self._driver.wait(self._claim, self._timeout)
            return Slot(self._driver, self._claim, owns_claim=False)
        except BaseException:  # raised by a signal handler, too
            self._driver.abandon(self._claim)
            raise

    def __exit__(self, *_: object) -> None:
        try:
            if not self._entered:
                raise self._misused(_NOT_ENTERED)
            if not self._claim.ended:
                self._driver.free(self._claim)
        except BaseException:
            self._driver.abandon(self._claim)
            raise


@only_async_with
class AsyncSlotBlock(_BaseBlock):
    """`async with slots.hold(key) as slot:`."""

    _written = (
        "`async with slots.hold(key):`, or, not to wait, `async with await slots.try_hold(key) as "
        "slot:` and in that block `if slot:`"
    )

    async def __aenter__(self) -> AsyncSlot:
        if self._entered:
            raise self._misused(_ENTERED_BEFORE)
        self._entered = True
        try:
            await self._driver.wait(self._claim, self._timeout)
            return AsyncSlot(self._driver, self._claim, owns_claim=False)
        except BaseException:  # a cancellation, or raised by a signal handler
            self._driver.abandon(self._claim)
            raise

    async def __aexit__(self, *_: object) -> None:
        try:
            if not self._entered:
                raise self._misused(_NOT_ENTERED)
            if not self._claim.ended:
                await self._driver.free(self._claim)
        except BaseException:
            self._driver.abandon(self._claim)
            raise
