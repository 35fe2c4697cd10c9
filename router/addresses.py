"""Reads and writes the addresses of servers: hosts, `host:port` and URLs, with IPv6 addresses in brackets where needed.

No other module takes an address apart or puts one together. No message repeats an address: one may hold a password. An
address with a zone (`fe80::1%eth0`) means something on one machine only: a listener takes it, nothing else does.
"""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import TypeAlias
from urllib.parse import SplitResult, urlsplit

from router.guards import in_range

MAX_PORT = 65_535
HostPort: TypeAlias = tuple[str, int]
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_ADDRESS = re.compile(r"(\[[^][]*\]|[^][:]*)(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}


def bracketed(host: str) -> str:
    """The host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def join_address(host: str, port: int | str) -> str:
    """`host:port`."""
    return f"{bracketed(host)}:{port}"


def read_host(text: str) -> str:
    """A host name in lower case, or an IP address in its shortest form, without brackets. Raises `ValueError`."""
    name = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if name is text and _NAME.fullmatch(name):
        return name.lower()
    if "%" in name:
        raise ValueError(
            "has a zone (%), which is valid on one machine only; use an address without one, such as fd00::1"
        )
    try:
        return str(IPv6Address(name))
    except ValueError:
        raise ValueError("must be a host name or an IP address, without scheme and port") from None


def read_address(text: str, default_port: int | None = None) -> HostPort:
    """The parts of `host:port`, and of a host alone if there is a default port. Raises `ValueError`."""
    found = _ADDRESS.fullmatch(text)
    if found is None and default_port is not None:
        return read_host(text), default_port
    port = int(found[2]) if found and found[2] else default_port
    if found is None or port is None or in_range(port, 0, MAX_PORT) is None:
        raise ValueError("needs HOST:PORT, with an IPv6 address in brackets: [::1]:8000")
    return read_host(found[1]), port


def split_url(url: str) -> SplitResult:
    """The parts of a URL. Raises `ValueError` for a wrong host or port."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:  # its message contains the value
        raise ValueError("must look like http://host:port, an IPv6 address in brackets: http://[::1]:8000") from None
    if host:
        read_host(host)
    return parts


@lru_cache(maxsize=4096)
def url_address(url: str) -> HostPort:
    """Host ("" without one) and port of a URL, by default that of its scheme."""
    parts = split_url(url)
    return (parts.hostname and read_host(parts.hostname)) or "", parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)


def url_host(url: str) -> str:
    """The host of a URL, an IPv6 address in its shortest form without brackets; "" if it has none."""
    return url_address(url)[0]


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to the host."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
