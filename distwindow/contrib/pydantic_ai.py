"""What the agents of a fleet may ask of a model: how many requests run at once, and how many
requests and tokens there are in a time.

    limiter = ConcurrencyLimiter("redis://localhost:6379/0", 20, key="openai")
    agent = Agent(ConcurrencyLimitedModel("openai:gpt-5", limiter=limiter))
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

from .. import (
    AsyncConcurrency,
    AsyncReservation,
    AsyncSlot,
    ConcurrencyExceeded,
    ConfigurationError,
    RateLimitExceeded,
    StoreError,
)
from ..away.policy import OnStoreError
from ..errors import short_repr
from ..ring.clock import SYSTEM, Clock
from ..ring.key import AnyKey
from ..ring.limit import LimitSpec
from ..runtime.options import ClockChoice, Consistency, Options
from ..support.async_use import result_of
from ..support.callables import check_takes
from ..support.fork import register_after_fork
from . import needs
from .model_calls import ModelCalls, longest_wait

with needs("pydantic-ai"):
    import anyio
    from pydantic_ai import RunContext, exceptions
    from pydantic_ai.concurrency import AbstractConcurrencyLimiter
    from pydantic_ai.exceptions import ConcurrencyLimitExceeded, ModelHTTPError
    from pydantic_ai.messages import ModelMessage, ModelResponse
    from pydantic_ai.models import Model, ModelRequestParameters, StreamedResponse
    from pydantic_ai.models.wrapper import WrapperModel
    from pydantic_ai.settings import ModelSettings

__all__ = ["ConcurrencyLimiter", "RateLimitedModel", "estimate_tokens"]


class ConcurrencyLimiter(AbstractConcurrencyLimiter):
    """At most `limit` requests of `key` run at once, over all processes that name this store. Who
    waits is served in order of arrival, and after `max_wait` seconds (None: never) raises
    `ConcurrencyLimitExceeded`. So does with "deny" who finds the store away; with "allow" it runs
    uncounted. The other arguments are those of `AsyncConcurrency`: a process that is killed keeps
    its slots for `ttl` seconds.
    """

    def __init__(
        self, store: Any, limit: int, *, key: AnyKey, max_wait: float | None = None,
        on_store_error: Literal["allow", "deny", "raise"] = "allow", prefix: str = "distwindow",
        ttl: float = 30.0, timeout: float = 0.5, clock: ClockChoice = "server",
        name: str | None = None, time: Clock = SYSTEM,
    ) -> None:  # fmt: skip
        if on_store_error not in ("allow", "deny", "raise"):
            shown = short_repr(on_store_error)
            raise ConfigurationError(f'on_store_error={shown} is none of "allow", "deny", "raise"')
        longest_wait(max_wait)
        self._slots = AsyncConcurrency(
            store, limit, prefix=prefix, ttl=ttl, timeout=timeout, clock=clock, name=name, time=time
        )
        self._slots.hold(key)  # raises for what is no key
        self._key, self._max_wait, self._on_store_error = key, max_wait, on_store_error
        register_after_fork(self)
        self.after_fork()

    def after_fork(self) -> None:
        """Begin without slots: those of the parent are the parent's."""
        self._held: list[tuple[AsyncSlot, object]] = []
        self._uncounted: list[None] = []

    async def acquire(self, source: str) -> None:
        """Wait for a slot. Raises `StoreError` with `on_store_error="raise"`."""
        block = None
        try:
            # First without a wait: `hold` would ask a store that is silent until `max_wait` ends.
            slot = await self._slots.try_hold(self._key)
            if not slot:
                block = self._slots.hold(self._key, self._max_wait)
                slot = await block.__aenter__()
        except ConcurrencyExceeded as exc:
            raise ConcurrencyLimitExceeded(f"{source} was not called: {exc}") from exc
        except StoreError as exc:
            if self._on_store_error == "raise":
                raise
            if self._on_store_error == "deny":
                raise ConcurrencyLimitExceeded(f"{source} was not called: {exc}") from exc
            self._uncounted.append(None)
        else:
            self._held.append((slot, block))  # a block that nobody keeps is given back

    def release(self) -> None:
        """Free a slot, on whatever task: it is free within one flush, without `await`."""
        if self._uncounted:  # first: so no more requests run than slots are held
            self._uncounted.pop()
        elif self._held:
            self._held.pop()[0].release_soon()
        else:
            raise RuntimeError("release() was called more often than acquire()")

    async def aclose(self) -> None:
        """Free all slots, and close the connections. The end of the process does so, too."""
        await self._slots.aclose()


