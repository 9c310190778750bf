"""When a whole process is protected from overload (Sentinel `SystemRule`)."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields

from ..core.errors import ConfigurationError
from ..sentinel.checks import check_threshold
from ..sentinel.rules import Rule


@dataclass(frozen=True, repr=False)
class SystemRule(Rule):
    """Thresholds for all calls of one process together (Sentinel `SystemRule`). None: not checked.

    | field | a call is refused where |
    |---|---|
    | `highest_system_load` | the machine's load average of one minute is above it, and more calls
        run than the process completes at its best rate and rt (Sentinel `checkBbr`) |
    | `highest_cpu_usage` | the machine's CPU usage is above it, from 0 to 1 |
    | `qps` | it would be one more than so many in the last second; a cost counts so many times |
    | `avg_rt` | the calls of the last second took longer on average, in ms |
    | `max_thread` | so many calls run already |

    Raises `ConfigurationError` for a field that cannot work, and if there is none.
    """

    _: KW_ONLY
    highest_system_load: float | None = None
    highest_cpu_usage: float | None = None
    qps: float | None = None
    avg_rt: float | None = None
    max_thread: int | None = None

    def __post_init__(self) -> None:
        given = {
            f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None
        }
        if not given:
            raise ConfigurationError("SystemRule: give at least one threshold")
        for name, value in given.items():
            try:
                check_threshold(name, value)
            except ConfigurationError as exc:
                raise ConfigurationError(f"SystemRule: {exc}") from exc
            if name in ("qps", "max_thread") and value < 1:
                raise ConfigurationError(
                    f"SystemRule: {name}={value!r} would refuse every call; give at least 1"
                )
        if self.highest_cpu_usage is not None and self.highest_cpu_usage > 1:
            raise ConfigurationError(
                f"SystemRule: highest_cpu_usage must be from 0 to 1, not {self.highest_cpu_usage!r}"
            )
        if self.max_thread is not None and type(self.max_thread) is not int:
            raise ConfigurationError(
                f"SystemRule: max_thread must be an int, not {self.max_thread!r}"
            )

    def __repr__(self) -> str:
        """Return the rule without the thresholds that it does not have."""
        given = (
            f"{f.name}={v!r}" for f in fields(self) if (v := getattr(self, f.name)) is not None
        )
        return f"SystemRule({', '.join(given)})"

    @property
    def needs_sample(self) -> bool:
        """True if the machine has to be sampled."""
        return self.highest_system_load is not None or self.highest_cpu_usage is not None
