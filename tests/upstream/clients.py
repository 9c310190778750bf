"""Every client as one function `call(url, ...)`, against an upstream that is a function."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import aiohttp
import httpx
import httpx2
import requests
from multidict import CIMultiDict
from requests.adapters import HTTPAdapter
from requests.structures import CaseInsensitiveDict
from yarl import URL as URL_

import distwindow.contrib.aiohttp as of_aiohttp
import distwindow.contrib.httpx as of_httpx
import distwindow.contrib.httpx2 as of_httpx2
import distwindow.contrib.requests as of_requests
from distwindow.contrib.upstream import AsyncUpstreamLimits, UpstreamLimited, UpstreamLimits

URL = "https://api.example/v1/items"


class Answer(NamedTuple):
    """What the upstream answers."""

    status: int = 200
    headers: Mapping[str, str] = MappingProxyType({})


Upstream = Callable[[str], Answer]
"""Answers the call of a URL; raises what the client raises where there is no answer."""


class Client:
    """One client. `call` returns the status, and raises what the client raises."""

    is_async = False
    body_argument = "content"
    limited: type[UpstreamLimited]
    store_error: type[Exception]
    library_error: type[Exception]

    def __init__(self, upstream: Upstream, limits: Any) -> None:
        self.upstream = upstream
        self.limits = limits

    def call(self, url: str = URL, **options: Any) -> int:
        return asyncio.run(self.calling(url, **options))

    async def calling(self, url: str = URL, **options: Any) -> int:
        raise NotImplementedError  # `call` of those that block

    def close(self) -> None:
        if self.is_async:
            asyncio.run(self.limits.aclose())
        else:
            self.limits.close()


class _OfHTTPX(Client):
    module: Any
    integration: Any

    def __init__(self, upstream: Upstream, limits: Any) -> None:
        super().__init__(upstream, limits)
        self.limited = self.integration.UpstreamLimited
        self.store_error = self.integration.UpstreamStoreError
        self.library_error = self.module.TransportError

    def _transport(self) -> Any:
        def handle(request: Any) -> Any:
            answer = self.upstream(str(request.url))
            return self.module.Response(answer.status, headers=answer.headers)

        return self.module.MockTransport(handle)

    def call(self, url: str = URL, method: str = "GET", **options: Any) -> int:
        transport = self.integration.RateLimitTransport(self.limits, self._transport())
        with self.module.Client(transport=transport) as client:
            return int(client.request(method, url, **options).status_code)


class _OfAsyncHTTPX(_OfHTTPX):
    is_async = True

    def call(self, url: str = URL, method: str = "GET", **options: Any) -> int:
        return asyncio.run(self.calling(url, method, **options))

    async def calling(self, url: str = URL, method: str = "GET", **options: Any) -> int:
        transport = self.integration.AsyncRateLimitTransport(self.limits, self._transport())
        async with self.module.AsyncClient(transport=transport) as client:
            return int((await client.request(method, url, **options)).status_code)


class HTTPX2(_OfHTTPX):
    module, integration = httpx2, of_httpx2


class AsyncHTTPX2(_OfAsyncHTTPX):
    module, integration = httpx2, of_httpx2


class HTTPX(_OfHTTPX):
    module, integration = httpx, of_httpx


class AsyncHTTPX(_OfAsyncHTTPX):
    module, integration = httpx, of_httpx


class Requests(Client):
    body_argument = "data"
    limited, store_error = of_requests.UpstreamLimited, of_requests.UpstreamStoreError
    library_error = requests.RequestException

    def call(self, url: str = URL, method: str = "GET", **options: Any) -> int:
        upstream = self.upstream

        class Adapter(HTTPAdapter):
            def send(self, request: Any, *arguments: Any, **options: Any) -> Any:
                answer = upstream(request.url)
                response = requests.Response()
                response.status_code, response.url = answer.status, request.url
                response.headers = CaseInsensitiveDict(answer.headers)
                response.raw = io.BytesIO()
                response._content = b""
                return response

        class Limited(of_requests.RateLimitMixin, Adapter):
            pass

        with requests.Session() as session:
            session.mount("https://", Limited(self.limits))
            return session.request(method, url, **options).status_code


class AIOHTTP(Client):
    body_argument = "data"
    is_async = True
    limited, store_error = of_aiohttp.UpstreamLimited, of_aiohttp.UpstreamStoreError
    library_error = aiohttp.ClientError

    async def calling(self, url: str = URL, method: str = "GET", **options: Any) -> int:
        async def answer(request: Any, handler: Any) -> Any:
            found = self.upstream(str(request.url))

            class Response:
                content = None
                status, headers = found.status, CIMultiDict(found.headers)

                def release(self) -> None: ...

            return Response()

        middleware = of_aiohttp.rate_limit_middleware(self.limits)
        loop = asyncio.get_running_loop()
        request = aiohttp.ClientRequest(method, URL_(url), loop=loop, **options)
        response = await middleware(request, lambda request: answer(request, None))
        return int(response.status)


CLIENTS: Iterable[type[Client]] = (HTTPX2, AsyncHTTPX2, HTTPX, AsyncHTTPX, Requests, AIOHTTP)


def limits_of(client: type[Client], *arguments: Any, **options: Any) -> Any:
    return (AsyncUpstreamLimits if client.is_async else UpstreamLimits)(*arguments, **options)
