"""The pods behind a DNS name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.pod_schema import DnsName
from router.feeds.discovery.dns_pods import (
    ABSENT_AFTER_S,
    MAX_TTL_S,
    RETRY_S,
    DnsPods,
    DnsRecords,
    DnsUnavailable,
    resolve,
)
from router.feeds.discovery.membership import ListedPod, SourceStatus
from tests.kit.virtual_time import run_virtually

NAME = DnsName(name="vllm.ns.svc", port=8000)
NONE: DnsRecords = DnsRecords((), 2.0)
Answer = DnsRecords | None


def addresses(*hosts: str, ttl_s: float = 5.0) -> DnsRecords:
    return DnsRecords(tuple((host, 8000) for host in hosts), ttl_s)


def sets_after(answers: Sequence[tuple[float, Answer]], until_s: float) -> tuple[list[list[str]], list[float]]:
    """The sets of pods, and the times of queries, where each answer (None: a failure) holds from a time on."""

    async def main() -> tuple[list[list[str]], list[float]]:
        loop, sets, queries = asyncio.get_running_loop(), list[list[str]](), list[float]()

        async def answer(_: DnsName) -> DnsRecords:
            queries.append(loop.time())
            found = [records for since_s, records in answers if since_s <= loop.time()][-1]
            if found is None:
                raise DnsUnavailable("SERVFAIL")
            return found

        async def follow() -> None:
            async for pods in DnsPods(NAME, SourceStatus("dns"), answer):
                sets.append(hosts(pods))

        task = asyncio.create_task(follow())
        await asyncio.sleep(until_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return sets, queries

    return run_virtually(main())


def hosts(pods: Sequence[ListedPod]) -> list[str]:
    return [pod.config.url.removeprefix("http://").removesuffix(":8000") for pod in pods]


@pytest.mark.parametrize(("ttl_s", "between_s"), [(30.0, 30.0), (0.0, 1.0), (86400.0, MAX_TTL_S)])
def test_a_name_is_resolved_again_when_its_ttl_ends(ttl_s: float, between_s: float) -> None:
    """Within bounds."""
    _, queries = sets_after([(0, addresses("10.0.0.1", ttl_s=ttl_s))], 3.5 * between_s)
    assert queries == pytest.approx([0, between_s, 2 * between_s, 3 * between_s])


def test_a_failure_keeps_the_last_pods() -> None:
    """For any time."""
    two, three = addresses("10.0.0.1", "10.0.0.2"), addresses("10.0.0.3")
    sets, _ = sets_after([(0, None), (10, two), (20, None), (9000, three)], 9010)
    assert sets == [["10.0.0.1", "10.0.0.2"], ["10.0.0.3"]]


def test_no_records_mean_no_pods_once_they_last() -> None:
    """Until then the last pods stay; a single answer with records begins anew."""
    one = addresses("10.0.0.1")
    assert sets_after([(0, one), (10, NONE), (10 + ABSENT_AFTER_S - 5, one)], 100)[0] == [["10.0.0.1"]]
    assert sets_after([(0, one), (10, NONE)], 20 + ABSENT_AFTER_S)[0] == [["10.0.0.1"], []]


@given(st.lists(st.tuples(st.integers(1, 40), st.sampled_from([None, NONE, *map(addresses, "abc")])), max_size=12))
def test_the_pods_are_those_of_the_last_answer_with_records(history: list[tuple[int, Answer]]) -> None:
    """Once the answers stay the same."""
    at, answers = 0.0, [(0.0, addresses("a"))]
    timeline: list[tuple[float, Answer]] = list(answers)
    for after_s, answer in history:
        at += after_s
        timeline.append((at, answer))
    sets, _ = sets_after(timeline, at + ABSENT_AFTER_S + 3 * RETRY_S + 5)
    last = timeline[-1][1]
    if last is not None:
        assert sets[-1] == [host for host, _ in last.addresses]
    assert all(one != other for one, other in pairwise(sets))


class DnsServer(asyncio.DatagramProtocol):
    """Answers with `reply(query, response)`."""

    def __init__(self, reply: Callable[[dns.message.Message], None]) -> None:
        self._reply = reply
        self._transport: asyncio.DatagramTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        response = dns.message.make_response(dns.message.from_wire(data))
        self._reply(response)
        self._transport.sendto(response.to_wire(), addr)


@asynccontextmanager
async def dns_server(reply: Callable[[dns.message.Message], None]) -> AsyncIterator[str]:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: DnsServer(reply), local_addr=("127.0.0.1", 0))
    try:
        host, port = transport.get_extra_info("sockname")
        yield f"{host}:{port}"
    finally:
        transport.close()


def records(section: list[dns.rrset.RRset], *rows: str) -> None:
    for row in rows:
        name, ttl, kind, text = row.split(" ", 3)
        section.append(dns.rrset.from_text(name, int(ttl), "IN", kind, text))


@pytest.mark.net
@pytest.mark.anyio
async def test_addresses_and_services_are_read_with_their_ttl() -> None:
    """AAAA only where there is no A; SRV targets by the added address, else by name."""

    def reply(response: dns.message.Message) -> None:
        question = response.question[0]
        name, kind = question.name.to_text(), question.rdtype.name
        if (name, kind) == ("four.x.", "A"):
            records(response.answer, "four.x. 7 A 10.0.0.1")
        elif (name, kind) == ("six.x.", "AAAA"):
            records(response.answer, "six.x. 9 AAAA fd00::1")
        elif kind == "SRV":
            both = dns.rrset.from_text("_http._tcp.x.", 11, "IN", "SRV", "0 1 8000 a.x.", "0 1 8001 b.x.")
            response.answer.append(both)
            records(response.additional, "a.x. 11 A 10.0.0.9")

    async with dns_server(reply) as server:
        assert await resolve(DnsName(name="four.x.", port=80, server=server)) == DnsRecords((("10.0.0.1", 80),), 7)
        assert await resolve(DnsName(name="six.x.", port=80, server=server)) == DnsRecords((("fd00::1", 80),), 9)
        found = await resolve(DnsName(name="_http._tcp.x.", server=server))
        assert (set(found.addresses), found.ttl_s) == ({("10.0.0.9", 8000), ("b.x", 8001)}, 11)
        assert not (await resolve(DnsName(name="none.x.", port=80, server=server))).addresses


@pytest.mark.net
@pytest.mark.anyio
@pytest.mark.parametrize(("code", "fails"), [(dns.rcode.NXDOMAIN, False), (dns.rcode.SERVFAIL, True)])
async def test_a_name_that_does_not_exist_differs_from_a_failure(code: dns.rcode.Rcode, fails: bool) -> None:
    """Only a failure says nothing about the pods."""
    async with dns_server(lambda response: response.set_rcode(code)) as server:
        entry = DnsName(name="x.y.", port=80, server=server)
        if fails:
            with pytest.raises(DnsUnavailable):
                await resolve(entry)
        else:
            assert not (await resolve(entry)).addresses
