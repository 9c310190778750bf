"""Whose calls of an API count together, and what is known of the limits of some APIs.

                key                                          tokens of a call are
    openai      host, account (digest), model of the body    those of its `usage`
    anthropic   host, account (digest), model of the body    input and output, without cache reads
    github      host, account (digest), `core`, `search`,    -
                `code_search` or `graphql` by the path

Tokens are reserved by an estimate, and what the response reports is what is counted then.
"""

from __future__ import annotations

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

_MAX_NAME = 100
"""Characters of the name of a model in a key. A request may have any text there."""


def by_host(request: Any) -> str:
    """Return the host that a request goes to: the default `key`."""
    url = request.url
    host = urlsplit(url).hostname if isinstance(url, str) else url.host
    return str(host or "").lower()


def by_header(name: str) -> Callable[[Any], str]:
    """Return a key function: the host, and a digest of this header field, such as the account in
    `Authorization`. A secret never becomes a key.
    """
    return lambda request: _with_digest(by_host(request), request, (name,))


@dataclass(frozen=True, kw_only=True)
class APILimits:
    """Limits of those calls of an API whose `part` matches `pattern`. Made by `openai`,
    `anthropic` and `github`.
    """

    pattern: str
    requests: tuple[Limit, ...]
    tokens: tuple[Limit, ...]
    account: tuple[str, ...]
    """Names of header fields of which the first that is there tells accounts apart."""
    part: Callable[[Any, dict[str, Any]], str]
    """`part(request, body)`: what of the API is called, such as the model."""
    estimate: Callable[[bytes], int]
    """The tokens that are reserved for a call with this body."""
    used: Callable[[bytes], int | None]
    """The tokens that a response reports, by its body; None where it does not."""

    def key(self, host: str, request: Any, part: str) -> str:
        """Return the key of a call."""
        return f"{_with_digest(host, request, self.account)}:{part}"


def openai(
    model: str = "*",
    *,
    requests: LimitSpec | None = None,
    tokens: LimitSpec | None = None,
    estimate: Callable[[bytes], int] | None = None,
) -> APILimits:
    """Return the limits of calls of models that match `model` (`*`: any characters), for APIs in
    the manner of OpenAI's: of each account and model. `estimate(body)` are the tokens that a call
    reserves; by default a quarter of the bytes of its body, and its largest answer.
    """
    return _of_models(
        model, requests, tokens, estimate, ("Authorization", "api-key"), _openai_tokens
    )


def anthropic(
    model: str = "*",
    *,
    requests: LimitSpec | None = None,
    tokens: LimitSpec | None = None,
    estimate: Callable[[bytes], int] | None = None,
) -> APILimits:
    """`openai` for Anthropic's API."""
    return _of_models(
        model, requests, tokens, estimate, ("x-api-key", "Authorization"), _anthropic_tokens
    )


def github(requests: LimitSpec | None = None, *, resource: str = "*") -> APILimits:
    """Return the limits of each account for one resource of GitHub's API: `core`, `search`,
    `code_search` or `graphql`, which the path tells.
    """
    if not isinstance(resource, str) or not fnmatch.filter(_GITHUB_RESOURCES, resource):
        raise ConfigurationError(
            f"resource={short_repr(resource)} is none of {', '.join(_GITHUB_RESOURCES)}"
        )
    return APILimits(
        pattern=resource, requests=_parsed(requests), tokens=(), account=("Authorization",),
        part=_github_resource, estimate=estimate_tokens, used=lambda body: None,
    )  # fmt: skip


def choose(
    known: Sequence[APILimits], request: Any, body: bytes | None
) -> tuple[APILimits, str] | None:
    """Return the first of these limits that holds for a call, and the part that it calls."""
    try:
        fields = json.loads(body or b"{}")
    except (ValueError, RecursionError):  # the API will say what is wrong with it
        fields = {}
    for each in known:
        part = each.part(request, fields if isinstance(fields, dict) else {})
        if fnmatch.fnmatchcase(part, each.pattern):
            return each, part
    return None


def estimate_tokens(body: bytes) -> int:
    """Return a quarter of the bytes of a request, and the most tokens that it lets the model
    answer.
    """
    answer = re.search(rb'"max_(?:completion_|output_)?tokens"\s*:\s*(\d{1,12})', body)
    return max(1, len(body) // 4 + (int(answer[1]) if answer else 0))


def _with_digest(key: str, request: Any, names: tuple[str, ...]) -> str:
    """Return `key` with a digest of the first of these header fields that the request has."""
    for name in names:
        value = request.headers.get(name)
        if value is not None:
            raw = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
            return f"{key}:{hashlib.blake2b(raw, digest_size=8).hexdigest()}"
    return key


def _path_of(request: Any) -> str:
    """Return the path of the URL of a request, without its query."""
    url = request.url
    return urlsplit(url).path if isinstance(url, str) else str(url.path)


def _of_models(
    model: str,
    requests: LimitSpec | None,
    tokens: LimitSpec | None,
    estimate: Callable[[bytes], int] | None,
    account: tuple[str, ...],
    used: Callable[[bytes], int | None],
) -> APILimits:
    if not isinstance(model, str):
        raise ConfigurationError(f"model={short_repr(model)} is no name of models, as 'gpt-*' is")
    if estimate is not None and not callable(estimate):
        raise ConfigurationError(f"estimate={short_repr(estimate)} is no function of a body")
    if estimate is not None:
        check_takes("estimate", estimate, 1)
    return APILimits(
        pattern=model, requests=_parsed(requests), tokens=_parsed(tokens), account=account,
        part=_model, estimate=estimate or estimate_tokens, used=used,
    )  # fmt: skip


def _parsed(limits: LimitSpec | None) -> tuple[Limit, ...]:
    return () if limits is None else parse_limits(limits)


def _model(request: Any, fields: dict[str, Any]) -> str:
    return str(fields.get("model", ""))[:_MAX_NAME]


_GITHUB_RESOURCES = ("core", "search", "code_search", "graphql")


def _github_resource(request: Any, fields: dict[str, Any]) -> str:
    path = _path_of(request)
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
