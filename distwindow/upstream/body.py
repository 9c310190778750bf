"""The body of a response, as the client reads it: for what it reports at its beginning or end."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from typing import Any

_PART = 65_536
"""Bytes that are kept of the beginning, and of the end."""
_LAST_EVENT = re.compile(rb"\n(?:data: *\[DONE\]|event: *message_stop)")
"""The last event of a stream of OpenAI and of Anthropic. Who has read it often reads no further. In
a text of the model, a line break would be an escape, so none of its lines begins so."""


class BodyWatch:
    """Keeps the beginning and the end of a body, and calls `end(body)` once, when it was read
    whole, or to the last event of a stream: what a part of it reports may be less than was used.
    `encoding` is that of the bytes it is fed: `gzip`, `deflate`, or none; of another it keeps
    nothing.
    """

    def __init__(self, end: Callable[[bytes], Any], encoding: str = "") -> None:
        self._end: Callable[[bytes], Any] | None = end
        self._head, self._tail = bytearray(), bytearray()
        self._line = b"\n"
        self._is_known = encoding.lower() in ("", "identity", "gzip", "x-gzip", "deflate")
        self.is_whole = False
        is_plain = encoding.lower() in ("", "identity")
        self._unpack = None if is_plain else zlib.decompressobj(zlib.MAX_WBITS | 32)

    def feed(self, data: bytes) -> bytes:
        """Take the next part of the body, and return it."""
        if self._is_known:
            try:
                self._keep(data if self._unpack is None else self._unpack.decompress(data))
            except zlib.error:  # the client will say what is wrong with it
                self._is_known = False
        return data

    def _keep(self, data: bytes) -> None:
        lines = self._line + data
        self.is_whole = self.is_whole or _LAST_EVENT.search(lines) is not None
        self._line = lines[-32:]
        room = _PART - len(self._head)
        self._head += data[:room]
        if rest := data[room:]:
            self._tail += rest[-_PART:]
            del self._tail[:-_PART]

    def end(self) -> Any:
        """Return what `end` has returned, which may have to be awaited; None the next time."""
        end, self._end = self._end, None
        return end(bytes(self._head + self._tail)) if end is not None and self.is_whole else None
