"""The comparison hides ids and times, and nothing else."""

from __future__ import annotations

import asyncio

import pytest

from tests.live_clients.comparison import differences
from tests.live_clients.recording_proxy import Exchange, recording

HEAD = b'data: {"id":"%b","created":%d,"choices":'
END = b"data: [DONE]\n\n"


def exchange(body: bytes, *headers: tuple[str, str]) -> Exchange:
    return Exchange("POST /v1/chat/completions", b"{}", 200, [*headers], body)


def differing(direct: Exchange, routed: Exchange) -> list[str]:
    return differences([[direct]], [[routed]])


def test_ids_and_times_may_differ() -> None:
    one, other = (HEAD % (name, at) + b"[]}\n\n" + END for name, at in ((b"a", 1), (b"bc", 2)))
    assert differing(exchange(one, ("content-length", "9")), exchange(other, ("content-length", "10"))) == []


@pytest.mark.parametrize(
    "other",
    [
        HEAD % (b"a", 1) + b'[],"usage":null}\n\n' + END,
        HEAD % (b"a", 1) + b'[],"system_fingerprint":"b"}\n\n' + END,
        HEAD % (b"a", 1) + b"[]}\n\n",
        HEAD % (b"a", 1) + b"[]}\n\n" + HEAD % (b"a", 1) + b'[],"usage":{}}\n\n' + END,
    ],
    ids=["a field", "the name of a masked field", "no end", "an event"],
)
def test_a_byte_more_or_less_is_a_difference(other: bytes) -> None:
    (found,) = differing(exchange(HEAD % (b"a", 1) + b"[]}\n\n" + END), exchange(other))
    assert found.startswith("POST /v1/chat/completions")


def test_a_header_of_the_answer_is_compared_and_those_of_the_router_are_not() -> None:
    body, own = b"{}", ("x-warmroute-pod", "a")
    direct = exchange(body, ("content-type", "application/json"), ("date", "now"))
    assert differing(direct, exchange(body, ("content-type", "application/json"), own)) == []
    assert differing(direct, exchange(body, ("content-type", "text/plain"), own))


def test_choices_may_come_in_another_order_and_not_with_another_text() -> None:
    first, second, changed = (
        HEAD % (b"a", 1) + b'[{"index":%d,"text":"%b"}]}\n\n' % one for one in ((0, b"a"), (1, b"b"), (1, b"c"))
    )
    direct = exchange(first + second + END)
    assert differing(direct, exchange(second + first + END)) == []
    assert differing(direct, exchange(first + changed + END))


def test_a_direct_response_that_a_routed_one_equals_is_enough() -> None:
    """Tokens of one pod may come as one piece or two."""
    one, other = exchange(b"ab"), exchange(b"a b")
    assert differences([[one], [other]], [[other], [other]]) == []
    assert len(differences([[one], [one]], [[other], [other]])) == 1
    assert differences([[one, one]], [[one]]) == ["the runs have [1, 2] requests"]


@pytest.mark.net
@pytest.mark.anyio
async def test_an_exchange_is_recorded_as_the_client_reads_it() -> None:
    """Two of them on one connection; the second is chunked and ends with the connection."""
    answers = [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 400 Bad Request\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n",
    ]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for one in answers:
            await reader.readuntil(b"\r\n\r\nbody")
            writer.write(one)
        writer.close()

    async with asyncio.timeout(30), await asyncio.start_server(answer, "127.0.0.1", 0) as pod:
        port = pod.sockets[0].getsockname()[1]
        async with recording(f"http://127.0.0.1:{port}") as proxy:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
            for one in answers:
                writer.write(b"POST /v1/x HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\nbody")
                assert await reader.readexactly(len(one)) == one
            writer.close()
    found = [(one.asked, one.asked_body, one.status, one.body) for one in proxy.exchanges]
    assert found == [("POST /v1/x", b"body", 200, b"{}"), ("POST /v1/x", b"body", 400, b"abc")]
