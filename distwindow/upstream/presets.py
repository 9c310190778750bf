"""Whose calls of an API count together, and what is known of the limits of some APIs.

                key                                          tokens of a call are
    openai      host, account (digest), model of the body    those of its `usage`
    anthropic   host, account (digest), model of the body    input and output, without cache reads
    github      host, account (digest), `core`, `search`,    -
                `code_search` or `graphql` by the path

Tokens are reserved by an estimate, and what the response reports is what is counted then. With
`account=` a name stands in the place of the digest, with `together=True` the pattern in that of the
model.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..errors import ConfigurationError, short_repr
from ..ring.limit import Limit, LimitSpec, parse_limits
from ..support.callables import check_takes

_BASE64 = re.compile(rb'(?<=[",])[A-Za-z0-9+/]{2000,}={0,2}(?=")')
"""A file in a body of JSON, by itself or in a URL of data."""
_TOKENS_OF_FILE = 1500
_MAX_NAME = 100
"""Characters of the name of a model in a key. A request may have any text there."""


def by_host(request: Any) -> str:
    """Return the host that a request goes to: the default `key`."""
    url = request.url
    host = urlsplit(url).hostname if isinstance(url, str) else url.host
    return ascii_host(str(host or ""))


def ascii_host(host: str) -> str:
    """Return `host` in lower case, in its ASCII form, and without the dot of the root: clients
    write the same host in different ways.
    """
    host = host.lower().rstrip(".")
    if not host.isascii():
        with contextlib.suppress(UnicodeError):  # no host; the client will say so
            return host.encode("idna").decode()
    return host


def by_header(name: str) -> Callable[[Any], str]:
    """Return a key function: the host, and a digest of this header field, such as the account in
    `Authorization`. A secret never becomes a key.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
        raise ConfigurationError(
            f"by_header({short_repr(name)}) needs the name of a header field: "
            'by_header("authorization")'
        )
    return lambda request: _with_digest(by_host(request), request, (name,))


@dataclass(frozen=True, kw_only=True)
class APILimits:
    """Limits of those calls of an API whose `part` matches `pattern`. Made by `openai`,
    `anthropic` and `github`.
    """

    pattern: str
    requests: tuple[Limit, ...]
    tokens: tuple[Limit, ...]
    account: str | tuple[str, ...]
    """The name of the account; or the header fields of which the first that is there tells accounts
    apart."""
    part: Callable[[Any, dict[str, Any]], str]
    """`part(request, body)`: what of the API is called, such as the model."""
    estimate: Callable[[bytes], int] | None
    """The tokens of a call with this body; None: `estimate_tokens`."""
    used: Callable[[bytes], int | None]
    """The tokens that a response reports, by its body; None where it does not."""
    together: bool = False
    """The calls of all parts that match count together."""

    def key(self, host: str, request: Any, part: str) -> str:
        """Return the key of a call."""
        if isinstance(self.account, str):
            whose = f"{host}:{self.account}"
        else:
            whose = _with_digest(host, request, self.account)
        return f"{whose}:{self.pattern if self.together else part}"

    def reserve(self, body: bytes) -> int:
        """Return the tokens that are reserved for a call with this body. An estimate of ours is at
        most half of the limit: a larger one would wait for a window that is empty.
        """
        if self.estimate is not None:
            return self.estimate(body)
        return max(1, min(estimate_tokens(body), largest_estimate(self.tokens)))


