"""A fault that tests of several scenarios put into the library, in the process of a client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distwindow.store.redis.blocking.store import RedisStore


def send_flushes_twice() -> None:
    """Have blocking stores send each flush a second time under another number, as if its reply had
    been lost, and the number had not been kept.
    """
    planted: Any = RedisStore
    real = RedisStore.exchange

    def exchange(self: Any, commands: Any, *deadline: Any) -> Any:
        again = []
        for command in commands:
            if getattr(command, "seq", 0):
                again.append(replace(command, seq=2 * command.seq, _split_frame=None))
                command.seq = 2 * command.seq + 1
                command._split_frame = None
        if again:
            real(self, again, *deadline)
        replies = real(self, commands, *deadline)
        for command in commands:
            if getattr(command, "seq", 0):
                command.seq //= 2
                command._split_frame = None
        return replies

    planted.exchange = exchange
