"""The commands of a limiter of which a limit is paced or warms up."""

from __future__ import annotations

from typing import cast

from ..core.key import AnyKey
from ..core.limit import LimitSpec, parse_limits
from ..protocol.commands import Acquire
from ..protocol.shaped_commands import AcquireShaped, any_shaped
from .command_cache import CommandCache
from .shaped_costs import check_shaped_costs


class ShapedCommandCache(CommandCache):
    """A cache that gives each caller a command of its own, as each call has a wait of its own."""

    command_type = AcquireShaped

    def acquire_command(self, key: AnyKey, cost: int = 1) -> Acquire:
        command = cast(AcquireShaped, super().acquire_command(key, cost))
        if cost != 1:
            check_shaped_costs(command.charges)
        return command.unshared()


def make_command_cache(prefix: str, limits: LimitSpec) -> CommandCache:
    """Return the command cache for these limits."""
    parsed = parse_limits(limits)
    cache = ShapedCommandCache if any_shaped(parsed) else CommandCache
    return cache(prefix, parsed)