def largest_estimate(limits: Sequence[Limit]) -> int:
    """Return half of the smallest of these limits, and at least 1."""
    return max(1, min((limit.amount for limit in limits), default=2) // 2)


def openai(
    model: str = "*",
    *,
    requests: LimitSpec | None = None,
    tokens: LimitSpec | None = None,
    estimate: Callable[[bytes], int] | None = None,
    account: str | None = None,
    together: bool = False,
) -> APILimits:
    """Return the limits of calls of models that match `model` (`*`: any characters), for APIs in
    the manner of OpenAI's: of each account and model. `estimate(body)` are the tokens that a call
    reserves; by default a quarter of the bytes of its body, and its largest answer, together at
    most half of the limit. `account` is a name for all calls, where several secrets are of one
    account. With `together`, all models that match count together.
    """
    accounts = account or ("Authorization", "api-key")
    return _of_models(
        model, requests, tokens, estimate, accounts, _openai_tokens, together=together
    )


def anthropic(
    model: str = "*",
    *,
    requests: LimitSpec | None = None,
    tokens: LimitSpec | None = None,
    estimate: Callable[[bytes], int] | None = None,
    account: str | None = None,
    together: bool = False,
) -> APILimits:
    """`openai` for Anthropic's API."""
    accounts = account or ("x-api-key", "Authorization")
    return _of_models(
        model, requests, tokens, estimate, accounts, _anthropic_tokens, together=together
    )


def github(
    requests: LimitSpec | None = None, *, resource: str = "*", account: str | None = None
) -> APILimits:
    """Return the limits of each account for one resource of GitHub's API: `core`, `search`,
    `code_search` or `graphql`, which the path tells. `account` is as for `openai`.
    """
    _check_account(account)
    if not isinstance(resource, str) or not fnmatch.filter(_GITHUB_RESOURCES, resource):
        raise ConfigurationError(
            f"resource={short_repr(resource)} is none of {', '.join(_GITHUB_RESOURCES)}"
        )
    return APILimits(
        pattern=resource, requests=_parsed(requests), tokens=(),
        account=account or ("Authorization",), part=_github_resource, estimate=None,
        used=lambda body: None,
    )  # fmt: skip


def choose(
    known: Sequence[APILimits], request: Any, body: bytes | None
) -> tuple[APILimits, str] | None:
    """Return the first of these limits that holds for a call, and the part that it calls. Where a
    body cannot be read, which has the model in it, the first of all holds: a form, for example.
    """
    try:
        fields = json.loads(body or b"{}")
    except (ValueError, RecursionError):  # the API will say what is wrong with it
        fields = {}
    for each in known:
        part = each.part(request, fields if isinstance(fields, dict) else {})
        if fnmatch.fnmatchcase(part, each.pattern):
            return each, part
    return (known[0], "") if body is None and known[0].part is _model else None


def estimate_tokens(body: bytes) -> int:
    """Return a quarter of the bytes of a request, and the most tokens that it lets the model
    answer. What is no text, such as an image, counts as 1,500 tokens.
    """
    answer = re.search(rb'"max_(?:completion_|output_)?tokens"\s*:\s*(\d{1,12})', body)
    text, files = _BASE64.subn(b"", body)
    return len(text) // 4 + files * _TOKENS_OF_FILE + (int(answer[1]) if answer else 0)


def _with_digest(key: str, request: Any, names: tuple[str, ...]) -> str:
    """Return `key` with a digest of the first of these header fields that the request has."""
    for name in names:
        value = request.headers.get(name)
        if value is not None:
            raw = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
            return f"{key}:{hashlib.blake2b(raw, digest_size=8).hexdigest()}"
    return key


def _of_models(
    model: str,
    requests: LimitSpec | None,
    tokens: LimitSpec | None,
    estimate: Callable[[bytes], int] | None,
    account: str | tuple[str, ...],
    used: Callable[[bytes], int | None],
    *,
    together: bool,
) -> APILimits:
    _check_account(account)
    if not isinstance(together, bool):
        raise ConfigurationError(f"together={short_repr(together)} is neither True nor False")
    if not isinstance(model, str):
        raise ConfigurationError(f"model={short_repr(model)} is no name of models, as 'gpt-*' is")
    if estimate is not None and not callable(estimate):
        raise ConfigurationError(f"estimate={short_repr(estimate)} is no function of a body")
    if estimate is not None:
        check_takes("estimate", estimate, 1)
    return APILimits(
        pattern=model, requests=_parsed(requests), tokens=_parsed(tokens), account=account,
        part=_model, estimate=estimate, used=used, together=together,
    )  # fmt: skip


def _check_account(account: Any) -> None:
    if account is not None and not isinstance(account, (str, tuple)):
        raise ConfigurationError(f"account={short_repr(account)} is no name of an account")


def _parsed(limits: LimitSpec | None) -> tuple[Limit, ...]:
    return () if limits is None else parse_limits(limits)


def _model(request: Any, fields: dict[str, Any]) -> str:
    return str(fields.get("model", ""))[:_MAX_NAME]


_GITHUB_RESOURCES = ("core", "search", "code_search", "graphql")


def _github_resource(request: Any, fields: dict[str, Any]) -> str:
    url = request.url
    path = urlsplit(url).path if isinstance(url, str) else str(url.path)
    if path.startswith("/search/code"):
        return "code_search"
    first = path.split("/", 2)[1] if "/" in path else ""
    return first if first in ("search", "graphql") else "core"


def _openai_tokens(body: bytes) -> int | None:
    return _last(b"total_tokens", body)


def _anthropic_tokens(body: bytes) -> int | None:
    # What is read from the cache counts for none of the limits of current models.
    names = (b"input_tokens", b"cache_creation_input_tokens", b"output_tokens")
    found = [_last(name, body) for name in names]
    return None if found[2] is None else sum(each or 0 for each in found)


def _last(name: bytes, body: bytes) -> int | None:
    """Return the last number of this name in a body of JSON, or of events of JSON. It may have lost
    its middle (`BodyWatch`), so it is not parsed; in a text, a quote would have a backslash.
    """
    found = re.findall(rb'"%s"\s*:\s*(\d{1,12})' % name, body)
    return int(found[-1]) if found else None
