"""What the integrations with web frameworks share. Imports no framework.

An integration is a module of its own that defines

- a subclass of `ClientAddress` with `peer` and `header_values`, and `client_address`, an object of
  it,
- a subclass of `RequestLimit` with `name_of`,
- a subclass of `AsyncRateLimits` or `BlockingRateLimits` with `limit_type`, `address_type`, and
  `error_type`: a subclass of `RateLimited` that is also an exception of the framework,

keeps one `LimitedRequest` with each request, and

    decision = await rate_limits.run(limit.decide(request, limited_request))   # may raise
    for name, value in limited_request.fields_to_set(status, headers.get).items(): ...
    if limited_request.needs_response:                     # after the response, or without one
        await rate_limits.run(limited_request.settle(response, status))

without `await` where nothing is awaited.
"""

from ...support.async_use import result_of
from .address import ClientAddress
from .fields import DRAFT, EXPOSED_HEADERS, PROBLEM_MEDIA_TYPE, PROBLEM_SCHEMA, Headers
from .rate_limits import AsyncRateLimits, BlockingRateLimits, DefaultLimits, MakesLimits
from .request_limit import (
    NOT_GIVEN,
    LimitedRequest,
    RateLimited,
    RequestLimit,
    UnwatchedRequest,
    decided,
)
from .routes import ExemptsViews, replace_default
from .together import decide_all

__all__ = [
    "DRAFT",
    "EXPOSED_HEADERS",
    "NOT_GIVEN",
    "PROBLEM_MEDIA_TYPE",
    "PROBLEM_SCHEMA",
    "AsyncRateLimits",
    "BlockingRateLimits",
    "ClientAddress",
    "DefaultLimits",
    "ExemptsViews",
    "Headers",
    "LimitedRequest",
    "MakesLimits",
    "RateLimited",
    "RequestLimit",
    "UnwatchedRequest",
    "decide_all",
    "decided",
    "replace_default",
    "result_of",
]
