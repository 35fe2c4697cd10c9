"""The address of a client behind trusted proxies, by uvicorn's rules (`forwarded_allow_ips`)."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from router.request.inbound import HeaderList


@cache
def trusted_proxies(allowed: str) -> ProxyHeadersMiddleware:
    """uvicorn's check of `forwarded_allow_ips`. The middleware itself is never called."""
    return ProxyHeadersMiddleware(cast(Any, None), allowed)


def forwarded_for(host: str, headers: HeaderList, proxies: ProxyHeadersMiddleware) -> str:
    """The client's address: from x-forwarded-for if `host`, which connected, is a trusted proxy."""
    trusted = proxies.trusted_hosts
    if host not in trusted:
        return host
    forwarded = [value for name, value in headers if name == b"x-forwarded-for"]
    chain = b", ".join(forwarded).decode("latin-1")
    return trusted.get_trusted_client_address(chain)[0] or host