class RateLimitedModel(WrapperModel):
    """A model of which all processes that name this store have so many `requests` and `tokens`, by
    `key`; by default that is `system:model_name` of the model.

    A request reserves one of `requests`, and of `tokens` its `estimate`: a number, or a function,
    async or not, of the arguments of `request`; by default what `estimate_tokens` returns. Then
    what its usage reports counts in place of the estimate. Without a report the estimate stays, as
    the least that counts for a stream that is closed early, and for an error; one with a status
    from 400 on has used no tokens. An estimate of ours is at most half of the limit.

    Where there is no room within `max_wait` seconds (None: no end), `request` raises
    `ModelHTTPError` with status 429, so that a `FallbackModel` falls back. The other arguments are
    those of `Limiter`.
    """

    def __init__(
        self, wrapped: Model | str, store: Any, *, requests: LimitSpec | None = None,
        tokens: LimitSpec | None = None, key: str | None = None,
        estimate: int | Callable[..., int | Awaitable[int]] | None = None,
        max_wait: float | None = 30.0, on_store_error: OnStoreError = "allow",
        prefix: str = "distwindow", timeout: float = 1.0, clock: ClockChoice = "server",
        consistency: Consistency = "direct", share: float | None = None, name: str | None = None,
        time: Clock = SYSTEM,
    ) -> None:  # fmt: skip
        if not isinstance(wrapped, (Model, str)):
            raise ConfigurationError(f'write "openai:gpt-5" or a Model, not {short_repr(wrapped)}')
        super().__init__(wrapped)
        if estimate is not None and tokens is None:
            raise ConfigurationError("estimate= means nothing without tokens=; give both or none")
        if callable(estimate):
            check_takes("estimate", estimate, 3)
        elif estimate is not None and (type(estimate) is not int or estimate < 1):
            raise ConfigurationError(
                f"estimate={short_repr(estimate)} is no whole number from 1 on, and no function"
            )
        options = Options(
            prefix=prefix, consistency=consistency, on_store_error=on_store_error, timeout=timeout,
            clock=clock, share=share, name=name, time=time,
        )  # fmt: skip
        self._estimate = estimate
        key = f"{self.system}:{self.model_name}" if key is None else key
        self._calls = ModelCalls(store, key, requests, tokens, max_wait, options)

    async def request(
        self, messages: list[ModelMessage], model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:  # fmt: skip
        call = (messages, model_settings, model_request_parameters)
        return await self._limited(partial(super().request, *call), call)

    async def compact_messages(
        self, request_context: Any, *, instructions: str | None = None
    ) -> ModelResponse:
        context = request_context
        call = (context.messages, context.model_settings, context.model_request_parameters)
        compact = partial(super().compact_messages, context, instructions=instructions)
        return await self._limited(compact, call)

    @asynccontextmanager
    async def request_stream(
        self, messages: list[ModelMessage], model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,
    ) -> AsyncGenerator[StreamedResponse, None]:  # fmt: skip
        call = (messages, model_settings, model_request_parameters)
        reservation, stream = await self._reserve(*call), None
        try:
            async with self.wrapped.request_stream(*call, run_context) as stream:
                yield stream
        except ModelHTTPError as exc:
            if stream is None:  # else it may be an error of who reads it
                await self._settle_refused(reservation, exc)
            raise
        finally:
            if stream is not None:
                await self._settle(reservation, stream.get(), is_stream=True)

    async def _limited(
        self, send: Callable[[], Awaitable[ModelResponse]], call: tuple[Any, ...]
    ) -> ModelResponse:
        reservation = await self._reserve(*call)
        try:
            response = await send()
        except ModelHTTPError as exc:
            await self._settle_refused(reservation, exc)
            raise
        await self._settle(reservation, response)
        return response

    async def _reserve(self, messages: Any, settings: Any, parameters: Any) -> AsyncReservation:
        tokens = self._estimate
        if tokens is None:
            tokens = estimate_tokens(messages, {**(self.settings or {}), **(settings or {})})
            tokens = min(tokens, self._calls.largest_estimate)
        elif callable(tokens):
            tokens = await result_of(tokens(messages, settings, parameters))
        try:
            return await self._calls.reserve(tokens)
        except RateLimitExceeded as exc:
            why = "the store of its limits is away" if exc.decision.source == "policy" else str(exc)
            body = {
                "detail": f"the model was not called: {why}",
                "limit": str(exc.decision.limit), "retry_after": round(exc.retry_after, 3),
            }  # fmt: skip
            error: ModelHTTPError
            if hasattr(ModelHTTPError, "for_category"):
                error = ModelHTTPError.for_category(
                    exceptions.ModelRateLimitError, status_code=429, model_name=self.model_name,
                    body=body, retry_after=exc.retry_after,
                )  # fmt: skip
            else:  # before pydantic-ai 2
                error = ModelHTTPError(429, self.model_name, body)
            raise error from exc

    async def _settle_refused(self, reservation: AsyncReservation, exc: ModelHTTPError) -> None:
        if exc.status_code >= 400:
            with anyio.CancelScope(shield=True):
                await self._calls.commit(reservation, 0)

    async def _settle(
        self, reservation: AsyncReservation, response: ModelResponse, *, is_stream: bool = False
    ) -> None:
        usage, tokens = response.usage, response.usage.total_tokens
        is_whole = not is_stream or response.finish_reason is not None  # has no state before 1.100
        is_whole = getattr(response, "state", "complete" if is_whole else "") == "complete"
        if not is_whole or getattr(usage, "unmeasured_requests", False):
            tokens = max(tokens, reservation.estimates[-1])
        if tokens > 0:
            with anyio.CancelScope(shield=True):  # who closes a stream early may be cancelled
                await self._calls.commit(reservation, tokens)

    async def aclose(self) -> None:
        """Send what was counted, and close the connections of the limits. The end of the process
        does so, too. Later requests raise `ConfigurationError`.
        """
        await self._calls.aclose()


def estimate_tokens(messages: list[ModelMessage], settings: Mapping[str, Any] | None) -> int:
    """Return a quarter of the characters of `messages`, 1000 for what is no text, such as an image,
    and `max_tokens`. Without that setting the answer is not in the estimate.
    """
    tokens = int((settings or {}).get("max_tokens") or 1)
    for message in messages:
        tokens += len(getattr(message, "instructions", None) or "") // 4
        for part in message.parts:
            content = getattr(part, "content", None) or getattr(part, "args", None) or ""
            for item in content if isinstance(content, list) else [content]:
                is_text = isinstance(item, (str, dict))
                tokens += len(str(item)) // 4 if is_text else 1000
    return tokens
