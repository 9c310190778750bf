"""Which origins may call a resource (Sentinel `AuthorityRule`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..core.errors import ConfigurationError, short_repr
from ..sentinel.checks import check_word
from ..sentinel.rules import Rule

AuthorityStrategy = Literal["allow", "deny"]


@dataclass(frozen=True)
class AuthorityRule(Rule):
    """Which origins may call `resource` (Sentinel `AuthorityRule`).

    `limit_app` lists origins, separated by commas. With the strategy `"allow"` (Sentinel's
    AUTHORITY_WHITE) only these may call, among the calls that have an origin; with `"deny"`
    (AUTHORITY_BLACK) all but these. A call without an origin passes with both, as in Sentinel's
    `AuthorityRuleChecker`: the rule tells callers apart, and does not make them say who they are.

    Raises `ConfigurationError` for a field that cannot work.
    """

    resource: str
    limit_app: str
    strategy: AuthorityStrategy = "allow"

    def __post_init__(self) -> None:
        if type(self.resource) is not str or not self.resource.strip():
            raise ConfigurationError(
                f"AuthorityRule: resource must be a name, not {short_repr(self.resource)}"
            )
        name = f"AuthorityRule of {short_repr(self.resource)}"
        if type(self.limit_app) is not str or not all(self._listed()):
            raise ConfigurationError(
                f"{name}: limit_app must be origins separated by commas, such as 'app-a,app-b', "
                f"not {short_repr(self.limit_app)}"
            )
        check_word(name, "strategy", self.strategy, get_args(AuthorityStrategy))

    def _listed(self) -> list[str]:
        return [origin.strip() for origin in self.limit_app.split(",")]

    @property
    def origins(self) -> frozenset[str]:
        """The origins that `limit_app` lists."""
        return frozenset(self._listed())

    def allows(self, origin: str) -> bool:
        """True if `origin` may call."""
        return not origin or (origin in self.origins) == (self.strategy == "allow")
