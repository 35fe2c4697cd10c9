"""Finds the pods behind a DNS name, and resolves it again when the TTL of its records ends.

A failure (no response, SERVFAIL) changes nothing: the last pods stay in use. An answer without records (NXDOMAIN, or
none of the type) means that there are no pods, but only if every answer for `ABSENT_AFTER_S` says so: DNS servers give
that answer for moments while they restart or while a Service changes.

dnspython resolves, which reports TTLs and SRV records, unlike the system's resolver: a millisecond of CPU for 20
records, once in a TTL.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import dns.asyncresolver
import dns.exception
import dns.rdatatype
import dns.resolver

from router.addresses import read_address
from router.config.pod_schema import DNS_PORT, DnsName
from router.errors import ConfigError
from router.feeds.discovery.membership import ListedPod, SourceStatus
from router.feeds.discovery.pod_facts import discovered_pod

MIN_TTL_S, MAX_TTL_S = 1.0, 300.0
RETRY_S = 2.0
ABSENT_AFTER_S = 30.0
MAX_ADDRESSES = 10_000
TIMEOUT_S = 5.0
NO_RECORDS_TTL_S = 2.0
EDNS_BYTES = 1232
"""Larger answers come over TCP."""
_ADDRESSES = (dns.rdatatype.A, dns.rdatatype.AAAA)


@dataclass(frozen=True, slots=True)
class DnsRecords:
    """The (host, port) pairs of a name, none if it has no records, and for how long they are valid."""

    addresses: tuple[tuple[str, int], ...]
    ttl_s: float


class DnsUnavailable(Exception):
    """The name could not be resolved, which says nothing about it."""


Resolve: TypeAlias = Callable[[DnsName], Awaitable[DnsRecords]]
"""Raises `DnsUnavailable`."""


@dataclass(slots=True, eq=False)
class DnsPods:
    entry: DnsName
    status: SourceStatus
    resolve: Resolve
    _absent_since_s: float | None = None

    async def __aiter__(self) -> AsyncGenerator[Sequence[ListedPod], None]:
        last: object = None
        while True:
            pause_s, records = RETRY_S, None
            try:
                records = await self.resolve(self.entry)
            except DnsUnavailable as error:
                self.status.fail(str(error))
            if records is not None and self._is_certain(records):
                self.status.confirm()
                pause_s = min(max(records.ttl_s, MIN_TTL_S), MAX_TTL_S)
                addresses = sorted(set(records.addresses))[:MAX_ADDRESSES]
                if addresses != last:
                    last = addresses
                    yield self._pods(addresses)
            await asyncio.sleep(pause_s)

    def _is_certain(self, records: DnsRecords) -> bool:
        """Whether the records can be used: no records only after `ABSENT_AFTER_S`."""
        now_s = asyncio.get_running_loop().time()
        if records.addresses:
            self._absent_since_s = None
            return True
        if self._absent_since_s is None:
            self._absent_since_s = now_s
        certain = now_s - self._absent_since_s >= ABSENT_AFTER_S
        if not certain:
            self.status.fail(
                f"{self.entry.name} has no records; without any for {ABSENT_AFTER_S:g} s its pods are gone"
            )
        return certain

    def _pods(self, addresses: Sequence[tuple[str, int]]) -> list[ListedPod]:
        pods = []
        for host, port in addresses:
            try:
                pods.append(ListedPod(discovered_pod(host, port, self.entry.pod)))
            except ConfigError as error:
                self.status.fail(str(error))
        return pods


# --- resolving ---


async def resolve(entry: DnsName) -> DnsRecords:
    """Uses A, else AAAA records of the name; SRV records if it begins with `_`. Raises `DnsUnavailable`."""
    try:
        resolver = _resolver(entry.server)
        if entry.port is None:
            return _targets(await _query(resolver, entry.name, dns.rdatatype.SRV))
        for kind in _ADDRESSES:
            answer = await _query(resolver, entry.name, kind)
            if answer is not None:
                return DnsRecords(tuple((record.address, entry.port) for record in answer), _ttl_s(answer))
    except (dns.exception.DNSException, OSError) as error:
        raise DnsUnavailable(f"{entry.name}: {type(error).__name__}: {error!s:.200}") from error
    return DnsRecords((), NO_RECORDS_TTL_S)


def _resolver(server: str) -> dns.asyncresolver.Resolver:
    """Reads /etc/resolv.conf again, which may have changed."""
    resolver = dns.asyncresolver.Resolver(configure=not server)
    resolver.use_edns(0, 0, EDNS_BYTES)
    if server:
        host, resolver.port = read_address(server, DNS_PORT)
        resolver.nameservers = [host]
    return resolver


async def _query(resolver: dns.asyncresolver.Resolver, name: str, kind: dns.rdatatype.RdataType) -> Any:
    """The answer; None if the name has no such records."""
    try:
        return await resolver.resolve(name, kind, search=True, lifetime=TIMEOUT_S)
    except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
        return None


def _targets(answer: Any) -> DnsRecords:
    """The targets of SRV records, by the address that the answer adds for each, else by name."""
    if answer is None:
        return DnsRecords((), NO_RECORDS_TTL_S)
    added = {
        rrset.name: record.address
        for rrset in reversed(answer.response.additional)
        if rrset.rdtype in _ADDRESSES
        for record in rrset
    }
    found = ((added.get(record.target) or record.target.to_text(omit_final_dot=True), record.port) for record in answer)
    return DnsRecords(tuple(found), _ttl_s(answer))


def _ttl_s(answer: Any) -> float:
    return float(answer.chaining_result.minimum_ttl)
