"""Which other hosts does a handoff name? The decode pod connects to them: a prefill pod may name its own host only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from router.addresses import read_address, url_host
from router.guards import Bound
from router.types import Pod

PARAMETERS = Bound("parameters of a handoff that may name a host", 64 * 1024, 4000)
"""All together, and the names of all parameters. Lists of numbers are not searched, however long they are."""
MAX_DEPTH = 8
_VALUES = msgspec.json.Decoder(list[Any])
_NAMES_AN_ADDRESS = re.compile(
    r"(?:^|_)(?:host|hostname|ip|addr|address|endpoint|url)(?:e?s)?(?:_port)?$", re.IGNORECASE
)
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def foreign_address(params: Mapping[str, Any], prefill: Pod) -> str:
    """The first address in the parameters whose host is neither the pod's own nor one of its `handoff_hosts`; empty if
    there is none. What cannot be read counts as one. Strings that only engines can read are not searched."""
    own = {url_host(prefill.url), *prefill.handoff_hosts}
    if own & _LOOPBACK:
        own |= _LOOPBACK
    try:
        PARAMETERS.check_items(len(params))
        PARAMETERS.check_size(sum(map(len, params)))
        searched = {name: raw for name, value in params.items() if (raw := _searched(name, value))}
        values = PARAMETERS.json(b"[%b]" % b",".join(searched.values()), _VALUES)
        for name, value in zip(searched, values, strict=True):
            for address in _addresses(value, MAX_DEPTH, is_named=_NAMES_AN_ADDRESS.search(name) is not None):
                if address and _host_of(address) not in own:
                    return f"{name}: {address}"
    except ValueError as error:
        return str(error)
    return ""


def _searched(name: str, value: Any) -> bytes:
    """The value as JSON, if it may name a host; else nothing."""
    raw = bytes(value) if isinstance(value, msgspec.Raw) else msgspec.json.encode(value)
    is_text = raw[:1] in (b"{", b"[") and b'"' in raw
    if not is_text and _NAMES_AN_ADDRESS.search(name) is None:
        return b""
    PARAMETERS.check_size(len(raw))
    return raw


def _addresses(value: Any, levels: int, *, is_named: bool) -> Iterator[str]:
    """Values under names of addresses; of numbers, too: an IPv4 address may be one."""
    if not levels:
        raise ValueError("nested too deeply")
    if isinstance(value, Mapping):
        for name, inner in value.items():
            is_address = _NAMES_AN_ADDRESS.search(name) is not None or (is_named and not name.endswith("port"))
            yield from _addresses(inner, levels - 1, is_named=is_address)
    elif isinstance(value, list):
        for inner in value:
            yield from _addresses(inner, levels - 1, is_named=is_named)
    elif is_named and value is not None:
        yield str(value)


def _host_of(address: str) -> str:
    """The host of `host`, `host:port`, or a URL; something else where parsers might differ."""
    authority = address.rpartition("://")[2].partition("/")[0].rpartition("@")[2]
    try:
        return read_address(authority, 0)[0]
    except ValueError:
        return authority
