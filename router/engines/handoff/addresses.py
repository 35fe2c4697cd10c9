"""Which other hosts does a handoff name? The decode pod connects to them: a prefill pod may name its own host only."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from router.engines.adapter import host
from router.guards import Bound
from router.types import Pod

PARAMETERS = Bound("a parameter of a handoff", 1024 * 1024, 50_000)
MAX_DEPTH = 8
_ANY = msgspec.json.Decoder()
_NAMES_AN_ADDRESS = re.compile(
    r"(?:^|_)(?:host|hostname|ip|addr|address|endpoint|url)(?:e?s)?(?:_port)?$", re.IGNORECASE
)
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def foreign_address(params: Mapping[str, Any], prefill: Pod) -> str:
    """The first address in the parameters whose host is neither the pod's own nor one of its `handoff_hosts`; empty if
    there is none. What cannot be read counts as one. Strings that only engines can read are not searched."""
    own = {host(prefill), *prefill.handoff_hosts}
    if own & _LOOPBACK:
        own |= _LOOPBACK
    for name, value in params.items():
        is_named = _NAMES_AN_ADDRESS.search(name) is not None
        raw = bytes(value) if isinstance(value, msgspec.Raw) else msgspec.json.encode(value)
        if not is_named and (raw[:1] not in (b"{", b"[") or b'"' not in raw):
            continue
        try:
            found = list(_addresses(PARAMETERS.json(raw, _ANY), MAX_DEPTH, is_named=is_named))
        except ValueError as error:
            return f"{name}: {error}"
        for address in found:
            if address and _host_of(address) not in own:
                return f"{name}: {address}"
    return ""


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
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0] if authority.count(":") == 1 else authority
