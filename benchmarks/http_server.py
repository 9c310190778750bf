"""An HTTP server that answers each request with the same two bytes, as cheaply as possible: what is
measured are its clients. `with answering() as url:` runs it in a process of its own.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\nok"


class _Answers(asyncio.Protocol):
    def __init__(self) -> None:
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *requests, self._received = (self._received + data).split(b"\r\n\r\n")
        self._transport.write(_ANSWER * len(requests))


@contextmanager
def answering() -> Iterator[str]:
    """Yield the URL of a server, on the cores of this thread."""
    process = subprocess.Popen([sys.executable, "-m", __name__], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/"
    finally:
        process.terminate()
        process.wait(timeout=20)
        process.stdout.close()


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(_Answers, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve())
