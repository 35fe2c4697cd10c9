"""Compressed request bodies: a pod receives them plain."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.schema import Limits
from router.errors import MalformedRequest
from router.frontends.http import http_edge
from router.frontends.http.http_edge import UNPACKED_INLINE_BYTES, unpack
from tests.api.edge_to_pod import AtPod, Chain, chain

zstd: Any = vars(http_edge)["zstd"]
"""From `compression` or `backports`, by the version of Python."""
PACK: dict[bytes, Callable[[bytes], bytes]] = {b"gzip": gzip.compress, b"x-gzip": gzip.compress, b"zstd": zstd.compress}
each_encoding = pytest.mark.parametrize("encoding", sorted(PACK))
LONG = b'{"a":"' + os.urandom(UNPACKED_INLINE_BYTES).hex().encode() + b'"}'
MARK = b"\xef\xbb\xbf"


@each_encoding
@given(body=st.binary(), more=st.integers(min_value=0, max_value=3))
def test_a_body_is_what_was_packed(encoding: bytes, body: bytes, more: int) -> None:
    packed = PACK[encoding](body)
    assert unpack(packed, encoding, len(body) + more) == body
    for wrong in (packed[:-1], packed + b"\0", packed + packed):
        with pytest.raises(MalformedRequest, match=encoding.decode()):
            unpack(wrong, encoding, len(body))


@each_encoding
@given(body=st.binary())
def test_any_bytes_are_a_body_or_refused(encoding: bytes, body: bytes) -> None:
    try:
        assert len(unpack(body, encoding, 9)) <= 10
    except MalformedRequest as error:
        assert encoding.decode() in str(error)


@each_encoding
def test_a_bomb_is_unpacked_to_the_limit_and_one_byte_more(encoding: bytes) -> None:
    """The client may have packed a gigabyte into a message of 32 KiB."""
    packed = PACK[encoding](bytes(1 << 24))
    assert len(unpack(packed, encoding, 1000)) == 1001


def test_a_zstd_frame_needs_no_more_than_8_mib() -> None:
    """RFC 9659: else one request could allocate 2 GiB."""
    packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 24})
    with pytest.raises(MalformedRequest, match="memory"):
        unpack(packer.compress(b"x") + packer.flush(), b"zstd", 1)


async def post(client: Chain, body: bytes, encoding: bytes, *more: bytes) -> tuple[bytes, bytes]:
    """The response to a body with this content-encoding."""
    head = [b"POST /v1/x HTTP/1.1", b"host: h", b"content-encoding: " + encoding, *more]
    client.writer.write(b"\r\n".join([*head, b"content-length: %d" % len(body), b"", body]))
    return await client.answer()


@pytest.mark.net
@pytest.mark.anyio
@pytest.mark.parametrize("body", [b"{}", LONG], ids=["short", "long"])
@each_encoding
async def test_a_pod_receives_the_plain_body(encoding: bytes, body: bytes) -> None:
    """Without content-encoding and with the right length (h11 checks it); no memory stays counted."""
    async with chain() as client:
        for _ in range(2):
            assert (await post(client, PACK[encoding](body), encoding.upper()))[0].startswith(b"HTTP/1.1 200 ")
        assert client.pod.requests == [AtPod(body)] * 2
        assert client.edge.body_memory.bytes == 0


@pytest.mark.net
@pytest.mark.anyio
async def test_a_pod_is_asked_for_plain_responses() -> None:
    """What the client accepts does not matter: the router reads what the pod sends."""
    async with chain() as client:
        client.pod.records_all = True
        await post(client, b"{}", b"identity", b"accept-encoding: gzip, br")
        ((seen),) = client.pod.requests
        assert [value for name, value in seen.headers if name == b"accept-encoding"] == [b"identity"]
        assert b"content-encoding" not in dict(seen.headers)


@pytest.mark.net
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("encoding", "body", "status", "code"),
    [
        (b"br", b"x", b"415", "unsupported_content_encoding"),
        (b"gzip, zstd", b"x", b"415", "unsupported_content_encoding"),
        (b"gzip", b"{}", b"400", "malformed_request"),
        (b"zstd", zstd.compress(b"{}")[:-1], b"400", "malformed_request"),
        (b"gzip", gzip.compress(bytes(Limits().max_body_bytes + 1)), b"413", "body_too_large"),
        (b"zstd", zstd.compress(bytes(Limits().max_body_bytes + 1)), b"413", "body_too_large"),
    ],
    ids=["br", "twice", "not gzip", "cut", "gzip bomb", "zstd bomb"],
)
async def test_a_body_that_cannot_be_unpacked_reaches_no_pod(
    encoding: bytes, body: bytes, status: bytes, code: str
) -> None:
    """A 415 lists what is accepted. Bombs are refused by their unpacked size, and the connection stays usable."""
    async with chain() as client:
        head, answer = await post(client, body, encoding)
        assert (head.split()[1], json.loads(answer)["error"]["code"]) == (status, code)
        assert (b"accept-encoding: gzip, zstd\r\n" in head) == (status == b"415")
        assert not client.pod.requests and client.edge.body_memory.bytes == 0
        assert (await post(client, b"{}", b"identity"))[0].startswith(b"HTTP/1.1 200 ")


@pytest.mark.net
@pytest.mark.anyio
async def test_unpacked_bytes_count_in_the_memory_of_bodies() -> None:
    async with chain() as client:
        client.edge.body_memory.bound.limit = 1000
        client.edge.body_memory.bound._free_to = 900
        head, answer = await post(client, gzip.compress(bytes(2000)), b"gzip")
        assert (head.split()[1], json.loads(answer)["error"]["code"]) == (b"503", "saturated")
        assert client.edge.body_memory.bytes == 0 and not client.pod.requests


@pytest.mark.net
@pytest.mark.anyio
async def test_a_long_body_is_unpacked_outside_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 256 KiB of it are unpacked inside."""
    asked: list[int] = []

    def recorded(body: bytes, encoding: bytes, max_bytes: int) -> bytes:
        asked.append(max_bytes)
        return unpack(body, encoding, max_bytes)

    monkeypatch.setattr("router.frontends.http.http_edge.unpack", recorded)
    async with chain() as client:
        await post(client, zlib.compress(b"{}", wbits=31), b"gzip")
        await post(client, gzip.compress(bytes(1 << 20)), b"gzip")
        await post(client, gzip.compress(LONG, 0), b"gzip")
    whole = Limits().max_body_bytes
    assert asked == [UNPACKED_INLINE_BYTES, UNPACKED_INLINE_BYTES, whole, whole]


@pytest.mark.net
@pytest.mark.anyio
@pytest.mark.parametrize("encoding", [b"identity", b"gzip"])
async def test_a_byte_order_mark_in_front_of_json_is_removed(encoding: bytes) -> None:
    """Not all engines accept it. Other bodies stay as they are."""
    pack = PACK.get(encoding, bytes)
    async with chain() as client:
        for sent, at_pod in ((MARK + b" {}", b" {}"), (MARK + b"text", MARK + b"text"), (b"{}" + MARK, b"{}" + MARK)):
            await post(client, pack(sent), encoding)
            assert client.pod.requests.pop() == AtPod(at_pod)
