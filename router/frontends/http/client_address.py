"""Names clients without a key by their address: behind trusted proxies, the one that these report."""

from __future__ import annotations

from functools import cache, lru_cache
from ipaddress import IPv6Address, IPv6Network
from typing import Any, cast

from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from router.request.inbound import HeaderList

IPV4_IN_IPV6 = "::ffff:"
MAX_ADDRESS = 45
"""Characters of an address that are compared: all of an IPv6 address."""


def host_in(address: object) -> str:
    """The host in a socket's address of a client; empty for a Unix socket. An IPv4 client of a listener for IPv6 and
    IPv4 has the address ::ffff:a.b.c.d there."""
    return str(address[0]).removeprefix(IPV4_IN_IPV6) if isinstance(address, tuple) else ""


@cache
def trusted_proxies(allowed: str) -> ProxyHeadersMiddleware:
    """uvicorn's check of `forwarded_allow_ips`. The middleware itself is never called."""
    return ProxyHeadersMiddleware(cast(Any, None), allowed)


def client_network(address: str, proxies: ProxyHeadersMiddleware) -> str:
    """The network of a client; "" for a proxy or no address."""
    return network_of(address) if address and address not in proxies.trusted_hosts else ""


def network_of(address: str) -> str:
    """The address of a client, or its network of IPv6, in which it may choose any."""
    return _network_of(address[:MAX_ADDRESS]) if ":" in address else address[:MAX_ADDRESS]


@lru_cache(4096)
def _network_of(address: str) -> str:
    try:
        return str(IPv6Network((int(IPv6Address(address)) >> 64 << 64, 64)))
    except ValueError:
        return address


def forwarded_for(host: str, headers: HeaderList, proxies: ProxyHeadersMiddleware) -> str:
    """The client's address: from x-forwarded-for if `host`, which connected, is a trusted proxy."""
    trusted = proxies.trusted_hosts
    if host not in trusted:
        return host
    forwarded = [value for name, value in headers if name == b"x-forwarded-for"]
    chain = b", ".join(forwarded).decode("latin-1")
    return trusted.get_trusted_client_address(chain)[0] or host
