"""What is sent for a limited request, as messages of ASGI."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, MutableMapping, Sequence
from typing import Any, NamedTuple

from ...errors import DistwindowError, RateLimitExceeded
from .fields import EXPOSED_HEADERS, PROBLEM_MEDIA_TYPE
from .rate_limits import AsyncRateLimits
from .request_limit import LimitedRequest, RateLimited

Message = MutableMapping[str, Any]
_RawHeaders = Sequence[tuple[bytes, bytes]]

STARTS = {
    "http.response.start": "status",
    "websocket.http.response.start": "status",
    "websocket.accept": "",
}
"""The messages that have the header fields of a response, and where they have its status."""
_TRY_AGAIN_LATER = 1013
"""The code that closes a websocket of a server that does not send responses to handshakes."""
_FAILED = (500, 1011, 4500)
"""What frameworks send for an exception: a status, or the code of a handshake that they close."""
_OURS = {name.lower().encode(): name for name in EXPOSED_HEADERS}
_RAW = {name: raw for raw, name in _OURS.items()}
_BODIES = ("http.response.body", "http.response.zerocopysend", "websocket.http.response.body")


async def receive_start(rate_limits: AsyncRateLimits[Any], receive: Any, send: Any) -> Message:
    """Return the next message of the lifespan, whose start fails without a required store."""
    message: Message = await receive()
    if message["type"] == "lifespan.startup":
        try:
            await rate_limits.start()
        except DistwindowError as exc:
            # Without it a server takes it that the application has no lifespan, and serves.
            await send({"type": "lifespan.startup.failed", "message": str(exc)})
            raise
    return message


class Response(NamedTuple):
    """What was sent, for `count_when` and `cost_after`."""

    status_code: int
    """101 where a websocket was accepted; 500 where nothing was sent."""
    headers: dict[str, str]
    """By name in lower case; several of one name are joined by ", "."""
    body_bytes: int
    complete: bool
    """False if the application ended before the end of the body, or the client had gone."""


class WatchedRequest(LimitedRequest):
    """What was decided for one request, and what was sent for it, as far as it is known."""

    __slots__ = ("_around", "body_bytes", "headers", "is_answered", "is_complete", "status_code")

    def __init__(self) -> None:
        super().__init__()
        self.status_code = 0  # until the response begins
        self.headers: _RawHeaders = ()
        self.body_bytes = 0
        self.is_complete = False
        self.is_answered = False  # until a refusal is sent in place of what the framework makes
        self._around = sys.exc_info()[1]  # a server may run in an `except`

    def refusal_to_send(self, message: Message) -> Exception | None:
        """Return the refusal that a handler has not caught, if `message` is sent for that."""
        if message.get("status", message.get("code")) not in _FAILED:
            return None
        handled = sys.exc_info()[1]  # where the framework sends while it handles the exception
        if handled is self._around:
            handled = None
        if isinstance(handled, RateLimitExceeded) and not isinstance(handled, RateLimited):
            return handled
        asked = self.refusal()
        if asked is None:
            return None
        if not isinstance(handled, RateLimited) and (handled or self[-1].decision.allowed):
            return None
        refused: Exception = asked.limit.refusal(self, asked)
        return refused

    def begin(self, message: Message) -> Message:
        """Return the first message of the response, with our header fields."""
        self.status_code = message.get(STARTS[message["type"]], 101)
        if not self:
            return message
        headers = [*message.get("headers", ())]
        decision, policies = self[0].decision, self[0].policies
        # Most responses are of one limit that has permits left, and have none of our fields: then
        # these are what `fields_to_set` returns, in half the time. By index: 0 is `allowed`, 4 is
        # `remaining`.
        if len(self) == 1 and policies.raw_policy and decision[0] and decision[4]:
            for raw, _ in headers:
                if raw.lower() in _OURS:
                    break
            else:
                headers += policies.raw_policy, (b"ratelimit", policies.raw_item(decision))
                self.headers = headers
                return {**message, "headers": headers}
        present: dict[str, str] = {}
        for raw, value in headers:
            name = _OURS.get(raw.lower())
            if name is not None:
                before = f"{present[name]}, " if name in present else ""
                present[name] = before + value.decode("latin-1")
        for name, text in self.fields_to_set(self.status_code, present.get).items():
            raw = _RAW[name]
            if name in present:
                headers = [field for field in headers if field[0].lower() != raw]
            headers.append((raw, text.encode("latin-1")))
        self.headers = headers
        return {**message, "headers": headers}

    def go_on(self, message: Message) -> None:
        """Note what a later message sends."""
        if message["type"] in _BODIES:
            self.body_bytes += len(message.get("body", b""))
            self.is_complete = not message.get("more_body", False)
        elif message["type"] == "http.response.pathsend":
            self.is_complete = True

    def response(self) -> Response:
        """Return what was sent so far."""
        headers: dict[str, str] = {}
        for raw, value in self.headers:
            name, text = raw.decode("latin-1").lower(), value.decode("latin-1")
            headers[name] = f"{headers[name]}, {text}" if name in headers else text
        return Response(self.status_code or 500, headers, self.body_bytes, self.is_complete)

    def refuse(self, scope: Any, refused: Any) -> list[Message]:
        """Return the messages of a refusal, which are the response to this request."""
        self.is_answered = True
        kind = ""
        if scope["type"] == "websocket":
            if "websocket.http.response" not in (scope.get("extensions") or {}):
                self.status_code = refused.status_code
                return [{"type": "websocket.close", "code": _TRY_AGAIN_LATER}]
            kind = "websocket."
        body = json.dumps(refused.problem).encode()
        own = {"content-type": PROBLEM_MEDIA_TYPE, "content-length": str(len(body))}
        fields = {**own, **refused.headers}.items()
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in fields]
        start = self.begin(
            {"type": f"{kind}http.response.start", "status": refused.status_code, "headers": raw}
        )
        end = {"type": f"{kind}http.response.body", "body": body}
        self.go_on(end)
        return [start, end]


class Settlements:
    """The requests of one application, until their responses have decided about their charges."""

    def __init__(self) -> None:
        self._open: dict[int, WatchedRequest] = {}  # by id
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, limited: WatchedRequest) -> None:
        self._open[id(limited)] = limited

    def end(self, limited: WatchedRequest) -> Awaitable[object] | None:
        """Settle a request by what was sent for it, all its charges at once. Return what ends when
        that has, which goes on where the task of the request is cancelled; None if nothing is to be
        settled.
        """
        self._open.pop(id(limited), None)
        if not limited.needs_response:
            return None
        limited.needs_response = False
        response = limited.response()
        tasks = []
        for each in limited.charges():
            settling = limited.settle(response, response.status_code, [each])
            tasks.append(asyncio.get_running_loop().create_task(settling))
            tasks[-1].add_done_callback(self._tasks.discard)
        self._tasks.update(tasks)
        return asyncio.shield(asyncio.gather(*tasks)) if tasks else None

    async def end_all(self) -> None:
        """Settle all requests by what was sent so far."""
        for limited in [*self._open.values()]:
            self.end(limited)
        loop = asyncio.get_running_loop()
        if here := [task for task in self._tasks if task.get_loop() is loop]:
            await asyncio.wait(here)
