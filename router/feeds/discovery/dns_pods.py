"""Finds the pods behind a DNS name, and resolves it again when the TTL of its records ends.

A failure (no response, SERVFAIL) changes nothing: the last pods stay in use. An answer without records (NXDOMAIN, or
none of the type) means that there are no pods, but only if every answer for `ABSENT_AFTER_S` says so: DNS servers give
that answer for moments while they restart or while a Service changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from router.config.discovery_schema import DnsName
from router.errors import ConfigError
from router.feeds.discovery.membership import ListedPod
from router.feeds.discovery.pod_facts import discovered_pod
from router.feeds.discovery.source_status import SourceStatus

MIN_TTL_S, MAX_TTL_S = 1.0, 300.0
RETRY_S = 2.0
ABSENT_AFTER_S = 30.0
MAX_ADDRESSES = 10_000


@dataclass(frozen=True, slots=True)
class DnsRecords:
    """The (host, port) pairs of a name, none if it has no records, and for how long they are valid."""

    addresses: tuple[tuple[str, int], ...]
    ttl_s: float


class DnsUnavailable(Exception):
    """The name could not be resolved, which says nothing about it."""


Resolve: TypeAlias = Callable[[DnsName], Awaitable[DnsRecords]]
"""Raises `DnsUnavailable`."""


class DnsPods:
    def __init__(self, entry: DnsName, status: SourceStatus, resolve: Resolve) -> None:
        self._entry = entry
        self.status = status
        self._resolve = resolve
        self._absent_since_s: float | None = None

    async def __aiter__(self) -> AsyncGenerator[Sequence[ListedPod], None]:
        last: object = None
        while True:
            pause_s, records = RETRY_S, None
            try:
                records = await self._resolve(self._entry)
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
                f"{self._entry.name} has no records; without any for {ABSENT_AFTER_S:g} s its pods are gone"
            )
        return certain

    def _pods(self, addresses: Sequence[tuple[str, int]]) -> list[ListedPod]:
        pods = []
        for host, port in addresses:
            try:
                pods.append(ListedPod(discovered_pod(host, port, self._entry.pod)))
            except ConfigError as error:
                self.status.fail(str(error))
        return pods
